"""The tables of a report: the groups of a task, what their time went to, and the form the paper has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from tekfac.lab.counting import PARTS
from tekfac.lab.optimizers import display, position
from tekfac.lab.report import words
from tekfac.lab.report.summary import TaskSummary
from tekfac.lab.report.table_formats import Table

Paper = Mapping[tuple[str, str, str], str]
"""(data, model, optimizer) to the accuracy that the paper prints, in percent."""


class Column(NamedTuple):
    """A column of a table with one row per group.

    Attributes:
        name: above it.
        what: attribute of a group's summary.
        form: that as text.
        measure: that as a number to be compared, or None.
        choose: the number that is best, to be bold.
    """

    name: str
    what: str
    form: Callable[[Any], str] = str
    measure: Callable[[Any], float | None] = lambda _: None
    choose: Callable[[Iterable[float]], float] = min


LABEL, RUNS = Column("optimizer", "group.label"), Column("runs", "group.status")
FINAL = Column("final test accuracy, %", "final_accuracy", words.accuracy, words.mean, max)
BEST = Column("best test accuracy, %", "best_accuracy", words.accuracy, words.mean, max)
LOSS = Column("final training loss", "train_loss", words.loss, words.mean)
SECONDS = Column("seconds in all", "seconds", words.seconds_or_ms, words.mean)
STEP = Column("ms per step", "step_ms", words.seconds_or_ms, words.mean)
SHARES = [Column(f"{part}, %", "parts_ms", partial(words.share, part)) for part in PARTS]
IN_FULL = {
    "final_test_accuracy": FINAL,
    "best_test_accuracy": BEST,
    "final_train_loss": LOSS,
    "seconds": SECONDS,
    "ms_per_step": STEP,
}


def comparison(summary: TaskSummary) -> Table:
    """One row per group: accuracies, loss, and how soon the target was reached."""
    columns = [LABEL, RUNS, FINAL, BEST, LOSS, *_to_target(summary)]
    title = f"{summary.task.title}: accuracy and the way to it"
    return _by_group(summary, title, columns, words.comparison_notes(summary))


def brief(summary: TaskSummary) -> Table:
    """What fits into a terminal: the table of a task without its best accuracy and loss, but with its speed."""
    return _by_group(summary, summary.task.title, [LABEL, RUNS, FINAL, *_to_target(summary), STEP])


def times(summary: TaskSummary) -> Table:
    """One row per group: seconds, and what a step spends them on."""
    title = f"{summary.task.title}: time"
    return _by_group(summary, title, [LABEL, SECONDS, STEP, *SHARES], words.time_notes(summary))


def _to_target(summary: TaskSummary) -> list[Column]:
    percent = f"{100 * summary.target:g}%"
    return [
        Column(f"epochs to {percent}", "epochs_to_target", words.reached, words.median_of_all),
        Column(
            f"seconds to {percent}",
            "seconds_to_target",
            partial(words.reached, form=words.duration),
            words.median_of_all,
        ),
    ]


def _by_group(
    summary: TaskSummary, title: str, columns: Sequence[Column], notes: tuple[str, ...] = ()
) -> Table:
    """A row for every group; bold is the best of a column, of groups all of whose runs finished."""
    bold, texts = set(), []
    for place, column in enumerate(columns):
        found = list(map(attrgetter(column.what), summary.rows))
        finished = [row.group.finished for row in summary.rows]
        values = [column.measure(one) if whole else None for one, whole in zip(found, finished, strict=True)]
        bold |= {(best, place) for best in words.best_places(values, column.choose)}
        texts.append(map(column.form, found))
    header = tuple(column.name for column in columns)
    return Table(title, header, tuple(zip(*texts, strict=True)), frozenset(bold), notes)


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
        means = [words.mean(row.final_accuracy) if row and row.group.finished else None for row in found]
        bold |= {(len(rows), 1 + place) for place in words.best_places(means, max)}
        rows.append(
            (
                summary.task.title,
                *(words.accuracy(row.final_accuracy) if row else words.NOTHING for row in found),
            )
        )
        numbers = [paper.get((summary.task.data, summary.task.model, o), "") for o in optimizers]
        if any(numbers):
            rows.append(
                (f"{summary.task.title}, in the paper", *(number or words.NOTHING for number in numbers))
            )
    several = any(len(s.rows) > len(s.best_of_optimizers) for s in summaries)
    chosen = "An optimizer with several settings is shown with the one that has the best mean test accuracy."
    return Table(
        title="Final test accuracy, %",
        header=("data and model", *map(display, optimizers)),
        rows=tuple(rows),
        bold=frozenset(bold),
        notes=(
            f"Mean ± sample standard deviation over seeds. Bold: the best mean {words.COMPARABLE}.",
            *([chosen] if several else []),
        ),
    )


def numbers(summaries: Sequence[TaskSummary]) -> Table:
    """Everything in full precision, one row per group, for other programs to read."""
    rows = []
    for task, target, row in [(s.task, s.target, row) for s in summaries for row in s.rows]:
        group, ends = row.group, Counter(run.status for run in row.group.runs)
        told = {"task": task.title, "data": task.data, "model": task.model, "label": group.label}
        told |= {"optimizer": group.optimizer, "seeds": " ".join(map(str, group.seeds))}
        told |= {status: str(ends[status]) for status in ("finished", "diverged", "unfinished")}
        for name, column in IN_FULL.items():
            found = attrgetter(column.what)(row)
            told[f"{name}_mean"] = _raw(found and found.mean)
            told[f"{name}_std"] = _raw(found and found.deviation)
        told |= {"target": _raw(target), "reached": str(row.epochs_to_target.count)}
        told |= {name: _raw(getattr(row, name).median) for name in ("epochs_to_target", "seconds_to_target")}
        rows.append(told | {f"{part}_ms": _raw(row.parts_ms.get(part)) for part in PARTS})
    return Table("All numbers", tuple(rows[0]), tuple(tuple(row.values()) for row in rows))


def _raw(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else repr(value)
