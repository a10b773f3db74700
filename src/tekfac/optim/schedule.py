"""Which layers are refreshed at which step: often at first, then at intervals; all at once, or by turns.

A network changes fastest in its first steps, so that intervals begin with one step, or a few where measuring is
much dearer than a step, and grow with the number of steps. By turns every layer keeps its interval but has a
step of its own in it, chosen so that no step has much more to do than another. All of it follows from the
layers, the settings and what the first step has shown of its own price.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from tekfac.common.balance import balanced
from tekfac.curvature.layer_curvature import NOTHING, Due
from tekfac.layers.layer import Layer

FLOPS_OF_EIGENDECOMPOSITION = 9
"""Times d^3: what eigenvalues and eigenvectors of a d x d matrix take, roughly."""

WORTH_TURNS = 10**9
"""Operations of a whole refresh, some 20 ms, up to which watching every step costs more than it saves."""

CALLS = 7 * 10**7
"""Multiplications in the time that calls around a layer's refresh take, roughly, on one core."""

CALLS_OF_PASSES = 5 * 10**6
"""The same of a layer's forward and backward pass."""

DEAR = 3
"""Steps that a measurement may take as long as: it is not dear then."""

LONGEST_AT_FIRST = 5
"""Interval."""

SAMPLES = 16
"""Whose gradients are formed and projected, in the weighing of layers against each other."""


@dataclass(frozen=True)
class Clock:
    """The times at which something is done: often at first, in the end at multiples of an interval.

    Attributes:
        every: the interval.
        growth: intervals before are this share of the steps so far; None: none are shorter.
        least: and at least so many steps.
        rounds: a clock of a shorter interval, at whose times the early ones of this clock are.
    """

    every: int
    growth: float | None = None
    least: int = 1
    rounds: Clock | None = None

    @cached_property
    def early(self) -> list[int]:
        """The times before those that are multiples of the interval, and 0, the first."""
        times = [0]
        while self.growth is not None and (interval := self._growing(times[-1])) < self.every:
            times.append(self._in_a_round(times[-1] + interval))
        while len(times) > 1 and -times[-1] % self.every < times[-1] - times[-2]:  # no shorter one in between
            times.pop()
        return times

    def _growing(self, time: int) -> int:
        """The interval after a time, as it grows."""
        return max(self.least, int((self.growth or 0.0) * time))

    def _in_a_round(self, time: int) -> int:
        """A time, or the next one of the rounds."""
        if self.rounds is None or self.rounds.latest(time) == time:
            return time
        return self.rounds.following(time)

    def latest(self, step: int) -> int:
        """The last time up to a step."""
        multiple = step - step % self.every
        return multiple if multiple > self.early[-1] else self.early[bisect_right(self.early, step) - 1]

    def following(self, time: int) -> int:
        """The first one after a time."""
        place = bisect_right(self.early, time)
        return self.early[place] if place < len(self.early) else time - time % self.every + self.every


@dataclass(frozen=True)
class Intervals:
    """Steps between updates; `rescaling` is None for a method that measures none.

    Attributes:
        factors: of the factors.
        basis: of the eigenbasis.
        rescaling: of Theta.
        growth: of all of them, at first, and
        least: how long they are then (see Clock).
    """

    factors: int
    basis: int
    rescaling: int | None
    growth: float | None = None
    least: int = 1

    @property
    def shortest(self) -> int:
        """As many turns there are."""
        return min(self.factors, self.basis, self.rescaling or self.factors)


class Schedule:
    """Tells what is due at every step.

    Attributes:
        turns: for each turn, the names of its layers.
    """

    def __init__(self, intervals: Intervals, layers: Mapping[str, Layer], *, by_turns: bool) -> None:
        self._round = Clock(intervals.shortest, intervals.growth, intervals.least)
        clock = partial(Clock, growth=intervals.growth, least=intervals.least, rounds=self._round)
        self._factors, self._basis = clock(intervals.factors), clock(intervals.basis)
        self._rescaling = None if intervals.rescaling is None else clock(intervals.rescaling)
        costs = {name: cost_of_refresh(layer) for name, layer in layers.items()}
        turns = max(1, min(intervals.shortest, len(costs))) if by_turns else 1
        self.turns = mixed(balanced(costs, turns))
        self._known: tuple[int, dict[str, Due]] | None = None

    def due(self, step: int) -> dict[str, Due]:
        """What Algorithm 1 refreshes at a step, by layer; layers of which nothing is due are left out."""
        if self._known is None or self._known[0] != step:
            found: dict[str, Due] = {}
            for turn, names in enumerate(self.turns):
                due = self._due(turn, step)
                if due != NOTHING:
                    found.update(dict.fromkeys(names, due))
            self._known = step, found
        return self._known[1]

    def steps_since_refresh(self, step: int) -> int:
        """So many steps before a step the eigenbases of the first turn were due."""
        return step - self._basis.latest(step)

    def _due(self, turn: int, step: int) -> Due:
        factors, basis, rescaling = (
            None if clock is None else self._age(clock, turn, step)
            for clock in (self._factors, self._basis, self._rescaling)
        )
        return Due(
            factors=factors is not None,
            basis=basis is not None,
            rescaling=rescaling is not None,
            age_of_factors=factors or 1,
            age_of_rescaling=rescaling or 1,
        )

    def _age(self, clock: Clock, turn: int, step: int) -> int | None:
        """At a step at which a clock strikes for a turn, the steps since it did so before; else None."""
        time = clock.latest(step)
        if self._strikes(clock, time, turn) != step:
            return None
        before = self._strikes(clock, clock.latest(time - 1), turn) if time else 0  # when all were measured
        return max(1, step - before)

    def _strikes(self, clock: Clock, time: int, turn: int) -> int:
        """When a turn's layers do what is done at a time: the turns share what lies before the next one."""
        if not turn:
            return time
        length = self._round.following(time) - self._round.latest(time)
        return time + turn * min(length, clock.following(time) - time) // len(self.turns)


def cost_of_refresh(layer: Layer) -> int:
    """Multiplications of a refresh, to weigh layers against each other: decompositions and projections."""
    shape = layer.shape
    sides = shape.d_in * shape.side_in**2 + shape.d_out * shape.side_out**2
    decompositions = FLOPS_OF_EIGENDECOMPOSITION * sides
    projections = 2 * SAMPLES * shape.d_in * shape.d_out * sum(shape.forms.turning(shape.d_in, shape.d_out))
    return shape.groups * (decompositions + projections)


def first_interval(layers: Collection[Layer], multiplications: float) -> int:
    """The shortest interval that is worth its price: so that measuring takes a few times as long as the rest.

    Args:
        layers: that are measured.
        multiplications: of the products with their weights in the forward passes of a step.
    """
    if not layers:
        return 1
    refresh = sum(map(cost_of_refresh, layers)) + CALLS * len(layers)
    step = 3 * multiplications + CALLS_OF_PASSES * len(layers)
    return max(1, min(LONGEST_AT_FIRST, round(refresh / (DEAR * step))))


def mixed(turns: Sequence[list[str]]) -> list[list[str]]:
    """The same turns, those that begin with a dear layer far from each other: the first stays the first.

    In a round that is shorter than there are turns, neighbours come together.
    """
    return [turns[place] for place in sorted(range(len(turns)), key=_reversed_bits)]


def _reversed_bits(place: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, ...: every place in the middle of a largest gap between those before."""
    found, weight = 0.0, 0.5
    while place:
        place, bit = divmod(place, 2)
        found, weight = found + bit * weight, weight / 2
    return found
