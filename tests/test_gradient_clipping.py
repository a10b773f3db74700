"""Promise: gradients may be clipped before the step, and reset in any way; the curvature does not notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from dense import assert_close, every_method, normal, seeded
from tekfac import KFAC, TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, everything, images, mlp, vectors

DAMPING = 0.1
LR = 0.5
Clip = Callable[[nn.Module], object]
CLIPS: dict[str, Clip] = {
    "by norm": lambda model: clip_grad_norm_(model.parameters(), 0.02),
    "by the largest entry": lambda model: clip_grad_norm_(model.parameters(), 0.02, norm_type=float("inf")),
    "by value": lambda model: clip_grad_value_(model.parameters(), 0.01),
}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def stepped(
    method: type[NaturalGradient], model: nn.Module, clip: Clip | None
) -> tuple[NaturalGradient, dict[str, Tensor], dict[str, Tensor]]:
    """One measured step: the optimizer, the gradients it was given, and how far each parameter moved."""
    optimizer = method.natural(model, lr=LR, momentum=0.0, damping=DAMPING, fisher="exact")
    backward(model, vectors(1, samples=12)[0])
    if clip is not None:
        clip(model)
    gradients, before = gradients_of(model), parameters_of(model)
    optimizer.step()
    after = parameters_of(model)
    return optimizer, gradients, {name: before[name] - after[name] for name in before}


@pytest.mark.parametrize("clip", CLIPS)
@every_method
def test_the_step_is_the_preconditioned_clipped_gradient(method: type[NaturalGradient], clip: str) -> None:
    plain, unclipped, _ = stepped(method, mlp(), None)
    optimizer, clipped, moved = stepped(method, mlp(), CLIPS[clip])
    assert any((clipped[name] - unclipped[name]).abs().max() > 1e-3 for name in clipped)
    expected = optimizer.curvature.solve(clipped, damping=DAMPING)
    for name in moved:
        assert_close(moved[name], LR * expected[name])
    assert_identical(optimizer.curvature.to_dense(), plain.curvature.to_dense())


@every_method
def test_clipping_on_a_step_that_does_not_measure_works_alike(method: type[NaturalGradient]) -> None:
    model = mlp()
    optimizer = method.natural(model, lr=LR, momentum=0.0, damping=DAMPING, fisher="empirical")
    first, second = vectors(2, samples=12)
    backward(model, first)
    optimizer.step()
    curvature = optimizer.curvature
    optimizer.zero_grad()
    backward(model, second)
    clip_grad_norm_(model.parameters(), 0.02)
    gradients, before = gradients_of(model), parameters_of(model)
    optimizer.step()
    expected = curvature.solve(gradients, damping=DAMPING)
    for name, after in parameters_of(model).items():
        assert_close(before[name] - after, LR * expected[name])
    assert_identical(optimizer.curvature.to_dense(), curvature.to_dense())


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_micro_batches_that_are_clipped_together_step_like_a_clipped_batch(fisher: str) -> None:
    states = []
    for split in ((12,), (5, 4, 3)):
        model = mlp()
        optimizer = TEKFAC.natural(model, lr=LR, damping=DAMPING, fisher=fisher, factors_every=2)  # type: ignore[arg-type]
        for x, y in vectors(3, samples=12):
            optimizer.zero_grad()
            for part in zip(x.split(list(split)), y.split(list(split)), strict=True):
                share = len(part[0]) / 12
                backward(model, part, lambda out, y, share=share: share * nn.functional.cross_entropy(out, y))
            clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        states.append([*parameters_of(model).values(), optimizer.curvature.to_dense()])
    for whole, cut in zip(*states, strict=True):
        assert_close(cut, whole)


def test_a_gradient_clipped_to_nothing_moves_nothing_and_is_no_error() -> None:
    model = mlp()
    optimizer, _, moved = stepped(TEKFAC, model, lambda model: clip_grad_value_(model.parameters(), 0.0))
    assert all(not bool(distance.any()) for distance in moved.values())
    assert optimizer.num_steps == 1
    assert set(optimizer.curvature) == {"0", "2"}


RESETS: dict[str, Callable[[nn.Module, NaturalGradient], None]] = {
    "optimizer, to None": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model, to None": lambda model, optimizer: model.zero_grad(set_to_none=True),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()] and None,
}


def convolutional() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(27, 3))
    )


@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
@pytest.mark.parametrize("method", [KFAC, TEKFAC])
@pytest.mark.parametrize("where", ["after the step", "before the backward pass"])
def test_every_way_to_reset_gradients_gives_the_same_run(
    method: type[NaturalGradient], fisher: str, where: str
) -> None:
    """Bit for bit, momentum, averages and drawn labels included."""
    states = []
    for reset in RESETS.values():
        model = convolutional()
        settings = {"factors_every": 2, "basis_every": 2, "seed": 0, "fisher": fisher}
        optimizer = method.natural(model, lr=0.05, damping=DAMPING, **settings)  # type: ignore[arg-type]
        for batch in images(5):
            if where == "before the backward pass":
                reset(model, optimizer)
            backward(model, batch)
            optimizer.step()
            if where == "after the step":
                reset(model, optimizer)
        states.append(everything(model, optimizer))
    for state in states[1:]:
        assert_identical(state, states[0])


def test_gradients_reset_between_the_passes_of_an_evaluation_do_not_count() -> None:
    """A user looks at gradients of other data, resets them, and trains on."""
    states = []
    for looks in (False, True):
        model = mlp()
        optimizer = TEKFAC.natural(model, lr=0.05, seed=0, factors_every=1)
        for batch in vectors(3):
            if looks:
                backward(model, (normal(6, 5, seed=9), batch[1]))
            optimizer.zero_grad(set_to_none=not looks)
            backward(model, batch)
            optimizer.step()
        states.append(everything(model, optimizer))
    assert_identical(*states)
    assert torch.isfinite(states[0]["model"]["0.weight"]).all()
