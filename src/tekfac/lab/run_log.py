"""The lines of a run's logs: what is known at the end of an epoch, of the whole run and of every layer.

In a file a number that is not finite is null; here it is nan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from tekfac.lab.clock import PARTS


@dataclass(frozen=True)
class Epoch:
    """A run at the end of an epoch.

    Attributes:
        epoch: counted from 1.
        step: optimizer steps so far.
        train_loss: mean over the epoch.
        train_accuracy: between 0 and 1, as is the next one.
        test_loss: at the end of the epoch.
        test_accuracy: at the end of the epoch.
        lr: of the epoch.
        seconds: spent on training so far, evaluation not counted.
        parts: the seconds so far of every part of a step.
        skipped_steps: steps so far that were left out.
    """

    epoch: int
    step: int
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    lr: float
    seconds: float
    parts: Mapping[str, float]
    skipped_steps: int

    def plain(self) -> dict[str, Any]:
        """The line of the log; the parts stand beside the other numbers."""
        own: dict[str, Any] = {}
        for name, value in vars(self).items():
            own |= value if name == "parts" else {name: value}
        return _finite(own)

    @classmethod
    def from_plain(cls, line: Mapping[str, Any]) -> Self:
        """The line of the log, read; raises ValueError for one that is not whole."""
        return cls(**_numbers(cls, line), parts={part: _number(line, part) for part in PARTS})


@dataclass(frozen=True)
class LayerEpoch:
    """The curvature of a layer at the end of an epoch.

    Attributes:
        epoch: counted from 1.
        step: optimizer steps so far.
        layer: its name.
        trace: of its block.
        damping: that was added.
        condition: number, of the damped block.
        staleness: steps since the eigenbasis was due.
        failed_refreshes: of its eigenbasis so far.
    """

    epoch: int
    step: int
    layer: str
    trace: float
    damping: float
    condition: float
    staleness: int
    failed_refreshes: int

    def plain(self) -> dict[str, Any]:
        """The line of the log."""
        return _finite(vars(self))

    @classmethod
    def from_plain(cls, line: Mapping[str, Any]) -> Self:
        """The line of the log, read; raises ValueError for one that is not whole."""
        return cls(**_numbers(cls, line), layer=str(line.get("layer")))


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with null in place of numbers that are not finite."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _numbers(kind: type[Epoch] | type[LayerEpoch], line: Mapping[str, Any]) -> dict[str, Any]:
    """What a line has for the fields that are numbers."""
    kinds = {"int": int, "float": float}
    return {
        field.name: kinds[str(field.type)](_number(line, field.name))
        for field in fields(kind)
        if field.type in kinds
    }


def _number(line: Mapping[str, Any], name: str) -> float:
    """A number of a line; null stands for one that was not finite."""
    if name not in line:
        raise ValueError(f"no {name!r}")
    value = line[name]
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name!r} is {value!r}, expected a number")
    return float(value)
