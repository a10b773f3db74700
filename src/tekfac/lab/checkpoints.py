"""The checkpoints of a run: the newest and the one before, which is gone on from where the newest is damaged.

checkpoint.pt           the newest
checkpoint.previous.pt  the one before
checkpoint.damaged.pt   one that was damaged, when the run went on from the one before
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tekfac.common.checksums import DamagedError
from tekfac.common.files import write_whole
from tekfac.lab import sealed_files

NEWEST, PREVIOUS, DAMAGED = "checkpoint.pt", "checkpoint.previous.pt", "checkpoint.damaged.pt"

logger = logging.getLogger("tekfac")


class Checkpoints:
    """Those in a folder."""

    def __init__(self, folder: Path) -> None:
        self._newest, self._previous = folder / NEWEST, folder / PREVIOUS
        self._kept = folder / DAMAGED
        self._damaged = False

    @property
    def there(self) -> list[Path]:
        """Those that may be gone on from, newest first."""
        return [path for path in (self._newest, self._previous) if path.is_file()]

    def write(self, values: Mapping[str, Any]) -> None:
        """Write one; the newest so far becomes the one before."""
        write_whole(self._newest, lambda path: sealed_files.write(values, path), earlier=self._previous)

    def read(self, require: Callable[[Path, Mapping[str, Any]], None]) -> dict[str, Any] | None:
        """The newest that is as it was written; None if there is none at all.

        Args:
            require: raises ValueError for one that cannot be gone on from for another reason.

        Raises:
            ValueError: from `require`, or if all are damaged.
        """
        damaged: list[DamagedError] = []
        for path in self.there:
            try:
                values = sealed_files.read(path)
            except DamagedError as error:
                damaged.append(error)
                continue
            require(path, values)
            if path == self._previous:
                why = damaged[0] if damaged else f"There is no {NEWEST}."
                logger.warning("%s The run goes on from %s.", why, PREVIOUS)
            self._damaged = bool(damaged)
            return values
        if damaged:
            names = " and ".join(path.name for path in self.there)
            raise ValueError(f"{damaged[0]} Remove {names} to begin anew.") from damaged[0]
        return None

    def put_damaged_aside(self) -> None:
        """Give the newest another name, if `read` found it damaged, so that the one before stays."""
        if self._damaged:
            self._newest.replace(self._kept)
            self._damaged = False

    def drop(self) -> None:
        """Remove all of them."""
        for path in (self._newest, self._previous, self._kept):
            path.unlink(missing_ok=True)
