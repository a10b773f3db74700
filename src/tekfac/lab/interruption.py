"""SIGINT and SIGTERM, noted, so that a run can save itself before it stops."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, and has saved itself.

    Attributes:
        status: the exit status that says so to a shell.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message, number)  # both, so that it can be sent from one process to another
        self.status = 128 + number

    def __str__(self) -> str:
        return str(self.args[0])


class Interruption:
    """While it is entered, the first signal is noted; a second one acts as ever.

    Attributes:
        number: of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
