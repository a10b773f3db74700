"""The page of a report: one file that needs nothing else, neither a network nor scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from tekfac.lab.report.details import provenance_section, rerun_section, runs_section
from tekfac.lab.report.drawing import Drawing, svg_of
from tekfac.lab.report.rendering import Table, to_html
from tekfac.lab.report.runs import Run
from tekfac.lab.report.stylesheet import CSS
from tekfac.lab.report.summary import TaskSummary
from tekfac.lab.report.svg import inline
from tekfac.lab.report.wording import highlights, lead, setup


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
    sections = "".join(_section(part, index) for index, part in enumerate(parts, start=1))
    links = {f"part-{index}": part.title for index, part in enumerate(parts, start=1)}
    links |= {"runs": "Runs", "provenance": "Provenance", "rerun": "Run it again"}
    entries = "".join(f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text in links.items())
    remarks = "".join(f'<p class="remark">{escape(note)}</p>\n' for note in notes)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        f'<header>\n<p class="kicker">tekfac report</p>\n<h1>{escape(title)}</h1>\n'
        f'<p class="lead">{escape(lead(summaries))}</p>\n{remarks}'
        f'<nav aria-label="Parts of this page"><ul>{entries}</ul></nav>\n</header>\n<main>\n'
        f"{sections}{runs_section(summaries)}{provenance_section(runs)}{rerun_section(runs, command)}"
        "</main>\n<footer>Made by tekfac from the files of the runs; the same runs make the same page. Tables "
        "are also in report.md and tables.tex, all numbers in summary.csv, figures in figures/.</footer>\n"
        "</body>\n</html>\n"
    )


def _section(part: Part, index: int) -> str:
    tables = "".join(map(to_html, part.tables))
    drawings = "".join(
        _figure(drawing, f"f{index}-{place}") for place, drawing in enumerate(part.drawings, start=1)
    )
    opening = ""
    if part.summary:
        said = "".join(
            f"<div><dt>{escape(what)}</dt><dd>{escape(which)}</dd><dd>{escape(much)}</dd></div>"
            for what, which, much in highlights(part.summary)
        )
        opening = f'<p class="setup">{escape(setup(part.summary))}</p>\n' + (
            f'<dl class="best">{said}</dl>\n' if said else ""
        )
    return (
        f'<section id="part-{index}">\n<h2>{escape(part.title)}</h2>\n{opening}{tables}{drawings}</section>\n'
    )


def _figure(drawing: Drawing, prefix: str) -> str:
    drawn = inline(svg_of(drawing.figure), prefix, drawing.alternative)
    return f"<figure>\n{drawn}\n<figcaption>{escape(drawing.caption)}</figcaption>\n</figure>\n"
