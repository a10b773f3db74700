"""Promise: in a loop of one's own, with accumulation, clipping and a schedule, TEKFAC gets further than SGD."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from framework_examples import assert_same_end, example, left_to_adamw, without_curvature


@pytest.fixture(scope="module")
def plain_loop() -> ModuleType:
    return example("plain_loop")


@pytest.fixture(scope="module")
def runs(plain_loop: ModuleType) -> Any:
    torch.set_num_threads(1)
    return plain_loop.main()


def test_the_loss_is_lower_than_that_of_sgd(plain_loop: ModuleType, runs: Any) -> None:
    tekfac, sgd, _ = runs
    assert plain_loop.loss_of(tekfac) < plain_loop.loss_of(sgd) < 0.1


def test_a_run_resumed_from_its_checkpoint_is_the_uninterrupted_one(runs: Any) -> None:
    tekfac, _, resumed = runs
    assert_same_end(tekfac.model, tekfac.optimizer, resumed.model, resumed.optimizer)
    assert tekfac.schedule.state_dict() == resumed.schedule.state_dict()


def test_every_weight_but_those_of_norms_is_preconditioned(runs: Any) -> None:
    tekfac, _, _ = runs
    assert without_curvature(tekfac.model, tekfac.optimizer) == left_to_adamw(tekfac.model)
