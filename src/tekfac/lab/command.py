"""The lab on the command line: all its commands."""

from __future__ import annotations

from typing import Any

from tekfac.lab.commands import compare, reproduce, sweep, train
from tekfac.lab.data import command as data
from tekfac.lab.report import command as report


def add_to(commands: Any) -> None:
    """Declare the lab's commands."""
    for module in (compare, train, sweep, reproduce, report, data):
        module.add_to(commands)
