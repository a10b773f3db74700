"""Which process decomposes what at a refresh: one function of sizes, for the refresh and for plans of it.

A side [G, d, b] is cut only where it is dear beside what each process should do: between groups, or between
blocks, each of which is decomposed by itself anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from tekfac.common.balance import balanced

Side = tuple[str, int]
"""The input side of a layer, 0, or its output side, 1."""

GRAINS = 4
"""A part should be no more than a share divided by this, so that shares differ by about as little."""


class SideSize(NamedTuple):
    """A side [G, d, b].

    Attributes:
        groups: G.
        dim: d.
        block: b; d: whole, 1: diagonal.
    """

    groups: int
    dim: int
    block: int

    @property
    def blocks(self) -> int:
        """In every group; the last may be smaller."""
        return math.ceil(self.dim / self.block)

    @property
    def cost(self) -> int:
        """Of its decomposition: the cubes of its blocks; a diagonal needs none."""
        if self.block == 1:
            return 0
        full, rest = divmod(self.dim, self.block)
        return self.groups * (full * self.block**3 + rest**3)


class Part(NamedTuple):
    """What one process decomposes of a side: whole blocks.

    Attributes:
        side: whose.
        groups: the first and the one after the last.
        rows: of each of these, likewise.
        size: of the part, as of a side.
    """

    side: Side
    groups: tuple[int, int]
    rows: tuple[int, int]
    size: SideSize


def placed(sides: Mapping[Side, SideSize], ranks: int, *, may_cut: bool = True) -> list[list[Part]]:
    """The parts that every process decomposes, the dearest first, by rank.

    Args:
        sides: all that are to be decomposed; of equal ones the first is dealt out first.
        ranks: how many processes there are.
        may_cut: whether sides may be cut; not where a basis is judged as a whole.
    """
    most = max(1, sum(size.cost for size in sides.values()) // (ranks * GRAINS))
    parts = [
        part
        for side, size in sides.items()
        for part in _cut(side, size, math.ceil(size.cost / most) if may_cut and ranks > 1 else 1)
    ]
    return balanced({part: part.size.cost for part in parts}, ranks)


def _cut(side: Side, size: SideSize, wanted: int) -> list[Part]:
    """A side in about so many parts, or in as many as it has blocks."""
    of_groups = _evenly(size.groups, wanted)
    of_blocks = _evenly(size.blocks, math.ceil(wanted / size.groups))
    parts = []
    for groups in of_groups:
        for first, end in of_blocks:
            rows = first * size.block, min(end * size.block, size.dim)
            dim = rows[1] - rows[0]
            parts.append(Part(side, groups, rows, SideSize(groups[1] - groups[0], dim, min(size.block, dim))))
    return parts


def _evenly(count: int, wanted: int) -> list[tuple[int, int]]:
    """So many things in a row, in so many pieces of nearly the same length, none of them empty."""
    pieces = min(count, max(1, wanted))
    ends = [count * place // pieces for place in range(pieces + 1)]
    return list(pairwise(ends))
