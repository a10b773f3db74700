"""Promise: the newest optimizer of a model wins; older ones that nobody uses do nothing and say nothing.

In a notebook the stored traceback of an error keeps an optimizer alive that was given up long ago.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac import KFAC, TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, everything, mlp, saved_whole, train, vectors

EVERY_STEP: dict[str, Any] = {"interval_growth": None, "factors_every": 1, "basis_every": 1}


def trained(older: Callable[[nn.Module], object]) -> tuple[Any, list[object]]:
    """A run with an optimizer, after something else has been made of the model and kept."""
    model = mlp()
    kept = [older(model)]
    optimizer = TEKFAC(model, lr=0.05, seed=0, **EVERY_STEP)
    for batch in vectors(4):
        model.zero_grad()
        backward(model, batch)
        optimizer.step()
    return everything(model, optimizer), kept


def failed(model: nn.Module) -> object:
    """An optimizer that a traceback keeps, since what it was told of the loss is wrong."""
    try:
        train(model, KFAC(model, fisher="sampled", likelihood={"nobody": "gaussian"}), vectors(1))
    except ValueError as error:
        return error
    raise AssertionError("it was to fail")


def ignored(model: nn.Module) -> object:
    return TEKFAC(model, likelihood="bernoulli", **EVERY_STEP)


def failing_half_way(model: nn.Module) -> object:
    """An error of the user's, in the middle of a backward pass."""
    optimizer = TEKFAC(model, fisher="sampled", likelihood="gaussian", **EVERY_STEP)
    x, y = vectors(1)[0]
    hidden: list[Tensor] = []
    handle = model[1].register_forward_hook(lambda module, args, out: hidden.append(out))
    loss = F.cross_entropy(model(x), y)
    handle.remove()
    hidden[0].register_hook(lambda gradient: gradient.no_such_name)  # type: ignore[no-untyped-call]
    try:
        loss.backward()
    except AttributeError as error:
        model.zero_grad()
        return optimizer, error
    raise AssertionError("it was to fail")


@pytest.mark.parametrize("older", [failed, ignored, failing_half_way])
def test_an_older_one_that_is_kept_changes_nothing_and_says_nothing(
    older: Callable[[nn.Module], object], caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = trained(lambda model: None)
    caplog.clear()
    found, kept = trained(older)
    assert_identical(expected, found)
    assert "likelihood=" not in caplog.text
    assert all(record.levelno < logging.WARNING for record in caplog.records)
    assert kept


def test_an_older_one_that_is_used_again_measures_again() -> None:
    ends = []
    for with_newer in (False, True):
        model = mlp()
        optimizer = TEKFAC(model, lr=0.05, seed=0, **EVERY_STEP)
        newer = KFAC(model) if with_newer else None
        train(model, optimizer, vectors(3))  # whose first call is optimizer.zero_grad()
        ends.append(everything(model, optimizer))
        assert newer is None or newer.num_steps == 0
    assert_identical(*ends)


def test_one_that_steps_first_measures_from_the_next_step_on() -> None:
    model = mlp()
    older, newer = TEKFAC(model, **EVERY_STEP), KFAC(model, **EVERY_STEP)
    for batch in vectors(2):
        model.zero_grad()
        backward(model, batch)
        older.step()
        newer.step()
    assert set(older.curvature) == set(newer.curvature) == {"0", "2"}


def test_two_that_are_used_say_which_one_speaks(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    first = TEKFAC(model, likelihood="bernoulli", **EVERY_STEP)
    second = KFAC(model, **EVERY_STEP)
    with caplog.at_level(logging.INFO, "tekfac"):
        first.zero_grad()
        second.zero_grad()
        backward(model, vectors(1)[0])
        first.step()
        second.step()
    told = [record.getMessage() for record in caplog.records if "The loss is" in record.getMessage()]
    assert len(told) == 2
    assert told[0].startswith("TEKFAC, optimizer no. 1 of this model: The loss is")
    assert told[1].startswith("KFAC, optimizer no. 2 of this model: The loss is")


def test_one_alone_needs_no_name(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    for _ in range(2):
        optimizer = TEKFAC(model, **EVERY_STEP)
        with caplog.at_level(logging.INFO, "tekfac"):
            train(model, optimizer, vectors(1))
        del optimizer
        gc.collect()
    told = [record.getMessage() for record in caplog.records if "The loss is" in record.getMessage()]
    assert len(told) == 2
    assert all(message.startswith("The loss is") for message in told)


# -- a backward pass that failed -------------------------------------------------------------------------


class Breaking(nn.Module):
    """Raises in its backward pass, when it is told to, where a drawn label comes by, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)
        self.breaks = False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.breaks:
            hidden.register_hook(self._break)  # type: ignore[no-untyped-call]
        out: Tensor = self.second(hidden)
        return out

    def _break(self, gradient: Tensor) -> None:
        raise MemoryError


def run(optimizer_of: Callable[[nn.Module], NaturalGradient], breaks: bool) -> Any:
    model = Breaking()
    optimizer = optimizer_of(model)
    for step, batch in enumerate(vectors(3)):
        if breaks and step:
            model.breaks = True
            with pytest.raises(MemoryError):
                backward(model, vectors(1, seed=9)[0])
            model.breaks = False
            model.zero_grad()
        backward(model, batch)
        optimizer.step()
        model.zero_grad()
    return everything(model, optimizer)


@pytest.mark.parametrize("fisher", ["sampled", "empirical", "exact"])
def test_after_zero_grad_of_the_model_it_is_as_if_it_had_not_been(fisher: Any) -> None:
    def make(model: nn.Module) -> NaturalGradient:
        return TEKFAC(model, lr=0.05, seed=0, fisher=fisher, statistics_samples=4, **EVERY_STEP)

    assert_identical(run(make, breaks=True), run(make, breaks=False))


def test_labels_that_were_drawn_for_it_are_taken_back_in_the_saved_state_too() -> None:
    model = Breaking()
    optimizer = TEKFAC(model, seed=0, fisher="sampled", **EVERY_STEP)
    train(model, optimizer, vectors(1))
    before = everything(model, optimizer)
    model.zero_grad()
    model.breaks = True
    with pytest.raises(MemoryError):
        backward(model, vectors(1)[0])
    model.zero_grad()
    after = everything(model, optimizer)
    assert_identical(saved_whole(before["optimizer"])["sampling"], saved_whole(after["optimizer"])["sampling"])
