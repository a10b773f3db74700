"""A refresh by several processes: sums are added up, and every decomposition is done by one of them.

All layers' refreshes go on side by side, one step at a time (layer_curvature.refreshing). What they ask for in
a step is answered for all of them at once, with few messages: the sums over samples, which are linear in the
data, are added; the sides to be decomposed are dealt out by cost, the dearest first, and what comes of them is
sent to all. So every process has the same curvature, to the last bit, and does a part of the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tekfac.common.balance import balanced
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
from tekfac.curvature.symmetric import DecompositionError
from tekfac.layers.batch import CapturedBatch, FormedBatch
from tekfac.layers.layer import Layer
from tekfac.ranks.group import Ranks

Side = tuple[str, int]
"""The input side of a layer, 0, or its output side, 1."""

KEPT, NEW, FAILED = range(3)
"""What became of a side."""


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
    """Sums as they are sent: of symmetric ones a triangle.

    Attributes:
        tensors: what is sent.
        triangles: of each, the size of the matrix that it is a triangle of; 0: it is none.
    """

    tensors: Sequence[Tensor]
    triangles: Sequence[int]

    def unpacked(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The sums again."""
        pairs = zip(tensors, self.triangles, strict=True)
        return tuple(_whole(tensor, size) if size else tensor for tensor, size in pairs)


def _packed(own: Addends, layer: Layer, recipe: Recipe) -> _Parcels:
    """Sums, or zeros like them where nothing was seen here."""
    sums = own.sums or _nothing(layer, recipe)
    if len(sums) == 1:  # squares in the eigenbasis
        return _Parcels(sums, [0])
    tensors, triangles = [], []
    for tensor in sums:
        is_whole = tensor.ndim == 3 and tensor.shape[-1] == tensor.shape[-2] > 1
        tensors.append(_triangle(tensor) if is_whole else tensor)
        triangles.append(tensor.shape[-1] if is_whole else 0)
    return _Parcels(tensors, triangles)


def _nothing(layer: Layer, recipe: Recipe) -> tuple[Tensor, ...]:
    """The sums of no samples."""
    shape = layer.shape
    nothing = layer.weight.new_zeros(1, shape.groups, 0, shape.d_out, shape.d_in, dtype=layer.dtype)
    sums = recipe.factors.sums([FormedBatch(layer, nothing, 0.0)], recipe.sharing, recipe.memory_budget)
    return tuple(own for own in sums if own is not None)


def _triangle(matrix: Tensor) -> Tensor:
    """The upper triangle of symmetric matrices [G, d, d]: [G, d (d + 1) / 2]."""
    rows, columns = torch.triu_indices(*matrix.shape[-2:], device=matrix.device)
    return matrix[:, rows, columns]


def _whole(triangle: Tensor, size: int) -> Tensor:
    rows, columns = torch.triu_indices(size, size, device=triangle.device)
    matrix = triangle.new_empty(len(triangle), size, size)
    matrix[:, rows, columns] = triangle
    matrix[:, columns, rows] = triangle
    return matrix


# -- decompositions --------------------------------------------------------------------------------------


def _decomposed(
    asked: Mapping[str, Decomposition], recipe: Recipe, ranks: Ranks
) -> dict[str, Eigenbasis | None]:
    """The eigenbasis of every layer's factors, each side decomposed by one process."""
    if not asked:
        return {}
    with Phase("eigh"):
        costs = {(name, place): _cost(own.factors[place]) for name, own in asked.items() for place in (0, 1)}
        dealt = balanced(costs, ranks.count)
        found = {side: _own_side(asked, side, recipe) for side in dealt[ranks.index]}
        for owner, sides in enumerate(dealt):
            found |= _sent(asked, sides, found if owner == ranks.index else {}, owner, ranks)
    return {name: _joined(own, found[name, 0], found[name, 1]) for name, own in asked.items()}


def _cost(factor: Tensor) -> int:
    """Of a decomposition: d b^2."""
    return factor.numel() * factor.shape[-1]


@dataclass(frozen=True)
class _DecomposedSide:
    outcome: int
    values: Tensor
    vectors: Tensor


def _own_side(asked: Mapping[str, Decomposition], side: Side, recipe: Recipe) -> _DecomposedSide:
    name, place = side
    factor, old = asked[name].factors[place], _old_vectors(asked[name], place)
    try:
        values, vectors = decompose_side(factor, old, recipe.basis_tolerance, recipe.track_basis)
    except DecompositionError:
        return _DecomposedSide(FAILED, *symmetric.axes(factor))
    if vectors is old:
        return _DecomposedSide(KEPT, values, vectors)
    return _DecomposedSide(NEW, values, vectors.contiguous())  # as others get them: products round alike


def _sent(
    asked: Mapping[str, Decomposition],
    sides: Sequence[Side],
    own: Mapping[Side, _DecomposedSide],
    owner: int,
    ranks: Ranks,
) -> dict[Side, _DecomposedSide]:
    """The sides of one process, in all of them; vectors that were kept are not sent."""
    if not sides:
        return {}
    outcomes = torch.tensor([own[side].outcome if own else NEW for side in sides])
    ranks.share([outcomes], owner)
    found = {}
    for (name, place), outcome in zip(sides, outcomes.tolist(), strict=True):
        there = own.get((name, place))
        if there is None:
            values, vectors = map(torch.empty_like, symmetric.axes(asked[name].factors[place]))
            old = _old_vectors(asked[name], place)
            there = _DecomposedSide(outcome, values, old if outcome == KEPT and old is not None else vectors)
        found[name, place] = there
    ranks.share([one.values for one in found.values()], owner)
    ranks.share([one.vectors for one in found.values() if one.outcome == NEW], owner)
    return found


def _old_vectors(asked: Decomposition, place: int) -> Tensor | None:
    return None if asked.before is None else asked.before[place]


def _joined(asked: Decomposition, inputs: _DecomposedSide, outputs: _DecomposedSide) -> Eigenbasis | None:
    """Both sides as a basis; None if one has failed."""
    if FAILED in (inputs.outcome, outputs.outcome):
        return None
    return Eigenbasis(inputs.vectors, outputs.vectors, inputs.values, outputs.values, asked.factors.scale)
