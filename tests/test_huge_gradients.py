"""Promise: one gradient that is finite but huge spoils nothing: a step that would leave the range is skipped.

After it training goes on. It is seen by the squares of what is looked at anyway: no pass more, no wait more.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS
from tekfac import KFAC, TEKFAC
from tekfac.damping import LevenbergMarquardt
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.optim.skipping import longest_direction, squares_are_finite
from training import assert_identical, both_steps, everything, maker, saved_whole, train, vectors

SCALES = (1e12, 1e16, 1e20, 1e30)
FACTORS = (1.0, 1e10)
INTERVALS: dict[str, Any] = {"interval_growth": None, "factors_every": 2, "basis_every": 2}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Nothing in it is bounded: what one layer makes too large the next makes larger."""
    torch.manual_seed(0)
    sizes = (5, 6, 8, 4, 3)
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*layers)).to(dtype)[:-1]


def run(make: Any, at: int, loss_scale: float, input_scale: float) -> tuple[nn.Module, NaturalGradient, str]:
    """Eight steps, of which one has a huge loss, or huge inputs; which were skipped."""
    model = network()
    every = (
        {"rescaling_every": 2} if make.__name__ == "natural" and make.__self__.method.rescaling.measured else {}
    )
    optimizer, taken = make(model, seed=0, **INTERVALS, **every), ""
    for step, (x, y) in enumerate(vectors(8, dtype=torch.float32)):
        before, bad = optimizer.skipped_steps, step == at
        scale = loss_scale if bad else 1.0
        batch = (x * input_scale if bad else x, y)
        train(model, optimizer, [batch], lambda p, y, scale=scale: F.cross_entropy(p, y) * scale)  # type: ignore[misc]
        taken += "S" if optimizer.skipped_steps > before else "."
    return model, optimizer, taken


@pytest.mark.every_pair
@both_steps
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "plain", "measuring"])
def test_no_later_step_is_skipped_whatever_the_scale(method: type[NaturalGradient], step: str, at: int) -> None:
    for loss_scale, input_scale in itertools.product(SCALES, FACTORS):
        model, _, taken = run(maker(method, step), at, loss_scale, input_scale)
        assert "S" not in taken[:at] + taken[at + 1 :], (loss_scale, input_scale, taken)
        largest = max(float(parameter.detach().abs().max()) for parameter in model.parameters())
        assert largest < 1e6, (loss_scale, input_scale, taken)


@pytest.mark.parametrize("method", METHODS)
def test_the_step_that_is_skipped_leaves_all_as_it_was_and_is_counted(method: type[NaturalGradient]) -> None:
    ends = []
    for has_huge in (False, True):
        model = network()
        optimizer = method.natural(model, seed=0, **INTERVALS)
        for step, batch in enumerate(vectors(4, dtype=torch.float32)):
            if has_huge and step == 2:
                train(
                    model, optimizer, vectors(1, dtype=torch.float32), lambda p, y: F.cross_entropy(p, y) * 1e16
                )
                assert optimizer.skipped_steps == 1
            train(model, optimizer, [batch])
        end = everything(model, optimizer)
        saved_whole(end["optimizer"]).pop("skipped_steps")
        ends.append(end)
    assert_identical(*ends)


def test_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = KFAC.natural(model)
    train(model, optimizer, vectors(1, dtype=torch.float32), lambda p, y: F.cross_entropy(p, y) * 1e16)
    assert "the gradient is too large" in caplog.text


def test_a_clip_shortens_a_huge_step_which_is_taken_then() -> None:
    model = network()
    optimizer = KFAC.natural(model, kl_clip=1e-3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, vectors(1, dtype=torch.float32), lambda p, y: F.cross_entropy(p, y) * 1e14)
    assert optimizer.num_steps == 1
    moved = [float((p.detach() - old).norm()) for p, old in zip(model.parameters(), before, strict=True)]
    assert 0 < max(moved) < 1


def test_what_counts_is_the_step_not_the_direction() -> None:
    """With a tiny learning rate a direction may be long."""
    model = network()
    optimizer = TEKFAC.natural(model, lr=1e-18)
    train(model, optimizer, vectors(1, dtype=torch.float32), lambda p, y: F.cross_entropy(p, y) * 1e16)
    assert optimizer.num_steps == 1


def test_in_float64_steps_may_be_as_long_as_its_range_allows() -> None:
    model = network(torch.float64)
    optimizer = TEKFAC.natural(model)
    train(model, optimizer, vectors(1), lambda p, y: F.cross_entropy(p, y) * 1e16)
    assert optimizer.num_steps == 1


def test_steps_that_are_judged_by_the_loss_are_as_long_as_it_allows() -> None:
    model = network()
    optimizer = TEKFAC.natural(model, damping=LevenbergMarquardt(1e-12))
    x, y = vectors(1, dtype=torch.float32)[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.num_steps == 1


def test_where_the_answer_stays_on_the_device_nothing_moves_either() -> None:
    model = network()
    optimizer = KFAC.natural(model, interval_growth=None, factors_every=10, basis_every=10)
    optimizer._skipping.deferred = True
    train(model, optimizer, vectors(1, dtype=torch.float32))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, vectors(1, dtype=torch.float32), lambda p, y: F.cross_entropy(p, y) * 1e16)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_bound_is_the_eighth_root_of_the_range(dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    longest = torch.finfo(wide).max ** 0.125
    fits = dtype != torch.float16  # whose own range ends before
    for share, length in ((1.0, longest), (0.5, longest / 2)) if fits else ((1e-2, longest / 100),):
        assert squares_are_finite([torch.tensor([0.9 * length], dtype=dtype)], share)
        assert not squares_are_finite([torch.tensor([1.1 * length], dtype=dtype)], share)
    assert not squares_are_finite([torch.tensor([math.nan], dtype=dtype)])
    assert not squares_are_finite([torch.tensor([math.inf], dtype=dtype)])


def test_rates_of_all_sorts_bound_directions() -> None:
    assert longest_direction([{"lr": 0.5}, {"lr": 0.1}], 1.0) == 2.0
    assert longest_direction([{"lr": torch.tensor(0.5)}], 2.0) == 1.0
    assert longest_direction([{"lr": 0.0}], 2.0) == math.inf
    assert longest_direction([{"lr": torch.tensor(0.5, device="meta")}], 2.0) == math.inf
