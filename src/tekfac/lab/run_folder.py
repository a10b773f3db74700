"""The folder of a run: its config, its logs, its checkpoint, its result.

run.json         config and provenance; enough to run it again
epochs.jsonl     a line per epoch; epochs.csv has the same as a table
curvature.jsonl  a line per layer and epoch, of natural-gradient methods
messages.log     what the library had to say
checkpoint.pt    while it runs: all that the next step depends on
model.pt         when it has ended: the weights
result.json      when it has ended: how
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tekfac.common.files import exclusive, read_json, settle_on_disk, write_json, write_text, write_whole
from tekfac.lab.config import RunConfig

FORMAT = 1
LOGS = ("epochs.jsonl", "curvature.jsonl")


class RunFolder:
    """A folder that holds one run, or will."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def has_progress(self) -> bool:
        """Whether a run in it has got anywhere: to a checkpoint, the end of an epoch, or its own end."""
        begun = (self.path / name for name in ("checkpoint.pt", "epochs.jsonl", "result.json"))
        return (self.path / "run.json").is_file() and any(path.is_file() for path in begun)

    def begin(self, config: RunConfig, identity: Mapping[str, str], provenance: Mapping[str, Any]) -> None:
        """Write down what is going to be run."""
        whole = {"format": FORMAT, "config": config.plain(), "identity": dict(identity)}
        write_json(self.path / "run.json", {**whole, "provenance": dict(provenance)})

    def config(self) -> RunConfig:
        """The config of the run in it."""
        return RunConfig.from_plain(self._saved()["config"], str(self.path / "run.json"))

    def identity(self) -> dict[str, str]:
        """What the run in it was computed from (see identity.py)."""
        return dict(self._saved().get("identity", {}))

    def command(self) -> str:
        """What the user typed that began the run in it."""
        return str(self._saved().get("provenance", {}).get("command", ""))

    def _saved(self) -> dict[str, Any]:
        """The content of run.json.

        Raises:
            ValueError: if there is none, or it is of another format.
        """
        path = self.path / "run.json"
        if not path.is_file():
            raise ValueError(f"{str(self.path)!r} holds no run: there is no run.json in it.")
        saved = read_json(path)
        if (
            not isinstance(saved, dict)
            or saved.get("format") != FORMAT
            or not isinstance(saved.get("config"), dict)
        ):
            raise ValueError(f"{str(path)!r} is no run of this version of tekfac (format {FORMAT} expected).")
        return saved

    def result(self) -> dict[str, Any] | None:
        """How the run ended, if it has."""
        path = self.path / "result.json"
        return read_json(path) if path.is_file() else None

    def end(self, model: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Write the weights and how the run ended; the checkpoint has served its purpose then."""
        write_whole(self.path / "model.pt", lambda path: _write_tensors(dict(model), path))
        write_json(self.path / "result.json", dict(result))
        self.drop_checkpoint()

    def drop_checkpoint(self) -> None:
        """Remove the checkpoint of a run that has ended."""
        (self.path / "checkpoint.pt").unlink(missing_ok=True)

    # -- logs ------------------------------------------------------------------------------------------

    def append(self, log: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to a log."""
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

    def rows(self, log: str) -> list[dict[str, Any]]:
        """The lines of a log."""
        path = self.path / log
        return (
            [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            if path.exists()
            else []
        )

    def _size(self, log: str) -> int:
        path = self.path / log
        return path.stat().st_size if path.exists() else 0

    def write_table(self) -> None:
        """Write the lines on epochs once more, as comma-separated values."""
        rows = self.rows("epochs.jsonl")
        text = io.StringIO()
        table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_text(self.path / "epochs.csv", text.getvalue())

    # -- checkpoints -----------------------------------------------------------------------------------

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint that remembers how long the logs were."""
        sizes = {log: self._size(log) for log in LOGS}
        for log in LOGS:
            if sizes[log]:
                settle_on_disk(self.path / log)
        whole = {**state, "logs": sizes}
        write_whole(self.path / "checkpoint.pt", lambda path: _write_tensors(whole, path))

    def load(self) -> dict[str, Any] | None:
        """The checkpoint, if there is one; the logs are cut back to where they were when it was written.

        Raises:
            ValueError: for a checkpoint that cannot be read, or a log that has lost some of its lines.
        """
        path = self.path / "checkpoint.pt"
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


def run_folder(folder: Path, config: RunConfig) -> Path:
    """Where a run of a sweep or a comparison is kept: a folder named after what is computed."""
    return folder / "runs" / f"{config.optimizer}-{config.fingerprint()}-seed{config.seed}"


def _write_tensors(values: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:  # given a file, torch.save passes on what the system says
        torch.save(values, file)
