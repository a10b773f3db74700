"""The folder of a run: its config, its logs, its checkpoints, its result. Nothing else knows its files.

run.json         config and provenance; enough to run it again
epochs.jsonl     a line per epoch; epochs.csv has the same as a table
curvature.jsonl  a line per layer and epoch, of natural-gradient methods
messages.log     what the library had to say
tensorboard/     TensorBoard's event files, if they were asked for
checkpoint.pt    while it runs: all that the next step depends on; checkpoint.previous.pt is the one before
model.pt         when it has ended: the weights
result.json      when it has ended: how

All but messages and tables carry checksums. Logs of a run that has to begin anew, for want of a checkpoint, are
kept as epochs.earlier-1.jsonl and so on.
"""

from __future__ import annotations

import logging
import os
import secrets
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from tekfac.common.files import (
    append_text,
    exclusive,
    read_json,
    read_parsed,
    settle_on_disk,
    write_json,
    write_text,
    write_whole,
)
from tekfac.common.tables import csv_of
from tekfac.lab import sealed_files
from tekfac.lab.checked_json import (
    CHECKSUMS,
    checked,
    checked_line,
    require_as_written,
    unchecked,
    values_of_line,
)
from tekfac.lab.checkpoints import Checkpoints
from tekfac.lab.config import RunConfig
from tekfac.lab.messages import MessagesHandler
from tekfac.lab.run_log import Epoch, LayerEpoch, Line

logger = logging.getLogger("tekfac")

FORMAT = 2
WITHOUT_CHECKSUMS = 1
"""The format of earlier runs, which are read; their checkpoints have no checksum and are not gone on from."""

RUN, RESULT, MODEL = "run.json", "result.json", "model.pt"
EPOCHS, LAYERS = "epochs.jsonl", "curvature.jsonl"
LOGS = (EPOCHS, LAYERS)
RUNS = "runs"
"""The folder, in that of a sweep or comparison, that has its runs."""

T = TypeVar("T")


class RunFolder:
    """A folder that holds one run, or will."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path)
        self._number: str | None = None

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
        begun = (self.path / name for name in (EPOCHS, RESULT))
        return self.file.is_file() and (bool(self.checkpoints.there) or any(map(Path.is_file, begun)))

    def begin(self, config: RunConfig, identity: Mapping[str, str], provenance: Mapping[str, Any]) -> None:
        """Write down what is going to be run."""
        self._number = secrets.token_hex(8)
        whole = {"format": FORMAT, "id": self._number, "config": config.plain()}
        write_json(self.file, checked({**whole, "identity": dict(identity), "provenance": dict(provenance)}))

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

    def number(self) -> str:
        """What no other run has; empty for one of an earlier format, and where there is none yet."""
        if self._number is None:  # read once, so that whatever is done to the file does not end a run
            self._number = str(self._saved().get("id", "")) if self.file.is_file() else ""
        return self._number

    def identity(self) -> dict[str, str]:
        """What the run in it was computed from (see provenance.py)."""
        return dict(self._saved().get("identity", {}))

    def provenance(self) -> dict[str, Any]:
        """Where the run in it comes from (see provenance.py)."""
        return dict(self._saved().get("provenance") or {})

    def _saved(self) -> dict[str, Any]:
        """The content of run.json.

        Raises:
            ValueError: if there is none, it is of another format, or not as it was written.
        """
        if not self.file.is_file():
            raise ValueError(f"{str(self.path)!r} holds no run: there is no {RUN} in it.")
        saved = read_json(self.file)
        found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
        if found not in (FORMAT, WITHOUT_CHECKSUMS) or not isinstance(saved.get("config"), dict):
            raise ValueError(
                f"{str(self.file)!r} has the format {found!r}, expected {FORMAT}, with a config. Did `tekfac "
                "train` of this version write it?"
            )
        if found == FORMAT or CHECKSUMS in saved:
            require_as_written(saved, self.file)
        return unchecked(saved)

    def result(self) -> dict[str, Any] | None:
        """How the run ended, if it has; its status is "finished" or "diverged".

        Raises:
            ValueError: if it has another one, or is not as it was written.
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
        if CHECKSUMS in result or "format" in result:
            require_as_written(result, path)
        return {key: value for key, value in unchecked(result).items() if key != "format"}

    def end(self, model: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Write the weights and how the run ended; the checkpoints have served their purpose then."""
        write_whole(self.path / MODEL, lambda path: sealed_files.write(model, path))
        self._settle_logs()
        write_json(self.path / RESULT, checked({"format": FORMAT, **result}))
        self.checkpoints.drop()

    # -- logs ------------------------------------------------------------------------------------------

    def log(self, epoch: Epoch, layers: Iterable[LayerEpoch]) -> None:
        """Add the lines of an epoch to the logs, and write the table of all epochs anew."""
        self._append(EPOCHS, [epoch.plain()])
        self._append(LAYERS, [layer.plain() for layer in layers])
        rows = [epoch.plain() for epoch in self.epochs()]
        write_text(self.path / "epochs.csv", csv_of([rows[0], *(row.values() for row in rows)]))

    def epochs(self) -> list[Epoch]:
        """The epochs so far."""
        return self._read(EPOCHS, Epoch.from_plain)

    def layers(self) -> list[LayerEpoch]:
        """The curvature of the layers after every epoch so far, if the optimizer has such a thing."""
        return self._read(LAYERS, LayerEpoch.from_plain)

    def _append(self, log: str, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(f"{checked_line(row)}\n" for row in rows)
        advice = "Free some room, then resume: the run goes on from its last checkpoint."
        append_text(self.path / log, text, advice)

    def _read(self, log: str, make: Callable[[Mapping[str, Any]], T], size: int | None = None) -> list[T]:
        """The lines of a log; a last one that was cut off in the middle, as by a kill, is left out.

        Args:
            log: its name.
            make: makes something of a line's values.
            size: how many of its bytes are read; None for all.

        Raises:
            ValueError: for a damaged line; the message names it.
        """
        path = self.path / log
        if not path.exists():
            return []
        *whole, last = path.read_bytes()[:size].split(b"\n")
        made = []
        for number, line in enumerate([*whole, last] if last else whole, start=1):
            try:
                made.append(make(values_of_line(line)))
            except (ValueError, OverflowError) as error:
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
        handler = MessagesHandler(self.path / "messages.log")
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

    def save(self, config: RunConfig, state: Mapping[str, Any]) -> None:
        """Write a checkpoint that remembers whose it is, and how long the logs were."""
        self._settle_logs()
        told = {
            "format": FORMAT,
            "run": self.number(),
            "config": config.plain(),
            "fingerprint": config.fingerprint(),
            "logs": {log: self._size(log) for log in LOGS},
        }
        self.checkpoints.write({**state, **told})

    def load(self, config: RunConfig) -> dict[str, Any] | None:
        """The newest checkpoint that is as it was written, if there is one; nothing in the folder is changed.

        Raises:
            ValueError: if all are damaged; for one of another run, config or format; for a log that is not what
                it was.
        """

        def require(path: Path, state: Mapping[str, Any]) -> None:
            self._require_own(path, state, config)
            self._require_logs(path, state)

        return self.checkpoints.read(require)

    def go_on_from(self, state: Mapping[str, Any] | None) -> None:
        """Cut the logs back to where they were when a checkpoint was written; without one, put them aside."""
        self.checkpoints.put_damaged_aside()
        for log in LOGS:
            path = self.path / log
            if state is not None and path.exists():
                os.truncate(path, state["logs"][log])
            elif path.exists():
                names = (path.with_suffix(f".earlier-{number}{path.suffix}") for number in count(1))
                kept = next(name for name in names if not name.exists())
                path.replace(kept)
                logger.warning("There is no checkpoint: the run begins anew, %s is kept as %s.", log, kept.name)

    def _require_own(self, path: Path, state: Mapping[str, Any], config: RunConfig) -> None:
        """Raise ValueError for a checkpoint that is not of this run, as it is to be gone on with."""
        if state.get("format") != FORMAT or not isinstance(state.get("config"), dict):
            raise ValueError(
                f"{str(path)!r} has the format {state.get('format')!r}, expected {FORMAT}. Go on with the "
                "tekfac that wrote it, or remove it to begin anew."
            )
        if state.get("fingerprint") != config.fingerprint():
            differences = RunConfig.from_plain(state["config"], str(path)).differences(config)
            raise ValueError(
                f"{str(path)!r} is of a run with another config ({'; '.join(differences) or 'unknown'}). Go on "
                "with its own, or choose another folder."
            )
        if state.get("run") != self.number():
            raise ValueError(
                f"{str(path)!r} is of another run than the {RUN} beside it. Put back the checkpoint that was "
                "there, or remove this one to begin anew."
            )

    def _require_logs(self, path: Path, state: Mapping[str, Any]) -> None:
        """Raise ValueError for logs that have lost, since a checkpoint was written, what they had then."""
        sizes = state.get("logs")
        if not isinstance(sizes, dict) or not all(isinstance(sizes.get(log), int) for log in LOGS):
            raise ValueError(f"{str(path)!r} does not tell how long the logs were. Remove it to begin anew.")
        lines: tuple[type[Line], ...] = (Epoch, LayerEpoch)
        for log, line in zip(LOGS, lines, strict=True):
            if not 0 <= sizes[log] <= self._size(log):
                raise ValueError(
                    f"{str(self.path / log)!r} is shorter than when {path.name} was written, so that the run "
                    f"cannot go on. Remove {path.name} to begin anew."
                )
            self._read(log, line.from_plain, sizes[log])

    def _settle_logs(self) -> None:
        """Wait until the logs would outlive a loss of power."""
        for log in LOGS:
            if self._size(log):
                settle_on_disk(self.path / log)

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
        plain = read_parsed(path, lambda text: _with_none(tomllib.loads(text)), "TOML")
    else:
        plain = read_json(path)
    if isinstance(plain, dict) and isinstance(plain.get("config"), dict):
        if CHECKSUMS in plain or plain.get("format") == FORMAT:
            require_as_written(plain, path)
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
