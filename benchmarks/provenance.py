"""Where a result comes from: the command, the commit, the machine, the versions."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from tekfac.lab.provenance import commit, machine


def provenance(seeds: Sequence[int]) -> str:
    """A Markdown list that says how to get the same result again."""
    command = " ".join(["python", _script(), *map(shlex.quote, _arguments())])
    lines = [
        f"command: `{command}`",
        f"commit: `{commit()}`",
        f"seeds: {', '.join(map(str, seeds))}",
        f"machine: {machine(torch.device('cpu'))}, {torch.get_num_threads()} threads",
        f"versions: Python {platform.python_version()}, torch {torch.__version__}",
        f"date: {datetime.now(UTC):%Y-%m-%d}",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _script() -> str:
    root = Path(__file__).resolve().parent.parent
    script = Path(sys.argv[0]).resolve()
    return str(script.relative_to(root)) if script.is_relative_to(root) else script.name


def _arguments() -> list[str]:
    """The arguments as given, but for folders of the user's own, which say nothing to others."""
    arguments = list(sys.argv[1:])
    for index, argument in enumerate(arguments):
        if argument in ("--data-dir", "--report") and index + 1 < len(arguments):
            arguments[index + 1] = {"--data-dir": "DIR", "--report": "FILE"}[argument]
    return arguments
