"""Promise: the Hugging Face Trainer gets BERT and GPT-2 further with TEKFAC than with SGD, and resumes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from framework_examples import assert_same_end, example, left_to_adamw, unwrapped, weights, without_curvature
from tekfac import TEKFAC
from training import saved_curvature


@pytest.fixture(
    scope="module", params=["huggingface_bert", pytest.param("huggingface_gpt2", marks=pytest.mark.slow)]
)
def script(request: pytest.FixtureRequest) -> ModuleType:
    return example(request.param, needs="transformers", extra="huggingface")


@pytest.fixture(scope="module")
def bert() -> ModuleType:
    return example("huggingface_bert", needs="transformers", extra="huggingface")


@pytest.fixture(scope="module")
def runs(script: ModuleType) -> Any:
    torch.set_num_threads(1)
    return script.main()


@pytest.mark.slow
def test_the_loss_is_lower_than_that_of_sgd(script: ModuleType, runs: Any) -> None:
    tekfac, sgd, _ = runs
    untrained = 1.386 if script.__name__.endswith("bert") else 4.852  # log 4 modules, log 128 bytes
    assert script.loss_of(tekfac) < script.loss_of(sgd) < 0.65 * untrained


@pytest.mark.slow
def test_a_run_resumed_from_its_checkpoint_is_the_uninterrupted_one(runs: Any) -> None:
    tekfac, _, resumed = runs
    assert resumed.state.global_step == tekfac.state.global_step
    assert_same_end(tekfac.model, tekfac.optimizer, resumed.model, resumed.optimizer)


@pytest.mark.slow
def test_every_parameter_is_preconditioned_those_of_embeddings_and_conv1d_included(runs: Any) -> None:
    """But for norms, and the embeddings of positions, which are looked up once for all samples."""
    tekfac, _, _ = runs
    kinds = {type(module).__name__ for module in tekfac.model.modules()}
    assert {"Embedding", "LayerNorm"} < kinds
    assert kinds & {"Conv1D", "BertAttention"}
    of_positions = {n for n, _ in tekfac.model.named_parameters() if "position_embeddings" in n or ".wpe." in n}
    assert without_curvature(tekfac.model, tekfac.optimizer) == of_positions | left_to_adamw(tekfac.model)


def test_checkpointing_of_activations_changes_nothing(script: ModuleType, tmp_path: Path) -> None:
    """The forward pass is repeated within the backward pass, dropout included; it must not be counted twice."""
    settings = {"max_steps": 12, "save_strategy": "no", "logging_strategy": "steps", "logging_steps": 1}
    plain = script.make_trainer("TEKFAC", tmp_path, **settings)
    plain.train()
    renamed = hasattr(plain.args, "activation_checkpointing")  # by transformers 5.4 or so
    setting = "activation_checkpointing" if renamed else "gradient_checkpointing"
    checkpointed = script.make_trainer(
        "TEKFAC",
        tmp_path,
        **{setting: True, f"{setting}_kwargs": {"use_reentrant": False}},
        **settings,
    )
    checkpointed.train()
    assert getattr(checkpointed.model, f"is_{setting}")
    assert losses(checkpointed) == losses(plain)
    assert len(losses(plain)) == 12
    assert_same_end(plain.model, plain.optimizer, checkpointed.model, checkpointed.optimizer)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_bfloat16_gives_nearly_the_same_and_leaves_parameters_and_curvature_in_float32(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all steps measure: a basis that is kept for some of them keeps its rounding, too."""
    monkeypatch.setattr("tekfac.optim.natural_gradient.first_interval", lambda *_: 1)
    settings = {"max_steps": 12, "save_strategy": "no", "logging_strategy": "steps", "logging_steps": 1}
    plain = script.make_trainer("TEKFAC", tmp_path, **settings)
    plain.train()
    trainer = script.make_trainer("TEKFAC", tmp_path, bf16=True, **settings)
    seen = []
    last = [module for module in trainer.model.modules() if isinstance(module, nn.Linear)][-1]
    last.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trainer.train()
    assert set(seen) == {torch.bfloat16}
    optimizer = unwrapped(trainer.optimizer)
    assert set(optimizer.curvature) == set(unwrapped(plain.optimizer).curvature)
    assert optimizer.num_steps == 12
    assert optimizer.skipped_steps == 0
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert {moment.dtype for moment in tensors(saved_curvature(optimizer.state_dict()))} == {torch.float32}
    # Gradients differ in the third digit, and the first steps are of the same length in all directions.
    assert losses(trainer) == pytest.approx(losses(plain), rel=0.06)


def tensors(state: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a nested state."""
    if isinstance(state, torch.Tensor):
        return [state] if state.is_floating_point() else []
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for value in values for tensor in tensors(value)]


def bert_trainer(bert: ModuleType, folder: Path, optimizer: dict[str, Any], **more: Any) -> Any:
    """BERT without dropout, with a TEKFAC that leaves nothing to chance, for a few steps at a constant rate.

    The position embeddings are looked up once for all samples, which `fisher="exact"` cannot take apart.
    """
    every_step = {"factors_every": 1, "basis_every": 1, "rescaling_every": 1}
    settings = {"fisher": "exact", "statistics_samples": None, "basis_tolerance": 0.0, **every_step}
    settings["first_order"] = ["bert.embeddings.position_embeddings"]

    def without_dropout(model: nn.Module) -> TEKFAC:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0
        return TEKFAC.natural(model, **settings, **optimizer)

    bert.OPTIMIZERS["here"] = without_dropout
    quiet = {"save_strategy": "no", "logging_strategy": "steps", "logging_steps": 1}
    return bert.make_trainer("here", folder, **{"lr_scheduler_type": "constant", **quiet, **more})


def test_accumulated_batches_are_one_batch(bert: ModuleType, tmp_path: Path) -> None:
    """Two times 8 lines, padded to different lengths, make the step of 16."""
    ends = []
    for parts in (1, 2):
        trainer = bert_trainer(
            bert,
            tmp_path,
            {"lr": 0.01},
            max_steps=3,
            per_device_train_batch_size=16 // parts,
            gradient_accumulation_steps=parts,
            max_grad_norm=1.0,
        )
        # BERT takes the mean over a micro-batch; the Trainer believes it is one over all that are accumulated.
        trainer.loss_is_scaled_for_ga = False
        trainer.train()
        assert unwrapped(trainer.optimizer).num_steps == 3
        ends.append(weights(trainer.model))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-4)


def test_clipping_by_the_trainer_shortens_the_gradient_before_it_is_preconditioned(
    bert: ModuleType, tmp_path: Path
) -> None:
    moves, norms = [], []
    for max_norm in (1e9, 0.05):
        trainer = bert_trainer(bert, tmp_path, {"lr": 0.01}, max_steps=1, max_grad_norm=max_norm)
        before = weights(trainer.model)
        trainer.train()
        moves.append(weights(trainer.model) - before)
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0.1
    assert float(moves[1].norm() / moves[0].norm()) == pytest.approx(0.05 / norms[0], rel=1e-3)
