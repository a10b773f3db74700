"""A side's eigenbasis is kept while it still makes its factor nearly diagonal, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense import assert_close, dense_block, every_method, normal, statistics
from tekfac import TEKFAC
from tekfac.curvature import eigenbasis, symmetric
from tekfac.curvature.eigenbasis import decompose
from tekfac.curvature.factors import KroneckerFactors
from tekfac.optim.natural_gradient import NaturalGradient
from training import Batch, mlp, train, vectors

DIM = 12


@pytest.fixture(autouse=True)
def _small_sides_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigenbasis, "WORTH_A_LOOK", 2)


def positive(*shape: int, seed: int = 0) -> Tensor:
    x = normal(*shape, 3 * shape[-1], seed=seed)
    return x @ x.mT


def off_diagonal_share(matrix: Tensor, vectors: Tensor) -> float:
    turned = vectors.T @ matrix @ vectors
    return float((turned - torch.diag(turned.diagonal())).norm() / turned.norm())


# -- the test itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [1e-3, 1e-2, 1e-1, 1.0])
def test_the_share_outside_of_the_diagonal_decides(noise: float) -> None:
    matrix = positive(1, DIM)
    basis = torch.linalg.eigh(matrix)[1]
    changed = matrix + noise * positive(1, DIM, seed=1)
    share = off_diagonal_share(changed[0], basis[0])
    along = symmetric.Along.of(changed, basis)
    assert_close(along.off_diagonal[0], share, 1e-6)
    assert_close(along.values[0], (basis[0].T @ changed[0] @ basis[0]).diagonal())
    assert_close(along.product, changed @ basis)
    factors = KroneckerFactors(changed, matrix, torch.ones(1).double())
    before = decompose(factors._replace(input=matrix))
    assert decompose(factors, before, 0.99 * share).vectors_in is not before.vectors_in
    assert decompose(factors, before, 1.01 * share).vectors_in is before.vectors_in


def test_every_group_has_to_be_nearly_diagonal() -> None:
    matrix = positive(3, DIM)
    basis = torch.linalg.eigh(matrix)[1]
    one = torch.ones(3).double()
    before = decompose(KroneckerFactors(matrix, matrix, one))
    matrix[1] = positive(DIM, seed=4)
    after = decompose(KroneckerFactors(matrix, matrix, one), before, 0.1)
    assert after.vectors_in is not before.vectors_in
    small = symmetric.Along.of(matrix, basis).off_diagonal < 1e-6
    assert small.tolist() == [True, False, True]


@pytest.mark.parametrize("size", [4, 5, 7])
def test_blocks_are_looked_at_like_the_whole(size: int) -> None:
    rows = normal(2, 1, 40, DIM)
    matrix = symmetric.sum_of_products(rows, rows, size)
    values, vectors = symmetric.eigen(matrix)
    assert_close(symmetric.Along.of(matrix, vectors).values, values)
    other = symmetric.sum_of_products(normal(2, 1, 40, DIM, seed=1), normal(2, 1, 40, DIM, seed=1), size)
    dense = torch.zeros(DIM, DIM).double()
    turn = torch.zeros(DIM, DIM).double()
    for start in range(0, DIM, size):
        part = slice(start, min(start + size, DIM))
        width = part.stop - part.start
        dense[part, part], turn[part, part] = other[0, part, :width], vectors[0, part, :width]
    share = off_diagonal_share(dense, turn)
    assert_close(symmetric.Along.of(other[:1], vectors[:1]).off_diagonal[0], share, 1e-6)


def test_each_side_is_kept_by_itself() -> None:
    one = torch.ones(1).double()
    factors = KroneckerFactors(positive(1, DIM), positive(1, DIM, seed=1), one)
    before = decompose(factors)
    after = decompose(factors._replace(input=positive(1, DIM, seed=2)), before, 0.1)
    assert after.vectors_out is before.vectors_out
    assert after.vectors_in is not before.vectors_in
    assert_close(after.values_out, before.values_out)


# -- in a run ------------------------------------------------------------------------------------------


def run(method: type[NaturalGradient], batches: list[Batch], **settings: Any) -> NaturalGradient:
    model: nn.Module = mlp(sizes=(5, 6, 3))
    every = dict.fromkeys(["factors_every", "basis_every"], 1)
    if method.method.rescaling.measured:
        every["rescaling_every"] = 1
    optimizer = method.natural(model, lr=1e-30, momentum=0.0, fisher="exact", damping=1e-3, **every, **settings)
    train(model, optimizer, batches)
    return optimizer


@every_method
def test_with_the_same_batch_the_basis_stays_and_so_does_the_block(method: type[NaturalGradient]) -> None:
    """What is kept stands for the same matrix as what is computed anew."""
    (batch,) = vectors(1, samples=20)
    kept, renewed = (run(method, [batch] * 3, basis_tolerance=tau) for tau in (0.1, 0.0))
    once = run(method, [batch])
    for name, block in statistics(kept).items():
        assert torch.equal(block.basis.vectors_in, statistics(once)[name].basis.vectors_in)
        assert_close(dense_block(block), dense_block(statistics(renewed)[name]), 1e-8)


def test_a_zero_renews_it_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(symmetric.Along, "of", lambda *arguments: looks.append(arguments))
    run(TEKFAC, vectors(3, samples=20), basis_tolerance=0.0, track_basis=False)
    assert not looks


def test_theta_in_a_kept_basis_is_not_turned() -> None:
    """It is averaged where it is: with a decay of 0 it is that of the last batch, whatever came before."""
    batches = vectors(3, samples=20)
    optimizer = run(TEKFAC, batches, basis_tolerance=0.9, rescaling_decay=0.0)
    first, last = (run(TEKFAC, part, basis_tolerance=0.9) for part in (batches[:1], batches[-1:]))
    for name, block in statistics(optimizer).items():
        basis = block.basis
        assert torch.equal(basis.vectors_out, statistics(first)[name].basis.vectors_out)
        assert torch.equal(basis.vectors_in, statistics(first)[name].basis.vectors_in)
        assert block.theta is not None
        trace = statistics(last)[name].rescaling.sum()  # that of F, in any basis
        assert_close(block.theta.values[0].sum(), trace)


@pytest.mark.parametrize("value", [-0.1, 1.0, "0.1", None, float("nan")])
def test_other_tolerances_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="basis_tolerance") as caught:
        TEKFAC.natural(nn.Linear(3, 2), basis_tolerance=value)
    assert repr(value) in str(caught.value)
