"""Promise: under a GradScaler curvature and steps are those without one, and a skipped step leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

from dense import assert_close, every_method
from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import Batch, assert_identical, everything, mlp, vectors

RTOL = 1e-5  # float32; scales are powers of two, so nothing but an overflow could make a difference
FISHERS = ("sampled", "exact", "empirical")
SETTINGS: dict[str, Any] = {
    "lr": 0.05,
    "damping": 0.1,
    "seed": 0,
    "interval_growth": None,
    "factors_every": 2,
    "basis_every": 2,
}

every_fisher = pytest.mark.parametrize("fisher", FISHERS)


def classifier() -> nn.Sequential:
    return mlp(dtype=torch.float32)


def data(count: int) -> list[Batch]:
    return vectors(count, samples=12, dtype=torch.float32)


def a_scaler(**settings: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 2.0**16, **settings})


def optimizer_for(
    model: nn.Module, fisher: Any, scaler: GradScaler | None, method: type[NaturalGradient] = TEKFAC
) -> NaturalGradient:
    """The scaler is only made known where the training gradient itself is measured."""
    known = {"grad_scaler": scaler} if fisher == "empirical" and scaler is not None else {}
    return method(model, fisher=fisher, **SETTINGS, **known)


def plain_run(
    fisher: Any, batches: list[Batch], clip: float | None = None, method: type[NaturalGradient] = TEKFAC
) -> tuple[nn.Module, NaturalGradient]:
    model = classifier()
    optimizer = optimizer_for(model, fisher, None, method)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, optimizer


def scaled_step(
    model: nn.Module, optimizer: NaturalGradient, scaler: GradScaler, batch: Batch, clip: float | None = None
) -> None:
    """As in torch's own recipe."""
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(batch[0]), batch[1])).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()


def assert_alike(a: nn.Module, of_a: NaturalGradient, b: nn.Module, of_b: NaturalGradient) -> None:
    assert of_a.num_steps == of_b.num_steps
    assert_close(of_a.curvature.to_dense(), of_b.curvature.to_dense(), RTOL)
    for own, other in zip(a.parameters(), b.parameters(), strict=True):
        assert_close(own.detach(), other.detach(), RTOL)


@pytest.mark.every_pair
@every_fisher
@pytest.mark.parametrize("clip", [None, 0.05], ids=["no clipping", "unscaled and clipped"])
@every_method
def test_curvature_and_steps_are_those_without_a_scaler(
    method: type[NaturalGradient], clip: float | None, fisher: Any
) -> None:
    batches = data(5)
    expected, of_expected = plain_run(fisher, batches, clip, method)
    model, scaler = classifier(), a_scaler()
    optimizer = optimizer_for(model, fisher, scaler, method)
    for batch in batches:
        scaled_step(model, optimizer, scaler, batch, clip)
    assert scaler.get_scale() == 2.0**16
    assert_alike(model, optimizer, expected, of_expected)


@every_fisher
def test_a_scale_that_changes_from_step_to_step_is_followed(fisher: Any) -> None:
    batches = data(5)
    expected, of_expected = plain_run(fisher, batches)
    model, scaler = classifier(), a_scaler(init_scale=4.0, growth_interval=1)
    optimizer = optimizer_for(model, fisher, scaler)
    for batch in batches:
        scaled_step(model, optimizer, scaler, batch)
    assert scaler.get_scale() == 2.0**7
    assert_alike(model, optimizer, expected, of_expected)


@every_fisher
def test_a_disabled_scaler_is_no_scaler(fisher: Any) -> None:
    batches = data(3)
    expected, of_expected = plain_run(fisher, batches)
    model, scaler = classifier(), a_scaler(enabled=False)
    optimizer = optimizer_for(model, fisher, scaler)
    for batch in batches:
        scaled_step(model, optimizer, scaler, batch, clip=1e9)
    assert_alike(model, optimizer, expected, of_expected)


@every_fisher
def test_a_scaler_that_is_made_known_without_need_changes_nothing(fisher: Any) -> None:
    batches = data(3)
    expected, of_expected = plain_run(fisher, batches)
    model, scaler = classifier(), a_scaler()
    optimizer = TEKFAC(model, fisher=fisher, grad_scaler=scaler, **SETTINGS)
    for batch in batches:
        scaled_step(model, optimizer, scaler, batch)
    assert_alike(model, optimizer, expected, of_expected)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_scaled_micro_batches_are_those_of_the_whole_batch(fisher: Any) -> None:
    batches = data(3)
    expected, of_expected = plain_run(fisher, batches)
    model, scaler = classifier(), a_scaler()
    optimizer = optimizer_for(model, fisher, scaler)
    for x, y in batches:
        optimizer.zero_grad()
        for part in (slice(0, 5), slice(5, 8), slice(8, 12)):
            scaler.scale(F.cross_entropy(model(x[part]), y[part], reduction="sum") / 12).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_alike(model, optimizer, expected, of_expected)


def test_the_scaler_of_something_else_is_refused() -> None:
    with pytest.raises((TypeError, ValueError), match="grad_scaler") as error:
        TEKFAC(classifier(), fisher="empirical", grad_scaler=2.0)  # type: ignore[arg-type]
    assert "2.0" in str(error.value) or "float" in str(error.value)
    assert "GradScaler" in str(error.value)


# -- overflow --------------------------------------------------------------------------------------------


def through_the_loss(model: nn.Module, scaler: GradScaler, batch: Batch) -> None:
    """The gradient is infinite from the outputs on."""
    scaler.scale(F.cross_entropy(model(batch[0]), batch[1]) * 1e38).backward()


def in_one_gradient(model: nn.Module, scaler: GradScaler, batch: Batch) -> None:
    """The backward pass is healthy, and so are its statistics; one gradient overflows."""
    scaler.scale(F.cross_entropy(model(batch[0]), batch[1])).backward()
    gradient = next(model.parameters()).grad
    assert isinstance(gradient, Tensor)
    gradient[0, 0] = float("inf")


def in_a_second_micro_batch(model: nn.Module, scaler: GradScaler, batch: Batch) -> None:
    scaler.scale(F.cross_entropy(model(batch[0]), batch[1])).backward()
    through_the_loss(model, scaler, batch)


POISONS: dict[str, Callable[[nn.Module, GradScaler, Batch], None]] = {
    "through the loss": through_the_loss,
    "in one gradient": in_one_gradient,
    "in a second micro-batch": in_a_second_micro_batch,
}
RESETS: dict[str, Callable[[nn.Module, NaturalGradient], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
}


@pytest.mark.every_pair
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("when", [2, 3], ids=["on a measured step", "on another step"])
@every_fisher
def test_a_step_that_the_scaler_skips_leaves_no_trace(fisher: Any, when: int, poison: str, reset: str) -> None:
    """Nothing changes bit for bit, and the run goes on as one that never met the batch."""
    batches = data(5)
    expected, of_expected = plain_run(fisher, batches)
    model, scaler = classifier(), a_scaler()
    optimizer = optimizer_for(model, fisher, scaler)

    def healthy_step(batch: Batch) -> None:
        RESETS[reset](model, optimizer)
        scaler.scale(F.cross_entropy(model(batch[0]), batch[1])).backward()
        scaler.step(optimizer)
        scaler.update()

    for batch in batches[:when]:
        healthy_step(batch)
    before, curvature = everything(model, optimizer), optimizer.curvature.to_dense()

    RESETS[reset](model, optimizer)
    POISONS[poison](model, scaler, data(6)[5])
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    RESETS[reset](model, optimizer)
    assert_identical(everything(model, optimizer), before)
    assert_identical(optimizer.curvature.to_dense(), curvature)

    for batch in batches[when:]:
        healthy_step(batch)
    assert optimizer.num_steps == 5
    assert optimizer.skipped_steps == 0
    assert_alike(model, optimizer, expected, of_expected)


@every_fisher
def test_a_first_step_that_the_scaler_skips_is_no_first_step(fisher: Any) -> None:
    """As with every scale that starts too high: the first steps are skipped, then training starts."""
    batches = data(3)
    expected, of_expected = plain_run(fisher, batches)
    model, scaler = classifier(), a_scaler()
    optimizer = optimizer_for(model, fisher, scaler)
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        model.zero_grad()
        in_one_gradient(model, scaler, batches[2])
        scaler.step(optimizer)
        scaler.update()
    assert not optimizer.curvature
    assert optimizer.num_steps == 0
    assert_identical([p.detach() for p in model.parameters()], start)
    for batch in batches:
        model.zero_grad()
        scaler.scale(F.cross_entropy(model(batch[0]), batch[1])).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_alike(model, optimizer, expected, of_expected)


@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_float16_autocast_with_a_scaler_trains(fisher: Any) -> None:
    """The usual use. The scale starts so high that the first backward passes overflow in float16."""
    model, scaler = mlp(dtype=torch.float32, sizes=(20, 16, 5)), a_scaler(init_scale=2.0**24)
    optimizer = optimizer_for(model, fisher, scaler)
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(5, 20, generator=generator)
    losses = []
    for _ in range(40):
        y = torch.randint(5, (32,), generator=generator)
        x = prototypes[y] + 0.5 * torch.randn(32, 20, generator=generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() < 2.0**24
    assert 0 < optimizer.num_steps < 40
    assert len(optimizer.curvature) == 2
    assert sum(losses[-5:]) < 0.3 * sum(losses[:5])
