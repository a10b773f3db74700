"""What a step of several processes takes, beside what the cost model of `tekfac explain --ranks` says.

    python benchmarks/several_processes.py --report docs/results/several-processes.md

For every number of processes (gloo, on this machine, one thread each) SGD and TEKFAC train He's ResNet20 under
DistributedDataParallel, each a copy of its own; they take turns, a step each, in an order that goes round, and
all processes begin every step together. Intervals and averages are those of late steps. The rates that the
model needs are measured in the same processes, all of them at work: operations of the passes, and of
decompositions, bytes that are added up, and what a small message takes. Beside the page, a .json with every
step's seconds. --quick has a tiny network, to see that all works.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tekfac
from provenance import provenance
from tekfac.lab.bench.ageing import age, with_full_intervals
from tekfac.lab.bench.networks import IMAGE, TINY, Network, loss_of
from tekfac.lab.bench.timing import turns
from tekfac.lab.flops import flops_of_a_step

SEED = 0
EVERY_TEN = {"factors_every": 10, "basis_every": 10}
CONTESTANTS: dict[str, dict[str, Any] | None] = {
    "SGD": None,
    "TEKFAC": {},
    "TEKFAC, every ten steps": EVERY_TEN,
    "TEKFAC, every ten steps, all layers at once": {**EVERY_TEN, "turns": False},
}
CYCLE = 50
"""Steps in which all of them complete whole cycles."""

WARMUP = 3
DECOMPOSED = 64
"""Dimensions of the matrices that the rate of decompositions is measured with: ResNet20's largest."""

PAYLOAD = 2**20
"""Numbers that are added up, to measure the link."""


def main() -> None:
    """Measure, print and perhaps write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3, help=f"of {CYCLE} steps of each")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    made_by = provenance([SEED])
    network = TINY["resnet20-he"] if arguments.quick else Network("resnet20-he", 64, IMAGE)
    found = {count: measured(network, count, arguments.rounds) for count in arguments.processes}
    text = page(network, found, arguments.rounds, made_by, quick=arguments.quick)
    print(text)
    if arguments.report:
        arguments.report.write_text(text)
        plain = {"made by": made_by.splitlines(), "network": network.plain(), "processes": found}
        arguments.report.with_suffix(".json").write_text(json.dumps(plain, indent=1) + "\n")


# -- one number of processes -----------------------------------------------------------------------------


def measured(network: Network, processes: int, rounds: int) -> dict[str, Any]:
    """Rates, every step's seconds, and what the model says, by so many processes: what the first has seen."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=_work, args=(rank, processes, folder, network, rounds))
            for rank in range(processes)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
        codes = [process.exitcode for process in started]
        if any(codes):
            raise RuntimeError(f"Processes ended with {codes}. Expected 0 of each; the first error is above.")
        return json.loads((Path(folder) / "result.json").read_text())  # type: ignore[no-any-return]


def _work(rank: int, processes: int, folder: str, network: Network, rounds: int) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    machine = rates(network, processes)
    result = {"machine": machine, "contestants": race(network, rank, processes, rounds, machine)}
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def race(
    network: Network, rank: int, processes: int, rounds: int, machine: dict[str, float]
) -> dict[str, dict[str, Any]]:
    """Every contestant's seconds, and those that the model says."""
    models: dict[str, nn.Module] = {}
    optimizers: dict[str, Any] = {}
    for name, settings in CONTESTANTS.items():
        model = network.make(SEED)
        models[name] = DistributedDataParallel(model)
        if settings is None:
            optimizers[name] = torch.optim.SGD(model.parameters(), lr=2e-2, momentum=0.9)
        else:
            optimizers[name] = tekfac.TEKFAC(models[name], lr=1e-3, seed=SEED, **settings)
    batches, seconds = network.batches(SEED + rank), {name: [] for name in CONTESTANTS}
    names = list(CONTESTANTS)
    steps = 1 + WARMUP + rounds * CYCLE
    for place, whose in enumerate(turns(len(names), range(steps))):
        name, step = names[whose], place // len(names)
        if step == 1:
            with_full_intervals(optimizers[name])
            age(optimizers[name])
        inputs, labels = batches[step % len(batches)]
        dist.barrier()
        start = time.perf_counter()
        optimizers[name].zero_grad()
        loss_of(models[name](inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizers[name].step()
        dist.barrier()
        seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "seconds": seconds[name][1 + WARMUP :],
            "first step": seconds[name][0],
            **foretold(network, processes, machine, optimizers[name], CONTESTANTS[name]),
        }
        for name in CONTESTANTS
    }


def foretold(
    network: Network,
    processes: int,
    machine: dict[str, float],
    optimizer: Any,
    settings: dict[str, Any] | None,
) -> dict[str, Any]:
    """What the model says of the mean step."""
    of_ours = {} if settings is None else {**settings, "turns": bool(optimizer._by_turns)}
    told = tekfac.explain(network.make(SEED), ranks=processes, machine=machine, file=None, **of_ours)
    assert told.costs is not None
    assert told.costs.ddp_step is not None
    if settings is None:
        return {"foretold": told.costs.ddp_step}
    work = told.work
    return {
        "foretold": told.costs.ddp_step + told.costs.added,
        "turns": bool(optimizer._by_turns),
        "max/mean": 1.0 if work is None else work.balance,
        "bytes of a refresh": 0 if work is None else work.sent.moments + work.sent.bases,
    }


# -- rates -----------------------------------------------------------------------------------------------


def rates(network: Network, processes: int) -> dict[str, float]:
    """Of one process while all are at work."""
    model, (inputs, labels) = network.make(SEED), network.batches(SEED)[0]
    passes = flops_of_a_step(model, inputs)

    def train() -> None:
        loss_of(model(inputs), labels).backward()  # type: ignore[no-untyped-call]

    matrix = torch.randn(DECOMPOSED, DECOMPOSED)
    matrix = matrix @ matrix.T
    found = {
        "flops": passes / seconds_of(train),
        "eigh_flops": 9 * DECOMPOSED**3 / seconds_of(lambda: torch.linalg.eigh(matrix)),
        "link": 1e9,  # of a process alone, which sends nothing
        "step_flops": float(passes),
        "samples": float(len(inputs)),
    }
    if processes > 1:
        payload, small = torch.ones(PAYLOAD), torch.ones(1)
        found["latency"] = seconds_of(lambda: dist.broadcast(small, 0))
        sent = 2 * (processes - 1) / processes * payload.nbytes
        found["link"] = sent / seconds_of(lambda: dist.all_reduce(payload))
    return found


def seconds_of(work: Callable[[], object], repeats: int = 9) -> float:
    """The median time of some work, which all processes begin together."""
    work()
    taken = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)


# -- the page --------------------------------------------------------------------------------------------


def page(network: Network, found: dict[int, dict[str, Any]], rounds: int, made_by: str, *, quick: bool) -> str:
    """All of it as Markdown."""
    size = "A tiny ResNet20" if quick else "He's ResNet20"
    lines = [
        "# Steps of several processes",
        "",
        f"{size}, batches of {network.batch} per process, DistributedDataParallel over gloo on one machine, "
        f"one thread per process. Contestants take turns, a step each, {rounds * CYCLE} steps of each, as they "
        "are after hundreds of steps. The mean step is that of whole cycles, measuring included; beside it the "
        f"smallest and the largest mean of the cycles of {CYCLE} steps, and the median of single steps with "
        "its quartiles. What the model says is told by `tekfac explain`, with the rates below. It knows "
        "nothing of the time that calls take, nor that processes that share a core have it otherwise than when "
        "the rates were measured.",
        "",
    ]
    header = ("processes", "optimizer", "mean step, ms", "by cycle", "median, ms", "quartiles")
    header += ("over SGD's", "the model says, ms", "over SGD's")
    rows = []
    for count, result in found.items():
        contestants = result["contestants"]
        sgd = contestants["SGD"]
        for name, own in contestants.items():
            seconds = own["seconds"]
            cycles = [mean(seconds[start : start + CYCLE]) for start in range(0, len(seconds), CYCLE)]
            ordered = sorted(seconds)
            quartiles = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
            rows.append(
                (
                    f"{count}",
                    name,
                    in_ms(mean(seconds)),
                    f"{in_ms(min(cycles))} to {in_ms(max(cycles))}",
                    in_ms(median(seconds)),
                    f"{in_ms(quartiles[0])} to {in_ms(quartiles[1])}",
                    f"{mean(seconds) / mean(sgd['seconds']):.2f}",
                    in_ms(own["foretold"]),
                    f"{own['foretold'] / sgd['foretold']:.2f}",
                )
            )
    lines += [*table(header, rows), "", "## The work, and the rates", ""]
    header = ("processes", "passes, GFLOP/s", "decompositions, GFLOP/s", "link, GB/s", "a message, ms")
    rows = []
    for count, result in found.items():
        machine = result["machine"]
        alone = count == 1
        rows.append(
            (
                f"{count}",
                f"{machine['flops'] / 1e9:.1f}",
                f"{machine['eigh_flops'] / 1e9:.2f}",
                "–" if alone else f"{machine['link'] / 1e9:.2f}",
                "–" if alone else f"{1e3 * machine['latency']:.2f}",
            )
        )
    lines += [*table(header, rows), ""]
    header = ("processes", "optimizer", "by turns", "max/mean load", "bytes of a refresh")
    rows = [
        (f"{count}", name, "yes" if own["turns"] else "no", f"{own['max/mean']:.2f}", f"{own[BYTES]:,}")
        for count, result in found.items()
        for name, own in result["contestants"].items()
        if "turns" in own
    ]
    return "\n".join([*lines, *table(header, rows), "", made_by, ""])


BYTES = "bytes of a refresh"


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def mean(values: list[float]) -> float:
    """Their mean."""
    return sum(values) / len(values)


def in_ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{1e3 * seconds:.1f}"


if __name__ == "__main__":
    main()
