"""The command line: `tekfac COMMAND ...`."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tekfac.cli import explain
from tekfac.cli import fisher as fisher_command
from tekfac.cli import lab as lab_command
from tekfac.common.checks import nearest
from tekfac.version import __version__


class Parser(argparse.ArgumentParser):
    """Says in a line what is wrong, and suggests the nearest name."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the whole usage, and end."""
        self.exit(2, f"{self.prog}: {message}. {self.prog} --help lists all arguments.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = nearest(str(value), map(str, action.choices)).rstrip(".")
            raise argparse.ArgumentError(action, f"{value!r} is unknown.{hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; what went wrong is said in one line, and is the exit status."""
    parser = Parser(prog="tekfac", description="Natural gradient and Fisher approximations.")
    parser.add_argument("--version", action="version", version=f"tekfac {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error happened")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    lab_command.add_to(commands)
    fisher_command.add_to(commands)
    explain.add_to(commands)
    options = parser.parse_args(arguments)
    options.command_line = shlex.join(["tekfac", *(sys.argv[1:] if arguments is None else arguments)])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not have ‖ or λ
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as in `tekfac ... | head`: what is left to print goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"tekfac: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return getattr(interrupt, "status", 130)
    except Exception as error:
        if options.debug:
            raise
        text = " ".join(str(error).split())
        if not isinstance(error, ValueError | TypeError | ImportError | OSError):
            text = f"{type(error).__name__}: {text} (tekfac --debug shows where)"
        print(f"tekfac: {text}", file=sys.stderr)
        return 1
    return 0
