"""`tekfac explain`: the table of a model's layers, from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from torch import nn

from tekfac import methods
from tekfac.common.user_code import find_function
from tekfac.explanation import explain
from tekfac.layers.side_forms import DEFAULT_MAX_DIM, LARGE_DIMS

DESCRIPTION = """\
What an optimizer would do with a network: a table of its layers, with the form of their blocks, the memory that
their curvature takes and the cost of a refresh; and what is left to first order, and why.

  tekfac explain nets.py:make --max-dim 2048
"""


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "explain",
        help="what an optimizer would do with a network, layer by layer",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "network", metavar="WHERE", help="package.module:function or file.py:function that returns the network"
    )
    names = [method.name.lower() for method in methods.ALL]
    parser.add_argument("--method", choices=names, default=names[-1], help="default: %(default)s")
    parser.add_argument(
        "--max-dim", type=int, default=DEFAULT_MAX_DIM, metavar="D", help="default: %(default)s"
    )
    parser.add_argument("--large-dims", choices=LARGE_DIMS, default=LARGE_DIMS[0], help="default: %(default)s")
    parser.add_argument(
        "--first-order", nargs="+", default=[], metavar="NAME", help="modules or parameters to leave out"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Make the network and explain it."""
    model = find_function(options.network, "the network")()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{options.network!r} returned a {type(model).__name__}. Expected a network (nn.Module)."
        )
    explanation = explain(
        model,
        method=options.method,
        file=None if options.json else sys.stdout,
        max_dim=options.max_dim,
        large_dims=options.large_dims,
        first_order=options.first_order,
    )
    if options.json:
        totals = {"memory": explanation.memory, "refresh_flops": explanation.refresh_flops}
        print(json.dumps({**asdict(explanation), **totals}, indent=2))
