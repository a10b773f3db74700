"""The parser of all commands: errors in a line, the nearest name, defaults in the help. And readers."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tekfac.common.checks import nearest, probably_meant


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description, and shows the default of every option that has one; a number is N."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not has_default(action) or "default:" in text:
            return text
        return f"{text} (default: %(default)s)"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "N" if action.type in NUMBERS else super()._get_default_metavar_for_optional(action)


def has_default(action: argparse.Action) -> bool:
    """Whether an option has a value if it is not given: one that is not merely off or empty."""
    is_off = action.default is None or action.default is False or action.default in ([], argparse.SUPPRESS)
    return bool(action.option_strings) and not is_off


class Parser(argparse.ArgumentParser):
    """Says in a line what is wrong, and suggests the nearest name."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **settings})

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; what is unknown is an error here, where the names of the options are known."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._of_unknown(unknown))
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, without the whole usage, and end."""
        stop = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"{self.prog}: {message}{stop} {self.prog} --help lists all arguments.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = nearest(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"{value!r} is unknown.{hint}")

    def _of_unknown(self, arguments: Sequence[str]) -> str:
        """What to say of arguments that do not exist: of the first option, since others may be its values."""
        first = next((argument for argument in arguments if argument.startswith("-")), arguments[0])
        name = first.partition("=")[0]
        return f"there is no argument {name!r}.{probably_meant(name, list(self._option_string_actions))}"


def add_out(parser: argparse._ActionsContainer, default: str) -> None:
    """The folder that a command writes to."""
    told = f"folder that is written to (default: {default})"
    parser.add_argument("--out", type=Path, default=Path(default), metavar="DIR", help=told)


def add_target(parser: argparse._ActionsContainer) -> None:
    """The accuracy that a report is to look for."""
    told = "test accuracy whose first epoch is looked for (default: one that most settings reach)"
    parser.add_argument("--target", type=float, metavar="PERCENT", help=told)


def add_repeated(parser: argparse._ActionsContainer, name: str, form: str, told: str) -> None:
    """An argument that may be given several times, each as text of some form."""
    parser.add_argument(name, action="append", default=[], metavar=form, help=told)


WORDS = {"True": True, "False": False, "None": None}
"""That Python has, and tables show, and TOML writes otherwise or has not."""


def pair(text: str) -> tuple[str, Any]:
    """KEY=VALUE; the value as in TOML (numbers, true, lists) or one of Python's words, or else as text."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"Cannot read {text!r}. Expected KEY=VALUE, such as factors_every=20.")
    if value in WORDS:
        return key.strip(), WORDS[value]
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def positive(text: str) -> int:
    """A whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def count_or_share(text: str) -> int | float:
    """A whole number, or a share below 1."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if 0 <= (share := float(text)) < 1:
            return share
    raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor a share below 1")


NUMBERS = (int, float, positive, count_or_share)
