"""The page of a report: one file that needs nothing else, neither a network nor scripts.

page.html is its template, page.css its looks. Whatever comes from outside is escaped by the template.
"""

from __future__ import annotations

import json
import shlex
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass

from tekfac.common.extras import require
from tekfac.lab.report import words
from tekfac.lab.report.drawing import Drawing, svg_of
from tekfac.lab.report.runs import Run, flat, plain
from tekfac.lab.report.summary import TaskSummary, spread
from tekfac.lab.report.table_formats import Table
from tekfac.lab.report.tables import Paper

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
    paper: Paper | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Part:
    """Tables and figures under one heading, and the summary of the task that they are about, if it is one."""

    title: str
    tables: Sequence[Table]
    drawings: Sequence[Drawing] = ()
    summary: TaskSummary | None = None


def page(asked: Asked, summaries: Sequence[TaskSummary], parts: Sequence[Part], runs: Sequence[Run]) -> str:
    """The whole page as HTML: the parts in order, and all runs that the numbers come from."""
    jinja = require("jinja2", "A report")
    environment = jinja.Environment(
        loader=jinja.PackageLoader(__package__, ""),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text: str = environment.get_template("page.html").render(
        asked=asked,
        summaries=summaries,
        parts=parts,
        origins=origins(runs),
        rerun=f"tekfac train --config {shlex.quote(str(runs[0].folder.file))}",
        words=words,
        plain=plain,
        spread=spread,
        json=json,
        facts_of=_facts_of,
        data_uri=_data_uri,
    )
    return text


def origins(runs: Sequence[Run]) -> dict[str, str]:
    """Where the runs come from: whatever they recorded, each value once, and their seeds."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in flat(run.provenance).items():
            if name not in OF_ONE_RUN and value:
                found.setdefault(name, {})[plain(value)] = None
    facts = {name: ", ".join(values) for name, values in found.items()}
    facts["seeds"] = ", ".join(dict.fromkeys(plain(run.seed) for run in sorted(runs, key=lambda run: run.seed)))
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
