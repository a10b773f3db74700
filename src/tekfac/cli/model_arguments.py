"""The arguments by which every command is told a model, and the model that they name."""

from __future__ import annotations

import argparse

from torch import nn

from tekfac.cli.parsing import pair, positive
from tekfac.lab.models import GIVEN, MODELS, build


def add_model(group: argparse._ArgumentGroup, default: str | None) -> None:
    """The model by name, and its settings."""
    told = "" if default is None else f" (default: {default})"
    group.add_argument(
        "--model",
        metavar="NAME",
        help=f"{', '.join(MODELS)}, or a function of yours that returns a network: package.module:function or "
        f"file.py:function{told}",
    )
    group.add_argument(
        "--model-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the model, such as width=8",
    )


def add_images(group: argparse._ArgumentGroup) -> None:
    """What a model may ask for of the images it is made for, where a command has no data to tell."""
    for name, meaning in zip(GIVEN, ("channels of the images", "classes", "edge of the images"), strict=True):
        group.add_argument(
            f"--{name}", type=positive, metavar="N", help=f"{meaning}, for a model that asks for {name}"
        )


def made(options: argparse.Namespace) -> nn.Module:
    """The network that the arguments name."""
    given = {name: getattr(options, name) for name in GIVEN}
    return build(options.model, **given, options=dict(pair(text) for text in options.model_option))
