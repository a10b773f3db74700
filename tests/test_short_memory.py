"""Promise: a refresh that finds no memory is left out and counted; the old basis stays, training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dense import METHODS, statistics
from processes import run_together
from tekfac import TEKFAC
from tekfac.common.memory import is_out_of_memory
from tekfac.curvature import layer_curvature
from tekfac.curvature.factors import FactorRule
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, both_steps, everything, maker, mlp, train, vectors

EVERY_STEP: dict[str, Any] = {"interval_growth": None, "factors_every": 1, "basis_every": 1}
ERRORS: dict[str, Callable[[], Exception]] = {
    "Python": MemoryError,
    "the device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "the host": lambda: RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."
    ),
}
PLACES: dict[str, tuple[Any, str]] = {
    "moments": (FactorRule, "sums"),
    "averages": (layer_curvature, "_averaged"),
    "decomposition": (torch.linalg, "eigh"),
}


def raising(error: Callable[[], Exception]) -> Callable[..., Any]:
    def fails(*arguments: Any, **keywords: Any) -> Any:
        raise error()

    return fails


@pytest.mark.every_pair
@both_steps
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", METHODS)
def test_the_old_basis_stays_and_it_is_counted(
    method: type[NaturalGradient], error: str, place: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = mlp(), vectors(3)
    optimizer = maker(method, step)(model, **EVERY_STEP)
    train(model, optimizer, data[:1])
    old = {name: own.basis for name, own in statistics(optimizer).items()}
    weight = model[0].weight.detach().clone()
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES[place], raising(ERRORS[error]))
        train(model, optimizer, data[1:2])
    assert optimizer.num_steps == 2
    assert optimizer.skipped_steps == 0
    assert optimizer.failed_refreshes == 2  # one for each layer
    assert not torch.equal(model[0].weight, weight)
    for name, own in statistics(optimizer).items():
        assert torch.equal(own.basis.vectors_in, old[name].vectors_in)
    problem, _ = optimizer.health().problems
    assert problem.kind == "failed refreshes"
    train(model, optimizer, data[2:])
    assert optimizer.failed_refreshes == 2
    assert optimizer.health().problems == ()


def test_theta_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, rescaling_every=1, **EVERY_STEP)
    train(model, optimizer, vectors(1))
    old = dict(statistics(optimizer))
    monkeypatch.setattr(layer_curvature, "sum_of_squares", raising(MemoryError))
    train(model, optimizer, vectors(1))
    assert optimizer.failed_refreshes == 2
    for name, own in statistics(optimizer).items():
        assert own.moments is old[name].moments


def test_it_is_told_of_each_layer_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    optimizer = TEKFAC(model, **EVERY_STEP)
    train(model, optimizer, vectors(1))
    monkeypatch.setattr(torch.linalg, "eigh", raising(MemoryError))
    caplog.clear()
    train(model, optimizer, vectors(9))
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 2
    for name, message in zip(("0", "2"), told, strict=True):
        assert f"the curvature of layer {name!r} (time 1): there was not enough memory" in message


def test_at_the_first_step_layers_are_trained_by_first_order_until_there_is_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = mlp(), vectors(2)
    optimizer = TEKFAC(model, **EVERY_STEP)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", raising(MemoryError))
        train(model, optimizer, data[:1])
    assert (optimizer.num_steps, len(optimizer.curvature)) == (1, 0)
    assert "not enough memory to measure" in caplog.text
    train(model, optimizer, data[1:])
    assert len(optimizer.curvature) == 2


def test_a_refresh_without_memory_is_as_if_nothing_had_been_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the count, and what is drawn."""
    ends = []
    for due in (True, False):
        model = mlp()
        optimizer = TEKFAC(
            model, interval_growth=None, factors_every=2 if due else 9, basis_every=2 if due else 9
        )
        train(model, optimizer, vectors(2))
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, "eigh", raising(MemoryError))
            train(model, optimizer, vectors(1, seed=3))
        ends.append(everything(model, optimizer)["model"])
    assert_identical(*ends)


def test_other_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = TEKFAC(model, **EVERY_STEP)
    monkeypatch.setattr(FactorRule, "sums", raising(lambda: RuntimeError("shapes do not match")))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(model, optimizer, vectors(1))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


def _decomposing_without_memory_in_one(rank: int, world: int) -> Any:
    model = mlp(dtype=torch.float32)
    optimizer = TEKFAC(model, **EVERY_STEP)
    train(model, optimizer, vectors(1, dtype=torch.float32))
    eigh = torch.linalg.eigh
    if rank == 1:
        torch.linalg.eigh = raising(MemoryError)
    train(model, optimizer, vectors(1, dtype=torch.float32))
    torch.linalg.eigh = eigh
    train(model, optimizer, vectors(1, dtype=torch.float32))
    return optimizer.num_steps, optimizer.failed_refreshes, everything(model, optimizer)["model"]


@pytest.mark.slow
def test_of_two_processes_one_finds_none_and_both_keep_the_old_basis(tmp_path: Path) -> None:
    first, second = run_together(2, tmp_path, _decomposing_without_memory_in_one)
    assert first[:2] == second[:2]
    assert first[0] == 3
    assert first[1] > 0
    assert_identical(first[2], second[2])
