"""Promise: parameters may be frozen and unfrozen at any time; what is unfrozen is preconditioned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import assert_close, every_method
from tekfac import TEKFAC, explain
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, everything, mlp, through_a_file, vectors

LR, DAMPING = 0.5, 0.1
SIZES = (5, 4, 4, 3)
LAYERS = {"0", "2", "4"}
PARTS = {"the whole layer": ("2.weight", "2.bias"), "its bias": ("2.bias",), "its weight": ("2.weight",)}
every_part = pytest.mark.parametrize("frozen", PARTS.values(), ids=list(PARTS))


def network(frozen: Iterable[str] = ()) -> nn.Sequential:
    model = mlp(sizes=SIZES)
    set_frozen(model, frozen, True)
    return model


def set_frozen(model: nn.Module, names: Iterable[str], frozen: bool) -> None:
    for name in names:
        model.get_parameter(name).requires_grad_(not frozen)


def every_step(method: type[NaturalGradient]) -> dict[str, Any]:
    """Curvature of the last batch alone, measured at every step."""
    settings: dict[str, Any] = {"factors_every": 1, "basis_every": 1, "factor_decay": 0.0, "fisher": "exact"}
    if method.method.rescaling.measured:
        settings |= {"rescaling_every": 1, "rescaling_decay": 0.0}
    return settings


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def one_step(model: nn.Module, optimizer: NaturalGradient, seed: int = 1) -> dict[str, Tensor]:
    """How far each parameter moves."""
    before = parameters_of(model)
    optimizer.zero_grad()
    backward(model, vectors(1, samples=12, seed=seed)[0])
    optimizer.step()
    return {name: before[name] - after for name, after in parameters_of(model).items()}


def assert_preconditioned(model: nn.Module, optimizer: NaturalGradient, moved: dict[str, Tensor]) -> None:
    """All three layers moved, without momentum, along (F + damping I)^-1 g."""
    assert set(optimizer.curvature) == LAYERS
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert list(optimizer.curvature.parameters) == list(gradients) == list(moved)
    expected = optimizer.curvature.solve(gradients, damping=DAMPING)
    for name in moved:
        assert_close(moved[name], LR * expected[name])


@every_part
@every_method
def test_what_is_frozen_at_first_is_preconditioned_from_the_next_measured_step_after_it_is_unfrozen(
    method: type[NaturalGradient], frozen: tuple[str, ...]
) -> None:
    model = network(frozen)
    optimizer = method.natural(model, lr=LR, momentum=0.0, damping=DAMPING, **every_step(method))
    for seed in range(2):
        moved = one_step(model, optimizer, seed)
        assert all(bool(moved[name].any()) != (name in frozen) for name in moved)
    set_frozen(model, frozen, False)
    moved = one_step(model, optimizer, seed=2)
    assert_preconditioned(model, optimizer, moved)


@every_part
@every_method
def test_the_curvature_after_unfreezing_is_that_of_a_model_that_never_was_frozen(
    method: type[NaturalGradient], frozen: tuple[str, ...]
) -> None:
    model = network(frozen)
    optimizer = method.natural(model, lr=LR, momentum=0.0, damping=DAMPING, **every_step(method))
    one_step(model, optimizer)
    set_frozen(model, frozen, False)
    twin = network()
    twin.load_state_dict(model.state_dict())
    other = method.natural(twin, lr=LR, momentum=0.0, damping=DAMPING, **every_step(method))
    moved, expected = one_step(model, optimizer, seed=2), one_step(twin, other, seed=2)
    assert_close(optimizer.curvature.to_dense(), other.curvature.to_dense())
    for name in moved:
        assert_close(moved[name], expected[name])


@every_part
def test_steps_that_do_not_measure_come_between(frozen: tuple[str, ...]) -> None:
    """Measured are steps 0, 4, 8; unfrozen after step 1. At step 4 at the latest the layer has its block."""
    model = network(frozen)
    clock = {"factors_every": 4, "basis_every": 4, "rescaling_every": 4}
    optimizer = TEKFAC.natural(model, lr=LR, momentum=0.0, damping=DAMPING, fisher="exact", **clock)
    for seed in range(2):
        one_step(model, optimizer, seed)
    set_frozen(model, frozen, False)
    for seed in range(2, 4):
        moved = one_step(model, optimizer, seed)
        assert all(bool(distance.any()) for distance in moved.values())
    moved = one_step(model, optimizer, seed=4)
    assert_preconditioned(model, optimizer, moved)
    moved = one_step(model, optimizer, seed=5)  # with the curvature of step 4
    assert_preconditioned(model, optimizer, moved)


@pytest.mark.every_pair
@pytest.mark.parametrize("set_to_none", [True, False])
@every_part
@every_method
def test_frozen_parameters_never_move(
    method: type[NaturalGradient], frozen: tuple[str, ...], set_to_none: bool
) -> None:
    """Not by weight decay, nor by the momentum of the time before they were frozen."""
    model = network()
    optimizer = method.natural(model, lr=0.05, momentum=0.9, weight_decay=0.1, damping=DAMPING, factors_every=2)
    for batch in vectors(3):
        optimizer.zero_grad(set_to_none)
        backward(model, batch)
        optimizer.step()
    optimizer.zero_grad(set_to_none)
    set_frozen(model, frozen, True)
    before = parameters_of(model)
    for batch in vectors(4, seed=2):
        optimizer.zero_grad(set_to_none)
        backward(model, batch)
        optimizer.step()
    after = parameters_of(model)
    for name in before:
        assert torch.equal(before[name], after[name]) == (name in frozen), name
    assert optimizer.skipped_steps == 0


@every_part
@every_method
def test_what_was_frozen_from_the_start_never_moves(
    method: type[NaturalGradient], frozen: tuple[str, ...]
) -> None:
    model = network(frozen)
    before = parameters_of(model)
    optimizer = method.natural(model, lr=0.05, weight_decay=0.1, damping=DAMPING, factors_every=2)
    for batch in vectors(5):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    for name, after in parameters_of(model).items():
        assert torch.equal(before[name], after) == (name in frozen), name


@every_part
@every_method
def test_frozen_in_the_middle_and_unfrozen_again_it_is_preconditioned_again(
    method: type[NaturalGradient], frozen: tuple[str, ...]
) -> None:
    model = network()
    optimizer = method.natural(model, lr=LR, momentum=0.0, damping=DAMPING, **every_step(method))
    assert_preconditioned(model, optimizer, one_step(model, optimizer, seed=1))
    set_frozen(model, frozen, True)
    for seed in (2, 3):
        moved = one_step(model, optimizer, seed)
        assert all(bool(moved[name].any()) != (name in frozen) for name in moved)
    set_frozen(model, frozen, False)
    assert_preconditioned(model, optimizer, one_step(model, optimizer, seed=4))


def test_the_other_layers_do_not_notice() -> None:
    """Their curvature and steps are those of an optimizer that was never told of the frozen layer."""
    model = network(PARTS["the whole layer"])
    optimizer = TEKFAC.natural(model, lr=LR, damping=DAMPING, fisher="exact", factors_every=2)
    twin = network(PARTS["the whole layer"])
    other = TEKFAC.natural(twin, lr=LR, damping=DAMPING, fisher="exact", factors_every=2, first_order=["2"])
    for seed in range(3):
        one_step(model, optimizer, seed)
        one_step(twin, other, seed)
    assert_identical(model, twin)
    for layer in ("0", "4"):
        assert_identical(optimizer.curvature[layer].to_dense(), other.curvature[layer].to_dense())


def test_everything_frozen_but_the_head_is_no_error() -> None:
    """Linear probing; then the whole network is trained."""
    model = network()
    body = [name for name, _ in model.named_parameters() if not name.startswith("4.")]
    set_frozen(model, body, True)
    optimizer = TEKFAC.natural(model, lr=LR, momentum=0.0, damping=DAMPING, **every_step(TEKFAC))
    moved = one_step(model, optimizer)
    assert [name for name in moved if bool(moved[name].any())] == ["4.weight", "4.bias"]
    assert set(optimizer.curvature) == {"4"}
    set_frozen(model, body, False)
    assert_preconditioned(model, optimizer, one_step(model, optimizer, seed=2))


@pytest.mark.parametrize("when", ["while frozen", "after unfreezing"])
@every_part
def test_a_saved_run_goes_on_bit_for_bit(frozen: tuple[str, ...], when: str) -> None:
    """The state is loaded into an optimizer that was made, like the first, for the frozen model."""
    settings: dict[str, Any] = {"lr": 0.05, "damping": DAMPING, "seed": 0, "factors_every": 2, "basis_every": 2}
    model = network(frozen)
    optimizer = TEKFAC.natural(model, **settings)
    for seed in range(3):
        one_step(model, optimizer, seed)
    if when == "after unfreezing":
        set_frozen(model, frozen, False)
        for seed in range(3, 6):
            one_step(model, optimizer, seed)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    other = network(frozen)
    other.load_state_dict(saved["model"])
    if when == "after unfreezing":
        set_frozen(other, frozen, False)
    resumed = (
        TEKFAC.natural(other, **settings)
        if when == "while frozen"
        else _made_for_frozen(other, frozen, settings)
    )
    resumed.load_state_dict(saved["optimizer"])
    assert_identical(resumed, saved["optimizer"])
    set_frozen(model, frozen, False)
    set_frozen(other, frozen, False)
    for seed in range(6, 10):
        one_step(model, optimizer, seed)
        one_step(other, resumed, seed)
    assert set(resumed.curvature) == LAYERS
    assert_identical(everything(other, resumed), everything(model, optimizer))


def _made_for_frozen(model: nn.Module, frozen: tuple[str, ...], settings: dict[str, Any]) -> NaturalGradient:
    """An optimizer with the param groups of a frozen model, which was unfrozen before its first step."""
    set_frozen(model, frozen, True)
    optimizer = TEKFAC.natural(model, **settings)
    set_frozen(model, frozen, False)
    return optimizer


def test_a_frozen_layer_between_trained_ones_passes_gradients_on() -> None:
    """And the gradients are torch's own."""
    model, twin = network(PARTS["the whole layer"]), network(PARTS["the whole layer"])
    optimizer = TEKFAC.natural(model, fisher="exact")
    x, y = vectors(1)[0]
    F.cross_entropy(model(x), y).backward()
    F.cross_entropy(twin(x), y).backward()
    assert_identical([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    optimizer.step()
    assert {"0", "4"} <= set(optimizer.curvature)


def test_the_log_counts_layers_that_are_trained_as_explain_does(caplog: pytest.LogCaptureFixture) -> None:
    model = network([name for name, _ in network().named_parameters() if not name.startswith("4.")])
    with caplog.at_level("INFO", logger="tekfac"):
        TEKFAC.natural(model)
    assert "TEKFAC preconditions 1 layer(s)" in caplog.text
    assert "TEKFAC preconditions 1 layer(s)" in str(explain(model, file=None))


@every_part
def test_what_is_unfrozen_after_its_pass_was_measured_changes_no_hook_inside_of_a_pass(
    frozen: Iterable[str],
) -> None:
    """Layers are looked at again by step(), where no hook is running; what was captured is read anew."""
    model = network()
    optimizer = TEKFAC.natural(model, **every_step(TEKFAC))
    hooks: list[int] = []
    model[0].register_forward_hook(lambda *_: hooks.append(len(model[2]._forward_hooks)))
    (batch,) = vectors(1)
    backward(model, batch)
    set_frozen(model, frozen, True)
    optimizer.step()
    set_frozen(model, frozen, False)
    before = len(model[2]._forward_hooks)
    optimizer.zero_grad()
    backward(model, batch)
    assert hooks[-1] == before == len(model[2]._forward_hooks)
    optimizer.step()
    assert set(optimizer.curvature) == LAYERS
