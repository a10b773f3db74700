"""Curves of several runs as one: mean and band, along epochs or along training time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tekfac.lab.report.runs import Epoch, Run
from tekfac.lab.report.summary import spread

POINTS = 120
LOWEST = 0.05
"""Of a band, as a share of the mean: it is to end above zero where an axis is logarithmic."""

Value = Callable[[Epoch], float]


class Line(NamedTuple):
    """Points of a mean, and of the band around it."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def over_epochs(runs: Sequence[Run], value: Value) -> Line:
    """At every epoch over the runs that got there."""
    found: dict[float, list[float]] = {}
    for run in runs:
        for epoch in run.epochs:
            found.setdefault(float(epoch.epoch), []).append(value(epoch))
    return _line(sorted(found), lambda x: found[x])


def over_time(runs: Sequence[Run], value: Value) -> Line:
    """On a grid of times that all of the longest runs cover; shorter runs count as far as they go."""
    longest = max((len(run.epochs) for run in runs), default=0)
    whole = [run for run in runs if run.epochs and len(run.epochs) == longest]
    if not whole:
        return Line([], [], [], [])
    start = max(run.epochs[0].seconds for run in whole)
    end = max(start, min(run.epochs[-1].seconds for run in whole))
    count = POINTS if end > start else 1
    grid = [start + (end - start) * point / max(count - 1, 1) for point in range(count)]

    def at(seconds: float) -> list[float]:
        known = [_between(run.epochs, value, seconds) for run in runs if run.epochs]
        return [number for number in known if number is not None]

    return _line(grid, at)


def _between(epochs: Sequence[Epoch], value: Value, seconds: float) -> float | None:
    """The value at a time, on a straight line between two epochs; None before the first and after the last."""
    times = [epoch.seconds for epoch in epochs]
    place = bisect_left(times, seconds)
    if place < len(times) and times[place] == seconds:
        return value(epochs[place])
    if place == 0 or place == len(times):
        return None
    share = (seconds - times[place - 1]) / (times[place] - times[place - 1])
    return (1 - share) * value(epochs[place - 1]) + share * value(epochs[place])


def _line(places: Sequence[float], values: Callable[[float], list[float]]) -> Line:
    """Mean and band at every place; numbers that are not finite are left out."""
    line = Line([], [], [], [])
    for x in places:
        found = spread([number for number in values(x) if math.isfinite(number)])
        if found is None:
            continue
        deviation = found.deviation or 0.0
        line.x.append(x)
        line.mean.append(found.mean)
        line.low.append(max(found.mean - deviation, LOWEST * found.mean))
        line.high.append(found.mean + deviation)
    return line
