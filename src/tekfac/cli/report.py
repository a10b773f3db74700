"""`tekfac report`: training runs as tables, figures and one page to look at."""

from __future__ import annotations

import argparse
from pathlib import Path

from tekfac.cli.parsing import add_out, add_target
from tekfac.lab.report import Asked, present, require_reports

DESCRIPTION = """\
Turns the folders that `tekfac train` wrote into a report: one page to open in a browser, tables in Markdown and
LaTeX, all numbers in a CSV file, and figures as PNG, SVG and PDF. Runs that differ only in their seed are put
together; runs that diverged or are still training are shown as that.

  tekfac report runs/digits --out report --target 95
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    told = "folder of a run, or one with runs anywhere below it"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=told)
    add_out(parser, "report")
    add_target(parser)
    parser.add_argument("--title", default="Training runs compared", help="of the page")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the report, print its numbers in brief and where the page is."""
    require_reports()
    asked = Asked(title=options.title, target=options.target, command=options.command_line)
    present(options.runs, options.out, asked)
