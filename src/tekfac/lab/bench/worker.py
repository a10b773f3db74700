"""What is run in a process of its own: `python -m tekfac.lab.bench.worker JOB RESULT`, both files of JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tekfac.common.files import read_json, write_json
from tekfac.lab.bench import counting, growth, memory
from tekfac.lab.bench.breakdown import broken_down
from tekfac.lab.bench.contestants import Contestant
from tekfac.lab.bench.networks import Network, network
from tekfac.lab.bench.timing import Racer, race, timed
from tekfac.optim.natural_gradient import NaturalGradient


def work(job: Mapping[str, Any]) -> Any:
    """Do a job: its kind, the number of threads, and what the kind needs."""
    torch.set_num_threads(job["threads"])
    return KINDS[job["kind"]](job)


def _time(job: Mapping[str, Any]) -> dict[str, Any]:
    """Every contestant's seconds, phases and multiplications, by label."""
    one, warmup, seed = network(job["network"], quick=job["quick"]), job["warmup"], job["seed"]
    contestants = [Contestant(**plain) for plain in job["contestants"]]
    racers = race(one, contestants, warmup=warmup, rounds=job["rounds"], seed=seed, early=job["early"])
    return {racer.contestant.label: timed(racer, warmup) | _explained(one, racer) for racer in racers}


def _explained(one: Network, racer: Racer) -> dict[str, Any]:
    """Phases and multiplications of our own; nothing of others."""
    optimizer = racer.optimizer
    if not isinstance(optimizer, NaturalGradient):
        return {}
    phases = broken_down(racer)
    return phases | {"multiplications": counting.counted(one, optimizer.curvature, racer)}


def _measure_memory(job: Mapping[str, Any]) -> dict[str, Any]:
    (contestant,) = (Contestant(**plain) for plain in job["contestants"])
    one = network(job["network"], quick=job["quick"])
    return memory.measured(one, contestant, steps=job["steps"], seed=job["seed"])


def _grow(job: Mapping[str, Any]) -> dict[str, Any]:
    return growth.measured(quick=job["quick"], seed=job["seed"])


KINDS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "timing": _time,
    "memory": _measure_memory,
    "growth": _grow,
}


def main(arguments: Sequence[str]) -> None:
    """Read the job, write the result."""
    job, result = map(Path, arguments)
    write_json(result, work(read_json(job)))


if __name__ == "__main__":
    main(sys.argv[1:])
