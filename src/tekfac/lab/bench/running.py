"""A benchmark as it is wished for: network by network, each measurement in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tekfac.common.console import remark
from tekfac.lab.bench import result
from tekfac.lab.bench.contestants import Contestant, fitting, present
from tekfac.lab.bench.memory import GIVES_BACK
from tekfac.lab.bench.networks import network
from tekfac.lab.bench.processes import alone
from tekfac.lab.bench.summary import plain_summary
from tekfac.lab.bench.timing import round_of
from tekfac.lab.bench.writing import show, write
from tekfac.lab.models import count_parameters
from tekfac.lab.provenance import provenance

RIVALS_PACKAGE = "pytorch-optimizer"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to be measured, and how.

    Attributes:
        networks: by name.
        contestants: SGD among them or not.
        threads: numbers of threads, each measured by itself.
        rounds: of whole cycles of all contestants.
        warmup: steps before them.
        memory: whether to measure it.
        memory_steps: of every contestant; None: the first and a whole cycle.
        growth: whether to measure that.
        seed: of weights, batches and drawn labels.
        early: the first steps of a training run instead of late ones.
        quick: tiny networks.
        out: folder.
        command: as it was given.
        quiet: say nothing meanwhile.
    """

    networks: Sequence[str]
    contestants: Sequence[Contestant]
    threads: Sequence[int]
    rounds: int
    warmup: int
    memory: bool
    memory_steps: int | None
    growth: bool
    seed: int
    early: bool
    quick: bool
    out: Path
    command: str
    quiet: bool


def run(wish: Wish) -> None:
    """Measure, and write what is known after every network; print the tables at the end."""
    result.read(wish.out)
    contestants = present(wish.contestants, remark) if wish.networks else []
    written: list[str] = []
    for name in wish.networks:
        written = write(result.add(wish.out, {name: _of_network(wish, name, contestants)}), wish.out)
    if wish.growth:
        written = write(result.add(wish.out, {}, _of_growth(wish)), wish.out)
    new = result.part(result.read(wish.out), wish.networks, growth=wish.growth)
    show(new, written, wish.out)


def _of_network(wish: Wish, name: str, contestants: Sequence[Contestant]) -> dict[str, Any]:
    """Everything about a network, as plain values."""
    one = network(name, quick=wish.quick)
    with torch.device("meta"):
        model = one.make()
    own = fitting(contestants, model, name, remark)
    timings = {str(threads): _timing(wish, name, own, threads) for threads in wish.threads}
    return {
        "network": one.plain() | {"parameters": count_parameters(model)},
        "provenance": _provenance(wish),
        "quick": wish.quick,
        "early": wish.early,
        "seed": wish.seed,
        "warmup": wish.warmup,
        "rounds": wish.rounds,
        "steps_of_round": round_of(own),
        "threads": timings,
        "summary": {threads: plain_summary(timing) for threads, timing in timings.items()},
        "memory": _memory(wish, name, own) if wish.memory else {},
    }


def _timing(wish: Wish, name: str, contestants: Sequence[Contestant], threads: int) -> Mapping[str, Any]:
    steps = wish.warmup + wish.rounds * round_of(contestants)
    _say(wish, f"{name}: {steps} steps of {len(contestants)} contestants in turn, {threads} thread(s) ...")
    job = _job(wish, "timing", threads, name, contestants)
    timing: Mapping[str, Any] = alone(
        {**job, "warmup": wish.warmup, "rounds": wish.rounds, "early": wish.early}
    )
    return timing


def _memory(wish: Wish, name: str, contestants: Sequence[Contestant]) -> dict[str, Any]:
    found = {}
    for contestant in contestants:
        _say(wish, f"{name}: memory of {contestant.label} ...")
        job = _job(wish, "memory", 1, name, [contestant])
        found[contestant.label] = alone({**job, "steps": wish.memory_steps}, GIVES_BACK)
    return found


def _of_growth(wish: Wish) -> dict[str, Any]:
    _say(wish, "Growth with width, batch and length of sequences ...")
    job = {"kind": "growth", "threads": wish.threads[0], "quick": wish.quick, "seed": wish.seed}
    return {"provenance": _provenance(wish), "quick": wish.quick, "sweeps": alone(job)}


def _job(wish: Wish, kind: str, threads: int, name: str, contestants: Sequence[Contestant]) -> dict[str, Any]:
    return {
        "kind": kind,
        "threads": threads,
        "network": name,
        "contestants": [contestant.plain() for contestant in contestants],
        "quick": wish.quick,
        "seed": wish.seed,
    }


def _provenance(wish: Wish) -> dict[str, Any]:
    """Where the numbers come from; threads are those of the processes that measured."""
    found = provenance(wish.command, torch.device("cpu"))
    return found | {"threads": list(wish.threads), "seed": wish.seed, "versions": found["versions"] | _rivals()}


def _rivals() -> dict[str, str]:
    try:
        return {RIVALS_PACKAGE: version(RIVALS_PACKAGE)}
    except PackageNotFoundError:
        return {}


def _say(wish: Wish, text: str) -> None:
    if not wish.quiet:
        remark(text)
