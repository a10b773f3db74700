"""Promise: the same seed, machine and number of threads give the same run, bit for bit, wherever it runs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS
from processes import run_together
from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, both_steps, cnn, everything, images, maker, train

SHORT: dict[str, Any] = {"interval_growth": None, "factors_every": 3, "basis_every": 3, "seed": 5}
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "turns": {"turns": True},
    "turns and some samples": {"turns": True, "statistics_samples": 3},
    "drawn labels": {"fisher": "sampled"},
    "some samples, drawn labels": {"statistics_samples": 3, "fisher": "sampled"},
    "a guard": {"guard": True},
}


def run(make: Callable[..., NaturalGradient] = TEKFAC, **settings: Any) -> Any:
    """Eight steps; all that is drawn but by the optimizer has the same seed."""
    model = cnn(dtype=torch.float32)
    optimizer = make(model, lr=0.05, **{**SHORT, **settings})
    train(model, optimizer, images(8, dtype=torch.float32))
    return everything(model, optimizer)


@pytest.mark.every_pair
@both_steps
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_two_runs_are_the_same(method: type[NaturalGradient], way: str, step: str) -> None:
    """Whatever others draw meanwhile from torch's own generator."""
    first = run(maker(method, step), **WAYS[way])
    torch.rand(7)
    assert_identical(first, run(maker(method, step), **WAYS[way]))


@pytest.mark.parametrize("way", ["turns and some samples", "drawn labels"])
def test_another_seed_gives_another_run(way: str) -> None:
    """So that the test above can fail."""
    first, second = run(**WAYS[way]), run(**{**WAYS[way], "seed": 6})
    assert not torch.equal(first["model"]["0.weight"], second["model"]["0.weight"])


def digest(state: Any) -> str:
    """Of all bits of the tensors in a nested state, in their order."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, own in value.items():
                found.update(repr(key).encode())
                add(own)
        elif isinstance(value, list | tuple):
            for own in value:
                add(own)
        else:
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()


def test_another_process_gives_the_same_run() -> None:
    """With other hashes of strings, other addresses, and nothing computed before."""
    settings = WAYS["turns and some samples"]
    code = (
        f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parent)!r}); torch.set_num_threads(1); "
        f"from test_determinism import digest, run; print(digest(run(**{settings!r})))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parent.parent / "src"), "PYTHONHASHSEED": "1"},
    ).stdout.strip()
    assert found == digest(run(**settings))


def _trained(rank: int, settings: dict[str, Any]) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = TEKFAC(ddp, lr=0.05, **{**SHORT, **settings})
    generator = torch.Generator().manual_seed(rank)
    for _ in range(7):
        x, y = torch.randn(6, 5, generator=generator), torch.randint(3, (6,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return digest(everything(ddp, optimizer))


def _each_way_twice(rank: int, world: int) -> list[tuple[str, str]]:
    return [(_trained(rank, settings), _trained(rank, settings)) for settings in WAYS.values()]


@pytest.mark.slow
def test_two_processes_together_give_the_same_run_twice(tmp_path: Path) -> None:
    first, second = run_together(2, tmp_path, _each_way_twice)
    assert all(one == other for one, other in first)
    assert first == second
