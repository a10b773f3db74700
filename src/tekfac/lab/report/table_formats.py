"""A table, and its form in the templates of Markdown, LaTeX and HTML, in CSV and in the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tekfac.common.console import printable
from tekfac.common.extras import require
from tekfac.common.tables import csv_of

if TYPE_CHECKING:
    from rich.table import Table as RichTable

LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "ϑ": r"$\vartheta$",
    "λ": r"$\lambda$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "—": "---",
    "–": "--",
    "…": r"\dots{}",
}
MARKDOWN = frozenset("\\`*_{}[]<>|#&~")


@dataclass(frozen=True)
class Table:
    """Plain text in rows; the first column names the rows.

    Attributes:
        title: what the table shows.
        header: one name per column.
        rows: one text per column.
        bold: (row, column) of the cells that stand out.
        notes: what a reader has to know, under the table.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: frozenset[tuple[int, int]] = frozenset()
    notes: tuple[str, ...] = ()

    def cells(self, escape: Callable[[str], str], bold: str) -> list[list[str]]:
        """The rows for a format: how text is escaped in it, and what is put around a cell that stands out."""
        return [
            [bold.format(escape(cell)) if (r, c) in self.bold else escape(cell) for c, cell in enumerate(row)]
            for r, row in enumerate(self.rows)
        ]


def rendered(template: str, **values: Any) -> str:
    """One of the templates beside this file; those of HTML escape whatever they are given."""
    jinja = require("jinja2", "A report")
    environment = jinja.Environment(
        loader=jinja.PackageLoader(__package__, ""),
        autoescape=jinja.select_autoescape(["html"]),
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    ways = {"markdown": markdown, "code": code, "prose": prose, "latex": latex, "slug": slug}
    environment.filters |= ways
    text: str = environment.get_template(template).render({**ways, **values})
    return text


def to_csv(table: Table) -> str:
    """Header and rows alone."""
    return csv_of([table.header, *table.rows])


def to_rich(table: Table) -> RichTable:
    """For `rich` to print; nothing in a cell is taken for markup."""
    rich_table, boxes = require("rich.table", "A report"), require("rich.box", "A report")
    text = require("rich.text", "A report").Text
    shown = rich_table.Table(
        title=text(table.title, style="bold"),
        title_justify="left",
        box=boxes.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column, name in enumerate(table.header):
        shown.add_column(text(_in_two_lines(name)), justify="right" if column else "left", overflow="fold")
    for r, row in enumerate(table.rows):
        shown.add_row(*(text(cell, style="bold" if (r, c) in table.bold else "") for c, cell in enumerate(row)))
    return shown  # type: ignore[no-any-return]


def latex(text: str) -> str:
    """Text as LaTeX shows it."""
    return "".join(LATEX.get(letter, letter) for letter in _line(text))


def slug(text: str) -> str:
    """Letters that are safe in the name of a file and in a label."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "task"


def markdown(text: str) -> str:
    """Text as Markdown shows it, letter by letter."""
    return "".join(f"\\{letter}" if letter in MARKDOWN else letter for letter in _line(text))


def prose(text: str) -> str:
    """Sentences of ours, which may have Markdown, with names from outside, which shall have no HTML."""
    return _line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def code(text: str) -> str:
    """Text as Markdown's code, whatever backticks are in it."""
    line = _line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    return f"{fence}{line}{fence}" if len(fence) == 1 else f"{fence} {line} {fence}"


def _line(text: str) -> str:
    """One line that a terminal shows letter by letter."""
    return printable(" ".join(text.split()))


def _in_two_lines(text: str) -> str:
    """Broken at the space that makes the longer line shortest."""
    spaces = [place for place, letter in enumerate(text) if letter == " "]
    place = min(spaces, key=lambda space: max(space, len(text) - space), default=None)
    return text if place is None else f"{text[:place]}\n{text[place + 1 :]}"
