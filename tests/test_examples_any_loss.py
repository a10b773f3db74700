"""Promise: in the examples of losses of all kinds TEKFAC, told nothing, ends at or below Adam at its best."""

from __future__ import annotations

from statistics import mean
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from framework_examples import example
from tekfac import TEKFAC
from tekfac.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Unknown

SQUARES = Gaussian(0.5, masked=True)

FOUND: dict[str, list[dict[str, Likelihood]]] = {
    "two_heads": [{"digit": Categorical(class_dim=1), "centre": SQUARES}],
    "question_answering": [{"start_logits": Categorical(class_dim=1), "end_logits": Categorical(class_dim=1)}],
    "actor_critic": [{"policy": Unknown(), "value": SQUARES}],
    "gan_ring": [{"": Bernoulli()}, {"": Unknown()}],
    "raw_regression": [{"": SQUARES}],
}
"""By example, of every optimizer that it makes."""


@pytest.fixture(scope="module", params=FOUND)
def script(request: pytest.FixtureRequest) -> ModuleType:
    needs = "transformers" if request.param == "question_answering" else "sklearn"
    return example(request.param, needs=needs, extra="test")


def test_likelihoods_are_found(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "STEPS", 20)
    made: list[TEKFAC] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        made.append(TEKFAC(model))
        return made[-1]

    script.train(make, 0)
    assert [optimizer.likelihoods for optimizer in made] == FOUND[script.__name__.removeprefix("example_")]
    assert all(optimizer.curvature and not optimizer.skipped_steps for optimizer in made)


@pytest.fixture(scope="module")
def comparison(script: ModuleType) -> Any:
    torch.set_num_threads(1)
    return script.main()


@pytest.mark.slow
def test_over_all_seeds_it_ends_at_or_below_adam_at_its_best_rate(comparison: Any) -> None:
    assert mean(comparison.tekfac) <= mean(comparison.best_adam)


@pytest.mark.slow
def test_with_every_seed_it_ends_at_or_below_adam_at_its_own_rate(comparison: Any) -> None:
    pairs = zip(comparison.tekfac, comparison.adam[3e-3], strict=True)
    assert all(own <= other for own, other in pairs)


@pytest.mark.slow
def test_likelihoods_stay_what_they_were(script: ModuleType, comparison: Any) -> None:
    found = FOUND[script.__name__.removeprefix("example_")] * len(comparison.tekfac)
    assert [optimizer.likelihoods for optimizer in comparison.optimizers] == found
