"""Tiny layers of equal size, refreshed together: as the groups of one block.

A norm's refresh is some fifty calls on tensors of a few hundred numbers. Everything that a refresh does is done
group by group, so that many such layers take the time of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tekfac.curvature.averages import Average
from tekfac.curvature.eigenbasis import WORTH_A_LOOK, Eigenbasis
from tekfac.curvature.factors import KroneckerFactors
from tekfac.curvature.layer_curvature import Due, LayerCurvature, Recipe, refreshed
from tekfac.layers.batch import BatchShape, CapturedBatch
from tekfac.layers.contractions import samples_per_chunk
from tekfac.layers.layer import Layer
from tekfac.layers.rows import Rows

Batches = Mapping[str, Sequence[CapturedBatch]]


def alike(
    layers: Mapping[str, Layer], old: Mapping[str, LayerCurvature], batches: Batches, due: Mapping[str, Due]
) -> list[list[str]]:
    """Names of tiny layers that can be refreshed together, two or more at a time."""
    found: dict[object, list[str]] = {}
    for name, own_due in due.items():
        if name not in old or len(batches.get(name, ())) != 1 or not _is_tiny(layers[name]):
            continue
        (batch,) = batches[name]
        theta = old[name].theta
        key = (
            own_due,
            type(batch),  # rows as they came and formed ones can have the same sizes by chance
            batch.shape._replace(groups=0),
            layers[name].shape.forms,
            batch.num_terms,
            layers[name].dtype,
            layers[name].weight.device,
            _weights(old[name].moments),
            None if theta is None else _weights(theta),
        )
        found.setdefault(key, []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _weights(average: Average[Any]) -> tuple[float, float]:
    return average.weight, average.squares


def _is_tiny(layer: Layer) -> bool:
    """Whether calls take longer than the arithmetic, and every refresh is a decomposition."""
    return max(layer.shape.d_in, layer.shape.d_out) < WORTH_A_LOOK and not layer.is_table and not layer.is_tied


def refreshed_together(
    old: Sequence[LayerCurvature], batches: Sequence[CapturedBatch], due: Due, recipe: Recipe
) -> list[LayerCurvature] | None:
    """The curvatures after one more batch, as `refreshed` gives them one by one.

    Returns:
        None where that has to be done one by one: positions that may not count, no rows any more, or too many
        for the memory budget, or a failed decomposition.

    Raises:
        NonFiniteStatisticsError: if a batch leads to numbers that are not finite.
    """
    if any(batch.has_masks or not batch.has_rows for batch in batches):
        return None
    rows = _JoinedRows(batches)
    if samples_per_chunk(rows, recipe.memory_budget) < rows.shape.samples:
        return None
    groups = [len(curvature.basis.scale) for curvature in old]
    whole = refreshed(_joined(old), [rows], due, recipe)
    if whole is None or whole.failed_refreshes:
        return None
    return _separated(whole, groups, [curvature.failed_refreshes for curvature in old])


class _JoinedRows:
    """The rows of several layers as those of one with all their groups."""

    def __init__(self, batches: Sequence[CapturedBatch]) -> None:
        shape = batches[0].shape
        self._batches = batches
        self.num_terms = batches[0].num_terms
        self.shape: BatchShape = shape._replace(groups=sum(batch.shape.groups for batch in batches))

    def chunks(self, samples_per_chunk: int) -> Iterator[Rows]:
        """The rows of all samples, at most `samples_per_chunk` at a time."""
        for parts in zip(*(batch.chunks(samples_per_chunk) for batch in self._batches), strict=True):
            inputs = [part.a if part.scale == 1 else part.a * part.scale**0.5 for part in parts]
            a, u = torch.cat(inputs), torch.cat([part.u for part in parts], dim=1)
            yield Rows(a, u, None, parts[0].forms)


def _joined(curvatures: Sequence[LayerCurvature]) -> LayerCurvature:
    first = curvatures[0]
    theta = None
    if first.theta is not None:
        thetas = [curvature.theta.values for curvature in curvatures if curvature.theta is not None]
        theta = first.theta.holding((torch.cat([value for (value,) in thetas]),))
    moments = KroneckerFactors(*_cat([curvature.moments.values for curvature in curvatures]))
    basis = Eigenbasis(*_cat([curvature.basis for curvature in curvatures]))
    return LayerCurvature(first.moments.holding(moments), basis, theta)


def _cat(values: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*values, strict=True)]


def _separated(whole: LayerCurvature, groups: list[int], failures: list[int]) -> list[LayerCurvature]:
    """One curvature for each of the layers, whose tensors are their own."""
    moments = _split(whole.moments.values, groups)
    bases = _split(whole.basis, groups)
    thetas = [None] * len(groups) if whole.theta is None else _split(whole.theta.values, groups)
    return [
        LayerCurvature(
            whole.moments.holding(KroneckerFactors(*own_moments)),
            Eigenbasis(*own_basis),
            None if own_theta is None or whole.theta is None else whole.theta.holding((own_theta[0],)),
            failed,
            whole.brought,
        )
        for own_moments, own_basis, own_theta, failed in zip(moments, bases, thetas, failures, strict=True)
    ]


def _split(values: tuple[Tensor, ...], groups: list[int]) -> list[tuple[Tensor, ...]]:
    parts = [[part.clone() for part in torch.split(value, groups)] for value in values]
    return list(zip(*parts, strict=True))
