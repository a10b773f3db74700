"""An eigendecomposition that fails is retried, then the old basis is kept and counted; training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dense import METHODS, assert_close, statistics
from tekfac import TEKFAC
from tekfac.curvature.eigenbasis import Turn
from tekfac.curvature.symmetric import JITTERS, DecompositionError, symmetric_eigen
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, both_steps, maker, mlp, through_a_file, train, vectors

Eigh = Callable[[Tensor], tuple[Tensor, Tensor]]
EIGH: Eigh = torch.linalg.eigh
EVERY_STEP = {"factors_every": 1, "basis_every": 1}


def with_one_twice(vectors: Tensor) -> Tensor:
    return torch.cat([vectors[..., :1], vectors[..., :1], vectors[..., 2:]], dim=-1)


BENT: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda vectors: vectors * float("nan"),
    "too long": lambda vectors: vectors * 1.01,
    "zero": torch.zeros_like,
    "one twice": with_one_twice,
    "one too short": lambda vectors: torch.cat([0.99 * vectors[..., :1], vectors[..., 1:]], dim=-1),
    "askew": lambda vectors: vectors + 0.01 * vectors.roll(1, dims=-1),
}
"""What decompositions may give, without an error, that are none."""


class Failing:
    """torch.linalg.eigh that fails for the first so many calls of each matrix, or always."""

    def __init__(self, failures: int | None, how: str = "error") -> None:
        self.failures, self.how = failures, how
        self.seen: list[Tensor] = []

    def __call__(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(matrix)
        if self.failures is None or len(self.seen) <= self.failures:
            if self.how == "error":
                raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")
            values, vectors = EIGH(matrix)
            return values, BENT[self.how](vectors)
        return EIGH(matrix)


@pytest.fixture
def matrix() -> Tensor:
    root = torch.randn(5, 5)
    return root @ root.T


@pytest.mark.parametrize("how", ["error", *BENT])
def test_a_failure_is_retried_in_float64_then_with_growing_jitter(
    how: str, matrix: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    eigh = Failing(2 + len(JITTERS) - 1, how)
    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    with caplog.at_level(logging.INFO, "tekfac"):
        values, vectors_ = symmetric_eigen(matrix)
    assert [m.dtype for m in eigh.seen] == [torch.float32] + [torch.float64] * (1 + len(JITTERS))
    added = [float((m - eigh.seen[1]).diagonal().mean()) for m in eigh.seen[2:]]
    assert added == sorted(added)
    assert added[0] > 0
    assert values.dtype == vectors_.dtype == torch.float32
    restored = vectors_ @ torch.diag(values) @ vectors_.T
    assert float((restored - matrix).abs().max()) < 2 * JITTERS[-1] * float(matrix.diagonal().mean())
    assert len(caplog.records) == len(eigh.seen) - 1


def test_a_retry_in_float64_gives_the_basis_itself(matrix: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", Failing(1))
    values, vectors_ = symmetric_eigen(matrix)
    torch.testing.assert_close(vectors_ @ torch.diag(values) @ vectors_.T, matrix)


def test_when_every_attempt_fails_that_is_said(matrix: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", Failing(None))
    with pytest.raises(DecompositionError, match=r"\(5, 5\).*float64"):
        symmetric_eigen(matrix)


def test_what_fails_for_long_is_told_of_each_layer_at_the_first_and_the_tenth_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = mlp(), vectors(14)
    optimizer = TEKFAC.natural(model, lr=0.001, **EVERY_STEP)  # type: ignore[arg-type]
    train(model, optimizer, data[:1])
    monkeypatch.setattr(torch.linalg, "eigh", Failing(None))
    train(model, optimizer, data[1:])
    assert optimizer.failed_refreshes == 2 * 13
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 4
    for name in ("0", "2"):
        for count in (1, 10):
            assert sum(f"layer {name!r} (time {count})" in message for message in told) == 1


@pytest.mark.parametrize("method", METHODS)
def test_the_old_basis_is_kept_and_counted_and_training_goes_on(
    method: type[NaturalGradient], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = mlp(), vectors(3)
    optimizer = method.natural(model, lr=0.01, **EVERY_STEP)  # type: ignore[arg-type]
    train(model, optimizer, data[:1])
    old = dict(statistics(optimizer))
    weight = model[0].weight.detach().clone()
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", Failing(None))
        train(model, optimizer, data[1:2])
    assert optimizer.failed_refreshes == 2  # one for each layer
    assert optimizer.num_steps == 2
    assert optimizer.skipped_steps == 0
    assert not torch.equal(model[0].weight, weight)
    for name, layer in statistics(optimizer).items():
        assert layer.basis is old[name].basis
        assert layer.moments.weight > old[name].moments.weight  # the factors are averaged on
    train(model, optimizer, data[2:])
    assert optimizer.failed_refreshes == 2
    assert statistics(optimizer)["0"].basis is not old["0"].basis


@pytest.mark.every_pair
@both_steps
@pytest.mark.parametrize("how", BENT)
@pytest.mark.parametrize("method", METHODS)
def test_finite_vectors_that_are_not_orthogonal_are_not_taken(
    method: type[NaturalGradient], how: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = mlp(), vectors(2)
    optimizer = maker(method, step)(model, interval_growth=None, **EVERY_STEP)
    train(model, optimizer, data[:1])
    old = {name: own.basis for name, own in statistics(optimizer).items()}
    monkeypatch.setattr(torch.linalg, "eigh", Failing(None, how))
    train(model, optimizer, data[1:])
    assert optimizer.num_steps == 2
    assert optimizer.failed_refreshes == 2
    for name, own in statistics(optimizer).items():
        assert torch.equal(own.basis.vectors_in, old[name].vectors_in)
        assert torch.equal(own.basis.vectors_out, old[name].vectors_out)


@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("dim", [1, 2, 5, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sound_decompositions_of_every_size_are_taken_at_once(
    dim: int, groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = torch.randn(groups, dim, max(1, dim // 2), dtype=dtype)  # so that many eigenvalues are 0
    eigh = Failing(0)
    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    symmetric_eigen(root @ root.mT)
    assert len(eigh.seen) == 1


def test_theta_goes_on_in_the_kept_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured in the basis in use, and rotated only once there is a new one."""
    model, data = mlp(), vectors(3)
    optimizer = TEKFAC.natural(
        model, lr=0.01, fisher="exact", rescaling_decay=0.5, rescaling_every=2, **EVERY_STEP
    )
    train(model, optimizer, data[:1])
    old = statistics(optimizer)["0"]
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", Failing(None))
        train(model, optimizer, data[1:2])
    kept = statistics(optimizer)["0"]
    assert kept.theta is not None
    assert old.theta is not None
    assert torch.equal(kept.rescaling, old.rescaling)
    model.zero_grad()
    train(model, optimizer, data[2:])
    new = statistics(optimizer)["0"]
    turned = Turn.of(kept.basis, new.basis).diagonal(kept.rescaling)
    assert_close(turned.sum(), kept.rescaling.sum())
    assert new.theta is not None
    assert new.theta.weight == 1.5


@pytest.mark.parametrize("method", METHODS)
def test_without_an_old_basis_the_coordinate_axes_are_used(
    method: type[NaturalGradient], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = mlp(), vectors(2)
    optimizer = method.natural(model, lr=0.01, damping=0.1, **EVERY_STEP)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", Failing(None))
        train(model, optimizer, data[:1])
    basis = statistics(optimizer)["0"].basis
    assert torch.equal(basis.vectors_in[0], torch.eye(6).double())
    assert optimizer.failed_refreshes == 2
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    train(model, optimizer, data[1:])
    assert not torch.equal(statistics(optimizer)["0"].basis.vectors_in, basis.vectors_in)


def test_one_failing_layer_does_not_hold_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = mlp(), vectors(2)
    optimizer = TEKFAC.natural(model, lr=0.01, **EVERY_STEP)
    train(model, optimizer, data[:1])
    old = dict(statistics(optimizer))

    def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if matrix.shape[-1] == 6:  # the first layer's inputs
            raise torch.linalg.LinAlgError("no")
        return EIGH(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    train(model, optimizer, data[1:])
    assert statistics(optimizer)["0"].basis is old["0"].basis
    assert statistics(optimizer)["2"].basis is not old["2"].basis
    assert optimizer.failed_refreshes == 1


def test_the_count_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.01, **EVERY_STEP)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", Failing(None))
        train(model, optimizer, vectors(1))
    other = TEKFAC.natural(mlp(), lr=0.01, **EVERY_STEP)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.failed_refreshes == 2
    assert_identical(other, optimizer)


def test_errors_that_are_not_of_the_decomposition_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(matrix: Tensor) -> tuple[Tensor, Tensor]:
        raise KeyboardInterrupt

    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.01)
    monkeypatch.setattr(torch.linalg, "eigh", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, vectors(1))
