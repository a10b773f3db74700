"""Promise: under accelerate TEKFAC gets further than SGD, accumulates, takes bfloat16, resumes bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from framework_examples import assert_same_end, example, left_to_adamw, unwrapped, weights, without_curvature
from tekfac import TEKFAC


@pytest.fixture(scope="module")
def accelerate_digits() -> ModuleType:
    return example("accelerate_digits", needs="accelerate", extra="huggingface")


@pytest.fixture(scope="module")
def runs(accelerate_digits: ModuleType) -> Any:
    torch.set_num_threads(1)
    return accelerate_digits.main()


def test_the_loss_is_lower_than_that_of_sgd(runs: Any) -> None:
    tekfac, sgd, _ = runs
    assert tekfac.loss() < sgd.loss() < 0.1


def test_a_run_resumed_from_its_checkpoint_is_the_uninterrupted_one(runs: Any) -> None:
    tekfac, _, resumed = runs
    assert_same_end(tekfac.model, tekfac.optimizer, resumed.model, resumed.optimizer)


def test_every_weight_but_those_of_norms_is_preconditioned(runs: Any) -> None:
    tekfac, _, _ = runs
    assert without_curvature(tekfac.model, tekfac.optimizer) == left_to_adamw(tekfac.model)


def test_accumulated_batches_are_one_batch(accelerate_digits: ModuleType) -> None:
    """Two times 32 images make the step of 64; labels are not drawn here, so that nothing is left to chance."""
    from accelerate import Accelerator

    images, labels = accelerate_digits.digits().tensors
    ends = []
    for parts in (1, 2):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))
        optimizer = TEKFAC.natural(
            model, lr=0.03, fisher="exact", factors_every=1, basis_every=1, rescaling_every=1
        )
        model, optimizer = accelerator.prepare(model, optimizer)
        for start in range(0, 256, 64 // parts):
            with accelerator.accumulate(model):
                chosen = slice(start, start + 64 // parts)
                loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        assert unwrapped(optimizer).num_steps == 4
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)


@pytest.fixture
def other_precision(accelerate_digits: ModuleType, runs: Any) -> Iterator[None]:
    """Accelerate keeps one precision for a whole process; here it may be chosen again."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.mark.usefixtures("other_precision")
def test_bfloat16_gives_nearly_the_same_and_leaves_parameters_and_curvature_in_float32(
    accelerate_digits: ModuleType, runs: Any
) -> None:
    run = accelerate_digits.Run("TEKFAC", mixed_precision="bf16")
    seen = []
    run.model[-1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    run.train(range(accelerate_digits.EPOCHS))
    assert set(seen) == {torch.bfloat16}
    assert without_curvature(run.model, run.optimizer) == without_curvature(runs[0].model, runs[0].optimizer)
    assert unwrapped(run.optimizer).skipped_steps == 0
    assert unwrapped(run.optimizer).curvature.to_dense().dtype == torch.float32
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert run.loss() < runs[1].loss()
