"""Figures of a task: how its groups learn, what their time goes to, and the curvature of their layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tekfac.extras import require
from tekfac.lab.clock import PARTS
from tekfac.lab.report.drawing import empty, legend, looks, style
from tekfac.lab.report.lines import Line, over_epochs, over_time
from tekfac.lab.report.runs import Epoch, LayerCurvature, Run
from tekfac.lab.report.summary import GroupSummary, TaskSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 10
MOST_LAYERS = 12
"""That are named; the others have the shades between."""

PART_COLOURS = ("#bbbbbb", "#77aadd", "#44bb99", "#ee8866", "#eedd88", "#e8e8e8")
MEASURED: dict[str, Callable[[LayerCurvature], float]] = {
    "trace": lambda row: row.trace,
    "condition number": lambda row: row.condition,
    "damping": lambda row: row.damping,
}


def shown(summary: TaskSummary) -> list[GroupSummary]:
    """The groups whose curves are drawn: all, or the best of every optimizer where they are too many."""
    return list(summary.rows) if len(summary.rows) <= MOST_LINES else summary.best_of_optimizers


def curves(summary: TaskSummary) -> Figure:
    """Test accuracy and training loss against epochs and against training time; bands are ± one deviation."""
    groups = [row.group for row in shown(summary)]
    values: list[tuple[str, Callable[[Epoch], float]]] = [
        ("test accuracy, %", lambda epoch: 100 * epoch.test_accuracy),
        ("training loss", lambda epoch: epoch.train_loss if epoch.train_loss > 0 else math.nan),
    ]
    with style():
        figure = empty(4.6)
        panels = figure.subplots(2, 2, sharex="col", sharey="row")
        for (ylabel, value), row in zip(values, panels, strict=True):
            for axes, along in zip(row, (over_epochs, over_time), strict=True):
                for group, look in zip(groups, looks(groups), strict=True):
                    _draw(axes, along(group.runs, value), group.label, look)
                    _mark_ends(axes, group.runs, value, look, by_time=along is over_time)
                axes.grid(visible=True)
            row[0].set_ylabel(ylabel)
        for axes in panels[0]:
            axes.axhline(100 * summary.target, color="#888888", linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        panels[1, 0].set(yscale="log", xlabel="epoch")
        _plain_within_a_decade(panels[1, 0])
        panels[1, 0].xaxis.get_major_locator().set_params(integer=True)
        panels[1, 1].set_xlabel("training time, seconds")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        if labels:
            legend(figure, handles, labels)
    return figure


def _plain_within_a_decade(axes: Axes) -> None:
    """Numbers as they are on a logarithmic axis that does not reach over a power of ten."""
    low, high = axes.get_ylim()
    if high < 10 * low:
        formatter = require("matplotlib.ticker", "A figure").FormatStrFormatter("%g")
        axes.yaxis.set_major_formatter(formatter)
        axes.yaxis.set_minor_formatter(formatter)


def time_shares(summary: TaskSummary) -> Figure:
    """Milliseconds per step of every group, by what they are spent on."""
    rows = [row for row in shown(summary) if row.parts_ms]
    parts = [part for part in (*PARTS, "other") if any(row.parts_ms[part] > 0 for row in rows)]
    with style():
        figure = empty(0.9 + 0.26 * len(rows))
        axes = figure.subplots()
        ends = [0.0] * len(rows)
        for part, colour in zip((*PARTS, "other"), PART_COLOURS, strict=True):
            if part in parts:
                widths = [row.parts_ms[part] for row in rows]
                axes.barh(range(len(rows)), widths, 0.7, left=ends, color=colour, label=part)
                ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for place, end in enumerate(ends):
            axes.annotate(
                f"{end:.3g}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=7
            )
        axes.set_yticks(range(len(rows)), [row.group.label for row in rows])
        axes.set(xlabel="milliseconds per step", xlim=(0, 1.08 * max(ends, default=1.0) or 1.0))
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=True, axis="x")
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            legend(figure, handles, labels)
    return figure


def has_curvature(summary: TaskSummary) -> bool:
    """Whether a group that is shown has rows of its layers' curvature."""
    return any(run.curvature for row in shown(summary) for run in row.group.runs)


def curvature(summary: TaskSummary) -> Figure:
    """Trace, condition number and damping of every layer against steps; one run of each group that has them.

    Raises:
        ValueError: if no run has rows of its layers' curvature.
    """
    found = [(row.group.label, run) for row in shown(summary) for run in row.group.runs if run.curvature]
    runs = dict(reversed(found))  # of every group the first seed
    if not runs:
        raise ValueError(
            f"No run of {summary.task.title} has recorded its curvature. Expected a curvature.jsonl in one."
        )
    runs = dict(list(reversed(runs.items()))[:4])
    layers = list(dict.fromkeys(row.layer for run in runs.values() for row in run.curvature))
    colours = require("matplotlib", "A figure").colormaps["viridis"]
    with style():
        figure = empty(4.9)
        panels = figure.subplots(len(MEASURED), len(runs), sharex="col", sharey="row", squeeze=False)
        for (ylabel, value), row in zip(MEASURED.items(), panels, strict=True):
            for axes, run in zip(row, runs.values(), strict=True):
                for place, layer in enumerate(layers):
                    own = [r for r in run.curvature if r.layer == layer]
                    heights = [v if (v := value(r)) > 0 else math.nan for r in own]
                    shade = colours(0.92 * place / max(len(layers) - 1, 1))
                    axes.plot([r.step for r in own], heights, color=shade, linewidth=1.0, label=_short(layer))
                axes.set_yscale("log")
                axes.grid(visible=True)
            row[0].set_ylabel(ylabel)
        for axes, label in zip(panels[0], runs, strict=True):
            axes.set_title(label)
        for axes in panels[-1]:
            axes.set_xlabel("step")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        every = math.ceil(len(labels) / MOST_LAYERS)
        legend(figure, handles[::every], labels[::every])
    return figure


def _draw(axes: Axes, line: Line, label: str, look: dict[str, Any]) -> None:
    """A mean and its band; a line of one point is a dot."""
    marker = "o" if len(line.x) == 1 else None
    axes.plot(line.x, line.mean, label=label, marker=marker, markersize=3, **look)
    if any(low < high for low, high in zip(line.low, line.high, strict=True)):
        axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.16, linewidth=0)


def _mark_ends(
    axes: Axes, runs: Sequence[Run], value: Callable[[Epoch], float], look: dict[str, Any], by_time: bool
) -> None:
    """A cross where a run diverged."""
    last = [run.epochs[-1] for run in runs if run.status == "diverged" and run.epochs]
    places = [(epoch.seconds if by_time else epoch.epoch, value(epoch)) for epoch in last]
    for x, y in places:
        axes.plot(x, y, "x", color=look["color"], markersize=5)


def _short(layer: str) -> str:
    return layer if len(layer) <= 22 else "…" + layer[-21:]
