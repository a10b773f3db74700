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


def width(scores: Mapping[int, float], slack: float) -> tuple[float, bool]:
    """The powers of ten, around the best learning rate, at which scores are within `slack` of the best.

    Between two places scores are taken to lie on a line over the logarithm of the rate.

    Returns:
        The width, and whether it reaches an end of what was tried, so that it may be larger.
    """
    here = best(scores)
    limit = scores[here] + slack
    upwards = [scores[place] for place in sorted(scores) if place >= here]
    downwards = [scores[place] for place in sorted(scores, reverse=True) if place <= here]
    is_open = any(max(way) <= limit for way in (upwards, downwards))
    return (_reach(upwards, limit) + _reach(downwards, limit)) / 2, is_open


def _reach(scores: Sequence[float], limit: float) -> float:
    """How many places, from the first on, scores stay within a limit."""
    for place, (before, after) in enumerate(pairwise(scores)):
        if after > limit:
            return place + ((limit - before) / (after - before) if math.isfinite(after) else 0.0)
    return float(len(scores) - 1)


def settled(curve: Iterable[tuple[float, float]], target: float) -> float:
    """From where on a curve of (x, score) stays at or below a target, on lines between its points.

    inf where its last point is above.
    """
    points = list(curve)
    if points[-1][1] > target:
        return math.inf
    for (start, above), (x, score) in reversed(list(pairwise(points))):
        if above > target:
            return start + (x - start) * (above - target) / (above - score) if math.isfinite(above) else x
    return points[0][0]
