"""Signals: SIGINT and SIGTERM, noted, so that a run can save itself before it stops; and one that only asks."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
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

    A signal that was ignored before stays ignored. One that was noted, but that nobody has acted on by the
    end, acts then.

    Attributes:
        number: of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._restore()
        if self.number is not None and not isinstance(error, Interrupted):
            signal.raise_signal(self.number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def is_running(number: int) -> bool:
    """Whether there is a process of a number on this machine; where that cannot be asked, there may be."""
    if os.name != "posix":
        return True
    try:
        os.kill(number, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
