"""The command line: `tekfac COMMAND ...`. A command's module is imported when the command is given."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from tekfac.cli.parsing import Parser
from tekfac.common.console import printable
from tekfac.common.launcher import launched
from tekfac.version import __version__

COMMANDS = {
    "compare": "train with several optimizers and compare them",
    "train": "train a network",
    "sweep": "try learning rates and other settings",
    "reproduce": "the paper's tables and figures",
    "report": "tables, figures and a page of training runs",
    "data": "data sets: list, check and fetch them",
    "fisher": "how good the approximations are on a network",
    "bench": "what a step costs beside one of SGD",
    "explain": "what an optimizer would do with a network, layer by layer",
}
"""Every command, which is also the name of its module here, and what it is for."""

OF_SEVERAL = ("train", "fisher")
"""Those that torchrun may start several processes of."""

DEBUG = "--debug"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; what went wrong is said in one line, and is the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not have ‖ or λ
    try:
        options = _parse(given)
        options.command_line = shlex.join(["tekfac", *given])
        _require_alone(options.command)
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # as in `tekfac ... | head`: what is left to print goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"tekfac: {printable(str(interrupt)) or 'interrupted'}", file=sys.stderr)
        return getattr(interrupt, "status", 130)
    except Exception as error:
        if DEBUG in given:
            raise
        text = " ".join(str(error).split())
        if not isinstance(error, ValueError | TypeError | ImportError | OSError):
            text = f"{type(error).__name__}: {text} (tekfac {DEBUG} shows where)"
        print(f"tekfac: {printable(text)}", file=sys.stderr)
        return 1
    return 0


def _require_alone(command: str) -> None:
    """Raise ValueError where a launcher has started several processes of a command that is for one."""
    count = launched()
    if count > 1 and command not in OF_SEVERAL:
        raise ValueError(
            f"tekfac {command} was started {count} times, by torchrun or the like, and is for one process. "
            f"Expected one of {', '.join(OF_SEVERAL)}, or no launcher (WORLD_SIZE in the environment is its)."
        )


def parser_of(command: str) -> Parser:
    """The parser of one command, as the command's module describes it."""
    module = import_module(f"tekfac.cli.{command}")
    parser = Parser(prog=f"tekfac {command}", description=module.DESCRIPTION)
    module.add_arguments(parser)
    return parser


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="tekfac", description="Natural gradient and Fisher approximations.")
    parser.add_argument("--version", action="version", version=f"tekfac {__version__}")
    parser.add_argument(DEBUG, action="store_true", help="show where an error happened")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", parser_class=_CommandInList
    )
    for command, purpose in COMMANDS.items():
        commands.add_parser(command, help=purpose)
    options = parser.parse_args(given)
    if options.command is None:
        parser.error(f"expected a command: {', '.join(COMMANDS)}")
    return options


class _CommandInList(Parser):
    """A command in the list of all; once it is given, its own parser reads the arguments."""

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        command = self.prog.rpartition(" ")[2]
        return parser_of(command).parse_known_args(args, namespace)
