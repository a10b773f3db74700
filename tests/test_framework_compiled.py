"""Promise: a compiled model is trained like any other, and stays compiled on all steps that do not measure."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from framework_examples import assert_same_end, example, left_to_adamw, unwrapped, without_curvature
from tekfac.optim.schedule import Clock
from tekfac.optim.settings import Settings

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",  # the compiler's own import
    "ignore:Skipping serialization of skipfiles:UserWarning",  # of torch 2.6 about itself
)


@pytest.fixture(scope="module")
def compiled_digits() -> ModuleType:
    return example("compiled_digits")


@pytest.fixture(scope="module")
def runs(compiled_digits: ModuleType) -> Any:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    return compiled_digits.main()


@pytest.mark.slow
def test_the_loss_is_lower_than_that_of_sgd(compiled_digits: ModuleType, runs: Any) -> None:
    tekfac, sgd, _ = runs
    assert compiled_digits.loss_of(tekfac) < compiled_digits.loss_of(sgd) < 0.2


@pytest.mark.slow
def test_a_run_resumed_from_its_checkpoint_is_the_uninterrupted_one(runs: Any) -> None:
    tekfac, _, resumed = runs
    assert_same_end(tekfac.model, tekfac.optimizer, resumed.model, resumed.optimizer)


@pytest.mark.slow
def test_every_weight_but_those_of_norms_is_preconditioned(runs: Any) -> None:
    tekfac, _, _ = runs
    assert without_curvature(tekfac.model, tekfac.optimizer) == left_to_adamw(tekfac.model)


def test_the_losses_are_those_of_the_model_without_a_compiler(compiled_digits: ModuleType) -> None:
    torch._dynamo.reset()
    compiled = compiled_digits.train(compiled_digits.start("TEKFAC", "aot_eager"), range(15))
    assert compiled == pytest.approx(uncompiled_losses(compiled_digits, 15), rel=1e-4)


def uncompiled_losses(compiled_digits: ModuleType, steps: int) -> list[float]:
    run = compiled_digits.start("TEKFAC", "eager")
    return compiled_digits.train(run._replace(compiled=run.model), range(steps))


class Counting:
    """A backend that runs graphs as they are, and counts them and their calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return graph.forward(*arguments)

        return run


def calls_by_step(compiled_digits: ModuleType, run: Any, backend: Counting, steps: int) -> list[int]:
    counts = []
    for step in range(steps):
        before = backend.calls
        compiled_digits.train(run, range(step, step + 1))
        counts.append(backend.calls - before)
    return counts


def test_the_compiled_graph_runs_on_every_step_that_does_not_measure(compiled_digits: ModuleType) -> None:
    torch._dynamo.reset()
    backend = Counting()
    run = compiled_digits.start("TEKFAC", backend)
    counts = calls_by_step(compiled_digits, run, backend, 45)
    measuring = Clock(Settings.factors_every, Settings.interval_growth, unwrapped(run.optimizer)._least)
    assert counts == [measuring.latest(step) != step for step in range(45)]
    assert sum(counts) > 10
    assert backend.graphs == 1
