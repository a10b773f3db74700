"""Figures of sweeps: final accuracy against one setting, or over two, and the curves for every value of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tekfac.fisher.figures import empty
from tekfac.lab.optimizers import display, position
from tekfac.lab.report.drawing import MOST_NAMED, Drawing, draw, legend, looks, shades, style
from tekfac.lab.report.figures import shown
from tekfac.lab.report.runs import differing, plain, words
from tekfac.lab.report.summary import GroupSummary, TaskSummary, over_epochs
from tekfac.lab.report.words import in_percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST = 3
"""Values of a setting that make a curve."""


def swept(summary: TaskSummary) -> list[Drawing]:
    """A figure for every setting, or two, that the optimizers of a task were tried with.

    Where these are too many for the curves of all, there are curves along every setting, too.
    """
    along: list[str] = []
    drawings = []
    for optimizer in sorted({row.group.optimizer for row in summary.rows}, key=position):
        own = [row for row in summary.ranked if row.group.optimizer == optimizer]
        names = _differing(own)
        values = {name: _values(own, name) for name in names}
        if len(names) == 1 and len(values[names[0]]) >= FEWEST:
            along += [] if names[0] in along else names
        elif len(names) == 2 and min(map(len, values.values())) >= 2:
            first, second = sorted(names, key=lambda name: -len(values[name]))
            text = f"Mean final test accuracy of {display(optimizer)} by {first} and {second}"
            figure = heat_map(summary, optimizer, first, second)
            drawings.append(Drawing(f"{optimizer}-{first}-{second}", f"{text}.", _listed(text, own), figure))
        if len(shown(summary)) < len(summary.rows):
            drawings += [_curves(own, name) for name in names if len(_beside_best(own, name)) >= FEWEST]
    for name in along:
        text = f"Final test accuracy against {name}, best of the other settings; mean ± deviation over seeds"
        rows = [row for row in summary.ranked if name in row.group.settings]
        drawings.append(
            Drawing(f"sensitivity-{name}", f"{text}.", _listed(text, rows), sensitivity(summary, name))
        )
    return drawings


def sensitivity(summary: TaskSummary, setting: str) -> Figure:
    """Final test accuracy against a setting, a line per optimizer; the best group where others differ too.

    Raises:
        ValueError: if no optimizer was tried with two numbers for the setting.
    """
    optimizers = sorted({row.group.optimizer for row in summary.ranked}, key=position)
    lines = {name: _along(summary, name, setting) for name in optimizers}
    lines = {name: rows for name, rows in lines.items() if len(rows) > 1}
    if not lines:
        raise ValueError(f"No optimizer was tried with several values of {setting!r}. Expected a sweep of it.")
    with style():
        figure = empty(2.8)
        axes = figure.subplots()
        for rows, look in zip(lines.values(), looks([rows[0].group for rows in lines.values()]), strict=True):
            places = [row.group.settings[setting] for row in rows]
            heights, spreads = zip(*map(_percent, rows), strict=True)
            label = display(rows[0].group.optimizer)
            axes.errorbar(places, heights, spreads, marker="o", markersize=3, capsize=2, label=label, **look)
        every = [row.group.settings[setting] for rows in lines.values() for row in rows]
        if min(every) > 0 and max(every) >= 10 * min(every):
            axes.set_xscale("log")
        axes.set_xlabel(setting, parse_math=False)
        axes.set_ylabel("final test accuracy, %")
        axes.grid(visible=True)
        legend(figure, axes.containers, list(map(display, lines)))
    return figure


def heat_map(summary: TaskSummary, optimizer: str, first: str, second: str) -> Figure:
    """Mean final test accuracy of an optimizer over two settings: the first to the right, the second upwards.

    Raises:
        ValueError: if the optimizer was not tried with numbers for both.
    """
    own = [row for row in summary.ranked if row.group.optimizer == optimizer]
    columns, lines = _values(own, first), _values(own, second)
    if not columns or not lines:
        raise ValueError(f"{display(optimizer)} was not tried with numbers for {first!r} and {second!r}.")
    found = {(r.group.settings.get(first), r.group.settings.get(second)): _percent(r)[0] for r in reversed(own)}
    grid = [[found.get((column, line), math.nan) for column in columns] for line in lines]
    known = [value for row in grid for value in row if not math.isnan(value)]
    middle = (min(known) + max(known)) / 2
    with style():
        figure = empty(0.9 + 0.36 * len(lines))
        axes = figure.subplots()
        image = axes.imshow(grid, cmap="cividis", origin="lower", aspect="auto")
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                text = "—" if math.isnan(value) else f"{value:.2f}"
                dark = math.isnan(value) or value > middle
                axes.text(x, y, text, ha="center", va="center", fontsize=7, color="black" if dark else "white")
        axes.set_xticks(range(len(columns)), list(map(plain, columns)))
        axes.set_yticks(range(len(lines)), list(map(plain, lines)))
        axes.set_xlabel(first, parse_math=False)
        axes.set_ylabel(second, parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, pad=0.015)
        bar.set_label(f"{display(optimizer)}: test accuracy, %", parse_math=False)
    return figure


def curves(rows: Sequence[GroupSummary], setting: str) -> Figure:
    """Test accuracy against epochs, a line for every group in the shade of its value of a setting."""
    with style():
        figure = empty(2.9)
        axes = figure.subplots()
        labels = [plain(row.group.settings[setting]) for row in rows]
        lines = [
            draw(
                axes,
                over_epochs(row.group.runs, lambda epoch: 100 * epoch.test_accuracy),
                label,
                {"color": colour, "linestyle": "-"},
            )
            for row, label, colour in zip(rows, labels, shades(len(rows)), strict=True)
        ]
        axes.set(xlabel="epoch", ylabel="test accuracy, %")
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.grid(visible=True)
        every = math.ceil(len(rows) / MOST_NAMED)
        legend(figure, lines[::every], labels[::every], setting)
    return figure


def _curves(own: Sequence[GroupSummary], setting: str) -> Drawing:
    """The curves of an optimizer along a setting, with what is said about them; its groups from the best on."""
    rows, best = _beside_best(own, setting), own[0].group
    others = words(best.settings, [name for name in _differing(own) if name != setting])
    at = f", at {', '.join(others)} as in its best setting" if others else ""
    text = f"Test accuracy of {display(best.optimizer)} against epochs for every {setting}{at}"
    caption = f"{text}: means over seeds, bands of one standard deviation."
    return Drawing(f"{best.optimizer}-curves-{setting}", caption, _listed(text, rows), curves(rows, setting))


def _beside_best(own: Sequence[GroupSummary], setting: str) -> list[GroupSummary]:
    """The groups that differ from the first, the best, in nothing but the number a setting has; by number."""
    known = {
        row.group.settings.get(setting): row for row in own if _differing([own[0], row]) in ([], [setting])
    }
    return [known[value] for value in _values(list(known.values()), setting)]


def _differing(rows: Sequence[GroupSummary]) -> list[str]:
    return differing([row.group.settings for row in rows])


def _along(summary: TaskSummary, optimizer: str, setting: str) -> list[GroupSummary]:
    """The best group of an optimizer at every value of a setting, by value."""
    own = [row for row in summary.ranked if row.group.optimizer == optimizer]
    best = {row.group.settings.get(setting): row for row in reversed(own)}
    return [best[value] for value in _values(own, setting)]


def _values(rows: Sequence[GroupSummary], setting: str) -> list[float]:
    """The numbers that a setting had."""
    found = {row.group.settings.get(setting) for row in rows}
    return sorted(value for value in found if isinstance(value, int | float) and not isinstance(value, bool))


def _percent(row: GroupSummary) -> tuple[float, float]:
    """Mean and deviation of the final test accuracy."""
    found = row.final_accuracy
    return (math.nan, 0.0) if found is None else (100 * found.mean, 100 * (found.deviation or 0.0))


def _listed(text: str, rows: Sequence[GroupSummary]) -> str:
    return f"{text}: " + "; ".join(f"{row.group.label}: {in_percent(row.final_accuracy)}" for row in rows)
