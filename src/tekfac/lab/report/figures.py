"""Figures of a task: how its groups learn, what their time goes to, and the curvature of their layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from textwrap import wrap
from typing import TYPE_CHECKING

from tekfac.fisher.figures import empty
from tekfac.lab.counting import PARTS
from tekfac.lab.report import drawing
from tekfac.lab.report.drawing import draw, legend, make_logarithmic, style
from tekfac.lab.report.runs import Run, plain
from tekfac.lab.report.summary import GroupSummary, TaskSummary, epoch_times, over_epochs, over_time
from tekfac.lab.run_log import Epoch, LayerEpoch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 10
MOST_RUNS = 4
"""Whose curvature is drawn."""

PART_COLOURS = ("#bbbbbb", "#77aadd", "#44bb99", "#ee8866", "#eedd88")
MEASURED: dict[str, Callable[[LayerEpoch], float]] = {
    "trace": lambda row: row.trace,
    "condition number": lambda row: row.condition,
    "damping": lambda row: row.damping,
}


def shown(summary: TaskSummary) -> list[GroupSummary]:
    """The groups whose curves are drawn: all, or the best of every optimizer where they are too many."""
    return list(summary.rows) if len(summary.rows) <= MOST_LINES else summary.best_of_optimizers


def curves(summary: TaskSummary) -> Figure:
    """Test accuracy and training loss against epochs and against training time; bands are ± one deviation.

    A cross is where a run diverged: at its epoch, or at the time that the epoch has.
    """
    groups = [row.group for row in shown(summary)]
    values: list[tuple[str, Callable[[Epoch], float]]] = [
        ("test accuracy, %", lambda epoch: 100 * epoch.test_accuracy),
        ("training loss", lambda epoch: epoch.train_loss if epoch.train_loss > 0 else math.nan),
    ]
    with style():
        figure = empty(4.6)
        panels = figure.subplots(2, 2, sharex="col", sharey="row")
        handles = []
        for (ylabel, value), row in zip(values, panels, strict=True):
            for axes, along in zip(row, (over_epochs, over_time), strict=True):
                for group, look in zip(groups, drawing.looks(groups), strict=True):
                    handles.append(draw(axes, along(group.runs, value), group.label, look))
                    times = epoch_times(group.runs) if along is over_time else {}
                    for last in [
                        run.epochs[-1] for run in group.runs if run.status == "diverged" and run.epochs
                    ]:
                        x = times.get(last.epoch, last.seconds) if along is over_time else last.epoch
                        axes.plot(x, value(last), "x", color=look["color"], markersize=5)
                axes.grid(visible=True)
            row[0].set_ylabel(ylabel)
        for axes in panels[0]:
            axes.axhline(100 * summary.target, color="#888888", linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        make_logarithmic(panels[1])
        panels[1, 0].set_xlabel("epoch")
        panels[1, 0].locator_params(axis="x", integer=True, min_n_ticks=1)
        panels[1, 1].set_xlabel("training time, seconds")
        legend(figure, handles[: len(groups)], [group.label for group in groups])
    return figure


def time_shares(summary: TaskSummary) -> Figure:
    """Milliseconds per step of every group, by what they are spent on."""
    rows = [row for row in shown(summary) if row.parts_ms]
    parts = [part for part in PARTS if any(row.parts_ms[part] > 0 for row in rows)]
    with style():
        figure = empty(0.9 + 0.26 * len(rows))
        axes = figure.subplots()
        ends = [0.0] * len(rows)
        for part, colour in zip(PARTS, PART_COLOURS, strict=True):
            if part in parts:
                widths = [row.parts_ms[part] for row in rows]
                axes.barh(range(len(rows)), widths, 0.7, left=ends, color=colour, label=part)
                ends = [end + width for end, width in zip(ends, widths, strict=True)]
        for place, end in enumerate(ends):
            axes.annotate(
                f"{end:.3g}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=7
            )
        axes.set_yticks(range(len(rows)), [row.group.label for row in rows], parse_math=False)
        axes.set(xlabel="milliseconds per step", xlim=(0, 1.08 * max(ends, default=1.0) or 1.0))
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=True, axis="x")
        legend(figure, axes.containers, parts)
    return figure


def with_curvature(summary: TaskSummary) -> list[tuple[str, Run]]:
    """Labels of the groups that are shown and, by seed, the first run of each that recorded its curvature."""
    found = [(row.group.label, [run for run in row.group.runs if run.layers]) for row in shown(summary)]
    return [(label, runs[0]) for label, runs in found if runs]


def curvature(summary: TaskSummary) -> Figure:
    """Trace, condition number and damping of every layer against steps, of the first runs that have them.

    Raises:
        ValueError: if no run has rows of its layers' curvature.
    """
    runs = with_curvature(summary)[:MOST_RUNS]
    if not runs:
        raise ValueError(
            f"No run of {summary.task.title} has recorded its curvature. Expected one of a natural-gradient "
            "method."
        )
    layers = list(dict.fromkeys(row.layer for _, run in runs for row in run.layers))
    colours = drawing.shades(len(layers))
    with style():
        figure = empty(4.9)
        panels = figure.subplots(len(MEASURED), len(runs), sharex="col", sharey="row", squeeze=False)
        for (ylabel, value), row in zip(MEASURED.items(), panels, strict=True):
            for axes, (_, run) in zip(row, runs, strict=True):
                for layer, colour in zip(layers, colours, strict=True):
                    own = [r for r in run.layers if r.layer == layer]
                    heights = [v if (v := value(r)) > 0 else math.nan for r in own]
                    marker = "o" if len(own) == 1 else None
                    axes.plot(
                        [r.step for r in own], heights, color=colour, linewidth=1.0, marker=marker, markersize=3
                    )
                axes.grid(visible=True)
            make_logarithmic(row)
            row[0].set_ylabel(ylabel)
        for axes, (label, run) in zip(panels[0], runs, strict=True):
            lines = wrap(f"{label}, seed {plain(run.seed)}", drawing.LETTERS_PER_LINE // len(runs) - 4)
            axes.set_title("\n".join(lines), parse_math=False)
        for axes in panels[-1]:
            axes.set_xlabel("step")
            axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        every = math.ceil(len(layers) / drawing.MOST_NAMED)
        legend(figure, panels[0, 0].lines[::every], list(map(_short, layers))[::every], "layer")
    return figure


def _short(layer: str) -> str:
    return layer if len(layer) <= 22 else "…" + layer[-21:]
