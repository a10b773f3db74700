"""How figures look, and how they are kept: as PNG for the screen, SVG for the page and PDF for print."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tekfac import methods
from tekfac.common.extras import require
from tekfac.common.files import write_whole
from tekfac.fisher import figures as printed
from tekfac.lab.report.runs import Group
from tekfac.lab.report.summary import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {
    **printed.STYLE,
    "svg.hashsalt": "tekfac",
    "svg.fonttype": "path",
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7.5,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
}
style = partial(printed.style, STYLE)
"""The settings of all figures of reports, for as long as one is drawn."""

FIRST_ORDER: Mapping[str, tuple[str, str]] = {
    "sgd": ("#a6a6a6", "--"),
    "sgdm": ("#555555", "-"),
    "adam": ("#009e73", "-"),
    "adamw": ("#66c2a4", "--"),
}
METHODS = {method.name.lower(): method for method in methods.ALL}
OTHER = ("#984ea3", "-.")
WITHOUT_DATE: Mapping[str, dict[str, Any]] = {
    "png": {},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None},
}
LETTERS_PER_LINE = 105
MOST_NAMED = 12
"""Lines in shades of one colour that are named; the others have the shades between."""

DIGITS = 4
"""Numbers that do not differ in so many are drawn as equal."""

SUBS = (1, 2, 3, 5, 7)
"""Ticks along most of a decade."""


@dataclass(frozen=True)
class Drawing:
    """A figure with what is said about it.

    Attributes:
        name: of its files, without an ending.
        caption: under it.
        alternative: for those who cannot see it.
        figure: of matplotlib.
    """

    name: str
    caption: str
    alternative: str
    figure: Figure


def looks(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Colour and line of every group; further groups of one optimizer are lighter and broken differently."""
    found = []
    for index, group in enumerate(groups):
        colour, line = _look(group.optimizer)
        same = [other for other in groups if other.optimizer == group.optimizer]
        earlier = sum(other.optimizer == group.optimizer for other in groups[:index])
        if earlier:
            line = [":", "-.", "--", "-"][(earlier - 1) % 4]
        found.append({"color": _lighter(colour, 0.65 * earlier / len(same)), "linestyle": line})
    return found


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], title: str | None = None) -> None:
    """Above all panels, in as many columns as there is room for; labels stand there letter by letter."""
    if not labels:
        return
    columns = max(1, min(len(labels), LETTERS_PER_LINE // (max(map(len, labels)) + 6)))
    places = [str(place) for place in range(len(labels))]
    made = figure.legend(handles, places, loc="outside upper center", ncols=columns, frameon=False, title=title)
    made.get_title().set(parse_math=False, fontsize=STYLE["legend.fontsize"])
    for text, label in zip(made.get_texts(), labels, strict=True):
        text.set(text=label, parse_math=False)


def shades(count: int) -> list[Any]:
    """Colours from dark to light."""
    colours = require("matplotlib", "A figure").colormaps["viridis"]
    return [colours(0.92 * place / max(count - 1, 1)) for place in range(count)]


def draw(axes: Axes, line: Line, label: str, look: Mapping[str, Any]) -> Any:
    """A mean and its band; a line of one point is a dot. Returns what stands in a legend."""
    marker = "o" if len(line.x) == 1 else None
    (drawn,) = axes.plot(line.x, line.mean, label=label, marker=marker, markersize=3, **look)
    if any(low < high for low, high in zip(line.low, line.high, strict=True)):
        axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.16, linewidth=0)
    return drawn


def make_logarithmic(panels: Sequence[Axes]) -> None:
    """Scale the axis that panels beside each other share; where nothing can stand on it, the panels say so."""
    low, high = min(axes.dataLim.minposy for axes in panels), max(axes.dataLim.y1 for axes in panels)
    if not math.isfinite(low):
        panels[0].set_yticks([])
        for axes in panels:
            axes.text(
                0.5, 0.5, "nothing finite", transform=axes.transAxes, ha="center", va="center", color="#888888"
            )
        return
    panels[0].set_yscale("log")
    if high < 10 * low:  # the powers of ten are no ticks then
        _put_ticks(panels[0], low, high)


def _put_ticks(axes: Axes, low: float, high: float) -> None:
    """Ticks between two numbers, with labels that differ; a single tick where the numbers do not."""
    ticker = require("matplotlib.ticker", "A figure")
    if f"{low:.{DIGITS}g}" == f"{high:.{DIGITS}g}":
        ticks, labels = [low], [f"{low:.{DIGITS}g}"]
        axes.set_ylim(low / 1.25, high * 1.25)
    else:
        even, along_decade = ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]), ticker.LogLocator(subs=SUBS)
        bottom, top = axes.get_ylim()
        found = (even if high < 4 * low else along_decade).tick_values(low, high)
        ticks = [float(tick) for tick in found if bottom <= tick <= top]
        labels = _distinct(ticks)
    axes.set_yticks(ticks, labels)
    axes.set_yticks([], minor=True)


def _distinct(ticks: Sequence[float]) -> list[str]:
    """Numbers as text, with as few digits as say them all."""
    apart = min(high - low for low, high in pairwise(ticks))
    for digits in range(1, 17):
        labels = [f"{tick:.{digits}g}" for tick in ticks]
        if all(abs(float(label) - tick) < 0.01 * apart for label, tick in zip(labels, ticks, strict=True)):
            return labels
    return list(map(repr, ticks))


def settle(figure: Figure) -> None:
    """Put everything in its place for good; otherwise places are looked for at every saving."""
    with style():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def svg_of(figure: Figure) -> str:
    """The figure as SVG, the same text whenever it is drawn."""
    text = io.StringIO()
    _write(figure, "svg", text, transparent=True)
    return text.getvalue()


def save(drawing: Drawing, folder: Path) -> list[str]:
    """Write PNG, SVG and PDF, each whole or not at all; the names of the files."""
    names = {f"{drawing.name}.{ending}": ending for ending in WITHOUT_DATE}
    for name, ending in names.items():
        write_whole(folder / name, partial(_write, drawing.figure, ending, dpi=200))
    return list(names)


def _write(figure: Figure, ending: str, unfinished: Any, **settings: Any) -> None:
    with style():
        figure.savefig(unfinished, format=ending, metadata=WITHOUT_DATE[ending], **settings)


def _look(optimizer: str) -> tuple[str, str]:
    """Of the methods as in the figures of their Fisher approximations."""
    method = METHODS.get(optimizer)
    if method is None:
        return FIRST_ORDER.get(optimizer, OTHER)
    return printed.COLOURS[method.factors.trace_restricted, method.rescaling.measured], (
        "-" if method.rescaling.measured else "--"
    )


def _lighter(colour: str, share: float) -> str:
    """Mixed with white."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
