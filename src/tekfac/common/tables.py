"""Tables as plain text and as CSV, and numbers in words."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from tekfac.common.console import printable

FORMULA = ("=", "+", "-", "@", "\t")
"""With what a cell begins that a spreadsheet computes, or whose next letter it looks at."""


def csv_of(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV; a text that a spreadsheet would take for a formula gets an apostrophe before it.

    What a terminal would not show, but do, is escaped.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_harmless(cell) for cell in row] for row in rows)
    return text.getvalue()


def _harmless(cell: Any) -> Any:
    if not isinstance(cell, str):
        return cell
    text = printable(cell)
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(FORMULA) else text
    return text


def aligned(rows: Sequence[Sequence[str]], right_from: int) -> list[str]:
    """Rows as lines with columns below one another; numbers, from that column on, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [f"{{:{'>' if index >= right_from else '<'}{width}}}" for index, width in enumerate(widths)]
    return ["  ".join(cells).format(*row).rstrip() for row in rows]


def in_bytes(count: float) -> str:
    """As "1.5 MiB"."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def in_flops(count: float) -> str:
    """As "2.25 GFLOP"; "-": none."""
    for size, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return "< 1 MFLOP" if count else "-"


def in_seconds(seconds: float) -> str:
    """As "12.5 ms"."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return "< 1 us" if seconds else "-"
