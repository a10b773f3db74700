"""`tekfac data`: which data sets there are, whether files are whole, and how to get them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tekfac.common.console import output
from tekfac.common.extras import require
from tekfac.lab.data.catalogue import DIGITS, FOLDER, KNOWN, Known
from tekfac.lab.data.checking import SetFinding, check
from tekfac.lab.data.fetching import fetch
from tekfac.lab.data.official import VARIABLE, default_folder, place_in

COLOURS = {"good": "green", "partial": "yellow", "damaged": "red"}


DESCRIPTION = """\
Which data sets there are, whether files are whole, and how to get them.

  tekfac data list
  tekfac data check DIR
  tekfac data fetch cifar10
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's actions."""
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="the data sets, and which of them are here")
    listing.set_defaults(run=run_list)
    checking = actions.add_parser("check", help="read all data in a folder and say whether they are whole")
    checking.add_argument("folder", type=Path, metavar="DIR", help="holds a data set, or folders of several")
    checking.add_argument("--name", metavar="NAME", help="check this set only (default: all that are found)")
    checking.set_defaults(run=run_check)
    fetching = actions.add_parser("fetch", help="download an official data set, check and unpack it")
    fetching.add_argument("name", metavar="NAME", help="cifar10, cifar100 or svhn")
    told = f"folder (default: ${VARIABLE}, or ~/.cache/tekfac/data)"
    fetching.add_argument("--to", type=Path, metavar="DIR", help=told)
    fetching.add_argument("--layout", choices=("python", "binary"), help="of CIFAR's files (default: python)")
    told = "fetch the same files from another address (default: the official one)"
    fetching.add_argument("--mirror", metavar="URL", help=told)
    fetching.add_argument("--quiet", action="store_true", help="no progress bar")
    fetching.set_defaults(run=run_fetch)


def run_list(options: argparse.Namespace) -> None:
    """Print the data sets."""
    table = _table("name", "classes", "train", "test", "here", "what it is")
    for known in KNOWN.values():
        train, test = (f"{count:,}" if count else "" for count in known.counts)
        classes = str(len(known.classes) or "")
        table.add_row(known.name, classes, train, test, _here(known), known.about)
    output().print(table)
    _say(f"Official sets are looked for in {default_folder(DIGITS.name)}.")


def run_check(options: argparse.Namespace) -> None:
    """Print what is in a folder, file by file.

    Raises:
        ValueError: if something is damaged.
    """
    found = check(options.folder, options.name)
    for finding in found:
        _print(finding)
    damaged = [str(finding.folder) for finding in found if finding.state == "damaged"]
    if damaged:
        raise ValueError(f"Damaged data in {', '.join(damaged)}; see above.")


def run_fetch(options: argparse.Namespace) -> None:
    """Fetch a data set and say where it is."""
    folder = fetch(options.name, options.to, layout=options.layout, mirror=options.mirror, quiet=options.quiet)
    _say(f"{options.name} is complete in {folder}")


def _here(known: Known) -> str:
    """Whether a set is in the default folder."""
    if known is DIGITS:
        return "yes"
    if known is FOLDER:
        return ""
    return "no" if place_in(known, default_folder(known.name)) is None else "yes"


def _print(finding: SetFinding) -> None:
    counts = f"{finding.train:,} + {finding.test:,} images"
    line = f"{finding.name} ({finding.kind}) in {finding.folder}: {finding.state}, {counts}"
    _say(line, COLOURS[finding.state])
    if finding.message:
        _say(f"  {finding.message}")
    if finding.files:
        table = _table("file", "state", "images", "checksum")
        for file in finding.files:
            images = f"{file.images:,}" if file.images else ""
            table.add_row(file.name, file.state, images, file.checksum, style=COLOURS[file.state])
        output().print(table)
    for file in finding.files:
        if file.message:
            _say(f"  {file.name}: {file.message}")


def _say(text: str, style: str | None = None) -> None:
    output().print(text, style=style, soft_wrap=True, markup=False)


def _table(*columns: str) -> Any:
    tables, boxes = require("rich.table", "The lab"), require("rich.box", "The lab")
    return tables.Table(*columns, box=boxes.SIMPLE)
