"""Processes that train one model together are told, each by name, what they do not have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dense import normal
from processes import run_together
from tekfac import KFAC, TEKFAC
from tekfac.ranks.group import Alone, ranks_of
from tekfac.ranks.replicas import ReplicaError
from training import mlp

WORLD = 2


def made(rank: int, **settings: Any) -> TEKFAC:
    return TEKFAC(mlp(), **settings)


def trained(rank: int, *, steps: int = 3, changed: int | None = None, **settings: Any) -> TEKFAC:
    """A few steps, whose gradients are averaged by hand; after one of them the last rank loses a weight."""
    model = settings.pop("model", None) or mlp()
    optimizer = settings.pop("optimizer", None) or TEKFAC(model, seed=0, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(normal(4, 5, seed=rank)), torch.arange(4) % 3).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= WORLD
        optimizer.step()
        if step == changed and rank == 1:
            model[0].weight.data[0, 0] += 1e-9
    return optimizer


def made_too_early(rank: int) -> str:
    """As by somebody who makes the optimizer before the processes know of each other."""
    with mock.patch("torch.distributed.is_initialized", return_value=False):
        optimizer = TEKFAC(mlp())
    with pytest.raises(RuntimeError) as error:
        trained(rank, steps=1, model=optimizer._model_layers.model, optimizer=optimizer)
    return str(error.value)


def with_problem(rank: int) -> list[int]:
    """One rank has a prediction that is not finite, in its first step."""
    model = DistributedDataParallel(mlp())
    optimizer = TEKFAC(model, seed=0)
    skipped = []
    for step in range(3):
        optimizer.zero_grad()
        x = normal(4, 5, seed=rank)
        x[0, 0] = float("inf") if step == 0 and rank == 1 else 1.0
        F.cross_entropy(model(x), torch.arange(4) % 3).backward()
        optimizer.step()
        skipped.append(optimizer.skipped_steps)
    return skipped


def unused(rank: int) -> list[str]:
    """A head that one rank alone uses, and one that nobody does."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head, self.other, self.nobodys = (nn.Linear(5, 5).double() for _ in range(4))

        def forward(self, x: torch.Tensor, uses_other: bool) -> torch.Tensor:
            x = torch.tanh(self.trunk(x))
            return self.head(x) + (self.other(x) if uses_other else 0)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = DistributedDataParallel(Heads(), find_unused_parameters=True)
    optimizer = TEKFAC(model, seed=0)
    for step in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(normal(4, 5, seed=step), rank == 1), torch.arange(4)).backward()
        optimizer.step()
    return sorted(optimizer.curvature)


def told(function: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    try:
        function(*arguments, **settings)
    except (ReplicaError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def attempts(rank: int, world: int) -> dict[str, Any]:
    kind = KFAC if rank else TEKFAC
    own_group = dist.new_group([0, 1])
    return {
        "widths": told(lambda: TEKFAC(mlp(sizes=(5, 4 + rank, 3)))),
        "precisions": told(lambda: TEKFAC(mlp(dtype=torch.float64 if rank else torch.float32))),
        "rates": told(made, rank, lr=0.1 * (1 + rank)),
        "settings": told(made, rank, basis_every=10 + rank),
        "seeds": told(made, rank, seed=rank),
        "methods": told(lambda: kind(mlp())),
        "weights": told(trained, rank, model=mlp(seed=rank)),
        "weights, alone": told(trained, rank, model=mlp(seed=rank), process_group="alone"),
        "weights, later": told(trained, rank, changed=0, replica_check_every=2),
        "weights, nobody looks": told(trained, rank, changed=0),
        "a group": told(trained, rank, process_group=own_group),
        "no group": told(made, rank, process_group="both"),
        "a problem": with_problem(rank),
        "unused": unused(rank),
        "too early": made_too_early(rank),
        "random seeds": [torch.manual_seed(rank).initial_seed(), made(rank)._capture.sampling._seed],
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_together(WORLD, tmp_path_factory.mktemp("replicas"), attempts)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("widths", "parameter '0.weight' is ([4, 5], 'torch.float64') on rank 0 and ([5, 5], 'torch.float64')"),
        ("precisions", "'torch.float32') on rank 0 and ([4, 5], 'torch.float64') on rank 1"),
        ("rates", "param_groups[0]['lr'] is 0.1 on rank 0 and 0.2 on rank 1"),
        ("settings", "basis_every= is 10 on rank 0 and 11 on rank 1"),
        ("seeds", "seed= is 0 on rank 0 and 1 on rank 1"),
        ("methods", "the optimizer is 'TEKFAC' on rank 0 and 'KFAC' on rank 1"),
        ("weights", "0.weight is "),
        ("weights, later", "0.weight is "),
    ],
)
def test_every_process_is_told_what_differs(case: str, expected: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result[case].startswith("ReplicaError: ")
        assert expected in result[case]
        assert "Make it the same everywhere, or pass process_group='alone'" in result[case]


@pytest.mark.parametrize("case", ["weights, alone", "weights, nobody looks", "a group"])
def test_what_does_not_train_together_may_differ_and_groups_may_be_given(
    case: str, results: list[dict[str, Any]]
) -> None:
    assert [result[case] for result in results] == ["nothing", "nothing"]


def test_a_step_that_one_process_cannot_take_is_taken_by_none(results: list[dict[str, Any]]) -> None:
    assert [result["a problem"] for result in results] == [[1, 1, 1], [1, 1, 1]]


def test_an_optimizer_that_was_made_before_the_others_were_there_is_refused(
    results: list[dict[str, Any]],
) -> None:
    """It would train by itself, on its part of every batch, and drift away from the others."""
    for result in results:
        assert "TEKFAC was made before torch.distributed knew of 2 processes" in result["too early"]


def test_layers_that_some_or_no_process_uses_are_measured_where_they_are(results: list[dict[str, Any]]) -> None:
    assert [result["unused"] for result in results] == [["head", "other", "trunk"]] * 2


def test_random_seeds_that_nobody_has_set_are_those_of_the_first(results: list[dict[str, Any]]) -> None:
    assert [result["random seeds"] for result in results] == [[0, 0], [1, 0]]


def test_a_group_is_one_of_torchs(results: list[dict[str, Any]]) -> None:
    assert all("Invalid process_group: 'both'" in result["no group"] for result in results)


def one_process(rank: int, world: int) -> list[str]:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = TEKFAC(model)
    return [type(optimizer._ranks).__name__, *optimizer.param_groups[0]["param_names"]]


def test_a_group_of_one_is_alone_and_names_have_no_wrapper_in_them(tmp_path: Path) -> None:
    assert run_together(1, tmp_path, one_process) == [["Alone", "weight", "bias"]]
    assert ranks_of(torch.nn.Linear(2, 2), "auto") == Alone()
