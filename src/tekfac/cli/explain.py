"""`tekfac explain`: the table of a model's layers, from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from tekfac import methods
from tekfac.cli.model_arguments import add_images, add_model, made
from tekfac.explanation import explain
from tekfac.layers.side_forms import LARGE_DIMS, MaxDim

DESCRIPTION = """\
What an optimizer would do with a network: a table of its layers, with the form of their blocks, the memory that
their curvature takes and the cost of a refresh; and what is left to first order, and why.

  tekfac explain --model nets.py:make --max-dim 2048
  tekfac explain --model resnet20 --channels 3 --classes 10 --method kfac
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    model = parser.add_argument_group("the model")
    add_model(model, default=None)
    add_images(model)
    optimizer = parser.add_argument_group("the optimizer")
    names = [method.name.lower() for method in methods.ALL]
    optimizer.add_argument("--method", choices=names, default=names[-1], help="which of the four")
    told = "inputs or outputs of a layer beyond which that side of its block takes a cheaper form"
    optimizer.add_argument("--max-dim", type=_max_dim, default="auto", metavar="N", help=told)
    told = "which form that side then takes"
    optimizer.add_argument("--large-dims", choices=LARGE_DIMS, default=LARGE_DIMS[0], help=told)
    told = "modules or parameters to leave out"
    optimizer.add_argument("--first-order", nargs="+", default=[], metavar="NAME", help=told)
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=run)


def _max_dim(text: str) -> MaxDim:
    return "auto" if text == "auto" else int(text)


def run(options: argparse.Namespace) -> None:
    """Make the network and explain it."""
    if options.model is None:
        raise ValueError("There is no model to explain. Add --model NAME, such as --model nets.py:make.")
    explanation = explain(
        made(options),
        method=options.method,
        file=None if options.json else sys.stdout,
        max_dim=options.max_dim,
        large_dims=options.large_dims,
        first_order=options.first_order,
    )
    if options.json:
        totals = {"memory": explanation.memory, "refresh_flops": explanation.refresh_flops}
        print(json.dumps({**asdict(explanation), **totals}, indent=2))
