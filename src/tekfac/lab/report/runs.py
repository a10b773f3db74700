"""Run folders, read: what was asked for, where it ran, and the numbers of every epoch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from tekfac.common.files import read_json
from tekfac.lab.clock import PARTS
from tekfac.lab.run_folder import FORMAT

Status = Literal["finished", "diverged", "unfinished"]
R = TypeVar("R")


@dataclass(frozen=True)
class Epoch:
    """The numbers at the end of an epoch; those that were not finite are nan.

    Attributes:
        epoch: counted from 1.
        step: optimizer steps so far.
        train_loss: mean over the epoch.
        train_accuracy: between 0 and 1, as is the next one.
        test_accuracy: at the end of the epoch.
        test_loss: at the end of the epoch.
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
class LayerCurvature:
    """What was measured of a layer's curvature at a step; what was not finite is nan."""

    epoch: int
    step: int
    layer: str
    trace: float
    damping: float
    condition: float
    staleness: float


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        path: its folder.
        config: everything that was asked for, as in run.json.
        provenance: command, commit, machine and versions.
        epochs: one row per finished epoch, in order.
        curvature: rows of the layers' curvature, if they were recorded.
        status: "unfinished" as long as there is no result.
    """

    path: Path
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    epochs: tuple[Epoch, ...]
    curvature: tuple[LayerCurvature, ...]
    status: Status

    @property
    def optimizer(self) -> str:
        """Its name in the configuration."""
        return str(self.config["optimizer"])

    @property
    def seed(self) -> Any:
        """The seed, None where the configuration has none."""
        return self.config.get("seed")


def find_runs(folders: Iterable[str | Path]) -> list[Run]:
    """The runs in the folders and anywhere below them, each once, in the order of their paths.

    Raises:
        ValueError: if a folder does not exist or holds no run, or if a file of a run is damaged.
    """
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(
                f"There is no folder {str(folder)!r}. Expected a run or a folder with runs below it."
            )
        below = {file.parent.resolve(): file.parent for file in sorted(folder.rglob("run.json"))}
        if not below:
            raise ValueError(
                f"No run in {str(folder)!r}: no run.json in it or below. Expected what `tekfac train` wrote."
            )
        found = below | found
    return [read_run(path) for path in sorted(found.values())]


def read_run(folder: str | Path) -> Run:
    """One run. A last line that was cut off in the middle, as by a kill, is left out.

    Raises:
        ValueError: for a damaged file; the message names it, and the line.
    """
    path = Path(folder)
    described = read_json(path / "run.json")
    config = _config(path / "run.json", described)
    return Run(
        path=path,
        config=config,
        provenance=described.get("provenance") or {},
        epochs=tuple(_rows(path / "epochs.jsonl", _epoch)),
        curvature=tuple(_rows(path / "curvature.jsonl", _layer_curvature)),
        status=_status(path / "result.json"),
    )


def _config(path: Path, described: Any) -> Mapping[str, Any]:
    """The configuration in run.json, looked at as far as a report needs it."""
    if not isinstance(described, Mapping) or described.get("format") != FORMAT:
        found = described.get("format") if isinstance(described, Mapping) else type(described).__name__
        raise ValueError(
            f"{str(path)!r} has the format {found!r}, expected {FORMAT}. Did `tekfac train` write it?"
        )
    config = described.get("config")
    missing = [
        key for key in ("data", "model", "optimizer") if not isinstance(config, Mapping) or key not in config
    ]
    if missing:
        raise ValueError(f"{str(path)!r} is damaged: its config has no {missing[0]!r}. Train the run again.")
    return cast("Mapping[str, Any]", config)


def _status(path: Path) -> Status:
    if not path.exists():
        return "unfinished"
    result = read_json(path)
    status = result.get("status") if isinstance(result, Mapping) else None
    if status not in ("finished", "diverged"):
        raise ValueError(
            f"{str(path)!r} has the status {status!r}, expected 'finished' or 'diverged'. "
            "Remove the file to have the run shown as unfinished."
        )
    return cast("Status", status)


def _rows(path: Path, make: Callable[[Mapping[str, Any]], R]) -> list[R]:
    """The rows of a file with one object per line; none where there is no file."""
    if not path.exists():
        return []
    *whole, last = path.read_bytes().split(b"\n")
    made = []
    for number, line in enumerate([*whole, last] if last else whole, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, Mapping):
                raise ValueError("not an object")
            made.append(make(row))
        except ValueError as error:
            if number > len(whole):  # without its line end: the run was killed while writing
                break
            raise ValueError(
                f"{str(path)!r} is damaged in line {number}: {error}. Remove the line or train the run again."
            ) from error
    return made


def _epoch(row: Mapping[str, Any]) -> Epoch:
    return Epoch(
        epoch=int(_number(row, "epoch")),
        step=int(_number(row, "step")),
        train_loss=_number(row, "train_loss"),
        train_accuracy=_number(row, "train_accuracy"),
        test_loss=_number(row, "test_loss"),
        test_accuracy=_number(row, "test_accuracy"),
        lr=_number(row, "lr"),
        seconds=_number(row, "seconds"),
        parts={part: _number(row, part) for part in PARTS},
        skipped_steps=int(_number(row, "skipped_steps")),
    )


def _layer_curvature(row: Mapping[str, Any]) -> LayerCurvature:
    return LayerCurvature(
        epoch=int(_number(row, "epoch")),
        step=int(_number(row, "step")),
        layer=str(row.get("layer")),
        trace=_number(row, "trace"),
        damping=_number(row, "damping"),
        condition=_number(row, "condition"),
        staleness=_number(row, "staleness"),
    )


def _number(row: Mapping[str, Any], key: str) -> float:
    """A number of a row; null stands for one that was not finite."""
    if key not in row:
        raise ValueError(f"no {key!r}")
    value = row[key]
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key!r} is {value!r}, expected a number")
    return float(value)
