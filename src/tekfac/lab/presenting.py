"""Finished runs, presented: the report written, its tables printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tekfac.common.console import output
from tekfac.lab.report.rendering import Table, to_rich
from tekfac.lab.report.runs import find_runs
from tekfac.lab.report.summary import summarise
from tekfac.lab.report.tables import Paper, accuracies, brief
from tekfac.lab.report.writing import write_report


def present(
    folders: Sequence[Path],
    out: Path,
    *,
    title: str,
    command: str,
    target: float | None = None,
    extra_tables: Sequence[Table] = (),
    paper: Paper | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Write the report of some runs (see write_report) and print its tables."""
    runs = find_runs(folders)
    write_report(
        runs,
        out,
        title=title,
        target=target,
        extra_tables=extra_tables,
        paper=paper,
        notes=notes,
        command=command,
    )
    console, summaries = output(), summarise(runs, target)
    overall = [accuracies(summaries, paper)] if paper or len(summaries) > 1 else []
    for table in [*map(brief, summaries), *overall, *extra_tables]:
        console.print(to_rich(table))
    console.print(f"The page is {out / 'report.html'}", markup=False, soft_wrap=True)
