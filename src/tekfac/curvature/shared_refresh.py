"""A refresh by several processes: sums are added up, and every decomposition is done by one of them.

All layers' refreshes go on side by side, one step at a time (layer_curvature.refreshing). What they ask for in
a step is answered for all of them at once, with few messages: the sums over samples, which are linear in the
data, are added; the sides to be decomposed are dealt out by cost (placement.py), and what comes of them is sent
to all. So every process has the same curvature, to the last bit, and does a part of the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tekfac.common.memory import OUT_OF_MEMORY, is_out_of_memory
from tekfac.common.phases import Phase
from tekfac.curvature import symmetric
from tekfac.curvature.eigenbasis import Eigenbasis, decompose_side
from tekfac.curvature.layer_curvature import (
    NOTHING,
    Addends,
    Decomposition,
    Due,
    LayerCurvature,
    Recipe,
    refreshing,
)
from tekfac.curvature.placement import Part, Side, SideSize, placed
from tekfac.curvature.symmetric import DecompositionError
from tekfac.layers.batch import CapturedBatch, FormedBatch
from tekfac.layers.layer import Layer
from tekfac.ranks.group import Ranks

KEPT, NEW, FAILED = range(3)
"""What became of a side, or of a part of it."""


def refreshed_by_all(
    layers: Mapping[str, Layer],
    old: Mapping[str, LayerCurvature],
    batches: Mapping[str, Sequence[CapturedBatch]],
    due: Mapping[str, Due],
    recipe: Recipe,
    ranks: Ranks,
) -> dict[str, LayerCurvature]:
    """New blocks for what is due; the others as they are. All processes have to call it, with the same dues.

    Args:
        layers: by name.
        old: blocks of those that were seen before.
        batches: what was captured of each here; nothing of some, perhaps.
        due: what is, by layer; a layer without a block is looked for, due or not.
        recipe: how curvature is estimated.
        ranks: the processes.
    """
    blocks = dict(old)
    running = {
        name: refreshing(old.get(name), batches.get(name, ()), due.get(name, NOTHING), recipe)
        for name in layers
        if name not in old or due.get(name, NOTHING) != NOTHING
    }
    answers: dict[str, Any] = dict.fromkeys(running)
    while running:
        asked: dict[str, Addends | Decomposition] = {}
        for name, steps in list(running.items()):
            try:
                asked[name] = steps.send(answers[name])
            except StopIteration as end:
                del running[name]
                if end.value is not None:
                    blocks[name] = end.value
        addends = {name: own for name, own in asked.items() if isinstance(own, Addends)}
        factors = {name: own for name, own in asked.items() if isinstance(own, Decomposition)}
        answers = {**_added(addends, layers, recipe, ranks), **_decomposed(factors, recipe, ranks)}
    return blocks


# -- sums ------------------------------------------------------------------------------------------------


def _added(
    addends: Mapping[str, Addends], layers: Mapping[str, Layer], recipe: Recipe, ranks: Ranks
) -> dict[str, Addends]:
    """The sums of all processes; those that nobody has seen anything of have no terms."""
    if not addends:
        return {}
    terms = torch.tensor([own.terms for own in addends.values()], dtype=torch.float64)
    (terms,) = ranks.add([terms])
    seen = {name: float(count) for name, count in zip(addends, terms, strict=True) if count}
    packed = {name: _packed(addends[name], layers[name], recipe) for name in seen}
    flat = iter(ranks.add([tensor for parcels in packed.values() for tensor in parcels.tensors]))
    found = {name: Addends((), 0.0) for name in addends}
    for name, parcels in packed.items():
        found[name] = Addends(parcels.unpacked([next(flat) for _ in parcels.tensors]), seen[name])
    return found


@dataclass(frozen=True)
class _Parcels:
    """Sums as they are sent: of symmetric ones the triangles of their blocks.

    Attributes:
        tensors: what is sent.
        shapes: of the sides that the first of them are triangles of.
    """

    tensors: Sequence[Tensor]
    shapes: Sequence[torch.Size]

    def unpacked(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The sums again."""
        sides = [symmetric.of_triangles(*pair) for pair in zip(tensors, self.shapes, strict=False)]
        return (*sides, *tensors[len(sides) :])


def _packed(own: Addends, layer: Layer, recipe: Recipe) -> _Parcels:
    """Sums, or zeros like them where nothing was seen here."""
    sums = own.sums or _nothing(layer, recipe)
    if len(sums) == 1:  # squares in the eigenbasis
        return _Parcels(sums, ())
    sides, counts = sums[:2], sums[2:]
    return _Parcels([*map(symmetric.triangles, sides), *counts], [side.shape for side in sides])


def _nothing(layer: Layer, recipe: Recipe) -> tuple[Tensor, ...]:
    """The sums of no samples."""
    shape = layer.shape
    sizes = 1, shape.groups, 0, shape.d_out, shape.d_in
    nothing = torch.zeros(sizes, dtype=layer.dtype, device=layer.weight.device)
    sums = recipe.factors.sums([FormedBatch(layer, nothing, 0.0)], recipe.sharing, recipe.memory_budget)
    return tuple(own for own in sums if own is not None)


# -- decompositions --------------------------------------------------------------------------------------


def _decomposed(
    asked: Mapping[str, Decomposition], recipe: Recipe, ranks: Ranks
) -> dict[str, Eigenbasis | None]:
    """The eigenbasis of every layer's factors, each part of a side decomposed by one process."""
    if not asked:
        return {}
    with Phase("eigh"):
        sizes = {
            (name, place): SideSize(*symmetric.in_blocks(own.factors[place]).shape)
            for name, own in asked.items()
            for place in (0, 1)
        }
        dealt = placed(sizes, ranks.count, may_cut=recipe.decomposes_anew)
        found = {part: _own_part(asked, part, recipe) for part in dealt[ranks.index]}
        for owner, parts in enumerate(dealt):
            found |= _sent(asked, parts, found if owner == ranks.index else {}, owner, ranks)
    sides: dict[Side, list[tuple[Part, _Decomposed]]] = {side: [] for side in sizes}
    for part, one in found.items():
        sides[part.side].append((part, one))
    return {
        name: _joined(own, *(_put_together(own.factors[place], sides[name, place]) for place in (0, 1)))
        for name, own in asked.items()
    }


@dataclass(frozen=True)
class _Decomposed:
    """A side, or a part of one."""

    outcome: int
    values: Tensor
    vectors: Tensor


def _own_part(asked: Mapping[str, Decomposition], part: Part, recipe: Recipe) -> _Decomposed:
    factor, old = _factor(asked, part), _old_vectors(asked, part)
    try:
        values, vectors = decompose_side(factor, old, recipe.basis_tolerance, recipe.track_basis)
    except (DecompositionError, *OUT_OF_MEMORY) as error:
        if not isinstance(error, DecompositionError) and not is_out_of_memory(error):
            raise
        return _Decomposed(FAILED, *symmetric.axes(factor))
    if vectors is old:
        return _Decomposed(KEPT, values, vectors)
    return _Decomposed(NEW, values, vectors.contiguous())  # as others get them: products round alike


def _sent(
    asked: Mapping[str, Decomposition],
    parts: Sequence[Part],
    own: Mapping[Part, _Decomposed],
    owner: int,
    ranks: Ranks,
) -> dict[Part, _Decomposed]:
    """The parts of one process, in all of them; vectors that were kept are not sent."""
    if not parts:
        return {}
    outcomes = torch.tensor([own[part].outcome if own else NEW for part in parts])
    ranks.share([outcomes], owner)
    found = {}
    for part, outcome in zip(parts, outcomes.tolist(), strict=True):
        there = own.get(part)
        if there is None:
            values, vectors = map(torch.empty_like, symmetric.axes(_factor(asked, part)))
            old = _old_vectors(asked, part)
            there = _Decomposed(outcome, values, old if outcome == KEPT and old is not None else vectors)
        found[part] = there
    renewed = [one.vectors for one in found.values() if one.outcome == NEW]
    ranks.share([*(one.values for one in found.values()), *renewed], owner)
    return found


def _factor(asked: Mapping[str, Decomposition], part: Part) -> Tensor:
    """What is decomposed: a part of a side, [g, d, b], or the side in its own form."""
    name, place = part.side
    return symmetric.part(asked[name].factors[place], part.groups, part.rows)


def _old_vectors(asked: Mapping[str, Decomposition], part: Part) -> Tensor | None:
    """Of a side that is not cut, the vectors so far."""
    name, place = part.side
    before = asked[name].before
    if before is None:
        return None
    old = before[place]
    return symmetric.part(old, part.groups, part.rows)


def _put_together(factor: Tensor, parts: Sequence[tuple[Part, _Decomposed]]) -> _Decomposed:
    """A side of its parts."""
    if len(parts) == 1:
        return parts[0][1]
    vectors = torch.zeros_like(factor, memory_format=torch.contiguous_format)
    rows_of_vectors = symmetric.in_blocks(vectors)
    values = factor.new_empty(rows_of_vectors.shape[:2])
    for part, one in parts:
        groups, rows = slice(*part.groups), slice(*part.rows)
        values[groups, rows] = one.values
        rows_of_vectors[groups, rows, : part.size.block] = one.vectors
    return _Decomposed(max(one.outcome for _, one in parts), values, vectors)


def _joined(asked: Decomposition, inputs: _Decomposed, outputs: _Decomposed) -> Eigenbasis | None:
    """Both sides as a basis; None if one has failed."""
    if FAILED in (inputs.outcome, outputs.outcome):
        return None
    return Eigenbasis(inputs.vectors, outputs.vectors, inputs.values, outputs.values, asked.factors.scale)
