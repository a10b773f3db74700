"""What the ways to the same sums cost, in multiplications and in memory; which one is taken follows from it.

Moments and Theta are sums over samples that can be contracted in several orders. Which is the cheapest depends
on the sizes alone: positions T, inputs d_in, outputs d_out, columns K.
"""

from __future__ import annotations

from typing import NamedTuple

from tekfac.layers.batch import RowSource
from tekfac.layers.rows import Rows, samples_within

TRAFFIC = 32
"""Multiplications in the time that it takes to write a number of a gradient, square it and add it up."""

IN_CACHE = 2**12
"""Numbers of a sample's gradient up to which that time does not count."""


class Sizes(NamedTuple):
    """What the cost of a contraction depends on."""

    positions: int  # T
    d_in: int
    d_out: int
    columns: int  # K
    turn_in: int  # multiplications to turn a number along the inputs: the size of a block; d_in: whole
    turn_out: int

    @property
    def pairs(self) -> int:
        """Of positions, each once, a position with itself included."""
        return self.positions * (self.positions + 1) // 2

    @property
    def projection(self) -> int:
        """Multiplications per sample to turn all rows into a basis, or to add up their squares."""
        return self.positions * (self.d_in * self.turn_in + self.columns * self.d_out * self.turn_out)

    @property
    def gradient(self) -> int:
        """Numbers in the gradients of a sample."""
        return self.columns * self.d_in * self.d_out

    @property
    def traffic(self) -> int:
        """Of every number of a gradient, in multiplications."""
        return TRAFFIC if self.d_in * self.d_out > IN_CACHE else 0


def sizes_of(rows: Rows) -> Sizes:
    """Those of a chunk of rows."""
    positions, d_in = rows.a.shape[2:]
    columns, d_out = rows.u.shape[0], rows.u.shape[-1]
    return Sizes(positions, d_in, d_out, columns, *rows.forms.turning(d_in, d_out))


# -- moments -------------------------------------------------------------------------------------------


def gram_cost(sizes: Sizes) -> int:
    """Multiplications per sample of the exact factors from T x T Gram matrices."""
    return 2 * sizes.positions**2 * (sizes.d_in + sizes.columns * sizes.d_out) + sizes.projection


def gradient_cost(sizes: Sizes) -> int:
    """Multiplications per sample of the exact factors from per-sample gradients."""
    return sizes.gradient * (sizes.positions + sizes.turn_in + sizes.turn_out)


def grams_are_cheaper(sizes: Sizes) -> bool:
    """Which of the two ways to the exact factors takes fewer multiplications."""
    return gram_cost(sizes) <= gradient_cost(sizes)


# -- Theta ---------------------------------------------------------------------------------------------


def pairs_cost(sizes: Sizes) -> int:
    """Of the squares multiplied out over pairs of positions, in multiplications per sample."""
    return sizes.projection + sizes.pairs * sizes.d_in * sizes.d_out


def project_first_cost(sizes: Sizes) -> int:
    """Of projected rows and gradients formed of them, in multiplications per sample."""
    return sizes.projection + sizes.gradient * (sizes.positions + sizes.traffic)


def gradient_first_cost(sizes: Sizes) -> int:
    """Of gradients formed and then projected, in multiplications per sample."""
    return sizes.gradient * (sizes.positions + sizes.traffic + sizes.turn_in + sizes.turn_out)


def pairs_are_cheapest(sizes: Sizes) -> bool:
    """Whether Theta is best had without forming gradients."""
    return pairs_cost(sizes) <= min(project_first_cost(sizes), gradient_first_cost(sizes))


# -- memory --------------------------------------------------------------------------------------------


def samples_per_chunk(batch: RowSource, memory_budget: int) -> int:
    """Samples such that rows and what is formed of them fit the budget.

    The same for moments and Theta, which therefore can share their rows.
    """
    columns, groups, _, positions, d_in, d_out = batch.shape
    sizes = Sizes(positions, d_in, d_out, columns, d_in, d_out)
    rows = 2 * positions * (d_in + columns * d_out)
    grams = 2 * positions**2 if grams_are_cheaper(sizes) else 0
    if pairs_are_cheapest(sizes):
        work = grams + 3 * sizes.pairs * (d_in + columns * d_out) + (0 if grams else sizes.gradient)
    else:
        work = grams + 2 * sizes.gradient
    return samples_within(memory_budget, groups * (rows + work))
