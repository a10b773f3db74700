"""Oracle 30 and Algorithm 1: factors, basis, re-scaling, precondition, update, each when due."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, dense_block, statistics
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC
from tekfac.curvature.layer_curvature import LayerCurvature
from tekfac.optim.natural_gradient import NaturalGradient
from training import Batch, mlp, train, vectors

CORRECTED = (EKFAC, TEKFAC)
LAYER = "0"


def history(
    optimizer: NaturalGradient, model: nn.Module, data: list[Batch]
) -> tuple[list[LayerCurvature], list[Tensor]]:
    """The layer's curvature after every step, and the exact Fisher of every step's batch before it."""
    curvatures, fishers = [], []
    for batch in data:
        samples = oracle.per_column(oracle.softmax_column, model, batch[0], LAYER)
        fishers.append(oracle.exact_fisher(samples.gradients[:, 0]))
        train(model, optimizer, [batch])
        curvatures.append(statistics(optimizer)[LAYER])
    return curvatures, fishers


def build(method: type[NaturalGradient], **settings: Any) -> tuple[nn.Module, NaturalGradient]:
    model = mlp()
    return model, method.natural(model, lr=0.05, damping=0.1, fisher="exact", **settings)


def same_basis(a: LayerCurvature, b: LayerCurvature) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.basis, b.basis, strict=True))


def theta_in(block: Tensor, curvature: LayerCurvature) -> Tensor:
    """Diagonal of a dense block in the eigenbasis in use."""
    basis = curvature.basis
    return oracle.theta(block, basis.vectors_out[0].contiguous(), basis.vectors_in[0].contiguous())


@pytest.mark.parametrize("method", METHODS)
def test_each_part_is_refreshed_when_it_is_due_and_only_then(method: type[NaturalGradient]) -> None:
    intervals = {"factors_every": 2, "basis_every": 6}
    if method in CORRECTED:
        intervals["rescaling_every"] = 3
    model, optimizer = build(method, **intervals)
    seen, _ = history(optimizer, model, vectors(13))
    for k in range(1, 13):
        old, new = seen[k - 1], seen[k]
        assert (new.moments.values is not old.moments.values) == (k % 2 == 0)
        assert same_basis(old, new) == (k % 6 != 0)
        if method in CORRECTED:
            assert old.theta is not None
            assert new.theta is not None
            assert (new.theta.weight != old.theta.weight) == (k % 3 == 0)
            assert torch.equal(new.rescaling, old.rescaling) == (k % 3 != 0 and k % 6 != 0)
        else:
            assert torch.equal(new.rescaling, old.rescaling) == (k % 6 != 0)


@pytest.mark.parametrize("method", METHODS)
def test_the_basis_diagonalises_the_factors_of_the_same_step(method: type[NaturalGradient]) -> None:
    model, optimizer = build(method, factors_every=1, basis_every=2)
    seen, _ = history(optimizer, model, vectors(4))
    for k, curvature in enumerate(seen):
        q, moment = curvature.basis.vectors_in[0], curvature.moments.values.input[0]
        turned = q.T @ moment @ q
        off_diagonal = float((turned - torch.diag(turned.diagonal())).abs().max() / turned.abs().max())
        assert (off_diagonal < 1e-12) == (k % 2 == 0)


@pytest.mark.parametrize("method", METHODS)
def test_every_step_uses_what_it_has_just_measured_at_the_iterate_it_starts_from(
    method: type[NaturalGradient],
) -> None:
    """The very first one too: no step is taken without a preconditioner."""
    model, optimizer = build(method, factors_every=1, basis_every=1, factor_decay=0.0, momentum=0.0)
    if method in CORRECTED:
        model = mlp()
        optimizer = method.natural(
            model, lr=0.05, damping=0.1, momentum=0.0, fisher="exact", factors_every=1, basis_every=1,
            rescaling_every=1, factor_decay=0.0, rescaling_decay=0.0,
        )  # fmt: skip
    for batch in vectors(3):
        samples = oracle.per_column(oracle.softmax_column, model, batch[0], LAYER)
        a, u = samples.a[:, 0], samples.u[:, 0]
        block = {
            KFAC: lambda a, u: oracle.kfac_expand(a, u).dense(),
            EKFAC: oracle.ekfac,
            TKFAC: lambda a, u: oracle.tkfac(a, u).dense(),
            TEKFAC: oracle.tekfac,
        }[method](a, u)  # type: ignore[operator]
        module = model[0]
        assert isinstance(module, nn.Linear)
        before = torch.cat([module.weight, module.bias[:, None]], 1).detach()
        train(model, optimizer, [batch])
        gradient = torch.cat([module.weight.grad, module.bias.grad[:, None]], 1)  # type: ignore[list-item,index]
        after = torch.cat([module.weight, module.bias[:, None]], 1).detach()
        assert_close(after - before, -0.05 * oracle.damped_solve(block, 0.1, gradient), rtol=1e-8)


@pytest.mark.parametrize("method", CORRECTED)
def test_a_new_basis_rotates_theta(method: type[NaturalGradient]) -> None:
    """Into the diagonal, in the new basis, of the approximation held so far."""
    model, optimizer = build(method, factors_every=1, basis_every=2, rescaling_every=100)
    seen, _ = history(optimizer, model, vectors(5))
    for k in (2, 4):
        old, new = seen[k - 1], seen[k]
        assert not same_basis(old, new)
        assert_close(new.rescaling[0], theta_in(dense_block(old), new))
        assert_close(new.rescaling.sum(), old.rescaling.sum())
        assert new.theta is not None
        assert new.theta.weight == 1.0


@pytest.mark.parametrize("method", CORRECTED)
def test_theta_is_first_rotated_and_then_averaged_with_what_is_measured_in_the_new_basis(
    method: type[NaturalGradient],
) -> None:
    decay = 0.7
    model, optimizer = build(method, factors_every=1, basis_every=2, rescaling_every=1, rescaling_decay=decay)
    seen, fishers = history(optimizer, model, vectors(6))
    weight = 1.0
    assert_close(seen[0].rescaling[0], theta_in(fishers[0], seen[0]))
    for k in range(1, 6):
        weight = decay * weight + 1
        past, measured = theta_in(dense_block(seen[k - 1]), seen[k]), theta_in(fishers[k], seen[k])
        assert_close(seen[k].rescaling[0], past + (measured - past) / weight)


@pytest.mark.parametrize("method", CORRECTED)
def test_the_sum_of_theta_is_the_average_of_the_traces_whatever_the_basis_does(
    method: type[NaturalGradient],
) -> None:
    decay = 0.6
    model, optimizer = build(method, factors_every=1, basis_every=1, rescaling_every=1, rescaling_decay=decay)
    seen, fishers = history(optimizer, model, vectors(6))
    weights = torch.tensor([decay**i for i in reversed(range(6))], dtype=torch.float64)
    traces = torch.stack([block.trace() for block in fishers])
    assert_close(seen[-1].rescaling.sum(), (weights * traces).sum() / weights.sum())


@pytest.mark.parametrize("method", [TKFAC, TEKFAC])
def test_both_moments_keep_the_averaged_trace_after_any_history(method: type[NaturalGradient]) -> None:
    decay = 0.6
    model, optimizer = build(method, factors_every=1, factor_decay=decay)
    seen, fishers = history(optimizer, model, vectors(6))
    weights = torch.tensor([decay**i for i in reversed(range(6))], dtype=torch.float64)
    sigma = (weights * torch.stack([block.trace() for block in fishers])).sum() / weights.sum()
    moments = seen[-1].moments.values
    assert_close(moments.scale[0], sigma)
    assert_close(moments.input[0].trace(), sigma)
    assert_close(moments.output[0].trace(), sigma)


@pytest.mark.parametrize("method", [TKFAC, TEKFAC])
def test_the_papers_way_averages_the_normalised_factors(method: type[NaturalGradient]) -> None:
    model, optimizer = build(method, factors_every=1, factor_decay=0.5, averaging="factors")
    seen, fishers = history(optimizer, model, vectors(2))
    parts = [oracle.partial_traces(block / block.trace(), 4, 6)[0] for block in fishers]
    assert_close(seen[1].moments.values.input[0], (0.5 * parts[0] + parts[1]) / 1.5)


@pytest.mark.parametrize("method", METHODS)
def test_a_basis_due_where_no_factors_are_is_taken_from_the_moments_there_are(
    method: type[NaturalGradient],
) -> None:
    model, optimizer = build(method, factors_every=4, basis_every=3)
    seen, _ = history(optimizer, model, vectors(7))
    assert seen[3].moments is seen[0].moments
    assert same_basis(seen[3], seen[0])  # the same factors
    assert not same_basis(seen[6], seen[3])  # those of step 4


def test_the_clock_counts_steps_not_forward_passes() -> None:
    model, optimizer = build(TEKFAC, factors_every=2)
    (x, y) = vectors(1)[0]
    for _ in range(5):
        model(x)
    assert optimizer.num_steps == 0
    train(model, optimizer, [(x, y)] * 3)
    assert optimizer.num_steps == 3
