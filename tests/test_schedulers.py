"""Learning-rate schedulers work as they do with torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from dense import METHODS
from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, cnn, images, mlp, train, vectors

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=4),
    "from zero": lambda o: lr_scheduler.LambdaLR(o, lambda k: k / 6),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=7),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, factor=0.5), lr_scheduler.ExponentialLR(o, gamma=0.5)], [2]
    ),
}


def settings_of(optimizer: Optimizer) -> list[tuple[float, float]]:
    return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # of an older SequentialLR about itself
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_groups_follow_the_scheduler_as_those_of_sgd_do(name: str) -> None:
    model, reference = mlp(), mlp()
    optimizer = TEKFAC.natural(model, lr=0.1, momentum=0.9)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    schedule, expected = SCHEDULERS[name](optimizer), SCHEDULERS[name](sgd)
    for batch in vectors(6):
        assert settings_of(optimizer) == settings_of(sgd)
        train(model, optimizer, [batch], scheduler=schedule)
        train(reference, sgd, [batch], scheduler=expected)
    assert settings_of(optimizer) == settings_of(sgd)


def test_a_plateau_lowers_the_rate() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for value in (1.0, 2.0, 3.0):
        train(model, optimizer, vectors(1))
        scheduler.step(value)
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("method", METHODS)
def test_a_scheduled_rate_acts_in_the_very_next_step(method: type[NaturalGradient]) -> None:
    """Without momentum a step is proportional to the rate."""
    data = vectors(3)

    def last_step(factor: float) -> torch.Tensor:
        model = mlp()
        optimizer = method.natural(model, lr=2.0**-8, momentum=0.0, seed=0)
        scheduler = lr_scheduler.MultiplicativeLR(optimizer, lambda _: factor)
        train(model, optimizer, data[:2])
        scheduler.step()
        before = model[0].weight.detach().clone()
        train(model, optimizer, data[2:])
        return model[0].weight.detach() - before

    torch.testing.assert_close(last_step(0.5), 0.5 * last_step(1.0), rtol=1e-9, atol=0)


def test_a_rate_of_zero_moves_no_parameter_and_still_gathers_statistics() -> None:
    model = cnn()
    optimizer = TEKFAC.natural(model, lr=0.1)
    lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, images(1))
    assert_identical({n: p.detach() for n, p in model.named_parameters()}, before)
    assert set(optimizer.curvature) == {"0", "1", "4"}


def test_each_group_can_have_its_own_schedule() -> None:
    model = cnn()
    optimizer = TEKFAC.natural(model, lr=0.1, first_order=[nn.BatchNorm2d], first_order_lr=0.5)
    scheduler = lr_scheduler.LambdaLR(optimizer, [lambda k: 0.5**k, lambda k: 0.1**k])
    train(model, optimizer, images(2), scheduler=scheduler)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.005])
