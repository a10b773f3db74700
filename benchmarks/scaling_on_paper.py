"""What a refresh of large networks by many processes comes to, by counting: nothing is trained or timed.

    python benchmarks/scaling_on_paper.py --report docs/results/scaling-on-paper.md

A ResNet50 and transformers of several widths and depths, on the meta device; who decomposes what, what is sent,
what every process holds, and seconds on a device whose rates are assumed and named in the page. It is what
`tekfac explain --ranks` prints, as a table of many.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tekfac
from provenance import provenance
from tekfac.common.tables import in_bytes, in_seconds
from tekfac.explanation import Explanation

RANKS = (8, 64, 256, 1024)
SYMBOLS = 32_000
POSITIONS = 2**13
"""Symbols of a process in a step, of a transformer."""

IMAGES, FLOPS_OF_AN_IMAGE = 64, 3 * 8.2e9
"""Of a process in a step, of a ResNet50: three times the forward pass of an image of 224 x 224 pixels."""

RATE, RATE_OF_EIGH, LINK, LATENCY = 1e14, 5e11, 25e9, 20e-6
"""Assumed of a device: operations per second, of decompositions, bytes per second, seconds of a message."""

NUMBER = 4
"""Bytes of one."""

HELD = 80 * 2**30
"""Bytes of a device's memory, assumed."""

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Of the ResNet50: channels of the inner convolutions, and blocks."""

HEAD = "head"
"""Stands for the name of the last layer."""

SETTINGS: Mapping[str, dict[str, Any]] = {
    "as it comes": {},
    "`max_dim=1024`": {"max_dim": 1024},
    "`max_dim=5000`": {"max_dim": 5000},
    '`large_dims="diagonal"`': {"large_dims": "diagonal"},
    "`first_order=[head]`": {"first_order": HEAD},
}


def resnet50() -> nn.Module:
    """Its convolutions and its head, none of which is ever called; norms are trained by first order."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, bias=False)]
    before = 64
    for width, blocks in STAGES:
        layers.append(nn.Conv2d(before, 4 * width, 1, bias=False))
        for _ in range(blocks):
            layers.append(nn.Conv2d(before, width, 1, bias=False))
            layers.append(nn.Conv2d(width, width, 3, bias=False))
            layers.append(nn.Conv2d(width, 4 * width, 1, bias=False))
            before = 4 * width
    return nn.Sequential(*layers, nn.Linear(2048, 1000))


def transformer(width: int, depth: int) -> nn.Module:
    """Blocks of queries, keys and values, a projection and two layers of four widths; a table, a head."""
    blocks = [
        nn.Sequential(
            *(nn.Linear(width, width, bias=False) for _ in range(4)),
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )
        for _ in range(depth)
    ]
    return nn.Sequential(nn.Embedding(SYMBOLS, width), *blocks, nn.Linear(width, SYMBOLS, bias=False))


@dataclass(frozen=True)
class Network:
    """A network on paper.

    Attributes:
        make: it.
        step_flops: operations of a forward and a backward pass of a process, from its parameters.
        samples: of these.
    """

    make: Callable[[], nn.Module]
    step_flops: Callable[[int], float]
    samples: int


def _of_symbols(parameters: int) -> float:
    """Six operations for every parameter and symbol."""
    return 6.0 * parameters * POSITIONS


NETWORKS: Mapping[str, Network] = {
    "ResNet50": Network(resnet50, lambda parameters: IMAGES * FLOPS_OF_AN_IMAGE, IMAGES),
    "transformer, 768 × 12": Network(lambda: transformer(768, 12), _of_symbols, 8),
    "transformer, 2048 × 24": Network(lambda: transformer(2048, 24), _of_symbols, 8),
    "transformer, 3072 × 40": Network(lambda: transformer(3072, 40), _of_symbols, 8),
    "transformer, 4096 × 32": Network(lambda: transformer(4096, 32), _of_symbols, 8),
}


def main() -> None:
    """Count, print and perhaps write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    text = page()
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


def page() -> str:
    """All of it as Markdown."""
    lines = [
        "# Many processes, on paper",
        "",
        "Nothing here was run: layer shapes are counted, with the placement that a refresh has. A ResNet50, "
        "and transformers of a width and depth (blocks of six linear layers, a table and a head of "
        f"{SYMBOLS:,} symbols). Rates of a device are assumed: {RATE / 1e12:.0f} TFLOP/s, "
        f"{RATE_OF_EIGH / 1e12:.1f} of them in decompositions, {LINK / 1e9:.0f} GB/s that each process sends, "
        f"{1e6 * LATENCY:.0f} μs for a message, {in_bytes(HELD)} of memory. A step of a process has {IMAGES} "
        f"images, or {POSITIONS:,} symbols. Nothing is taken to happen at the same "
        "time, and measuring is counted as if all layers were measured in sums.",
        "",
        "## Memory, as the settings are",
        "",
        "Bytes in every process, float32: weights, gradients, curvature and mean gradients, and AdamW's two "
        "numbers for each parameter of no block; with AdamW, four numbers for each. What passes keep, and room "
        "to work in, are not counted.",
        "",
    ]
    rows = []
    for name, network in NETWORKS.items():
        for words, settings in SETTINGS.items():
            told = explained(network, 8, **settings)
            count = parameters_of(network)
            others = sum(parameter.parameters for parameter in told.first_order)
            held, with_adamw = told.memory + NUMBER * (3 * count + others), 4 * NUMBER * count
            rows.append(
                (
                    name,
                    f"{count / 1e6:,.0f} M",
                    words,
                    in_bytes(told.memory),
                    f"{told.memory / (NUMBER * count):.2f}",
                    in_bytes(held),
                    in_bytes(with_adamw),
                    f"{held / with_adamw:.2f}",
                    "yes" if held <= HELD else "no",
                    f"{told.refresh_flops / 1e12:.3g}",
                )
            )
    header: tuple[str, ...] = ("network", "parameters", "settings", "curvature", "over the weights", "all")
    header += ("with AdamW", "over AdamW's", f"fits in {in_bytes(HELD)}", "a refresh, TFLOP")
    lines += [*table(header, rows), "", "## Work and messages, as it comes", ""]
    lines += ["All layers at once, as on an accelerator; beside it the load where layers take turns.", ""]
    rows, seconds = [], []
    for name, network in NETWORKS.items():
        for ranks in RANKS:
            told = explained(network, ranks)
            work, costs = told.work, told.costs
            by_turns = explained(network, ranks, turns=True).work
            assert work is not None
            assert by_turns is not None
            assert costs is not None
            gradients = NUMBER * parameters_of(network)
            dearest = work.dearest
            rows.append(
                (
                    name,
                    f"{ranks}",
                    f"{work.balance:.2f}",
                    f"{by_turns.balance:.2f}",
                    "–" if dearest is None else f"{dearest.block}",
                    in_bytes(work.sent.moments),
                    in_bytes(work.sent.bases),
                    f"{(work.sent.moments + work.sent.bases) / (work.least.moments + work.least.bases):.3f}",
                    in_bytes(work.sent.per_step(work.intervals)),
                    f"{work.sent.per_step(work.intervals) / gradients:.3f}",
                )
            )
            step = costs.ddp_step
            assert step is not None
            seconds.append(
                (
                    name,
                    f"{ranks}",
                    in_seconds(step),
                    in_seconds(costs.precondition),
                    in_seconds(costs.decompose),
                    in_seconds(costs.moments + costs.bases),
                    in_seconds(work.broadcasts * LATENCY),
                    in_seconds(costs.refresh),
                    f"{costs.refresh / step:.2f}",
                    f"{costs.ratio:.3f}",
                    f"{every(costs.refresh, step)}",
                )
            )
    header = (
        "network",
        "processes",
        "max/mean load",
        "by turns",
        "largest block",
        "moments",
        "bases",
        "over the least",
    )
    header += ("per step", "of the gradients' bytes")
    lines += [*table(header, rows), "", "## Seconds, with the assumed rates", ""]
    header = (
        "network",
        "processes",
        "DDP's step",
        "precondition",
        "decompose",
        "send",
        "of it by messages",
        "a refresh",
    )
    header += ("in steps", "mean step over DDP's", "interval for 1% more")
    lines += [*table(header, seconds), ""]
    lines += [
        "The interval for 1% more is that at which a refresh, all in all, takes a hundredth of the steps "
        "between; the mean step is with the default of 50.",
        "",
    ]
    return "\n".join([*lines, provenance([]).replace("- seeds: \n", ""), ""])


def explained(network: Network, ranks: int, **settings: Any) -> Explanation:
    """What `tekfac explain` tells of it."""
    with torch.device("meta"):
        model = network.make()
    if settings.get("first_order") == HEAD:
        settings["first_order"] = [list(model.named_children())[-1][0]]
    machine = {
        "flops": RATE,
        "eigh_flops": RATE_OF_EIGH,
        "link": LINK,
        "latency": LATENCY,
        "step_flops": network.step_flops(parameters_of(network)),
        "samples": network.samples,
    }
    return tekfac.explain(model, ranks=ranks, machine=machine, file=None, **settings)


def parameters_of(network: Network) -> int:
    """How many it has."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in network.make().parameters())


def every(refresh: float, step: float) -> int:
    """Steps between two refreshes that make the mean step longer by a hundredth."""
    return max(1, round(100 * refresh / step))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown, numbers to the right."""
    ruler = ["---"] + ["---:"] * (len(header) - 1)
    return [f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows)]


if __name__ == "__main__":
    main()
