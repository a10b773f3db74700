"""The tables of a report: the groups of a task, what their time went to, and the form the paper has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from tekfac.lab.clock import PARTS
from tekfac.lab.optimizers import display, position
from tekfac.lab.report.summary import GroupSummary, Spread, TaskSummary
from tekfac.lab.report.table_formats import Table
from tekfac.lab.report.words import (
    COMPARABLE,
    NOTHING,
    Measure,
    accuracy,
    best_places,
    comparison_notes,
    count,
    duration,
    loss,
    mean,
    median_of_all,
    reached,
    seconds_or_ms,
    time_notes,
)

Paper = Mapping[tuple[str, str, str], str]
"""(data, model, optimizer) to the accuracy that the paper prints, in percent."""


def comparison(summary: TaskSummary) -> Table:
    """One row per group: accuracies, loss, and how soon the target was reached."""
    rows, percent = summary.rows, f"{100 * summary.target:g}%"
    return Table(
        title=f"{summary.task.title}: accuracy and the way to it",
        header=(
            "optimizer",
            "runs",
            "final test accuracy, %",
            "best test accuracy, %",
            "final training loss",
            f"epochs to {percent}",
            f"seconds to {percent}",
        ),
        rows=tuple(
            (
                row.group.label,
                row.group.status,
                accuracy(row.final_accuracy),
                accuracy(row.best_accuracy),
                loss(row.train_loss),
                reached(row.epochs_to_target, count),
                reached(row.seconds_to_target, duration),
            )
            for row in rows
        ),
        bold=_bold(2, rows, lambda row: mean(row.final_accuracy), max)
        | _bold(3, rows, lambda row: mean(row.best_accuracy), max)
        | _bold(4, rows, lambda row: mean(row.train_loss), min)
        | _bold(5, rows, lambda row: median_of_all(row.epochs_to_target), min)
        | _bold(6, rows, lambda row: median_of_all(row.seconds_to_target), min),
        notes=comparison_notes(summary),
    )


def brief(summary: TaskSummary) -> Table:
    """What fits into a terminal: the table of a task without its best accuracy and loss, but with its speed."""
    whole, speed = comparison(summary), times(summary)
    kept = (0, 1, 2, 5, 6)
    return Table(
        title=summary.task.title,
        header=(*(whole.header[column] for column in kept), speed.header[2]),
        rows=tuple(
            (*(row[column] for column in kept), timed[2])
            for row, timed in zip(whole.rows, speed.rows, strict=True)
        ),
        bold=frozenset(
            [(row, kept.index(column)) for row, column in whole.bold if column in kept]
            + [(row, len(kept)) for row, column in speed.bold if column == 2]
        ),
    )


def times(summary: TaskSummary) -> Table:
    """One row per group: seconds, and what a step spends them on."""
    return Table(
        title=f"{summary.task.title}: time",
        header=("optimizer", "seconds in all", "ms per step", *(f"{part}, %" for part in PARTS)),
        rows=tuple(
            (
                row.group.label,
                seconds_or_ms(row.seconds),
                seconds_or_ms(row.step_ms),
                *(f"{100 * share:.0f}" for share in _shares(row)),
            )
            if row.seconds
            else (row.group.label, *[NOTHING] * (2 + len(PARTS)))
            for row in summary.rows
        ),
        bold=_bold(1, summary.rows, lambda row: mean(row.seconds), min)
        | _bold(2, summary.rows, lambda row: mean(row.step_ms), min),
        notes=time_notes(summary),
    )


def accuracies(summaries: Sequence[TaskSummary], paper: Paper | None = None) -> Table:
    """The form of the paper: one row per task, one column per optimizer; beneath, what the paper prints."""
    paper = paper or {}
    known = {(s.task.data, s.task.model) for s in summaries}
    run = {row.group.optimizer for s in summaries for row in s.rows}
    printed = {optimizer for data, model, optimizer in paper if (data, model) in known}
    optimizers = sorted(run | printed, key=position)
    rows: list[tuple[str, ...]] = []
    bold: set[tuple[int, int]] = set()
    for summary in summaries:
        own = {row.group.optimizer: row for row in summary.best_of_optimizers}
        found = [own.get(optimizer) for optimizer in optimizers]
        means = [mean(row.final_accuracy) if row and row.group.finished else None for row in found]
        bold |= {(len(rows), 1 + place) for place in best_places(means, max)}
        rows.append((summary.task.title, *(accuracy(row.final_accuracy) if row else NOTHING for row in found)))
        numbers = [paper.get((summary.task.data, summary.task.model, o), "") for o in optimizers]
        if any(numbers):
            rows.append((f"{summary.task.title}, in the paper", *(number or NOTHING for number in numbers)))
    several = any(len(s.rows) > len(s.best_of_optimizers) for s in summaries)
    chosen = "An optimizer with several settings is shown with the one that has the best mean test accuracy."
    return Table(
        title="Final test accuracy, %",
        header=("data and model", *map(display, optimizers)),
        rows=tuple(rows),
        bold=frozenset(bold),
        notes=(
            f"Mean ± sample standard deviation over seeds. Bold: the best mean {COMPARABLE}.",
            *([chosen] if several else []),
        ),
    )


def numbers(summaries: Sequence[TaskSummary]) -> Table:
    """Everything in full precision, one row per group, for other programs to read."""
    header = ("task", "data", "model", "label", "optimizer", "seeds", "finished", "diverged", "unfinished")
    spreads: dict[str, Callable[[GroupSummary], Spread | None]] = {
        "final_test_accuracy": lambda row: row.final_accuracy,
        "best_test_accuracy": lambda row: row.best_accuracy,
        "final_train_loss": lambda row: row.train_loss,
        "seconds": lambda row: row.seconds,
        "ms_per_step": lambda row: row.step_ms,
    }
    both = [f"{name}_{kind}" for name in spreads for kind in ("mean", "std")]
    to_target = ("target", "reached", "epochs_to_target", "seconds_to_target")
    rows = []
    for summary in summaries:
        task = summary.task
        for row in summary.rows:
            group = row.group
            ends = Counter(run.status for run in group.runs)
            seeds = " ".join(map(str, group.seeds))
            cells = [task.title, task.data, task.model, group.label, group.optimizer, seeds]
            cells += [str(ends[status]) for status in ("finished", "diverged", "unfinished")]
            for get in spreads.values():
                found = get(row)
                cells += [_raw(found.mean), _raw(found.deviation)] if found else ["", ""]
            epochs, seconds = row.epochs_to_target, row.seconds_to_target
            cells += [_raw(summary.target), str(epochs.count), _raw(epochs.median), _raw(seconds.median)]
            rows.append((*cells, *(_raw(row.parts_ms.get(part)) for part in PARTS)))
    return Table("All numbers", (*header, *both, *to_target, *(f"{part}_ms" for part in PARTS)), tuple(rows))


def _bold(
    column: int, rows: Sequence[GroupSummary], get: Measure, choose: Callable[[Iterable[float]], float]
) -> frozenset[tuple[int, int]]:
    """The best of a column, of groups all of whose runs finished."""
    values = [get(row) if row.group.finished else None for row in rows]
    return frozenset((place, column) for place in best_places(values, choose))


def _raw(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else repr(value)


def _shares(row: GroupSummary) -> list[float]:
    whole = math.fsum(row.parts_ms.values()) or 1.0
    return [row.parts_ms[part] / whole for part in PARTS]
