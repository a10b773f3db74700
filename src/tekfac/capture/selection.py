"""Which samples of a batch are measured: all of them, or as many as a layer needs, drawn at random.

A sample that uses a layer's weights at T positions has a gradient of rank up to min(T, d): a few of them say
as much of the layer as a whole batch of single rows, if there are labels enough in them; and the fewer will do,
the more the running average holds already that they enter. See docs/mathematics.md, section 6.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from tekfac.capture.sampling import Sampling
from tekfac.layers.shapes import LayerShape

StatisticsSamples = int | Literal["auto"] | None
"""A number of samples; None: all; "auto": by the layer."""

FEWEST = 2
"""Samples that "auto" measures at least."""

FEWEST_OF_UNITS = 16
"""The same for norms, whose blocks are exact and have nothing but these samples."""

COVER = 16
"""How often the ranks of all gradients in a running average cover a side of the block."""

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


class Selection:
    """The samples of one pass in a random order, of which every layer takes the first few.

    Attributes:
        samples: how many take part in the loss.
        terms: of the loss, per such sample.
    """

    def __init__(self, setting: StatisticsSamples, counted: Tensor, choosing: Sampling) -> None:
        """Draw nothing yet.

        Args:
            setting: of the optimizer.
            counted: which terms take part in the loss, [N, P].
            choosing: the generator to draw with.
        """
        self._setting: StatisticsSamples = setting
        self._choosing = choosing
        self._candidates = counted.any(dim=1)
        self._order: Tensor | None = None
        self.samples = int(self._candidates.sum())
        self.terms = int(counted.sum()) / self.samples

    def of(self, positions: int, shape: LayerShape, measurements: float) -> Tensor | None:
        """The samples to measure for a layer, in their own order; None for all.

        Args:
            positions: T, at which every sample uses the weights.
            shape: of the layer.
            measurements: as many as its running average holds so far.
        """
        count = wanted(self._setting, positions, shape, self.terms, measurements)
        if count >= self.samples:
            return None
        if self._order is None:
            generator = self._choosing.generator_on(torch.device("cpu"))
            order = torch.randperm(self.samples, generator=generator).to(self._candidates.device)
            self._order = self._candidates.nonzero()[:, 0][order]
        return self._order[: int(count)].sort().values
