"""A benchmark written as a page with its figures, and printed as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tekfac.common.console import output
from tekfac.common.files import write_text
from tekfac.lab.bench.figures import drawings
from tekfac.lab.bench.result import FILE, Result
from tekfac.lab.bench.tables import all_tables
from tekfac.lab.report.drawing import Drawing, save
from tekfac.lab.report.table_formats import rendered, to_rich

PAGE = "bench.md"

LEAD = """\
What a step of an optimizer costs beside one of SGD with momentum on the same network. Every contestant has a
copy of its own; they take turns, a step each, in an order that goes round. Images are noise with the spectrum
of photographs, text is the standard library's; ours are timed as late in a run, unless --early is given."""


def write(result: Result, out: Path) -> list[str]:
    """Write the page and the figures; the names of all files, bench.json among them."""
    drawn = drawings(result)
    files = [name for drawing in drawn for name in save(drawing, out)]
    write_text(out / PAGE, page(result, drawn))
    return [FILE, PAGE, *files]


def page(result: Result, drawn: Sequence[Drawing]) -> str:
    """The page in Markdown."""
    parts = ["# What a step costs", LEAD]
    parts += [f"![{drawing.alternative}]({drawing.name}.png)\n\n{drawing.caption}" for drawing in drawn]
    parts += [rendered("table.md", table=table).strip() for table in all_tables(result)]
    parts.append("## Where this comes from")
    parts += [_origin(name, one) for name, one in result["networks"].items()]
    if result["growth"] is not None:
        parts.append(_origin("Growth", result["growth"]))
    return "\n\n".join(parts) + "\n"


def _origin(name: str, one: Mapping[str, Any]) -> str:
    facts = dict(one["provenance"])
    versions = ", ".join(f"{package} {version}" for package, version in facts.pop("versions").items())
    facts |= {"threads": ", ".join(map(str, facts["threads"])), "versions": versions}
    lines = [f"- {key}: `{value}`" for key, value in facts.items()]
    if "network" in one:
        lines.append(f"- network: `{one['network']}`")
    tiny = " (tiny version, --quick: no numbers to use)" if one["quick"] else ""
    return "\n".join([f"{name}{tiny}:", "", *lines])


def show(result: Result, written: Sequence[str], out: Path) -> None:
    """Print the tables of a result, or of a part of it, and where everything is."""
    console = output()
    for table in all_tables(result):
        console.print(to_rich(table))
    console.print(f"Written to {out}: {', '.join(written)}", markup=False, soft_wrap=True)
