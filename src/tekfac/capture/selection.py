"""Which samples of a batch are measured: each of them, many in a few sums, or as many as a layer needs.

Where a layer's statistics are made of its samples' gradients alone, samples are put together to sums with
random signs, whose squares are right in expectation. Otherwise some are drawn at random: a sample that uses a
layer's weights at T positions has a gradient of rank up to min(T, d), so that a few of them say as much of the
layer as a whole batch of single rows, if there are labels enough in them; and the fewer will do, the more the
running average holds already that they enter. See docs/mathematics.md, section 6.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from tekfac.capture.sampling import Sampling
from tekfac.layers.batch import Sums
from tekfac.layers.contractions import Sizes, grams_are_cheaper
from tekfac.layers.shapes import LayerShape
from tekfac.ranks.whole_batch import WholeBatch

StatisticsSamples = int | Literal["auto"] | None
"""A number of samples; None: all; "auto": by the layer."""

FEWEST = 2
"""Samples that "auto" measures at least."""

FEWEST_OF_UNITS = 16
"""The same for norms, whose blocks are exact and have nothing but these samples."""

COVER = 16
"""How often the ranks of all gradients in a running average cover a side of the block."""

SUMS = 64
"""In a running average, at least, where samples are put together; half of them where their ranks cover."""

IN_A_SUM = 2
"""Samples, at most: more of them hardly lessen the noise of its squares, and cost as much each."""

FEWEST_SUMS = 8
"""In one measurement."""

WORTH_SUMS = 2**26
"""Multiplications of a weight's gradient from which those of sums take longer than the calls for them."""

WORTH_SINGLY = 2**21
"""Multiplications of one sample's gradient from which it takes longer than the call for it."""

ROOM = 2**24
"""Numbers in the gradients of a layer's sums, at most: where they are kept, all are there at a time."""

TERMS = 2400
"""Of the loss, in a running average: each is a label of its own, and their gradients are heavy-tailed."""


def wanted(
    setting: StatisticsSamples, positions: int, shape: LayerShape, terms: float, measurements: float
) -> float:
    """How many samples of a batch are measured for a layer, if there are so many.

    Args:
        setting: of the optimizer.
        positions: T, at which every sample uses the weights.
        shape: of the layer.
        terms: of the loss, per sample.
        measurements: as many as the running average that they enter holds so far.
    """
    if setting is None or measurements == 0:
        return math.inf
    if setting != "auto":
        return setting
    if positions <= 1:
        return math.inf
    by_terms = math.ceil(TERMS / terms / measurements)
    if shape.layout == "units":
        return max(FEWEST_OF_UNITS, by_terms)
    side = max(shape.side_in, shape.side_out)
    rank = min(positions, shape.d_in, shape.d_out)
    return max(FEWEST, by_terms, math.ceil(COVER * side / rank / measurements))


def can_be_summed(shape: LayerShape) -> bool:
    """Whether there is room for the gradients of a few sums; norms need none."""
    return shape.layout != "units" and FEWEST_SUMS * shape.size <= ROOM


def wanted_sums(samples: int, positions: int, shape: LayerShape, measurements: float) -> int | None:
    """How many sums the samples of a batch are put together to, for a layer; None: that would not pay.

    It would not where the samples have no more rows than the sums' gradients, or a single one each, or so
    little to do that calls take longer.

    Args:
        samples: of the batch.
        positions: T, at which every sample uses the weights.
        shape: of the layer.
        measurements: as many as the running average that they enter holds so far.
    """
    cover = COVER * max(shape.side_in, shape.side_out) / min(shape.d_in, shape.d_out)
    in_all = min(SUMS, max(SUMS / 2, cover))
    count = max(FEWEST_SUMS, min(math.ceil(in_all / max(1.0, measurements)), ROOM // shape.size))
    rows = samples * positions
    pays = rows > count * min(shape.d_in, shape.d_out) and rows * shape.size >= WORTH_SUMS
    return count if pays and samples > count and positions > 1 else None


def pays_singly(positions: int, shape: LayerShape) -> bool:
    """Whether the gradients of single samples had best be formed where they arrive.

    It would not pay where Gram matrices take fewer multiplications, for one vector, or there is little to do.
    """
    if positions <= 1 or positions * shape.size < WORTH_SINGLY:
        return False
    sides = shape.d_in, shape.d_out
    return not grams_are_cheaper(Sizes(positions, *sides, 1, *shape.forms.turning(*sides)))


class Selection:
    """The samples of one pass in a random order, of which every layer takes the first few, or some in sums.

    Where several processes have a part of the batch each, all draw the same of the whole batch, and each is
    told of its own part.

    Attributes:
        samples: how many take part in the loss, of the whole batch.
    """

    def __init__(self, setting: StatisticsSamples, batch: WholeBatch, choosing: Sampling) -> None:
        """Draw nothing yet.

        Args:
            setting: of the optimizer.
            batch: of which this process has a part, or all.
            choosing: the generator to draw with.
        """
        self._signs: Tensor | None = None
        self._parts: dict[int, list[int]] = {}
        self._setting: StatisticsSamples = setting
        self._choosing = choosing
        self._batch = batch
        self._order: Tensor | None = None
        self.samples = int(batch.candidates.sum())
        self._terms = batch.terms / self.samples

    def share(self, count: int) -> float:
        """What share of the own terms so many chosen samples, of those here, stand for."""
        of_whole = count / self.samples
        return of_whole if self._batch.is_all else of_whole * self._batch.terms / self._batch.own_terms

    def of(self, positions: int, shape: LayerShape, measurements: float) -> Tensor | None:
        """The samples to measure for a layer, in their own order; None for all.

        Args:
            positions: T, at which every sample uses the weights.
            shape: of the layer.
            measurements: as many as its running average holds so far.
        """
        chosen = self._chosen(positions, shape, measurements)
        return None if chosen is None else self._batch.own(chosen)

    def _chosen(self, positions: int, shape: LayerShape, measurements: float) -> Tensor | None:
        """The same of the whole batch."""
        count = wanted(self._setting, positions, shape, self._terms, measurements)
        if count >= self.samples:
            return None
        if self._order is None:
            generator, candidates = self._choosing.generator_on(torch.device("cpu")), self._batch.candidates
            order = torch.randperm(self.samples, generator=generator).to(candidates.device)
            self._order = candidates.nonzero()[:, 0][order]
        return self._order[: int(count)].sort().values

    def in_sums(
        self, positions: int, shape: LayerShape, measurements: float, *, singly: bool = False
    ) -> Tensor | Sums | None:
        """How the samples are put together for a layer, or as `of` where that would not pay.

        Args:
            positions: T, at which every sample uses the weights.
            shape: of the layer.
            measurements: as many as its running average holds so far.
            singly: whether samples that are not put together may be sums of one each, whose gradients are
                formed, where that pays.
        """
        samples = len(self._batch.candidates)
        count = wanted_sums(samples, positions, shape, measurements)
        if count is None:
            if not (singly and pays_singly(positions, shape)):
                return self.of(positions, shape, measurements)
            return self._here(self._as_sums(self._chosen(positions, shape, measurements)))
        generator = self._choosing.generator_on(torch.device("cpu"))
        if self._signs is None:
            bits = torch.randint(0, 2, (samples,), generator=generator)
            self._signs = (2 * bits - 1).to(self._batch.candidates.device)
        parts = max(count, math.ceil(samples / IN_A_SUM))
        if parts == count:
            return self._here(Sums.of_all(self._signs, count))
        if parts not in self._parts:
            self._parts[parts] = torch.randperm(parts, generator=generator).tolist()
        return self._here(Sums.of_some(self._signs, parts, sorted(self._parts[parts][:count])))

    def _here(self, sums: Sums) -> Sums:
        """Of sums of the whole batch what is here."""
        return sums if self._batch.is_all else sums.of_part(self._batch.start, self._batch.samples)

    def _as_sums(self, chosen: Tensor | None) -> Sums:
        """Each of some samples, or of all, as a sum of its own."""
        ones = torch.ones_like(self._batch.candidates, dtype=torch.int64)
        if chosen is None:
            return Sums.of_all(ones, len(ones))
        return Sums(ones, len(ones), chosen.tolist(), math.sqrt(self.samples / len(chosen)))
