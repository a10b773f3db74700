"""Curves of several runs as one: mean and band, along epochs or along training time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tekfac.lab.report.runs import Epoch, Run
from tekfac.lab.report.summary import spread

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
    found = _by_epoch(runs, value)
    return _line(sorted(found), found)


def over_time(runs: Sequence[Run], value: Value) -> Line:
    """As over epochs, every epoch at its mean time: where all runs finish, the line ends with their means."""
    times = epoch_times(runs)
    line = _line(sorted(times), _by_epoch(runs, value))
    return line._replace(x=[times[epoch] for epoch in line.x])


def epoch_times(runs: Sequence[Run]) -> dict[float, float]:
    """Mean seconds of training up to every epoch, of the runs that got farthest; so they never go back."""
    farthest = max((run.epochs[-1].epoch for run in runs if run.epochs), default=0)
    whole = [run for run in runs if run.epochs and run.epochs[-1].epoch == farthest]
    found = _by_epoch(whole, lambda epoch: epoch.seconds)
    return {epoch: math.fsum(seconds) / len(seconds) for epoch, seconds in found.items()}


def _by_epoch(runs: Sequence[Run], value: Value) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for run in runs:
        for epoch in run.epochs:
            found.setdefault(float(epoch.epoch), []).append(value(epoch))
    return found


def _line(places: Sequence[float], values: Mapping[float, list[float]]) -> Line:
    """Mean and band at every place; numbers that are not finite are left out."""
    line = Line([], [], [], [])
    for x in places:
        found = spread([number for number in values[x] if math.isfinite(number)])
        if found is None:
            continue
        deviation = found.deviation or 0.0
        line.x.append(x)
        line.mean.append(found.mean)
        line.low.append(max(found.mean - deviation, LOWEST * found.mean))
        line.high.append(found.mean + deviation)
    return line
