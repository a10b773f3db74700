"""Scores of several seeds in a few words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation."""
    if not all(map(math.isfinite, values)):
        return "diverged"
    if len(values) < 2:
        return f"{mean(values):.4g}"
    return f"{mean(values):.4g} ± {stdev(values):.2g}"


def gap(values: Sequence[float], others: Sequence[float]) -> str:
    """The mean difference ± its standard error."""
    if not all(map(math.isfinite, (*values, *others))):
        return ""
    gaps = [own - other for own, other in zip(values, others, strict=True)]
    if not any(gaps):
        return "–"
    if len(gaps) < 2:
        return f"{gaps[0]:+.3g}"
    return f"{mean(gaps):+.3g} ± {stdev(gaps) / math.sqrt(len(gaps)):.2g}"
