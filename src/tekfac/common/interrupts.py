"""Ctrl-C that waits until what was begun is ended."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self


class Uninterrupted:
    """While it is entered, SIGINT is noted, and acts at the end as it would have acted then.

    Python runs handlers of signals in the main thread; in others this does nothing. Nor does it where SIGINT is
    ignored, or has no handler in Python.
    """

    def __enter__(self) -> Self:
        self._came = False
        found = (
            signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        )
        self._before = found if callable(found) else None
        if self._before is not None:
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def __exit__(self, *raised: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._came:
                signal.raise_signal(signal.SIGINT)
