"""Large tensors are worked on a piece at a time, with the same result; gradients stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS
from tekfac import TEKFAC
from tekfac.curvature import pieces, stacks
from tekfac.curvature.pieces import in_pieces


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "IN_CACHE", 7)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("shape", [(1, 9, 5), (1, 1, 40), (6, 3, 4), (2, 30, 4), (1, 60, 1)])
def test_pieces_are_views_of_everything_once(shape: tuple[int, int, int]) -> None:
    whole, scale = torch.zeros(shape), torch.arange(1.0, shape[0] + 1)[:, None, None]
    for part, each, number in in_pieces(whole, scale, 2.0):
        part.add_(each * number)
    assert torch.equal(whole, (2 * scale).expand(shape))


@pytest.mark.usefixtures("small_pieces")
def test_what_is_large_is_cut_and_what_is_small_is_not() -> None:
    assert len(list(in_pieces(torch.zeros(1, 50, 3), 1.0))) > 5
    assert len(list(in_pieces(torch.zeros(1, 4, 3), 1.0))) == 1
    assert len(list(in_pieces(torch.zeros(1, 50, 3, device="meta"), 1.0))) == 1


def trained(method: type[TEKFAC], preset: str, **settings: Any) -> list[Tensor]:
    """Weights after steps with layers that are cut, groups, and equal ones; one lacks a gradient once.

    Samples are many enough for every factor to have a basis of its own: in a space where it is 0 that would be
    made of rounding.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3, groups=2, padding=1),
        nn.Flatten(),
        nn.Linear(40, 9),
        nn.Linear(9, 9),
        nn.Linear(9, 9),
    ).double()
    make = method if preset == "default" else getattr(method, preset)
    optimizer = make(model, **{"interval_growth": None, "factors_every": 2, "basis_every": 2, **settings})
    for step in range(6):
        x, y = torch.randn(100, 4, 5, dtype=torch.float64), torch.randint(9, (100,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if step == 3:
            model[3].zero_grad()
        optimizer.step()
    return list(model.parameters())


CASES: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("default", {"turns": True}),
    ("default", {"factors_every": 1}),
    ("default", {"nesterov": False}),
    ("default", {"max_dim": 7}),
    ("default", {"damping": 1e-3}),
    ("natural", {}),
    ("natural", {"damping": 0.1, "max_dim": 7}),
]


@pytest.mark.parametrize(("preset", "settings"), CASES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_in_pieces_is_the_same_run(
    method: type[TEKFAC], preset: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal layers together, and with each by itself and nothing kept of it."""
    at_once = trained(method, preset, **settings)
    monkeypatch.setattr(pieces, "IN_CACHE", 7)
    in_pieces_ = trained(method, preset, **settings)
    for limit in ("SMALL", "STACKED", "ROOMY"):
        monkeypatch.setattr(stacks, limit, 0)
    for others in (in_pieces_, trained(method, preset, **settings)):
        for one, other in zip(at_once, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("large_dims", ["blocks", "diagonal"])
def test_a_step_leaves_gradients_as_they_are(large_dims: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where both sides are diagonals, nothing has to be turned, and a layer has no room of its own."""
    for limit in ("SMALL", "STACKED", "ROOMY"):
        monkeypatch.setattr(stacks, limit, 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30, bias=False), nn.Linear(30, 20))
    optimizer = TEKFAC(model, max_dim=8, large_dims=large_dims)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(16, 40)), torch.randint(20, (16,))).backward()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        after = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, before, after))
