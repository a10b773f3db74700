"""Promise: the bytes that a plan tells are those that processes hand over, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tekfac
from dense import METHODS, normal, seeded
from processes import run_together
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.ranks.group import Ranks

WORLD = 2
EVERY, STEPS = 3, 4


class Net(nn.Module):
    """Sides that are whole, by frequencies, in blocks of which the last is smaller, and in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 12, 3, padding=1)
        self.second = nn.Conv2d(12, 12, 3, padding=1, groups=2)
        self.third = nn.Conv2d(12, 10, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 10)
        self.hidden = nn.Linear(10, 23)
        self.head = nn.Linear(23, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.third(self.second(torch.relu(self.first(x)))))
        x = self.hidden(self.norm(x).flatten(2).mean(-1))
        return self.head(torch.relu(x))  # type: ignore[no-any-return]


class Counting:
    """Processes, and the bytes that this one has given them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.index, self.count = ranks.index, ranks.count
        self.added = self.shared = self.messages = 0

    def gather(self, value: Any) -> list[Any]:
        return self._ranks.gather(value)

    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.added += sum(tensor.nbytes for tensor in tensors)
        return self._ranks.add(tensors)

    def share(self, tensors: Sequence[Tensor], owner: int) -> None:
        self.shared += sum(tensor.nbytes for tensor in tensors)
        self.messages += 1
        self._ranks.share(tensors, owner)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"{method.__name__}, as it comes": (place, {}) for place, method in enumerate(METHODS)},
    "blocks": (3, {"max_dim": 7, "large_dims": "blocks"}),
    "the diagonal": (3, {"max_dim": 7, "large_dims": "diagonal"}),
    "norms": (3, {"precondition_norms": True}),
    "measured": (3, {"rescaling": "measured", "rescaling_every": EVERY, "max_dim": 7}),
    "measured, plain": (1, {"rescaling": "measured", "rescaling_every": EVERY}),
    "by turns": (3, {"turns": True}),
    "whole sides": (3, {"track_basis": True, "max_dim": 7}),
    "float64": (3, {"curvature_dtype": torch.float64}),
}

USUAL: dict[str, Any] = {"interval_growth": None, "factors_every": EVERY, "basis_every": EVERY, "turns": False}


def optimizer_of(model: nn.Module, case: str) -> NaturalGradient:
    place, settings = CASES[case]
    return METHODS[place](model, seed=0, **{**USUAL, **settings})


def counted(rank: int, case: str) -> tuple[int, int, int]:
    """Bytes that were added up and shared out, and messages of the latter, in a round after the first step."""
    model = seeded(Net).float()
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_of(wrapped, case)
    for step in range(STEPS):
        if step == STEPS - EVERY:
            ranks = Counting(optimizer._network._ranks)
            optimizer._network._ranks = ranks
        optimizer.zero_grad()
        x, y = normal(8, 2, 4, 4, seed=2 * step + rank).float(), torch.arange(8).roll(step) % 3
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    return ranks.added, ranks.shared, ranks.messages


def counted_all(rank: int, world: int) -> dict[str, tuple[int, int, int]]:
    return {case: counted(rank, case) for case in CASES}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[int, int, int]]]:
    return run_together(WORLD, tmp_path_factory.mktemp("bytes"), counted_all)


@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_is_what_was_planned(case: str, results: list[dict[str, tuple[int, int, int]]]) -> None:
    place, settings = CASES[case]
    method = METHODS[place].__name__
    work = tekfac.explain(seeded(Net).float(), method=method, ranks=WORLD, file=None, **USUAL | settings).work
    assert work is not None
    expected = (work.sent.moments + work.sent.theta, work.sent.bases, work.broadcasts)
    for result in results:
        assert result[case] == expected


def test_one_process_sends_nothing() -> None:
    work = tekfac.explain(seeded(Net), machine={"flops": 1, "link": 1}, file=None)
    assert work.costs is not None
    assert work.costs.gradients == work.costs.moments == work.costs.bases == 0
