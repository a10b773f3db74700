"""The folder of a run: its config, its logs, its checkpoint, its result. Nothing else knows its files.

run.json         config and provenance; enough to run it again
epochs.jsonl     a line per epoch; epochs.csv has the same as a table
curvature.jsonl  a line per layer and epoch, of natural-gradient methods
messages.log     what the library had to say
tensorboard/     TensorBoard's event files, if they were asked for
checkpoint.pt    while it runs: all that the next step depends on
model.pt         when it has ended: the weights
result.json      when it has ended: how
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from tekfac.common.files import exclusive, read_json, settle_on_disk, write_json, write_text, write_whole
from tekfac.lab.config import RunConfig
from tekfac.lab.run_log import Epoch, LayerEpoch

FORMAT = 1
RUN, RESULT, CHECKPOINT, MODEL = "run.json", "result.json", "checkpoint.pt", "model.pt"
EPOCHS, LAYERS = "epochs.jsonl", "curvature.jsonl"
LOGS = (EPOCHS, LAYERS)
RUNS = "runs"
"""The folder, in that of a sweep or comparison, that has its runs."""

T = TypeVar("T")


class RunFolder:
    """A folder that holds one run, or will."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, folder: Path, config: RunConfig) -> RunFolder:
        """Where a run of a sweep or a comparison is kept: a folder named after what is computed."""
        return cls(folder / RUNS / f"{config.optimizer}-{config.fingerprint()}-seed{config.seed}")

    @classmethod
    def below(cls, folder: Path) -> list[RunFolder]:
        """The runs in a folder and anywhere below it, in the order of their paths."""
        return [cls(path.parent) for path in sorted(folder.rglob(RUN))]

    @property
    def file(self) -> Path:
        """What `tekfac train --config` takes to run it again."""
        return self.path / RUN

    @property
    def events(self) -> Path:
        """Where TensorBoard's event files are."""
        return self.path / "tensorboard"

    # -- begin and end ---------------------------------------------------------------------------------

    @property
    def has_progress(self) -> bool:
        """Whether a run in it has got anywhere: to a checkpoint, the end of an epoch, or its own end."""
        begun = (self.path / name for name in (CHECKPOINT, EPOCHS, RESULT))
        return self.file.is_file() and any(path.is_file() for path in begun)

    def begin(self, config: RunConfig, identity: Mapping[str, str], provenance: Mapping[str, Any]) -> None:
        """Write down what is going to be run."""
        whole = {"format": FORMAT, "config": config.plain(), "identity": dict(identity)}
        write_json(self.file, {**whole, "provenance": dict(provenance)})

    def config(self) -> RunConfig:
        """The config of the run in it."""
        return RunConfig.from_plain(self.settings(), str(self.file))

    def settings(self) -> dict[str, Any]:
        """The plain values of that config, which may have keys that this version does not know.

        Raises:
            ValueError: if it does not say what was trained.
        """
        config = self._saved()["config"]
        for key in ("data", "model", "optimizer"):
            if key not in config:
                raise ValueError(
                    f"{str(self.file)!r} is damaged: its config has no {key!r}. Train the run again."
                )
        return dict(config)

    def identity(self) -> dict[str, str]:
        """What the run in it was computed from (see provenance.py)."""
        return dict(self._saved().get("identity", {}))

    def provenance(self) -> dict[str, Any]:
        """Where the run in it comes from (see provenance.py)."""
        return dict(self._saved().get("provenance") or {})

    def _saved(self) -> dict[str, Any]:
        """The content of run.json.

        Raises:
            ValueError: if there is none, or it is of another format.
        """
        if not self.file.is_file():
            raise ValueError(f"{str(self.path)!r} holds no run: there is no {RUN} in it.")
        saved = read_json(self.file)
        found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
        if found != FORMAT or not isinstance(saved.get("config"), dict):
            raise ValueError(
                f"{str(self.file)!r} has the format {found!r}, expected {FORMAT}, with a config. Did `tekfac "
                "train` of this version write it?"
            )
        return dict(saved)

    def result(self) -> dict[str, Any] | None:
        """How the run ended, if it has; its status is "finished" or "diverged".

        Raises:
            ValueError: if it has another one.
        """
        path = self.path / RESULT
        if not path.is_file():
            return None
        result = read_json(path)
        status = result.get("status") if isinstance(result, dict) else None
        if status not in ("finished", "diverged"):
            raise ValueError(
                f"{str(path)!r} has the status {status!r}, expected 'finished' or 'diverged'. Remove the file "
                "to have the run taken for unfinished."
            )
        return dict(result)

    def end(self, model: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Write the weights and how the run ended; the checkpoint has served its purpose then."""
        write_whole(self.path / MODEL, lambda path: _write_tensors(dict(model), path))
        write_json(self.path / RESULT, dict(result))
        self.drop_checkpoint()

    def drop_checkpoint(self) -> None:
        """Remove the checkpoint of a run that has ended."""
        (self.path / CHECKPOINT).unlink(missing_ok=True)

    # -- logs ------------------------------------------------------------------------------------------

    def log(self, epoch: Epoch, layers: Iterable[LayerEpoch]) -> None:
        """Add the lines of an epoch to the logs, and write the table of all epochs anew."""
        self._append(EPOCHS, [epoch.plain()])
        self._append(LAYERS, [layer.plain() for layer in layers])
        rows = [epoch.plain() for epoch in self.epochs()]
        text = io.StringIO()
        table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_text(self.path / "epochs.csv", text.getvalue())

    def epochs(self) -> list[Epoch]:
        """The epochs so far."""
        return self._read(EPOCHS, Epoch.from_plain)

    def layers(self) -> list[LayerEpoch]:
        """The curvature of the layers after every epoch so far, if the optimizer has such a thing."""
        return self._read(LAYERS, LayerEpoch.from_plain)

    def _append(self, log: str, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        path = self.path / log
        size = self._size(log)
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            if path.exists():
                os.truncate(path, size)
            raise OSError(
                f"Cannot write {str(path)!r}: {error.strerror}. Free some room, then resume; nothing is lost."
            ) from error

    def _read(self, log: str, make: Callable[[Mapping[str, Any]], T]) -> list[T]:
        """The lines of a log; a last one that was cut off in the middle, as by a kill, is left out.

        Raises:
            ValueError: for a damaged line; the message names it.
        """
        path = self.path / log
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
                if number > len(whole):
                    break
                raise ValueError(
                    f"{str(path)!r} is damaged in line {number}: {error}. Remove the line or train the run "
                    "again."
                ) from error
        return made

    def _size(self, log: str) -> int:
        path = self.path / log
        return path.stat().st_size if path.exists() else 0

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Let what the library logs meanwhile go to a file of the run."""
        logger = logging.getLogger("tekfac")
        handler = logging.FileHandler(self.path / "messages.log", delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        propagated = logger.propagate
        logger.addHandler(handler)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagated
            handler.close()

    # -- checkpoints -----------------------------------------------------------------------------------

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint that remembers how long the logs were."""
        sizes = {log: self._size(log) for log in LOGS}
        for log in LOGS:
            if sizes[log]:
                settle_on_disk(self.path / log)
        whole = {**state, "logs": sizes}
        write_whole(self.path / CHECKPOINT, lambda path: _write_tensors(whole, path))

    def load(self) -> dict[str, Any] | None:
        """The checkpoint, if there is one; the logs are cut back to where they were when it was written.

        Raises:
            ValueError: for a checkpoint that cannot be read, or a log that has lost some of its lines.
        """
        path = self.path / CHECKPOINT
        state: dict[str, Any] | None = None
        if path.is_file():
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:
                raise ValueError(
                    f"Cannot read checkpoint {str(path)!r} ({type(error).__name__}). Remove it to begin anew."
                ) from error
        sizes = dict.fromkeys(LOGS, 0) if state is None else state["logs"]
        for log in LOGS:
            if self._size(log) < sizes[log]:
                raise ValueError(
                    f"{str(self.path / log)!r} is shorter than when {path.name} was written, so that the run "
                    f"cannot go on. Remove {path.name} to begin anew."
                )
            if (self.path / log).exists():
                os.truncate(self.path / log, sizes[log])
        return state

    @contextmanager
    def locked(self, waiting: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Keep other processes out; the system lets go of the lock when this one ends, however it does.

        Args:
            waiting: asked while another process is at work in the folder, whether to go on waiting for it.

        Raises:
            ValueError: if another process is at work in the folder, and is not waited for.
        """
        with exclusive(self.path / "lock", waiting):
            for left_over in self.path.glob("*.unfinished"):  # of a process that was killed while it wrote
                left_over.unlink()
            yield


def read_plain(path: Path) -> dict[str, Any]:
    """The plain values of a TOML or JSON file; of a run (its folder or its file), those of its config.

    Raises:
        ValueError: for a file that is not there or cannot be read.
    """
    if path.is_dir():
        path = RunFolder(path).file
    if path.suffix == ".toml":
        try:
            plain: Any = _with_none(tomllib.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise ValueError(f"There is no file {str(path)!r}.") from error
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"Cannot read {str(path)!r} as TOML: {error}") from error
    else:
        plain = read_json(path)
    if isinstance(plain, dict) and isinstance(plain.get("config"), dict):
        plain = plain["config"]
    if not isinstance(plain, dict):
        raise ValueError(f"{str(path)!r} holds a {type(plain).__name__}. Expected keys and values of a config.")
    return plain


def _with_none(value: Any) -> Any:
    """The same values, with None for the word "None", which TOML has no other way to say."""
    if isinstance(value, dict):
        return {key: _with_none(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_with_none(own) for own in value]
    return None if value == "None" else value


def _write_tensors(values: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:  # given a file, torch.save passes on what the system says
        torch.save(values, file)
