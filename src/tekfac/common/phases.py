"""Where the time of a step goes: the library names its phases, and whoever wants to know listens.

    with listening() as seconds:
        ... some steps ...
    seconds["eigh"]

Nobody listens while people train, and a phase then costs less than a microsecond. By the clock of the host:
work that an accelerator has queued and not finished is not in it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

PHASES = ("capture", "unfold", "factors", "eigh", "theta", "precondition", "update")
"""Every phase, in the order in which a step comes to them."""


class Phase:
    """A phase by name, to be entered by `with`. Time inside of an inner phase is the inner one's alone."""

    def __init__(self, name: str) -> None:
        assert name in PHASES, name
        self.name = name

    def __enter__(self) -> Self:
        if _listener is not None:
            _listener.enter(self.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _listener is not None:
            _listener.leave()


class _Listener:
    """Adds up the seconds of every phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._entered: list[str] = []
        self._since = 0.0

    def enter(self, name: str) -> None:
        """A phase begins; the one around it, if any, pauses."""
        self._book()
        self._entered.append(name)

    def leave(self) -> None:
        """The innermost phase ends; the one around it goes on."""
        self._book()
        if self._entered:
            self._entered.pop()

    def _book(self) -> None:
        now = time.perf_counter()
        if self._entered:
            self.seconds[self._entered[-1]] += now - self._since
        self._since = now


_listener: _Listener | None = None


@contextmanager
def listening() -> Iterator[dict[str, float]]:
    """Add up the seconds of every phase meanwhile, by name. One listener at a time."""
    global _listener
    if _listener is not None:
        raise RuntimeError("Somebody listens to the phases already; only one can.")
    listener = _listener = _Listener()
    try:
        yield listener.seconds
    finally:
        _listener = None
