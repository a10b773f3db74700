"""What several processes will do of a refresh, and send, told before training: by counting, without a group.

The placement is that of the refresh itself (curvature/placement.py). Bytes are those of what every process
hands over to be added up, and of what is shared out; how often a network carries them on the way is told by
the cost model (work_costs.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tekfac.common.tables import aligned, in_bytes, in_flops
from tekfac.curvature.placement import Part, Side, SideSize, placed
from tekfac.layers.layer import Layer
from tekfac.layers.shapes import LayerShape
from tekfac.optim.schedule import FLOPS_OF_EIGENDECOMPOSITION, Intervals

BYTES_OF_A_HEADER = 8
"""A float64 with the terms of a layer, or an int64 with what became of a part of a side."""

MESSAGES = 2
"""Of every process that decomposes something: what became of its parts, and the bases."""

EVEN = 1.25
"""The dearest share over the mean up to which nothing better is looked for."""

SHOWN = 8
"""Processes with a row of their own."""


@dataclass(frozen=True)
class Measures:
    """What of the settings decides what a refresh does.

    Attributes:
        intervals: between refreshes, in the end.
        counts_inputs: whether the inputs' sum comes with a count of its own (plain factors).
        may_cut: whether sides may be dealt out in parts.
    """

    intervals: Intervals
    counts_inputs: bool
    may_cut: bool


@dataclass(frozen=True)
class Sent:
    """Bytes of one round of refreshes of all layers.

    Attributes:
        moments: sums that are added up over processes.
        theta: second moments in the basis, likewise; 0: none are measured.
        bases: what processes decompose, and all get.
    """

    moments: int
    theta: int
    bases: int

    def per_step(self, intervals: Intervals) -> float:
        """On the average, when intervals have their full length."""
        theta = self.theta / intervals.rescaling if intervals.rescaling else 0
        return self.moments / intervals.factors + theta + self.bases / intervals.basis


@dataclass(frozen=True)
class OwnedPart:
    """A side, or some blocks of it, that one process decomposes.

    Attributes:
        layer: its name.
        side: "inputs" or "outputs".
        groups: the first and the one after the last.
        rows: of each of these, likewise.
        block: the size of its blocks.
        flops: of its decomposition.
    """

    layer: str
    side: str
    groups: tuple[int, int]
    rows: tuple[int, int]
    block: int
    flops: int

    @classmethod
    def of(cls, part: Part) -> OwnedPart:
        """In words."""
        name, place = part.side
        flops = FLOPS_OF_EIGENDECOMPOSITION * part.size.cost
        return cls(name, ("inputs", "outputs")[place], part.groups, part.rows, part.size.block, flops)

    @property
    def flops_of_a_block(self) -> int:
        """Of its largest."""
        return FLOPS_OF_EIGENDECOMPOSITION * SideSize(1, self.block, self.block).cost


@dataclass(frozen=True)
class WorkPlan:
    """Who decomposes what, and what is sent.

    Attributes:
        ranks: how many processes there are.
        turns: in which all layers are refreshed; 1: at once.
        owned: what each process decomposes in a round, by rank.
        longest: floating-point operations of the process that has most to do, added up over turns.
        sent: bytes per round.
        least: what has to be sent at least: the triangle of every moment once, every basis once.
        broadcasts: messages with bases, per round.
        intervals: between refreshes, in the end.
        may_cut: whether sides may be dealt out in parts.
    """

    ranks: int
    turns: int
    owned: tuple[tuple[OwnedPart, ...], ...]
    longest: int
    sent: Sent
    least: Sent
    broadcasts: int
    intervals: Intervals
    may_cut: bool

    @property
    def loads(self) -> tuple[int, ...]:
        """Floating-point operations of a round, by rank."""
        return tuple(sum(part.flops for part in parts) for parts in self.owned)

    @property
    def mean(self) -> float:
        """Operations of a round by the number of processes."""
        return sum(self.loads) / self.ranks

    @property
    def balance(self) -> float:
        """The longest way through a round, over the mean: 1 is even."""
        return self.longest / self.mean if self.mean else 1.0

    @property
    def dearest(self) -> OwnedPart | None:
        """The part with the largest block; None: nothing is decomposed."""
        parts = [part for parts in self.owned for part in parts if part.flops]
        return max(parts, key=lambda part: part.block, default=None)

    @property
    def advice(self) -> str:
        """How even the loads are, and what would balance them better."""
        found, dearest = f"Max/mean load {self.balance:.2f}", self.dearest
        if dearest is None:
            return f"{found}: nothing is decomposed."
        if self.balance <= EVEN:
            return f"{found}: even."
        if self.turns > 1:
            return f"{found}: a turn has few layers to deal out; turns=False balances better."
        block = dearest.flops_of_a_block
        if not self.may_cut and block < max(part.flops for parts in self.owned for part in parts):
            told = "sides are dealt out whole, so that bases can be judged as a whole"
            return f"{found}: {told}; basis_tolerance=0 with track_basis=False balances better."
        told = (
            f"a block of {dearest.block} dimensions ({dearest.layer or 'the model'}, {dearest.side}) is not cut"
        )
        enough = math.ceil(sum(self.loads) / block)
        return (
            f"{found}: {told}, and takes {block / self.mean:.2f} of the mean: "
            f"{min(enough, self.ranks)} processes do as well. "
            f"Smaller blocks (max_dim < {dearest.block}) balance better."
        )

    def __str__(self) -> str:
        rows = [("rank", "parts", "decomposes", "of the mean", "dearest")]
        for rank, (parts, load) in enumerate(zip(self.owned[:SHOWN], self.loads, strict=False)):
            share = f"{load / self.mean:.2f}" if self.mean else "-"
            first = f"{parts[0].layer or '(the model)'}, {parts[0].side}" if parts else "-"
            rows.append((str(rank), f"{len(parts)}", in_flops(load), share, first))
        lines = aligned(rows, right_from=1)
        if self.ranks > SHOWN:
            lines.append(f"... and {self.ranks - SHOWN} more")
        every = self.intervals
        kinds: list[tuple[str, int, int, int | None]] = [
            ("moments, added up", self.sent.moments, self.least.moments, every.factors),
            ("theta, added up", self.sent.theta, self.least.theta, every.rescaling),
            ("bases, to all", self.sent.bases, self.least.bases, every.basis),
        ]
        table = [("sent", "per refresh", "at least", "every", "per step")]
        table += [
            (name, in_bytes(own), in_bytes(least), f"{steps}", in_bytes(own / steps))
            for name, own, least, steps in kinds
            if steps is not None
        ]
        per_step, at_least = self.sent.per_step(every), self.least.per_step(every)
        table.append(("on the average", "", in_bytes(at_least), "1", in_bytes(per_step)))
        return "\n".join(
            [
                f"A refresh by {self.ranks} processes"
                + (f", in {self.turns} turns:" if self.turns > 1 else ":"),
                *lines,
                "",
                *aligned(table, right_from=1),
                "",
                self.advice,
                "Every process holds all curvature, as in the table above.",
            ]
        )


def planned(
    layers: Sequence[Layer], turns: Sequence[Sequence[str]], ranks: int, measures: Measures
) -> WorkPlan:
    """The plan of a refresh of all layers.

    Args:
        layers: those that are trained.
        turns: names of layers that are refreshed at once (optim/schedule.py).
        ranks: how many processes there are.
        measures: what of the settings decides.
    """
    own = {layer.name: layer for layer in layers}
    owned: list[list[OwnedPart]] = [[] for _ in range(ranks)]
    longest = broadcasts = bases = 0
    for names in map(set, turns):
        due = [layer for layer in layers if layer.name in names]  # in their order, as in a refresh
        dealt = placed(
            {side: size for layer in due for side, size in sizes(layer.shape).items()},
            ranks,
            may_cut=measures.may_cut,
        )
        longest += max(sum(part.size.cost for part in parts) for parts in dealt)
        broadcasts += MESSAGES * sum(map(bool, dealt))
        for parts, place in zip(dealt, owned, strict=True):
            place += map(OwnedPart.of, parts)
            bases += sum(
                _bytes_of_basis(part.size) * own[part.side[0]].dtype.itemsize + BYTES_OF_A_HEADER
                for part in parts
            )
    measures_theta = measures.intervals.rescaling is not None
    sent = Sent(
        sum(BYTES_OF_A_HEADER + _moments(layer, measures, padded=True) for layer in layers),
        sum(BYTES_OF_A_HEADER + _theta(layer) for layer in layers) if measures_theta else 0,
        bases,
    )
    least = Sent(
        sum(_moments(layer, measures, padded=False) for layer in layers),
        sum(map(_theta, layers)) if measures_theta else 0,
        sum(
            _least_of_basis(size) * layer.dtype.itemsize
            for layer in layers
            for size in sizes(layer.shape).values()
        ),
    )
    nothing = Sent(0, 0, 0)
    return WorkPlan(
        ranks,
        sum(map(bool, turns)),
        tuple(map(tuple, owned)),
        FLOPS_OF_EIGENDECOMPOSITION * longest,
        sent if ranks > 1 else nothing,
        least if ranks > 1 else nothing,
        broadcasts if ranks > 1 else 0,
        measures.intervals,
        measures.may_cut,
    )


def sizes(shape: LayerShape) -> Mapping[Side, SideSize]:
    """Both sides of a layer."""
    return {
        (shape.name, 0): SideSize(shape.groups, shape.d_in, shape.side_in),
        (shape.name, 1): SideSize(shape.groups, shape.d_out, shape.side_out),
    }


def _widths(size: SideSize) -> Counter[int]:
    """How many blocks there are of each width."""
    full, rest = divmod(size.dim, size.block)
    return Counter({size.block: size.groups * full, rest: size.groups if rest else 0})


def _moments(layer: Layer, measures: Measures, *, padded: bool) -> int:
    """Bytes of triangles of both moments, the last block filled up or not, and of the count of inputs."""
    numbers = 0
    for size in sizes(layer.shape).values():
        if padded:
            numbers += size.groups * size.blocks * size.block * (size.block + 1) // 2
        else:
            numbers += sum(count * width * (width + 1) // 2 for width, count in _widths(size).items())
    numbers += measures.counts_inputs and not layer.is_tied
    return numbers * layer.dtype.itemsize


def _theta(layer: Layer) -> int:
    return layer.shape.size * layer.dtype.itemsize


def _bytes_of_basis(size: SideSize) -> int:
    """Eigenvalues and eigenvectors of a part as they are sent."""
    return size.groups * (size.dim + size.dim * size.block)


def _least_of_basis(size: SideSize) -> int:
    """Of a side at least: a diagonal is known to all from its moments."""
    if size.block == 1:
        return 0
    return size.groups * size.dim + sum(count * width**2 for width, count in _widths(size).items())
