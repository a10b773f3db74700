"""The page of a report: one file that needs nothing else, neither a network nor scripts.

page.html is its template, page.css its looks. Whatever comes from outside is escaped by the template.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from tekfac.common.extras import require
from tekfac.lab.report.drawing import Drawing, svg_of
from tekfac.lab.report.runs import Run, flat, plain
from tekfac.lab.report.summary import TaskSummary, spread
from tekfac.lab.report.table_formats import Table
from tekfac.lab.report.words import highlights, in_percent, lead, setup

OF_ONE_RUN = ("command", "date")
"""What is said of every run alone."""


@dataclass(frozen=True)
class Part:
    """Tables and figures under one heading.

    Attributes:
        title: the heading.
        tables: first.
        drawings: then.
        summary: of the task that it is about, if it is about one.
    """

    title: str
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = field(default=())
    summary: TaskSummary | None = None


def page(
    title: str,
    summaries: Sequence[TaskSummary],
    parts: Sequence[Part],
    *,
    runs: Sequence[Run],
    command: str,
    notes: Sequence[str] = (),
) -> str:
    """The whole page as HTML.

    Args:
        title: above all.
        summaries: of what is told in the first sentences.
        parts: the tables and figures, in order.
        runs: all that the numbers come from.
        command: which makes the page again.
        notes: what a reader has to know first.
    """
    jinja = require("jinja2", "A report")
    environment = jinja.Environment(
        autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text: str = environment.from_string(_resource("page.html")).render(
        css=_resource("page.css"),
        title=title,
        lead=lead(summaries),
        notes=notes,
        parts=parts,
        summaries=summaries,
        origins=origins(runs),
        rerun=f"tekfac train --config {shlex.quote(str(runs[0].folder.file))}",
        command=command,
        highlights=highlights,
        setup=setup,
        plain=plain,
        data_uri=_data_uri,
        ending=_ending,
        facts_of=_facts_of,
        config_of=_config_of,
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


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _data_uri(drawing: Drawing) -> str:
    """The figure inside of an address; a browser runs no script in it and loads nothing for it."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg_of(drawing.figure).encode()).decode()


def _ending(run: Run) -> str:
    """How far a run got."""
    end = f"{len(run.epochs)} epochs"
    return end + (f", {in_percent(spread([run.epochs[-1].test_accuracy]))}" if run.epochs else "")


def _facts_of(run: Run) -> dict[str, str]:
    known = {name: str(run.provenance[name]) for name in OF_ONE_RUN if name in run.provenance}
    return {"folder": str(run.path), **known}


def _config_of(run: Run) -> str:
    return json.dumps(run.config, indent=2, ensure_ascii=False)
