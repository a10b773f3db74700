"""How the cost of a step grows with width, batch and length of sequences: seconds, and a fitted exponent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression, median
from typing import Any

from tekfac.lab.bench.breakdown import REST, listen, of_measuring, of_plain_step
from tekfac.lab.bench.contestants import Contestant
from tekfac.lab.bench.networks import Network, network
from tekfac.lab.bench.timing import Racer
from tekfac.lab.optimizers import NATURAL

CYCLE = 4
CYCLES = 3
"""That are listened to, after a first one."""

MEASURED = {
    "precondition and update": "of every step",
    "measuring": "all layers once",
    "forward and backward": "of the network alone",
}
"""What seconds are told of."""


@dataclass(frozen=True)
class Sweep:
    """One size of a network is changed.

    Attributes:
        network: which.
        sizes: its values; fewer and smaller ones when it is quick.
        change: the network with another size.
    """

    network: str
    sizes: Sequence[int]
    quick_sizes: Sequence[int]
    change: Callable[[Network, int], Network]


def _width(one: Network, width: int) -> Network:
    return replace(one, options={**one.options, "width": width})


def _batch(one: Network, batch: int) -> Network:
    return replace(one, batch=batch)


def _length(one: Network, length: int) -> Network:
    return replace(one, shape=(length,))


SWEEPS: Mapping[str, Sweep] = {
    "width of the MLP": Sweep("mlp", (256, 512, 1024, 2048), (8, 16, 32), _width),
    "width of the CNN": Sweep("cnn", (16, 32, 64, 128), (2, 4, 8), _width),
    "batch of the CNN": Sweep("cnn", (32, 64, 128, 256, 512), (2, 4, 8), _batch),
    "sequences of the GPT": Sweep("gpt", (64, 128, 256, 512), (4, 8, 16), _length),
}


def measured(*, quick: bool, seed: int) -> dict[str, Any]:
    """Every sweep as plain values: sizes, seconds and exponents."""
    found = {}
    for name, sweep in SWEEPS.items():
        sizes = list(sweep.quick_sizes if quick else sweep.sizes)
        base = network(sweep.network, quick=quick)
        points = [seconds_of(sweep.change(base, size), seed) for size in sizes]
        seconds = {what: [point[what] for point in points] for what in MEASURED}
        fits = {what: exponent(sizes, values) for what, values in seconds.items()}
        found[name] = {"network": sweep.network, "sizes": sizes, "seconds": seconds, "exponents": fits}
    return found


def seconds_of(one: Network, seed: int) -> dict[str, float]:
    """Of MEASURED, in a network; median over steps, or over cycles."""
    racer = Racer.of(Contestant(list(NATURAL)[-1], CYCLE, {"interval_growth": None}), one, seed)
    listen(racer, CYCLE)
    cycles = [listen(racer, CYCLE) for _ in range(CYCLES)]
    steps = [step for cycle in cycles for step in cycle]
    found = (
        of_plain_step(steps),
        median(sum(map(of_measuring, cycle)) for cycle in cycles),
        median(step[REST] for step in steps),
    )
    return dict(zip(MEASURED, found, strict=True))


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float | None:
    """p of seconds ~ size^p, by least squares through the logarithms; None for less than two points."""
    points = [(math.log(x), math.log(y)) for x, y in zip(sizes, seconds, strict=True) if y > 0]
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else None
