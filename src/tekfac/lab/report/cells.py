"""Numbers as text in the cells of tables, and which of them are best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from tekfac.lab.report.summary import Reached, Spread

NOTHING = "—"


Form = Callable[[float, float], str]
"""A number as text, with the digits that another one of some size needs."""


def with_deviation(found: Spread | None, form: Form) -> str:
    """Mean ± deviation with as many digits, the mean alone of a single seed."""
    if found is None:
        return NOTHING
    if math.isnan(found.mean):
        return "not finite"
    mean = form(found.mean, found.mean)
    return mean if found.deviation is None else f"{mean} ± {form(found.deviation, found.mean)}"


def accuracy(found: Spread | None) -> str:
    """In percent."""
    return with_deviation(found, lambda value, _: f"{100 * value:.2f}")


def in_percent(found: Spread | None) -> str:
    """As part of a sentence, in one piece."""
    return accuracy(found).replace(" ", "\N{NO-BREAK SPACE}") + ("" if mean(found) is None else "%")


def loss(found: Spread | None) -> str:
    """As many digits as the mean needs."""
    return with_deviation(found, lambda value, size: f"{value:.1e}" if 0 < size < 1e-3 else f"{value:.4f}")


def reached(found: Reached, form: Callable[[float], str]) -> str:
    """The median, and how many seeds it is of if some did not get there."""
    if found.median is None:
        return NOTHING
    return form(found.median) + ("" if found.by_all else f" ({found.count} of {found.runs})")


def seconds_or_ms(found: Spread | None) -> str:
    """Times with their deviation."""
    return with_deviation(found, duration)


def duration(value: float, size: float | None = None) -> str:
    """Seconds or milliseconds, three digits or more."""
    size = value if size is None else size
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:,.0f}"


def count(value: float) -> str:
    """Epochs; the median of an even number may lie between two."""
    return f"{value:g}"


def best_places(values: Sequence[float | None], choose: Callable[[Iterable[float]], float]) -> list[int]:
    """Where the largest or smallest number stands, in several places if these tie; nowhere if all do."""
    known = [value for value in values if value is not None]
    best = choose(known) if known else None
    places = [place for place, value in enumerate(values) if value is not None and value == best]
    return places if len(places) < len(values) else []


def mean(found: Spread | None) -> float | None:
    """To be compared; None where there is nothing finite."""
    return None if found is None or math.isnan(found.mean) else found.mean


def median_of_all(found: Reached) -> float | None:
    """To be compared; None where a seed did not get there."""
    return found.median if found.by_all else None
