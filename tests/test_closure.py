"""step(closure) evaluates the closure once, with gradients enabled, and gives back its loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS
from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import Batch, assert_identical, everything, mlp, train, vectors


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("method", METHODS)
def test_steps_with_a_closure_are_the_steps_without(method: type[NaturalGradient]) -> None:
    data = vectors(5)
    plain, closed = mlp(), mlp()
    first, second = (
        method(m, lr=0.05, interval_growth=None, factors_every=2, basis_every=2, seed=3)
        for m in (plain, closed)
    )
    train(plain, first, data)
    for batch in data:
        second.step(closure_of(closed, second, batch))
    assert_identical(everything(closed, second), everything(plain, first))


def test_the_closure_runs_once_with_gradients_enabled_even_under_no_grad() -> None:
    model = mlp()
    optimizer = TEKFAC(model, lr=0.05)
    modes = []
    inner = closure_of(model, optimizer, vectors(1)[0])

    def closure() -> Tensor:
        modes.append(torch.is_grad_enabled())
        return inner()

    with torch.no_grad():
        optimizer.step(closure)
        assert not torch.is_grad_enabled()
    assert modes == [True]
    assert optimizer.num_steps == 1


def test_the_loss_of_the_closure_comes_back_as_it_was_returned() -> None:
    model = mlp()
    optimizer = TEKFAC(model, lr=0.05)
    batch = vectors(1)[0]
    expected = F.cross_entropy(model(batch[0]), batch[1]).detach()
    returned: list[Tensor] = []

    def closure() -> Tensor:
        returned.append(closure_of(model, optimizer, batch)())
        return returned[-1]

    loss = optimizer.step(closure)
    assert loss is returned[0]
    assert torch.equal(loss, expected)


def test_the_closure_may_return_a_plain_number() -> None:
    model = mlp()
    optimizer = TEKFAC(model, lr=0.05)
    inner = closure_of(model, optimizer, vectors(1)[0])
    loss = optimizer.step(lambda: inner().item())
    assert isinstance(loss, float)
    assert optimizer.num_steps == 1


def test_without_a_closure_step_gives_nothing() -> None:
    model = mlp()
    optimizer = TEKFAC(model, lr=0.05)
    F.cross_entropy(model(vectors(1)[0][0]), vectors(1)[0][1]).backward()
    assert optimizer.step() is None


def test_an_error_in_the_closure_reaches_the_user_and_changes_nothing() -> None:
    model = mlp()
    optimizer = TEKFAC(model, lr=0.05)
    train(model, optimizer, vectors(2))
    before = everything(model, optimizer)

    def closure() -> Tensor:
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        optimizer.step(closure)
    assert_identical(everything(model, optimizer), before)
