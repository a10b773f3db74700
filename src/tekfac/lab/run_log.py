"""The lines of a run's logs: what is known at the end of an epoch, of the whole run and of every layer.

TensorBoard's event files have the same.

In a file a number that is not finite is null; here it is nan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self

from tekfac.common.extras import require
from tekfac.lab.counting import PARTS


@dataclass(frozen=True)
class Line:
    """A line of a log: fields of numbers and texts, and the parts of a step, which stand beside them there."""

    def plain(self) -> dict[str, Any]:
        """What is written; null in place of numbers that are not finite."""
        own: dict[str, Any] = {}
        for name, value in vars(self).items():
            own |= value if isinstance(value, Mapping) else {name: value}
        lost = [name for name, value in own.items() if isinstance(value, float) and not math.isfinite(value)]
        return own | dict.fromkeys(lost)

    @classmethod
    def from_plain(cls, line: Mapping[str, Any]) -> Self:
        """What was written, read; raises ValueError for a line that lacks something, or has something else."""
        read: dict[str, Callable[[str], Any]] = {
            "int": lambda name: int(_number(line, name)),
            "float": lambda name: _number(line, name),
            "str": lambda name: str(line.get(name)),
            "Mapping[str, float]": lambda _: {part: _number(line, part) for part in PARTS},
        }
        later = {own.name for own in fields(cls) if own.default is not MISSING and own.name not in line}
        named = [own for own in fields(cls) if own.name not in later]
        made = cls(**{own.name: read[str(own.type)](own.name) for own in named})
        strange = line.keys() - made.plain().keys()
        if strange:
            raise ValueError(f"unknown {', '.join(map(repr, sorted(strange)))}")
        return made


@dataclass(frozen=True)
class Epoch(Line):
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


@dataclass(frozen=True)
class LayerEpoch(Line):
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
        age_of_factors: steps since a refresh that brought statistics.
        age_of_basis: steps since factors were decomposed.
        empty_refreshes: due ones that brought no statistics, so far.

    The last three are nan in logs that were written before there were any.
    """

    epoch: int
    step: int
    layer: str
    trace: float
    damping: float
    condition: float
    staleness: int
    failed_refreshes: int
    age_of_factors: float = math.nan
    age_of_basis: float = math.nan
    empty_refreshes: float = math.nan


OF_LAYERS = (
    *("trace", "damping", "condition", "staleness"),
    *("age_of_factors", "age_of_basis", "empty_refreshes", "failed_refreshes"),
)
"""What TensorBoard gets of every layer."""


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


class TensorBoard:
    """What a run logs, as scalars under the number of steps."""

    def __init__(self, folder: Path) -> None:
        require("tensorboard", "Writing TensorBoard's files")
        self._writer_class = require("torch.utils.tensorboard", "Writing TensorBoard's files").SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def write(self, epoch: Epoch, layers: Iterable[LayerEpoch]) -> None:
        """An epoch and its layers; what was written for later steps before is hidden."""
        if self._writer is None:
            self._writer = self._writer_class(str(self._folder), purge_step=epoch.step)
        scalars = {
            f"run/{name}": value for name, value in epoch.plain().items() if name not in ("epoch", "step")
        }
        for layer in layers:
            own = layer.plain()
            for name in OF_LAYERS:
                scalars[f"{name}/{layer.layer}"] = own[name]
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, epoch.step)
        self._writer.flush()

    def close(self) -> None:
        """Let go of the file."""
        if self._writer is not None:
            self._writer.close()
