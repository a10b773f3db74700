"""Several processes that train together, for the tests: a function is run in each, its results come back."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 240


def run_together(world: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function gives in each of so many processes, in the order of their ranks."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run, args=(rank, world, str(folder), function, arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in stuck:
        processes[rank].kill()
    found = []
    for rank in range(world):
        place = folder / f"result-{rank}.pt"
        assert place.exists(), f"rank {rank} gave nothing{' in time' if rank in stuck else ''}"
        result, problem = torch.load(place, weights_only=False)
        assert problem is None, f"rank {rank}:\n{problem}"
        found.append(result)
    return found


def _run(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    result, problem = None, None
    try:
        result = function(rank, world, *arguments)
    except Exception:
        problem = traceback.format_exc()
    torch.save((result, problem), Path(folder) / f"result-{rank}.pt")
    if problem is None:
        dist.barrier()
    dist.destroy_process_group()
