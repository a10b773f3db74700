"""The parts of the page that say where its numbers come from: every run, and how to make it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape

from tekfac.lab.report.cells import in_percent
from tekfac.lab.report.grouping import flat, plain
from tekfac.lab.report.runs import Run
from tekfac.lab.report.summary import TaskSummary, spread

IN_RUNS = ("command", "date")
"""What is said of every run alone."""


def runs_section(summaries: Sequence[TaskSummary]) -> str:
    """Every run with its configuration, folded."""
    folded = [
        _run(f"{row.group.label}", summary.task.title if len(summaries) > 1 else "", run)
        for summary in summaries
        for row in summary.rows
        for run in row.group.runs
    ]
    return (
        '<section id="runs">\n<h2>Runs</h2>\n<p class="setup">Each with its whole configuration.</p>\n'
        + "\n".join(folded)
        + "\n</section>\n"
    )


def provenance_section(runs: Sequence[Run]) -> str:
    """Where the runs come from."""
    return f'<section id="provenance">\n<h2>Provenance</h2>\n{fact_list(origins(runs))}</section>\n'


def origins(runs: Sequence[Run]) -> dict[str, str]:
    """Where the runs come from: whatever they recorded, each value once, and their seeds."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in flat(run.provenance).items():
            if name not in IN_RUNS and value:
                found.setdefault(name, {})[plain(value)] = None
    facts = {name: ", ".join(values) for name, values in found.items()}
    facts["seeds"] = ", ".join(dict.fromkeys(plain(run.seed) for run in sorted(runs, key=lambda run: run.seed)))
    dates = sorted(str(run.provenance["date"]) for run in runs if "date" in run.provenance)
    if dates:
        facts["dates"] = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return facts


def rerun_section(runs: Sequence[Run], command: str) -> str:
    """The commands that make a run, and this page, again."""
    first = f"tekfac train --config {shlex.quote(str(runs[0].path / 'run.json'))}"
    return (
        '<section id="rerun">\n<h2>How to run it again</h2>\n'
        "<p>Every run has its configuration beside its numbers, and is trained again from it:</p>\n"
        f"<pre><code>{escape(first)}</code></pre>\n"
        "<p>This page, its tables and its figures are made again from the folders of the runs:</p>\n"
        f"<pre><code>{escape(command)}</code></pre>\n</section>\n"
    )


def fact_list(facts: Mapping[str, str]) -> str:
    """Names and values."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>\n" for name, value in facts.items())
    return f'<dl class="facts">\n{rows}</dl>\n'


def _run(label: str, task: str, run: Run) -> str:
    """One run, folded: what it was and how it ended; unfolded, all that was asked for."""
    end = f"{len(run.epochs)} epochs"
    if run.epochs:
        end += f", {in_percent(spread([run.epochs[-1].test_accuracy]))}"
    status = f'<span class="bad">{run.status}</span>' if run.status != "finished" else run.status
    where = f" <span>{escape(task)}</span>" if task else ""
    facts = {"folder": str(run.path)}
    facts |= {name: str(run.provenance[name]) for name in IN_RUNS if name in run.provenance}
    config = json.dumps(run.config, indent=2, ensure_ascii=False)
    return (
        f"<details>\n<summary><span>{escape(label)}, seed {escape(plain(run.seed))}</span>{where}"
        f'<span class="end">{status}, {escape(end)}</span></summary>\n{fact_list(facts)}'
        f"<pre><code>{escape(config)}</code></pre>\n</details>"
    )
