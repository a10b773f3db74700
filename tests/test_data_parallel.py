"""Processes with a part of every batch each train as one with the whole batch does, and share the work."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dense import METHODS, assert_close, normal, seeded
from processes import run_together
from tekfac.capture import selection
from tekfac.optim.natural_gradient import NaturalGradient
from training import maker

WORLD = 2
SAMPLES = 12
STEPS = 4


class Net(nn.Module):
    """A convolution, a norm of each sample by itself, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.convolution(x)))
        return self.head(x.flatten(2).mean(-1))  # type: ignore[no-any-return]


class Case(NamedTuple):
    """Settings, and what the batches are like."""

    method: int = 3
    step: str = "adaptive"
    settings: Mapping[str, Any] = {}
    parts: tuple[int, ...] = (6, 6)
    likelihood: str = "classes"
    accumulated: int = 1
    wraps_first: bool = True
    in_sums: bool = False


CASES: dict[str, Case] = {
    **{
        f"{METHODS[method].__name__}, {step}": Case(method, step)
        for method in range(4)
        for step in ("adaptive", "natural")
    },
    "sampled labels": Case(settings={"fisher": "sampled"}),
    "sampled labels of a regression": Case(settings={"fisher": "sampled"}, likelihood="numbers"),
    "sampled labels, yes or no": Case(settings={"fisher": "sampled"}, likelihood="yes or no"),
    "exact": Case(step="natural", settings={"fisher": "exact"}),
    "some samples": Case(step="natural", settings={"fisher": "empirical", "statistics_samples": 5}),
    "by turns": Case(settings={"turns": True, "factors_every": 2, "basis_every": 2}),
    "blocks, dealt out one by one": Case(settings={"max_dim": 3}),
    "blocks and tolerance": Case(settings={"max_dim": 3, "basis_tolerance": 0.3}),
    "the inner module": Case(wraps_first=False),
    "norms": Case(settings={"precondition_norms": True}),
    "accumulated": Case(accumulated=2),
    "accumulated, sampled": Case(step="natural", accumulated=2),
    "in sums": Case(in_sums=True),
    "in sums, sampled": Case(step="natural", in_sums=True),
    "some samples, each a sum": Case(settings={"factor_decay": 0.5}, in_sums=True, accumulated=3),
    "uneven": Case(step="natural", settings={"fisher": "exact"}, parts=(8, 4)),
}


SMALL = {"SUMS": 6, "FEWEST_SUMS": 2, "WORTH_SUMS": 0, "WORTH_SINGLY": 0}
"""So that samples of these small networks are put together, too: first all, later some, and no null space."""

USUAL = {name: getattr(selection, name) for name in SMALL}


def targets_of(case: Case, step: int) -> Tensor:
    if case.likelihood == "classes":
        return torch.arange(SAMPLES).roll(step) % 3
    numbers = normal(SAMPLES, 3, seed=100 + step)
    return numbers if case.likelihood == "numbers" else (numbers > 0).double()


def loss_of(case: Case, outputs: Tensor, targets: Tensor) -> Tensor:
    losses = {
        "classes": F.cross_entropy,
        "numbers": F.mse_loss,
        "yes or no": F.binary_cross_entropy_with_logits,
    }
    return losses[case.likelihood](outputs, targets)


def optimizer_of(case: Case, model: nn.Module, **more: Any) -> NaturalGradient:
    make = maker(METHODS[case.method], case.step)
    settings = {"lr": 0.05, "seed": 3, "interval_growth": None, "factors_every": 1, "basis_every": 1}
    if case.step == "natural" and METHODS[case.method].method.rescaling.measured:
        settings["rescaling_every"] = 1
    return make(model, **{**settings, **case.settings, **more})


def own_samples(case: Case, rank: int | None, micro_batch: int) -> Tensor:
    """Numbers of the samples of a micro-batch: those of a rank, or of all ranks, one after the other."""
    if rank is None:
        return torch.cat([own_samples(case, one, micro_batch) for one in range(len(case.parts))])
    size = case.parts[rank] // case.accumulated
    return sum(case.parts[:rank]) + micro_batch * size + torch.arange(size)


def train(rank: int | None, world: int, case: Case) -> dict[str, Tensor]:
    """Parameters and curvature in the end; rank None: of one process with everything."""
    torch.set_default_dtype(torch.float64)
    for name, usual in USUAL.items():
        setattr(selection, name, SMALL[name] if case.in_sums else usual)
    model = seeded(Net).double()
    wrapped = model if rank is None else DistributedDataParallel(model)
    optimizer = optimizer_of(case, wrapped if case.wraps_first else model)
    # Gradients are averaged over ranks: one with more samples than others has a loss that counts more.
    weight = 1.0 if rank is None else world * case.parts[rank] / SAMPLES
    for step in range(STEPS):
        x, y = normal(SAMPLES, 2, 4, 4, seed=step), targets_of(case, step)
        optimizer.zero_grad()
        for micro_batch in range(case.accumulated):
            own, is_last = own_samples(case, rank, micro_batch), micro_batch == case.accumulated - 1
            alone = isinstance(wrapped, DistributedDataParallel) and not is_last
            with wrapped.no_sync() if alone else contextlib.nullcontext():
                loss = loss_of(case, wrapped(x[own]), y[own])
                (loss * weight / case.accumulated).backward()
        optimizer.step()
    found = {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    blocks = {f"curvature {name}": block.to_dense() for name, block in optimizer.curvature.items()}
    return {**found, **blocks}


def train_all(rank: int, world: int, cases: dict[str, Case]) -> dict[str, dict[str, Tensor]]:
    return {name: train(rank, world, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    return run_together(WORLD, tmp_path_factory.mktemp("ranks"), train_all, CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name: str, results: list[dict[str, dict[str, Tensor]]]) -> None:
    dtype = torch.get_default_dtype()
    try:
        alone = train(None, 1, CASES[name])
    finally:
        torch.set_default_dtype(dtype)
        for own, value in USUAL.items():
            setattr(selection, own, value)
    first, second = (result[name] for result in results)
    for what, expected in alone.items():
        assert torch.equal(first[what], second[what]), what
        assert_close(first[what], expected)
