"""A step with non-finite numbers is skipped, counted and logged; later steps are as if it had not been."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS
from tekfac import EKFAC, KFAC, TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import (
    Batch,
    assert_identical,
    backward,
    both_steps,
    differences,
    everything,
    maker,
    mlp,
    saved_whole,
    train,
    vectors,
)

NAN, INFINITY = float("nan"), float("inf")
INTERVALS = {"interval_growth": None, "factors_every": 2, "basis_every": 4}
BAD = vectors(1, seed=55)[0]

SKIPPED = ".optimizer.param_groups[0].tekfac.skipped_steps"
"""Where a state counts skipped steps."""


def poisoned_input(value: float) -> Callable[[nn.Module, NaturalGradient], None]:
    def step(model: nn.Module, optimizer: NaturalGradient) -> None:
        x = BAD[0].clone()
        x[0, 0] = value
        train(model, optimizer, [(x, BAD[1])])

    return step


def poisoned_loss(model: nn.Module, optimizer: NaturalGradient) -> None:
    train(model, optimizer, [BAD], lambda logits, y: F.cross_entropy(logits, y) * NAN)


def poisoned_gradient(model: nn.Module, optimizer: NaturalGradient) -> None:
    optimizer.zero_grad()
    backward(model, BAD)
    next(model.parameters()).grad[0] = INFINITY  # type: ignore[index]
    optimizer.step()


def poisoned_closure(model: nn.Module, optimizer: NaturalGradient) -> None:
    """Only the returned loss is bad."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(model, BAD) * NAN

    loss = optimizer.step(closure)
    assert bool(torch.isnan(torch.as_tensor(loss)))


def poisoned_micro_batch(model: nn.Module, optimizer: NaturalGradient) -> None:
    """One good and one bad micro-batch."""
    optimizer.zero_grad()
    backward(model, BAD)
    backward(model, (BAD[0] * NAN, BAD[1]))
    optimizer.step()


POISONS: dict[str, Callable[[nn.Module, NaturalGradient], None]] = {
    "nan in the input": poisoned_input(NAN),
    "infinity in the input": poisoned_input(INFINITY),
    "nan loss": poisoned_loss,
    "infinite gradient": poisoned_gradient,
    "nan from a closure": poisoned_closure,
    "bad micro-batch": poisoned_micro_batch,
}


def finite(state: Any) -> bool:
    if isinstance(state, Tensor):
        return bool(torch.isfinite(state).all())
    if isinstance(state, dict):
        return all(finite(value) for value in state.values())
    return all(finite(value) for value in state) if isinstance(state, list | tuple) else True


def run(make: Callable[..., NaturalGradient], poison: Callable[..., None], bad_steps: list[int]) -> Any:
    """A short run with bad steps before the given good ones."""
    model = mlp()
    optimizer = make(model, lr=0.05, damping=0.1, seed=0, first_order=["2.bias"], **INTERVALS)
    for k, batch in enumerate(vectors(5)):
        for _ in range(bad_steps.count(k)):
            poison(model, optimizer)
        train(model, optimizer, [batch])
    assert optimizer.skipped_steps == len(bad_steps)
    assert optimizer.num_steps == 5
    return everything(model, optimizer)


@both_steps
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("method", METHODS)
def test_later_steps_are_as_if_the_bad_ones_had_not_been(
    method: type[NaturalGradient], poison: str, step: str
) -> None:
    """Bad steps before the first one, where statistics are due, where they are not, and twice in a row."""
    make = maker(method, step)
    clean, disturbed = run(make, POISONS[poison], []), run(make, POISONS[poison], [0, 1, 2, 4, 4])
    assert finite(disturbed)
    assert saved_whole(clean["optimizer"]).pop("skipped_steps") == 0
    assert saved_whole(disturbed["optimizer"]).pop("skipped_steps") == 5
    assert_identical(disturbed, clean)


@both_steps
@pytest.mark.parametrize("poison", POISONS)
def test_a_bad_step_changes_nothing_but_the_count(poison: str, step: str) -> None:
    model = mlp()
    optimizer = maker(TEKFAC, step)(
        model, lr=0.05, interval_growth=None, factors_every=2, basis_every=2, weight_decay=0.1
    )
    train(model, optimizer, vectors(1))
    for _ in range(3):
        before = everything(model, optimizer)
        POISONS[poison](model, optimizer)
        assert differences(everything(model, optimizer), before) == [
            f"{SKIPPED}: {optimizer.skipped_steps} and {optimizer.skipped_steps - 1}"
        ]
        train(model, optimizer, vectors(1))


def test_a_skipped_step_is_logged_with_what_was_wrong(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = TEKFAC(model, lr=0.05)
    train(model, optimizer, vectors(1))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tekfac"):
        poisoned_gradient(model, optimizer)
    (record,) = caplog.records
    assert "0.weight" in record.getMessage()
    assert "2.weight" not in record.getMessage()
    assert "1 skipped" in record.getMessage()


def test_the_count_of_skipped_steps_is_saved() -> None:
    model = mlp()
    optimizer = TEKFAC(model, lr=0.05)
    poisoned_loss(model, optimizer)
    other = TEKFAC(mlp(), lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    assert other.skipped_steps == 1


class Overflowing(nn.Module):
    """Finite outputs and gradients, but second moments beyond float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.layer(x * self.scale) / self.scale))
        return out


@pytest.mark.parametrize("method", METHODS)
def test_statistics_that_overflow_are_skipped_too(method: type[NaturalGradient]) -> None:
    data = vectors(3, dtype=torch.float32)

    def steps(scales: list[float]) -> tuple[Any, int]:
        model = Overflowing()
        optimizer = method(model, lr=0.05, seed=0, factors_every=1, basis_every=1)
        batches = iter(data)
        for scale in scales:
            model.scale = scale
            train(model, optimizer, [BAD32 if scale > 1 else next(batches)])
        state = everything(model, optimizer)
        return state, saved_whole(state["optimizer"]).pop("skipped_steps")

    BAD32: Batch = (BAD[0].float(), BAD[1])
    (clean, none), (disturbed, skipped) = steps([1, 1, 1]), steps([1e25, 1, 1e25, 1, 1])
    assert (none, skipped) == (0, 2)
    assert_identical(disturbed, clean)


@pytest.mark.parametrize("method", METHODS)
def test_a_finite_gradient_whose_natural_gradient_overflows_is_skipped(method: type[NaturalGradient]) -> None:
    model = mlp(dtype=torch.float32)
    optimizer = method(model, lr=0.05, damping=1e-6)
    train(model, optimizer, vectors(2, dtype=torch.float32))
    before = everything(model, optimizer)
    optimizer.zero_grad()
    backward(model, (BAD[0].float(), BAD[1]))
    for parameter in model.parameters():
        parameter.grad.fill_(1e36)  # type: ignore[union-attr]
    optimizer.step()
    assert optimizer.skipped_steps == 1
    after = everything(model, optimizer)
    assert finite(after)
    assert differences(after, before) == [f"{SKIPPED}: 1 and 0"]


def test_a_large_gradient_in_float64_is_finite() -> None:
    """1e45 is beyond float32, not beyond the numbers that are trained here."""
    model = mlp()
    optimizer = EKFAC(model, lr=1e-50, damping=1.0)
    optimizer.zero_grad()
    backward(model, BAD)
    for parameter in model.parameters():
        parameter.grad.mul_(1e45)  # type: ignore[union-attr]
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert optimizer.num_steps == 1


def test_gradients_dropped_by_the_user_take_their_statistics_with_them() -> None:
    """Loops that look at the gradient's norm and go on with the next batch instead of stepping."""

    def steps(disturbed: bool) -> Any:
        model = mlp()
        optimizer = TEKFAC(model, lr=0.05, seed=0, interval_growth=None, factors_every=2, basis_every=2)
        for batch in vectors(4):
            if disturbed:
                for bad in (BAD, (BAD[0] * NAN, BAD[1])):
                    optimizer.zero_grad()
                    backward(model, bad)
            train(model, optimizer, [batch])
        return everything(model, optimizer)

    assert_identical(steps(disturbed=True), steps(disturbed=False))


def test_classes_that_are_masked_with_minus_infinity_do_not_stop_the_training() -> None:
    class Masked(nn.Module):
        """The last class is never possible: its logit is -infinity, its probability exactly 0."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(5, 3)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out.masked_fill(torch.tensor([False, False, True]), -INFINITY)

    data = [(x, y % 2) for x, y in vectors(3)]
    for fisher in ("sampled", "empirical", "exact"):
        model = Masked()
        optimizer = KFAC(model, lr=0.05, fisher=fisher)  # type: ignore[arg-type]
        train(model, optimizer, data)
        assert optimizer.skipped_steps == 0
        assert optimizer.num_steps == 3
        assert finite(everything(model, optimizer))


def test_a_direction_that_leaves_the_range_of_half_precision_is_not_taken() -> None:
    """Curvature is computed in float32, where the direction is finite."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).half()
    optimizer = EKFAC.natural(model, lr=1e-3, damping=1e-2)
    x = torch.randn(6, 4)
    x[:, 0] = 0
    F.cross_entropy(model(x.half()).float(), torch.arange(6) % 3).backward()
    before = model.weight.detach().clone()
    model.weight.grad[:, 0] = 1000.0  # type: ignore[index]
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert torch.equal(model.weight, before)
