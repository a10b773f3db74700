"""Seconds of every step: contestants take turns, a step each, so that a busy moment of the machine hits all."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tekfac.lab.bench.ageing import age, with_full_intervals
from tekfac.lab.bench.contestants import Contestant, Stepping
from tekfac.lab.bench.networks import Batch, Network, loss_of


@dataclass
class Racer:
    """A contestant with a model of its own, which has the same weights at the start as all others.

    Attributes:
        contestant: who it is.
        model: its copy.
        optimizer: of the model.
        batches: which it goes through in turn.
        taken: steps so far.
        seconds: of each step that was timed.
    """

    contestant: Contestant
    model: nn.Module
    optimizer: Stepping
    batches: Sequence[Batch]
    taken: int = 0
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, contestant: Contestant, network: Network, seed: int) -> Racer:
        """At the start."""
        model = network.make(seed)
        return cls(contestant, model, contestant.make(model, seed), network.batches(seed))

    def step(self) -> float:
        """Take a step of training; its seconds."""
        inputs, labels = self.batches[self.taken % len(self.batches)]
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss_of(self.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.taken += 1
        return time.perf_counter() - start


def race(
    network: Network,
    contestants: Sequence[Contestant],
    *,
    warmup: int,
    rounds: int,
    seed: int,
    early: bool = False,
) -> list[Racer]:
    """Take every contestant through the same steps.

    Args:
        network: which they train.
        contestants: who takes turns.
        warmup: steps before the rounds, at least the first.
        rounds: each is so many steps that everybody completes whole cycles.
        seed: of weights, batches and drawn labels.
        early: measure with averages as they are in the first steps of a training run, not in late ones (see
            ageing.py); intervals have their full length anyway.
    """
    racers = [Racer.of(contestant, network, seed) for contestant in contestants]
    _take_turns(racers, range(1))
    for racer in racers:
        with_full_intervals(racer.optimizer)
        if not early:
            age(racer.optimizer)
    _take_turns(racers, range(1, warmup))
    with _little_garbage():
        _take_turns(racers, range(warmup, warmup + rounds * round_of(contestants)))
    return racers


def round_of(contestants: Sequence[Contestant]) -> int:
    """Steps in which every contestant completes whole cycles."""
    return math.lcm(*(contestant.cycle for contestant in contestants))


def turns(count: int, steps: Sequence[int]) -> Iterator[int]:
    """Whose turn it is: at every step each of so many once, in an order that goes round."""
    for step in steps:
        for place in range(count):
            yield (step + place) % count


def _take_turns(racers: Sequence[Racer], steps: Sequence[int]) -> None:
    for whose in turns(len(racers), steps):
        racers[whose].seconds.append(racers[whose].step())


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Spare the collector of garbage the objects of all models, which it would go through in anybody's turn."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def timed(racer: Racer, warmup: int) -> dict[str, Any]:
    """What was measured, as plain values; the place of a step in its cycle is its number modulo the cycle."""
    contestant = racer.contestant
    return {
        **contestant.plain(),
        "cycle": contestant.cycle,
        "plain": [not contestant.measures_at(step) for step in range(contestant.cycle)],
        "first_step": racer.seconds[0],
        "begin": warmup,
        "seconds": racer.seconds[warmup:],
        "skipped": int(getattr(racer.optimizer, "skipped_steps", 0)),
    }
