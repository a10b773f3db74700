"""What seconds of steps say: ratios to SGD cycle by cycle, their spread, and how even the steps are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from tekfac.lab.bench.contestants import REFERENCE


@dataclass(frozen=True)
class Spread:
    """Of several numbers: the middle, the quartiles, the least and the most."""

    median: float
    first_quartile: float
    third_quartile: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one number."""
        middle, low, high = (quantile(values, share) for share in (0.5, 0.25, 0.75))
        return cls(middle, low, high, min(values), max(values), len(values))


@dataclass(frozen=True)
class Times:
    """What the steps of a contestant take.

    Attributes:
        ratio: the mean step of a cycle over SGD's at the same turns, one for each cycle.
        median: seconds of the median step.
        p95: the step that 95% are not longer than, over the median.
        longest: the longest, over the median.
        plain: the median of those that measure nothing, over SGD's median; None if all measure.
        first_step: seconds of the very first, before the warm-up was over.
    """

    ratio: Spread
    median: float
    p95: float
    longest: float
    plain: float | None
    first_step: float


def quantile(values: Sequence[float], share: float) -> float:
    """The number that this share of the values is not above, on straight lines between them."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def times_of(own: Mapping[str, Any], reference: Mapping[str, Any]) -> Times:
    """Of a contestant, from its plain values and SGD's (see timing.timed)."""
    seconds, middle = own["seconds"], median(own["seconds"])
    plain = plain_seconds(own)
    return Times(
        ratio=Spread.of(ratios(seconds, reference["seconds"], own["cycle"])),
        median=middle,
        p95=quantile(seconds, 0.95) / middle,
        longest=max(seconds) / middle,
        plain=median(plain) / median(reference["seconds"]) if plain else None,
        first_step=own["first_step"],
    )


def ratios(seconds: Sequence[float], reference: Sequence[float], cycle: int) -> list[float]:
    """The mean of every cycle over that of the reference at the same steps."""
    starts = range(0, len(seconds) - cycle + 1, cycle)
    return [fmean(seconds[at : at + cycle]) / fmean(reference[at : at + cycle]) for at in starts]


def plain_seconds(own: Mapping[str, Any]) -> list[float]:
    """Of the steps that measure nothing."""
    numbered = enumerate(own["seconds"], start=own["begin"])
    return [seconds for step, seconds in numbered if own["plain"][step % own["cycle"]]]


def summarised(timing: Mapping[str, Mapping[str, Any]]) -> dict[str, Times]:
    """Of all contestants of a network, by label."""
    return {label: times_of(own, timing[REFERENCE]) for label, own in timing.items()}


def plain_summary(timing: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same as plain values."""
    return {label: asdict(times) for label, times in summarised(timing).items()}
