"""The arguments by which every command is told a model, and the model that they name."""

from __future__ import annotations

import argparse

from torch import nn

from tekfac.cli.parsing import add_repeated, pair, positive
from tekfac.lab.models import GIVEN, MODELS, build

FUNCTION = "package.module:function or file.py:function"


def add_model(group: argparse._ArgumentGroup, default: str | None) -> None:
    """The model by name, and its settings."""
    told = "" if default is None else f" (default: {default})"
    known = f"{', '.join(MODELS)}, or a function of yours that returns a network: "
    group.add_argument("--model", metavar="NAME", help=f"{known}{FUNCTION}{told}")
    add_repeated(group, "--model-option", "KEY=VALUE", "a setting of the model, such as width=8")


def add_images(group: argparse._ArgumentGroup) -> None:
    """What a model may ask for of the images it is made for, where a command has no data to tell."""
    for name, meaning in zip(GIVEN, ("channels of the images", "classes", "edge of the images"), strict=True):
        group.add_argument(f"--{name}", type=positive, help=f"{meaning}, for a model that asks for {name}")


def made(options: argparse.Namespace) -> nn.Module:
    """The network that the arguments name."""
    given = {name: getattr(options, name) for name in GIVEN}
    return build(options.model, **given, options=dict(map(pair, options.model_option)))
