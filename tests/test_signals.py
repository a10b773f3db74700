"""What an optimizer tells of its layers and of its time, for logs and monitors."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dense import METHODS, assert_close, dense_block, statistics
from tekfac import EKFAC, KFAC, TEKFAC
from tekfac.capture.capture import Capture
from tekfac.curvature.network import NetworkCurvature
from tekfac.optim.natural_gradient import NaturalGradient
from training import cnn, images, mlp, train, vectors


@pytest.mark.parametrize("method", METHODS)
def test_trace_and_condition_are_those_of_the_dense_blocks(method: type[NaturalGradient]) -> None:
    model = cnn()
    optimizer = method.natural(model, lr=1e-3, damping=0.1, fisher="exact")
    assert optimizer.signals() == {}
    train(model, optimizer, images(2))
    signals = optimizer.signals()
    assert list(signals) == list(statistics(optimizer)) == ["0", "1", "4"]
    for name, curvature in statistics(optimizer).items():
        block = torch.block_diag(*(dense_block(curvature, group) for group in range(len(curvature.rescaling))))
        eigenvalues = torch.linalg.eigvalsh(block)
        assert_close(signals[name].trace, float(block.trace()))
        assert_close(signals[name].damping, 0.1)
        assert_close(
            signals[name].condition, float((eigenvalues[-1] + 0.1) / (eigenvalues[0] + 0.1)), rtol=1e-8
        )
        assert signals[name].failed_refreshes == 0


def test_the_damping_told_is_what_the_methods_own_rule_adds() -> None:
    model = cnn()
    optimizer = TEKFAC.natural(model, lr=1e-3, fisher="exact", trace_floor=1e-6)
    train(model, optimizer, images(1))
    for name, curvature in statistics(optimizer).items():
        if optimizer._layers[name].is_convolution:
            assert_close(optimizer.signals()[name].damping, float(curvature.rescaling.mean()))


def test_asking_changes_nothing() -> None:
    def weights(ask: bool) -> list[Any]:
        model = mlp()
        optimizer = KFAC.natural(model, lr=0.05)
        for batch in vectors(3):
            train(model, optimizer, [batch])
            if ask:
                optimizer.signals()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(ask=True), weights(ask=False), strict=True))


def test_staleness_counts_the_steps_since_the_basis_was_due() -> None:
    model = mlp()
    optimizer = EKFAC.natural(model, lr=1e-3, basis_every=3)
    found = [optimizer.steps_since_refresh]
    for batch in vectors(7):
        train(model, optimizer, [batch])
        found.append(optimizer.steps_since_refresh)
    assert found == [0, 0, 1, 2, 0, 1, 2, 0]


def test_time_on_curvature_is_counted_where_it_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in the measured backward pass and in the refresh, and in no step that does neither."""
    keep, refresh = Capture._keep, NetworkCurvature.refreshed

    def slow_keep(self: Capture, *arguments: Any) -> None:
        time.sleep(0.05)
        keep(self, *arguments)

    def slow_refresh(self: NetworkCurvature, batches: Any, due: Any) -> Any:
        if batches:
            time.sleep(0.05)
        return refresh(self, batches, due)

    monkeypatch.setattr(Capture, "_keep", slow_keep)
    monkeypatch.setattr(NetworkCurvature, "refreshed", slow_refresh)
    model = mlp()
    optimizer = EKFAC.natural(model, lr=1e-3, factors_every=2, basis_every=2, rescaling_every=2)
    first, second = vectors(2)
    train(model, optimizer, [first])
    measured = optimizer.curvature_seconds
    assert measured >= 0.1
    train(model, optimizer, [second])
    assert optimizer.curvature_seconds - measured < 0.05
