"""The terminal: one console, and progress bars that are silent where nobody watches.

What is shown may come from files of others. So it is shown letter by letter: nothing in it is markup, and what
would make a terminal do something is escaped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from operator import length_hint
from typing import TYPE_CHECKING, Any, TypeVar

from tekfac.common.extras import require

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.progress import Progress
    from rich.text import Text

T = TypeVar("T")


def printable(text: str) -> str:
    """The text, with escapes in place of what has no look of its own, but for the ends of lines and tabs."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def output() -> Console:
    """Where results are printed."""
    return _console()


def remark(text: str) -> None:
    """Say something by the way, on standard error."""
    _console(stderr=True).print(text)


def _console(**settings: Any) -> Console:
    console: Console = require("rich.console", "The lab").Console(
        highlight=False, markup=False, emoji=False, **settings
    )
    console.push_render_hook(_AsText())  # type: ignore[arg-type]
    return console


class _AsText:
    """Between what is printed and the terminal, and between a bar's texts and it."""

    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        """As rich asks a hook of a console; text is escaped before it is broken into lines."""
        for renderable in renderables:
            if hasattr(renderable, "plain"):
                self.highlight(renderable)
        return [_Escaped(renderable) for renderable in renderables]

    def highlight(self, text: Text) -> None:
        """As rich asks the highlighter of a column."""
        text.plain = printable(text.plain)


class _Escaped:
    """Something that rich can print; the escapes that rich itself puts around it stay what they are."""

    def __init__(self, renderable: Any) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def progress(*columns: str, quiet: bool = False) -> Progress:
    """Progress bars on standard error; the columns are fields of the tasks, shown after the bar.

    They are shown only where standard error is a terminal or a notebook, and `quiet` is not asked for.
    """
    bars = require("rich.progress", "A progress bar")
    console = require("rich.console", "A progress bar").Console(stderr=True)
    plain = {"markup": False, "highlighter": _AsText()}
    return bars.Progress(  # type: ignore[no-any-return]
        bars.TextColumn("{task.description}", **plain),
        bars.BarColumn(bar_width=12),
        bars.MofNCompleteColumn(),
        *(bars.TextColumn("{task.fields[" + column + "]}", **plain) for column in columns),
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
