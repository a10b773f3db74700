"""The terminal: one console, and progress bars that are silent where nobody watches."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tekfac.common.extras import require

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def require_reports() -> None:
    """Say now, before any work is done, if a package is missing that its report will need."""
    for package in ("rich", "matplotlib"):
        require(package, "The lab")


def output() -> Console:
    """Where results are printed."""
    return require("rich.console", "The lab").Console(highlight=False)  # type: ignore[no-any-return]


def remark(text: str) -> None:
    """Say something by the way, on standard error."""
    require("rich.console", "The lab").Console(stderr=True, highlight=False).print(text)


def progress(*columns: str, quiet: bool = False) -> Progress:
    """Progress bars on standard error; the columns are fields of the tasks, shown after the bar.

    They are shown only where standard error is a terminal and `quiet` is not asked for.
    """
    bars = require("rich.progress", "The lab")
    console = require("rich.console", "The lab").Console(stderr=True)
    return bars.Progress(  # type: ignore[no-any-return]
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=12),
        bars.MofNCompleteColumn(),
        *(bars.TextColumn("{task.fields[" + column + "]}") for column in columns),
        bars.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )
