"""Promise: several processes that train together are refused by name, until they share their curvature."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORLD = 2
CODE = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tekfac import TEKFAC

rank, world, place = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
try:
    optimizer = TEKFAC(model)
except RuntimeError as error:
    print("refused:", error)
else:
    print("names:", optimizer.param_groups[0]["param_names"])
dist.destroy_process_group()
"""


def told_by_each(world: int, place: Path) -> list[str]:
    """What every one of so many processes prints."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(rank), str(world), str(place)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        )
        for rank in range(world)
    ]
    return [process.communicate(timeout=300)[0].strip() for process in processes]


def test_each_of_two_processes_is_told_that_replicas_would_drift_apart(tmp_path: Path) -> None:
    for told in told_by_each(WORLD, tmp_path / "store"):
        assert told.startswith("refused: TEKFAC does not share curvature between processes yet, and 2 of them")
        assert "drift apart" in told


def test_a_single_process_is_no_reason_to_refuse_and_names_have_no_wrapper_in_them(tmp_path: Path) -> None:
    assert told_by_each(1, tmp_path / "store") == ["names: ['weight', 'bias']"]
