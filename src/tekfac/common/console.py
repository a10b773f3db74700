"""The terminal: one console, and progress bars that are silent where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from operator import length_hint
from typing import TYPE_CHECKING, TypeVar

from tekfac.common.extras import require

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")


def output() -> Console:
    """Where results are printed."""
    return require("rich.console", "The lab").Console(highlight=False)  # type: ignore[no-any-return]


def remark(text: str) -> None:
    """Say something by the way, on standard error."""
    require("rich.console", "The lab").Console(stderr=True, highlight=False).print(text)


def progress(*columns: str, quiet: bool = False) -> Progress:
    """Progress bars on standard error; the columns are fields of the tasks, shown after the bar.

    They are shown only where standard error is a terminal or a notebook, and `quiet` is not asked for.
    """
    bars = require("rich.progress", "A progress bar")
    console = require("rich.console", "A progress bar").Console(stderr=True)
    return bars.Progress(  # type: ignore[no-any-return]
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=12),
        bars.MofNCompleteColumn(),
        *(bars.TextColumn("{task.fields[" + column + "]}") for column in columns),
        bars.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        transient=True,
        disable=quiet or not (sys.stderr.isatty() or console.is_jupyter),
    )


def track(iterable: Iterable[T], description: str, unit: str = "batch") -> Iterator[T]:
    """The items, one by one, behind a progress bar that is gone when they are over.

    Args:
        iterable: of any kind; where it has no length, the bar only counts.
        description: shown before the bar.
        unit: what is counted, shown after the number.

    Raises:
        ImportError: at the call, where rich is not installed.
    """
    return _tracked(iterable, progress("unit"), description, unit)


def _tracked(iterable: Iterable[T], bars: Progress, description: str, unit: str) -> Iterator[T]:
    with bars:
        task = bars.add_task(description, total=length_hint(iterable) or None, unit=unit)
        for item in iterable:
            yield item
            bars.advance(task)
