"""Running averages are right from the first value on (oracle 29)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dense import assert_close
from tekfac.averages import Average


def averaged(values: list[Tensor], decay: float) -> Average[tuple[Tensor]]:
    average = Average.of((values[0],))
    for value in values[1:]:
        average = average.updated((value,), decay)
    return average


@pytest.fixture
def values() -> list[Tensor]:
    return list(torch.randn(6, 3, 3, dtype=torch.float64))


def test_one_value_is_its_own_average(values: list[Tensor]) -> None:
    assert torch.equal(averaged(values[:1], 0.95).values[0], values[0])


def test_equal_values_are_their_own_average(values: list[Tensor]) -> None:
    assert_close(averaged([values[0]] * 5, 0.95).values[0], values[0], rtol=1e-15)


def test_decay_zero_keeps_the_last(values: list[Tensor]) -> None:
    assert torch.equal(averaged(values, 0.0).values[0], values[-1])


def test_decay_one_is_the_arithmetic_mean(values: list[Tensor]) -> None:
    assert_close(averaged(values, 1.0).values[0], torch.stack(values).mean(0))


@pytest.mark.parametrize("decay", [0.05, 0.5, 0.95])
def test_it_is_the_zero_started_average_without_its_bias(values: list[Tensor], decay: float) -> None:
    biased = torch.zeros_like(values[0])
    for value in values:
        biased = decay * biased + (1 - decay) * value
    average = averaged(values, decay)
    assert_close(average.values[0], biased / (1 - decay ** len(values)))
    assert average.weight == pytest.approx((1 - decay ** len(values)) / (1 - decay))


def test_an_update_leaves_the_old_average_as_it_was(values: list[Tensor]) -> None:
    old = averaged(values[:2], 0.9)
    before = old.values[0].clone()
    old.updated((values[2],), 0.9)
    assert torch.equal(old.values[0], before)
