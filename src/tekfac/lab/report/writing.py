"""A report written: the page, its tables, all numbers, and the figures in three formats; its tables printed.

The page is one file that needs nothing else, neither a network nor scripts: page.html is its template, page.css
its looks. Whatever comes from outside is escaped by the template.
"""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tekfac.common.console import output
from tekfac.common.extras import require
from tekfac.common.files import write_text
from tekfac.lab.report import figures, tables, words
from tekfac.lab.report.drawing import Drawing, save, settle, svg_of
from tekfac.lab.report.runs import Run, find_runs, flat, ordered, plain
from tekfac.lab.report.summary import TaskSummary, spread, summarise
from tekfac.lab.report.sweep_figures import swept
from tekfac.lab.report.table_formats import Table, rendered, slug, to_csv, to_rich

OF_ONE_RUN = ("command", "date")
"""What is said of every run alone."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a report is to say beside its runs.

    Attributes:
        title: of the page.
        command: which makes it (default: the `tekfac report` that does).
        target: test accuracy in percent that is to be reached; one is chosen for each task by default.
        extra_tables: further tables, before those of the tasks.
        paper: accuracies that the paper prints, by (data, model, optimizer).
        notes: what a reader has to know first.
    """

    title: str
    command: str = ""
    target: float | None = None
    extra_tables: Sequence[Table] = ()
    paper: tables.Paper | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Part:
    """Tables and figures under one heading, and the summary of the task that they are about, if it is one."""

    title: str
    tables: Sequence[Table]
    drawings: Sequence[Drawing] = ()
    summary: TaskSummary | None = None


def require_reports() -> None:
    """Say now, before any work is done, if a package is missing that its report will need."""
    for package in ("rich", "matplotlib", "jinja2"):
        require(package, "A report")


def present(folders: Sequence[Path], out: Path, asked: Asked) -> None:
    """Write the report of the runs in some folders (see write_report) and print its tables."""
    runs = find_runs(folders)
    write_report(runs, out, asked)
    console, summaries = output(), summarise(runs, asked.target)
    overall = [tables.accuracies(summaries, asked.paper)] if asked.paper or len(summaries) > 1 else []
    for table in [*map(tables.brief, summaries), *overall, *asked.extra_tables]:
        console.print(to_rich(table))
    console.print(f"The page is {out / 'report.html'}", markup=False, soft_wrap=True)


def write_report(runs: Sequence[Run], out: Path, asked: Asked) -> list[str]:
    """Write report.html, report.md, tables.tex, summary.csv and figures/; other files in the folder stay.

    Args:
        runs: what is reported, see `find_runs`.
        out: folder, made if need be.
        asked: what is said of them.

    Returns:
        The names of the files, relative to the folder.

    Raises:
        ValueError: if no run has finished an epoch, or the target is no percentage.
        OSError: if a file cannot be written.
    """
    asked = asked if asked.command else replace(asked, command=_command(runs, out, asked))
    summaries = summarise(runs, asked.target)
    parts = [_task_part(summary, name) for summary, name in zip(summaries, _names(summaries), strict=True)]
    if len(summaries) > 1 or asked.paper:
        parts.insert(0, Part("Accuracy", [tables.accuracies(summaries, asked.paper)]))
    if asked.extra_tables:
        parts.insert(0, Part("Beside the paper", asked.extra_tables))
    drawings = [drawing for part in parts for drawing in part.drawings]
    for drawing in drawings:
        settle(drawing.figure)
    values = {"asked": asked, "summaries": summaries, "parts": parts, "runs": runs, "origins": _origins(runs)}
    known = {"words": words, "plain": plain, "spread": spread, "facts_of": _facts_of, "data_uri": _data_uri}
    texts = {
        "report.html": rendered("page.html", **values, **known, dumps=json.dumps, quote=shlex.quote),
        "report.md": rendered("report.md", **values, words=words),
        "tables.tex": rendered("tables.tex", parts=parts),
        "summary.csv": to_csv(tables.numbers(summaries)),
    }
    written = [f"figures/{name}" for drawing in drawings for name in save(drawing, out / "figures")]
    for name, text in texts.items():
        write_text(out / name, text)
    return [*texts, *written]


def _origins(runs: Sequence[Run]) -> dict[str, str]:
    """Where the runs come from: whatever they recorded, each value once, and their seeds."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in flat(run.provenance).items():
            if name not in OF_ONE_RUN and value:
                found.setdefault(name, {})[plain(value)] = None
    facts = {name: ", ".join(values) for name, values in found.items()}
    facts["seeds"] = ", ".join(
        dict.fromkeys(plain(run.seed) for run in sorted(runs, key=lambda run: ordered(run.seed)))
    )
    dates = sorted(str(run.provenance["date"]) for run in runs if "date" in run.provenance)
    if dates:
        facts["dates"] = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return facts


def _facts_of(run: Run) -> dict[str, str]:
    known = {name: str(run.provenance[name]) for name in OF_ONE_RUN if name in run.provenance}
    return {"folder": str(run.path), **known}


def _data_uri(drawing: Drawing) -> str:
    """The figure inside of an address; a browser runs no script in it and loads nothing for it."""
    return "data:image/svg+xml;base64," + b64encode(svg_of(drawing.figure).encode()).decode()


def _task_part(summary: TaskSummary, name: str) -> Part:
    """The tables and figures of one task; without any epoch there is nothing to draw."""
    drawings = _drawings(summary) if any(row.seconds for row in summary.rows) else []
    own = [replace(drawing, name=f"{name}-{slug(drawing.name)}") for drawing in drawings]
    return Part(summary.task.title, [tables.comparison(summary), tables.times(summary)], own, summary)


def _drawings(summary: TaskSummary) -> list[Drawing]:
    """The figures of one task."""
    shows_all = len(figures.shown(summary)) == len(summary.rows)
    who = "all settings" if shows_all else "the best setting of each optimizer"
    drawings = [
        Drawing(
            "curves",
            f"Test accuracy and training loss against epochs and training time, {who}: means over the seeds "
            "that got there, bands of one standard deviation; every epoch stands at its mean time. "
            f"Dotted: the target of {100 * summary.target:g}%; a cross: a run that diverged.",
            f"Learning curves of {summary.task.title}. Final test accuracy: {words.alternative(summary)}",
            figures.curves(summary),
        ),
        Drawing(
            "time",
            "Time of one training step by what it is spent on, mean over the run and over seeds.",
            f"Milliseconds per step of {summary.task.title}; the numbers are in the table of times",
            figures.time_shares(summary),
        ),
    ]
    measured = len(figures.with_curvature(summary))
    if measured:
        most = figures.MOST_RUNS
        which = "each setting" if measured <= most else f"each of the first {most} settings"
        drawings.append(
            Drawing(
                "curvature",
                "Trace, condition number and damping of every layer along training, from the first layer "
                f"(dark) to the last (light); one run of {which} that recorded them, with its first seed.",
                f"Curvature of the layers of {summary.task.title} along training",
                figures.curvature(summary),
            )
        )
    return drawings + swept(summary)


def _names(summaries: Sequence[TaskSummary]) -> list[str]:
    """A name for every task, none twice."""
    names: list[str] = []
    for summary in summaries:
        name = slug(summary.task.title)
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names


def _command(runs: Sequence[Run], out: Path, asked: Asked) -> str:
    """The command line that makes the report again."""
    target = [] if asked.target is None else ["--target", f"{asked.target:g}"]
    paths = [str(run.path) for run in runs]
    return shlex.join(["tekfac", "report", *paths, "--out", str(out), "--title", asked.title, *target])
