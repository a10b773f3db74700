"""Learning rates on a grid: where each optimizer is best, and how much it matters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

TRIALS = 5
"""Learning rates that are tried at first, for every optimizer."""

MOST_TRIALS = 9
"""In all, where the best one lies at an end of the grid."""


def rate(place: int) -> float:
    """The learning rate of a place on the grid: two in every power of ten."""
    power, half = divmod(place, 2)
    return float(f"{3 if half else 1}e{power}")


def first_places(middle: int) -> list[int]:
    """Those that are tried at first."""
    return list(range(middle - TRIALS // 2, middle + TRIALS // 2 + 1))


def best(scores: Mapping[int, float]) -> int:
    """The place with the lowest score; of equal ones the lowest rate."""
    return min(sorted(scores), key=lambda place: scores[place])


def next_place(scores: Mapping[int, float]) -> int | None:
    """Where to go on: beyond the end where the best one lies; None if it lies inside, or enough was tried."""
    if len(scores) >= MOST_TRIALS:
        return None
    here = best(scores)
    if here == min(scores):
        return here - 1
    return here + 1 if here == max(scores) else None


def width(scores: Mapping[int, float], slack: float) -> float:
    """The powers of ten, around the best learning rate, at which scores are within `slack` of the best.

    Between two places scores are taken to lie on a line over the logarithm of the rate.
    """
    here = best(scores)
    limit = scores[here] + slack
    above = _reach([scores[place] for place in sorted(scores) if place >= here], limit)
    below = _reach([scores[place] for place in sorted(scores, reverse=True) if place <= here], limit)
    return (above + below) / 2


def _reach(scores: Sequence[float], limit: float) -> float:
    """How many places, from the first on, scores stay within a limit."""
    for place, (before, after) in enumerate(pairwise(scores)):
        if after > limit:
            return place + ((limit - before) / (after - before) if math.isfinite(after) else 0.0)
    return float(len(scores) - 1)


def crossing(curve: Iterable[tuple[float, float]], target: float) -> float:
    """Where a curve of (x, score) first reaches a target, on lines between its points; inf if it does not."""
    before: tuple[float, float] | None = None
    for x, score in curve:
        if score <= target:
            if before is None or not math.isfinite(before[1]):
                return x
            start, above = before
            return start + (x - start) * (above - target) / (above - score)
        before = (x, score)
    return math.inf
