"""What the library logs during a run, in a file; where that cannot be written, the run goes on without."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tekfac.common.console import remark


class MessagesHandler(logging.FileHandler):
    """Writes to a file that is made with the first message, and says once if that cannot be done."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True, encoding="utf-8", errors="backslashreplace")
        self._told = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message."""
        try:
            super().emit(record)
        except OSError:  # the file cannot be made
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, D102
        self._say(sys.exc_info()[1])

    def close(self) -> None:
        """Let go of the file."""
        try:
            super().close()
        except OSError as error:
            self._say(error)

    def _say(self, error: BaseException | None) -> None:
        if not self._told:
            reason = getattr(error, "strerror", None) or error
            remark(f"Cannot write {self.baseFilename!r}: {reason}. The run goes on; its messages are lost.")
        self._told = True
