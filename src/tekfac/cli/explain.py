"""`tekfac explain`: the table of a model's layers, from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import torch
from torch import nn

from tekfac import methods
from tekfac.cli.model_arguments import add_images, add_model, made
from tekfac.cli.parsing import positive
from tekfac.explanation import explain
from tekfac.lab.flops import flops_of_a_step
from tekfac.layers.side_forms import LARGE_DIMS, MaxDim

DESCRIPTION = """\
What an optimizer would do with a network: a table of its layers, with the form of their blocks, the memory that
their curvature takes and the cost of a refresh; and what is left to first order, and why.

  tekfac explain --model nets.py:make --max-dim 2048
  tekfac explain --model resnet20 --channels 3 --classes 10 --method kfac
  tekfac explain --model vgg16 --channels 3 --classes 10 --size 32 --ranks 8 --flops 1e13 --link 10 --batch 64
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
    several = parser.add_argument_group("several processes, under DistributedDataParallel")
    told = "processes: who decomposes what at a refresh, and what is sent"
    several.add_argument("--ranks", type=positive, default=1, metavar="N", help=told)
    told = "what each of them can send, for seconds by counting, with --flops"
    several.add_argument("--link", type=float, metavar="GB/S", help=told)
    told = "operations per second of one process, such as 1e13"
    several.add_argument("--flops", type=float, metavar="RATE", help=told)
    told = "the same of decompositions, which are slower (default: --flops)"
    several.add_argument("--eigh-flops", type=float, metavar="RATE", help=told)
    several.add_argument("--latency", type=float, default=0, metavar="S", help="seconds of a message")
    told = "images of one process in a step: counts the operations of its passes, with --size and --channels"
    several.add_argument("--batch", type=positive, metavar="N", help=told)
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.set_defaults(run=run)


def _max_dim(text: str) -> MaxDim:
    return "auto" if text == "auto" else int(text)


def _machine(options: argparse.Namespace, model: nn.Module) -> dict[str, float] | None:
    """Rates, and the operations of a step where a batch is told."""
    if options.flops is None and options.link is None:
        return None
    if options.flops is None or options.link is None:
        raise ValueError("Seconds are counted with both rates. Add --flops RATE and --link GB/S, or neither.")
    machine = {"flops": options.flops, "link": 1e9 * options.link, "latency": options.latency}
    if options.eigh_flops is not None:
        machine["eigh_flops"] = options.eigh_flops
    if options.batch is not None:
        if options.channels is None or options.size is None:
            raise ValueError("--batch is of images. Add --channels and --size, which they have.")
        images = torch.zeros(options.batch, options.channels, options.size, options.size)
        machine |= {"step_flops": flops_of_a_step(model, images), "samples": options.batch}
    return machine


def run(options: argparse.Namespace) -> None:
    """Make the network and explain it."""
    if options.model is None:
        raise ValueError("There is no model to explain. Add --model NAME, such as --model nets.py:make.")
    model = made(options)
    explanation = explain(
        model,
        method=options.method,
        ranks=options.ranks,
        machine=_machine(options, model),
        file=None if options.json else sys.stdout,
        max_dim=options.max_dim,
        large_dims=options.large_dims,
        first_order=options.first_order,
    )
    if options.json:
        totals = {"memory": explanation.memory, "refresh_flops": explanation.refresh_flops}
        print(json.dumps({**asdict(explanation), **totals}, indent=2))
