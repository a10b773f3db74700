"""The lab on the command line: all its commands."""

from __future__ import annotations

from typing import Any

from tekfac.cli import compare, data, report, reproduce, sweep, train


def add_to(commands: Any) -> None:
    """Declare the lab's commands."""
    for module in (compare, train, sweep, reproduce, report, data):
        module.add_to(commands)
