"""Promise: under Lightning, automatic and manual, TEKFAC gets further than SGD and resumes bit by bit."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from framework_examples import assert_same_end, example, left_to_adamw, weights, without_curvature
from tekfac import TEKFAC

# Lightning's own: it uses a part of torch that is going away, and advises on workers and on float32.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]


@pytest.fixture(scope="module")
def lightning_digits() -> ModuleType:
    return example("lightning_digits", needs="lightning", extra="lightning")


@pytest.fixture(scope="module", params=["Digits", "ManualDigits"])
def runs(request: pytest.FixtureRequest, lightning_digits: ModuleType) -> Any:
    torch.set_num_threads(1)
    return lightning_digits.main(getattr(lightning_digits, request.param))


def optimizer_of(module: Any) -> TEKFAC:
    (optimizer,) = module.trainer.optimizers
    return optimizer


def test_the_loss_is_lower_than_that_of_sgd(lightning_digits: ModuleType, runs: Any) -> None:
    tekfac, sgd, _ = runs
    assert lightning_digits.loss_of(tekfac) < lightning_digits.loss_of(sgd) < 0.1


def test_a_run_resumed_from_its_checkpoint_is_the_uninterrupted_one(runs: Any) -> None:
    tekfac, _, resumed = runs
    assert_same_end(tekfac, optimizer_of(tekfac), resumed, optimizer_of(resumed))


def test_every_weight_but_those_of_norms_is_preconditioned(runs: Any) -> None:
    tekfac, _, _ = runs
    assert without_curvature(tekfac.network, optimizer_of(tekfac)) == left_to_adamw(tekfac.network)


def test_accumulated_batches_are_one_batch(lightning_digits: ModuleType, tmp_path: Path) -> None:
    """Two times 64 images make the step of 128, clipped; no labels are drawn: nothing is left to chance."""

    class Exact(lightning_digits.Digits):
        def __init__(self) -> None:
            super().__init__("TEKFAC")
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))

        def configure_optimizers(self) -> Any:
            every_step = {"factors_every": 1, "basis_every": 1, "rescaling_every": 1}
            return TEKFAC.natural(self.network, lr=0.03, fisher="exact", **every_step)

    ends = []
    for parts in (1, 2):
        lightning_digits.BATCH = 128 // parts
        module = lightning_digits.fit(
            Exact(),
            tmp_path,
            epochs=1,
            accumulate_grad_batches=parts,
            gradient_clip_val=0.5,
            limit_train_batches=4 * parts,
        )
        assert optimizer_of(module).num_steps == 4
        ends.append(weights(module.network))
    lightning_digits.BATCH = 128
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)


def test_bfloat16_gives_nearly_the_same_and_leaves_parameters_and_curvature_in_float32(
    lightning_digits: ModuleType, runs: Any, tmp_path: Path
) -> None:
    module = type(runs[0])("TEKFAC")
    seen = []
    module.network[-1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    lightning_digits.fit(module, tmp_path, precision="bf16-mixed")
    optimizer = optimizer_of(module)
    assert set(seen) == {torch.bfloat16}
    assert without_curvature(module.network, optimizer) == without_curvature(
        runs[0].network, optimizer_of(runs[0])
    )
    assert optimizer.skipped_steps == 0
    assert optimizer.curvature.to_dense().dtype == torch.float32
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert lightning_digits.loss_of(module) < lightning_digits.loss_of(runs[1])
