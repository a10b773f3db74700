"""`tekfac fisher`: how good the approximations are on a network, as a table, files and figures."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from tekfac.capture.likelihood_of_loss import AUTO
from tekfac.capture.measurement import FISHER_KINDS, LikelihoodSetting
from tekfac.cli import fisher_demo
from tekfac.cli.fisher_sources import Limited, distinct, load_state
from tekfac.cli.model_arguments import FUNCTION, add_images, add_model, made
from tekfac.cli.parsing import add_out, positive
from tekfac.common.checks import nearest
from tekfac.common.extras import require
from tekfac.common.files import write_text
from tekfac.common.user_code import find_function
from tekfac.fisher import figures
from tekfac.fisher.approximation import Approximation
from tekfac.fisher.compare_to_exact import ALL_METHODS, DEFAULT_EXACT_MEMORY, DEFAULT_PROBES, compare
from tekfac.fisher.comparison_table import Comparison, write_csv, write_json
from tekfac.fisher.estimate_blocks import estimate, exact_blocks
from tekfac.fisher.options import Keywords
from tekfac.fisher.paper_claims import Finding, findings
from tekfac.lab.data.digits import read_digits
from tekfac.layers.inventory import take_inventory
from tekfac.likelihoods import LIKELIHOODS
from tekfac.ranks.launched import joined

KINDS = (AUTO, *LIKELIHOODS)
EPOCHS = (0, 1, 2, 4, 8)
HEAT_MAP_ROWS = 400

Points = Iterator[tuple[str, nn.Module, bool]]
"""The network at points of its training, each with a name; and whether it is the last one."""

DESCRIPTION = """\
How good KFAC, EKFAC, TKFAC and TEKFAC approximate the Fisher blocks of a network: trace, Frobenius error and
the angle between preconditioned gradients, layer by layer, against the exact blocks.

Without a model it trains a small CNN on scikit-learn's digits and looks at it along its training. With one,
give the data it is to be measured on and, if you have them, checkpoints of its training:

  tekfac fisher --model nets.py:make --data data.py:loader --state run/epoch1.pt run/epoch9.pt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    source = parser.add_argument_group("what is looked at")
    add_model(source, default="a small CNN that is trained on digits")
    add_images(source)
    loader = "a function of yours that returns batches (inputs, targets), such as a DataLoader: "
    told = f"{loader}{FUNCTION} (default: digits, for the CNN trained on them)"
    source.add_argument("--data", metavar="WHERE", help=told)
    told = f"a function of yours (model, batch) -> loss: {FUNCTION} (default: that of the likelihood)"
    source.add_argument("--loss", metavar="WHERE", help=told)
    told = "checkpoints of the model, as it was trained"
    source.add_argument("--state", nargs="+", default=[], metavar="FILE", help=told)
    source.add_argument("--layers", nargs="+", metavar="NAME", help="only these layers (default: all)")
    source.add_argument("--samples", type=positive, default=512, help="use so many samples of the data")
    how = parser.add_argument_group("how")
    told = "kfac, ekfac, tkfac, tekfac; kfac:reduce for another sharing (default: all four)"
    how.add_argument("--methods", nargs="+", default=list(ALL_METHODS), metavar="METHOD", help=told)
    how.add_argument("--fisher", choices=FISHER_KINDS, default="exact", help="where labels come from")
    told = f"of the targets: {', '.join(KINDS)}; of several predictions NAME=KIND for each"
    told += " (default: auto: what the loss tells, or categorical)"
    how.add_argument("--likelihood", nargs="+", default=["auto"], metavar="KIND", help=told)
    told = "of the preconditioned gradients (default: tr F / d of each layer)"
    how.add_argument("--damping", type=float, help=told)
    how.add_argument("--float32", action="store_true", help="compute in single precision, not in double")
    told, memory = (
        "for exact blocks; a layer that needs more is measured by probes",
        DEFAULT_EXACT_MEMORY >> 20,
    )
    how.add_argument("--exact-memory", type=positive, default=memory, metavar="MiB", help=told)
    how.add_argument("--probes", type=positive, default=DEFAULT_PROBES, help="for such layers")
    how.add_argument("--seed", type=int, default=0, help="of the model, drawn labels and probes")
    out = parser.add_argument_group("what comes out")
    add_out(out, "fisher-report")
    out.add_argument("--heat-map", metavar="LAYER", help="layer to draw as matrices (default: the smallest)")
    out.add_argument("--no-figures", action="store_true", help="table and files only")
    out.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, write files and figures, print the table and what it says.

    Under torchrun all processes measure, each a share of the batches, and the first one writes and prints.
    """
    with joined() as ranks:
        _run(options, is_first=ranks.index == 0)


def _run(options: argparse.Namespace, *, is_first: bool) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    _check(options)
    dtype = torch.float32 if options.float32 else torch.float64
    loader = Limited(_data(options), options.samples, dtype)
    keywords: Keywords = {
        "fisher": options.fisher,
        "likelihood": _likelihood(options.likelihood),
        "loss": None if options.loss is None else find_function(options.loss, "--loss"),
        "layers": options.layers,
        "seed": options.seed,
        "progress": is_first and not options.quiet and sys.stderr.isatty(),
    }
    comparisons: dict[str, Comparison] = {}
    model: nn.Module | None = None
    for point, model, is_last in _points(options, dtype):
        _check_heat_map(options, model)
        if is_first:
            print(f"Measuring {point} ...", file=sys.stderr)
        comparisons[point] = compare(
            model,
            loader,
            approximations=options.methods,
            damping=options.damping,
            exact_memory=options.exact_memory << 20,
            probes=options.probes,
            spectra=is_last and not options.no_figures,
            **keywords,
        )
    assert model is not None
    last, found = list(comparisons)[-1], findings(list(comparisons.values()))
    written: list[str] = []
    if is_first:
        written += _write_numbers(options, comparisons, found)
        samples = comparisons[last].metadata["samples"]
        print(f"\n{options.model or 'The digits CNN'}, {last}; {samples} samples\n\n{comparisons[last]}\n")
        print("\n".join(map(str, found)))
    if not options.no_figures:
        drawn = _figures(options, comparisons, model, loader, keywords)
        if is_first:
            written += _written(options, drawn)
    if is_first:
        print(f"\nWritten to {options.out}: {', '.join(written)}")
    contradicted = [finding for finding in found if finding.contradicted]
    if contradicted:
        raise ValueError(f"Mathematics rules this out; please report it: {contradicted[0]}")


def _check(options: argparse.Namespace) -> None:
    """What can be known to fail before any work is done."""
    if options.model is not None and options.data is None:
        raise ValueError("--model needs --data: a function that returns batches (inputs, targets).")
    if options.model is None and options.data is not None:
        raise ValueError("--data needs --model: the network it is data of.")
    if options.model is None and options.loss is not None:
        raise ValueError("--loss needs --model: the network it is the loss of.")
    _likelihood(options.likelihood)
    for name in options.methods:
        Approximation.named(name)
    if not options.no_figures:
        require("matplotlib", "A figure (--no-figures does without)")
    options.out.mkdir(parents=True, exist_ok=True)


def _check_heat_map(options: argparse.Namespace, model: nn.Module) -> None:
    layers = take_inventory(model, ()).layers
    if options.heat_map is not None and options.heat_map not in layers:
        raise ValueError(f"No layer {options.heat_map!r} for --heat-map. The layers are {', '.join(layers)}.")


# -- in ------------------------------------------------------------------------------------------------------


def _data(options: argparse.Namespace) -> Iterable[Any]:
    if options.data is None:
        images, labels = read_digits()
        return list(zip(torch.split(images, 128), torch.split(labels, 128), strict=True))
    loader = find_function(options.data, "--data")()
    if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
        raise ValueError(
            f"--data {options.data} returned a {type(loader).__name__}. Expected batches that can be read "
            "several times: a DataLoader or a list."
        )
    return loader


def _likelihood(told: Sequence[str]) -> LikelihoodSetting:
    """One for all predictions, or one for each by name."""
    pairs = [text.rpartition("=") for text in told]
    for _, _, kind in pairs:
        if kind not in KINDS:
            raise ValueError(f"--likelihood: {kind!r} is unknown.{nearest(kind, KINDS)}")
    if len(pairs) == 1 and not pairs[0][1]:
        return told[0]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(
            f"--likelihood: got {' '.join(told)}. Expected one for all predictions, or NAME=KIND for each."
        )
    return {name: kind for name, _, kind in pairs}


def _points(options: argparse.Namespace, dtype: torch.dtype) -> Points:
    """The network at each of its checkpoints; the digits CNN along its training, if it has none."""
    torch.manual_seed(options.seed)
    model = (fisher_demo.network() if options.model is None else made(options)).to(dtype)
    if options.state:
        for name, path in zip(distinct(options.state), options.state, strict=True):
            load_state(model, path)
            yield name, model, path == options.state[-1]
    elif options.model is None:
        for epoch, accuracy in fisher_demo.training(model, EPOCHS[-1], options.seed):
            if epoch in EPOCHS:
                yield f"epoch {epoch} ({100 * accuracy:.1f}% right)", deepcopy(model), epoch == EPOCHS[-1]
    else:
        yield "the network as it was made", model, True


# -- out -----------------------------------------------------------------------------------------------------


def _write_numbers(
    options: argparse.Namespace, comparisons: dict[str, Comparison], found: list[Finding]
) -> list[str]:
    rows = [{"point": point, **row.plain()} for point, c in comparisons.items() for row in c.rows]
    write_csv(options.out / "comparison.csv", rows)
    points = {point: comparison.plain() for point, comparison in comparisons.items()}
    plain = {"command": options.command_line, "findings": list(map(vars, found)), "points": points}
    write_json(options.out / "comparison.json", plain)
    table = [f"{point}\n\n{comparison}\n" for point, comparison in comparisons.items()]
    text = "\n".join([*table, *map(str, found)])
    write_text(options.out / "comparison.txt", f"{text}\n")
    return ["comparison.csv", "comparison.json", "comparison.txt"]


def _figures(
    options: argparse.Namespace,
    comparisons: dict[str, Comparison],
    model: nn.Module,
    loader: Iterable[Any],
    keywords: Keywords,
) -> dict[str, Any]:
    """By the names of their files; of several processes all have to draw, since they measure together."""
    last = list(comparisons.values())[-1]
    drawn = {"errors": figures.errors(last), "angles": figures.angles(last), "spectra": figures.spectra(last)}
    if len(comparisons) > 1:
        short = {point.partition(" (")[0].removeprefix("epoch "): c for point, c in comparisons.items()}
        xlabel = "epoch" if options.model is None and not options.state else "checkpoint"
        drawn["training"] = figures.along_training(short, xlabel)
    sizes = {name: truth.shape.size for name, truth in last.truths.items() if truth.trace > 0}
    layer = options.heat_map or min(sizes, key=lambda name: sizes[name], default=None)
    if options.heat_map is None and (layer is None or sizes[layer] > HEAT_MAP_ROWS):
        print(f"No heat map: no layer has up to {HEAT_MAP_ROWS} parameters (--heat-map LAYER draws any).")
    else:
        one: Keywords = {**keywords, "layers": [str(layer)], "progress": False}
        approximations = {
            a.label: estimate(model, loader, method=a.method.name, sharing=a.sharing, **one)[str(layer)]
            for a in last.compared
        }
        exact = exact_blocks(model, loader, **one)[str(layer)]
        drawn["heat-map"] = figures.heat_maps(exact, approximations)
    return drawn


def _written(options: argparse.Namespace, drawn: Mapping[str, Any]) -> list[str]:
    for name, figure in drawn.items():
        figures.save(figure, options.out / name)
    return [f"{name}.{ending}" for name in drawn for ending in ("png", "pdf")]
