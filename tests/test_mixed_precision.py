"""Promise: under autocast and with bfloat16 parameters curvature is float32 and near the full one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import every_method
from tekfac import KFAC, TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.optim.update import kl_coefficient
from training import (
    Batch,
    assert_identical,
    both_steps,
    copied,
    everything,
    images,
    maker,
    mlp,
    saved_curvature,
    through_a_file,
    vectors,
)

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
every_half = pytest.mark.parametrize("half", HALVES.values(), ids=list(HALVES))


def classifier(seed: int = 0) -> nn.Sequential:
    return mlp(seed=seed, dtype=torch.float32, sizes=(20, 16, 10))


def convolutional(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(54, 3))


def data(count: int) -> list[Batch]:
    return vectors(count, samples=32, d_in=20, classes=10, dtype=torch.float32)


def train_under_autocast(
    model: nn.Module, optimizer: NaturalGradient, batches: list[Batch], half: torch.dtype | None
) -> list[float]:
    """Forward pass and loss under autocast, backward pass and step outside, as torch recommends."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None):
            logits = model(x)
            assert half is None or logits.dtype == half
            loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_cast(model: nn.Module, optimizer: NaturalGradient, batches: list[Batch]) -> None:
    """Inputs in the dtype of the parameters."""
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
        optimizer.step()


def floating_dtypes(state: Any) -> set[torch.dtype]:
    """Of all floating-point tensors in a nested state."""
    if isinstance(state, Tensor):
        return {state.dtype} if state.is_floating_point() else set()
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return {dtype for value in values for dtype in floating_dtypes(value)}


def assert_curvature_is(optimizer: NaturalGradient, dtype: torch.dtype) -> None:
    """Blocks, and everything that the state keeps of the layers."""
    assert len(optimizer.curvature) == 2
    assert all(block.to_dense().dtype == dtype for block in optimizer.curvature.values())
    assert optimizer.curvature.dtype == dtype
    assert floating_dtypes(saved_curvature(optimizer.state_dict())) == {dtype}


# -- dtypes ----------------------------------------------------------------------------------------------


@every_half
@every_method
def test_curvature_under_autocast_is_float32(method: type[NaturalGradient], half: torch.dtype) -> None:
    model = classifier()
    optimizer = method(model, lr=0.01, factors_every=1)
    train_under_autocast(model, optimizer, data(2), half)
    assert_curvature_is(optimizer, torch.float32)
    assert floating_dtypes(model.state_dict()) == {torch.float32}


@every_method
def test_curvature_of_bfloat16_parameters_is_float32(method: type[NaturalGradient]) -> None:
    model = classifier().bfloat16()
    optimizer = method(model, lr=0.01, factors_every=1)
    train_cast(model, optimizer, data(2))
    assert_curvature_is(optimizer, torch.float32)
    assert floating_dtypes(model.state_dict()) == {torch.bfloat16}
    assert optimizer.skipped_steps == 0


def test_curvature_of_float64_parameters_is_float64() -> None:
    model = classifier().double()
    optimizer = TEKFAC(model, lr=0.01)
    train_cast(model, optimizer, data(1))
    assert_curvature_is(optimizer, torch.float64)


@pytest.mark.every_pair
@pytest.mark.parametrize("curvature_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32, torch.float64])
@every_method
def test_curvature_dtype_sets_the_dtype_of_the_curvature_alone(
    method: type[NaturalGradient], parameters: torch.dtype, curvature_dtype: torch.dtype
) -> None:
    model = classifier().to(parameters)
    optimizer = method(model, lr=0.01, factors_every=1, curvature_dtype=curvature_dtype)
    train_cast(model, optimizer, data(2))
    assert_curvature_is(optimizer, curvature_dtype)
    assert floating_dtypes(model.state_dict()) == {parameters}
    assert all(p.grad is not None and p.grad.dtype == parameters for p in model.parameters())


def test_curvature_in_float64_under_autocast() -> None:
    model = classifier()
    optimizer = TEKFAC(model, lr=0.01, curvature_dtype=torch.float64)
    train_under_autocast(model, optimizer, data(2), torch.bfloat16)
    assert_curvature_is(optimizer, torch.float64)


def test_curvature_in_float64_of_float32_parameters_is_that_of_the_same_numbers() -> None:
    """More digits, not other values."""
    dense = []
    for dtype in (None, torch.float64):
        model = classifier()
        optimizer = KFAC(model, lr=0.01, fisher="exact", curvature_dtype=dtype)
        train_cast(model, optimizer, data(1))
        dense.append(optimizer.curvature.to_dense().double())
    assert 0 < (dense[0] - dense[1]).norm() < 1e-5 * dense[1].norm()


@pytest.mark.parametrize("value", [torch.bfloat16, torch.float16, torch.int64, "float32", 32])
def test_another_curvature_dtype_is_refused_with_those_there_are(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="curvature_dtype") as error:
        TEKFAC(classifier(), curvature_dtype=value)
    assert repr(value) in str(error.value)
    assert "torch.float32" in str(error.value)
    assert "torch.float64" in str(error.value)


# -- values ----------------------------------------------------------------------------------------------


@pytest.mark.every_pair
@every_half
@pytest.mark.parametrize("build", [classifier, convolutional])
@every_method
def test_curvature_under_autocast_is_near_that_of_full_precision(
    method: type[NaturalGradient], build: Any, half: torch.dtype
) -> None:
    """Within eps of the half precision, by the Frobenius norm; within 4 eps where the diagonal is corrected.

    Inputs, weights and gradients are rounded by at most eps / 2 each. The roundings of single numbers are
    independent and mostly cancel in the sums that the blocks are: eps / 4 was measured. A corrected diagonal
    also depends on the eigenvectors, which turn where eigenvalues are near one another: eps was measured.
    """
    batches = data(1) if build is classifier else images(1, samples=32, dtype=torch.float32)
    dense = []
    for used in (None, half):
        model = build()
        optimizer = method(model, lr=1e-9, fisher="exact")
        train_under_autocast(model, optimizer, batches, used)
        dense.append(optimizer.curvature.to_dense())
    error = float((dense[1] - dense[0]).norm() / dense[0].norm())
    assert 0 < error < (4 if method.method.rescaling.measured else 1) * torch.finfo(half).eps


@every_method
def test_curvature_of_bfloat16_parameters_is_near_that_of_full_precision(
    method: type[NaturalGradient],
) -> None:
    """The same weights, rounded before both runs; then as above, but the whole backward pass is rounded."""
    dense = []
    for dtype in (torch.float32, torch.bfloat16):
        model = classifier().bfloat16().to(dtype)
        optimizer = method(model, lr=1e-9, fisher="exact")
        train_cast(model, optimizer, [(x.bfloat16().float(), y) for x, y in data(1)])
        dense.append(optimizer.curvature.to_dense())
    error = float((dense[1] - dense[0]).norm() / dense[0].norm())
    assert 0 < error < 2 * torch.finfo(torch.bfloat16).eps


def digits_like(count: int) -> list[Batch]:
    """Ten blurred prototypes of 8 x 8 pixels, with noise."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(10, 64, generator=generator)
    batches = []
    for _ in range(count):
        y = torch.randint(10, (64,), generator=generator)
        batches.append((prototypes[y] + 0.7 * torch.randn(64, 64, generator=generator), y))
    return batches


@both_steps
@every_half
@every_method
def test_training_under_autocast_lowers_the_loss_as_in_full_precision(
    method: type[NaturalGradient], half: torch.dtype, step: str
) -> None:
    last, share = [], {"natural": 0.25, "adaptive": 0.6}[step]
    for used in (None, half):
        model = mlp(dtype=torch.float32, sizes=(64, 32, 10))
        optimizer = maker(method, step)(model, lr=0.01, damping=0.1, seed=0, factors_every=5, basis_every=5)
        losses = train_under_autocast(model, optimizer, digits_like(40), used)
        assert optimizer.skipped_steps == 0
        assert sum(losses[-5:]) < share * sum(losses[:5])
        last.append(sum(losses[-5:]) / 5)
    assert last[1] < 1.5 * last[0] + 0.05


def test_training_bfloat16_parameters_lowers_the_loss() -> None:
    model = mlp(dtype=torch.float32, sizes=(64, 32, 10)).bfloat16()
    optimizer = TEKFAC(model, lr=0.01, damping=0.1, seed=0, factors_every=5, basis_every=5)
    batches = digits_like(40)

    def loss() -> float:
        with torch.no_grad():
            return F.cross_entropy(model(batches[0][0].bfloat16()).float(), batches[0][1]).item()

    before = loss()
    train_cast(model, optimizer, batches)
    assert loss() < 0.5 * before


def test_a_step_inside_autocast_is_that_outside() -> None:
    """Some users wrap the whole loop. Preconditioning must not be rounded to half precision."""
    states = []
    for inside in (False, True):
        model = classifier()
        optimizer = TEKFAC(model, lr=0.01, seed=0, interval_growth=None, factors_every=2)
        for x, y in data(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                optimizer.step()
        states.append(everything(model, optimizer))
    assert_identical(*states)


def test_a_backward_pass_inside_autocast_is_measured_near_that_outside() -> None:
    dense = []
    for inside in (False, True):
        model = classifier()
        optimizer = TEKFAC(model, lr=1e-9, fisher="exact")
        x, y = data(1)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            loss.backward()
        optimizer.step()
        dense.append(optimizer.curvature.to_dense())
    assert dense[1].dtype == torch.float32
    assert (dense[1] - dense[0]).norm() < torch.finfo(torch.bfloat16).eps * dense[0].norm()


# -- state -----------------------------------------------------------------------------------------------

RESUMED = {"lr": 0.01, "seed": 0, "interval_growth": None, "factors_every": 2, "basis_every": 2}


@pytest.mark.parametrize("fisher", ["sampled", "empirical", "exact"])
@every_method
def test_a_resumed_run_with_bfloat16_parameters_is_bit_identical(
    method: type[NaturalGradient], fisher: Any
) -> None:
    batches = data(6)
    straight = classifier().bfloat16()
    optimizer = method(straight, fisher=fisher, **RESUMED)
    train_cast(straight, optimizer, batches)

    first = classifier().bfloat16()
    stopped = method(first, fisher=fisher, **RESUMED)
    train_cast(first, stopped, batches[:3])
    saved = through_a_file({"model": first.state_dict(), "optimizer": stopped.state_dict()})
    second = classifier(seed=5).bfloat16()
    second.load_state_dict(saved["model"])
    resumed = method(second, fisher=fisher, **RESUMED)
    resumed.load_state_dict(saved["optimizer"])
    assert_identical(resumed, saved["optimizer"])
    train_cast(second, resumed, batches[3:])
    assert_identical(everything(second, resumed), everything(straight, optimizer))


@pytest.mark.parametrize("curvature_dtype", [None, torch.float64])
def test_loading_does_not_round_the_curvature_to_the_parameters(curvature_dtype: Any) -> None:
    model = classifier().bfloat16()
    settings = {} if curvature_dtype is None else {"curvature_dtype": curvature_dtype}
    optimizer = TEKFAC(model, **RESUMED, **settings)
    train_cast(model, optimizer, data(3))
    state = copied(optimizer.state_dict())
    other = TEKFAC(model, **RESUMED, **settings)
    other.load_state_dict(state)
    assert_curvature_is(other, curvature_dtype or torch.float32)
    assert_identical(saved_curvature(other.state_dict()), saved_curvature(state))


def test_a_resumed_run_under_autocast_is_bit_identical() -> None:
    batches = data(6)
    straight, first, second = classifier(), classifier(), classifier(seed=5)
    optimizer, stopped = TEKFAC(straight, **RESUMED), TEKFAC(first, **RESUMED)
    train_under_autocast(straight, optimizer, batches, torch.bfloat16)
    train_under_autocast(first, stopped, batches[:3], torch.bfloat16)
    saved = through_a_file({"model": first.state_dict(), "optimizer": stopped.state_dict()})
    second.load_state_dict(saved["model"])
    resumed = TEKFAC(second, **RESUMED)
    resumed.load_state_dict(saved["optimizer"])
    train_under_autocast(second, resumed, batches[3:], torch.bfloat16)
    assert_identical(everything(second, resumed), everything(straight, optimizer))


def test_the_clip_does_not_overflow_in_half_precision() -> None:
    """g.Pg of 100 entries of 100 is 10^6, more than float16 can hold."""
    g = torch.full((100,), 100.0, dtype=torch.float16)
    assert float(kl_coefficient([(1.0, g, g)], kl_clip=1e6)) == 1.0
    assert float(kl_coefficient([(1.0, g, g)], kl_clip=1e4)) == pytest.approx(0.1)
