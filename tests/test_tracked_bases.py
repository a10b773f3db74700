"""An eigenbasis that is nearly right is improved by an orthogonal iteration; otherwise it is computed anew."""

from __future__ import annotations

import itertools
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
from training import mlp, train, vectors

DIM = 12


@pytest.fixture(autouse=True)
def _small_sides_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigenbasis, "WORTH_A_LOOK", 2)
    monkeypatch.setattr(eigenbasis, "WORTH_TRACKING", 2)


def spectrum(*, seed: int = 0, dim: int = DIM, ratio: float = 0.5, groups: int = 1) -> Tensor:
    """A symmetric matrix with eigenvalues 1, ratio, ratio^2, ..., for each group."""
    turn = torch.linalg.qr(normal(groups, dim, dim, seed=seed))[0]
    values = ratio ** torch.arange(dim, dtype=torch.float64)
    return (turn * values) @ turn.mT


def near(matrix: Tensor, noise: float, seed: int = 9) -> Tensor:
    """A matrix whose eigenvectors have turned a little."""
    x = normal(*matrix.shape, seed=seed) * noise
    turn = torch.linalg.matrix_exp(x - x.mT)
    return turn @ matrix @ turn.mT


def assert_orthonormal(vectors: Tensor, rtol: float = 1e-12) -> None:
    eye = torch.eye(vectors.shape[-1], dtype=vectors.dtype).expand(len(vectors), -1, -1)
    assert (vectors.mT @ vectors - eye).abs().max() < rtol


# -- one iteration -------------------------------------------------------------------------------------


def test_it_is_the_orthogonal_factor_of_the_shifted_product() -> None:
    """Q R = (M + shift) Q, from the last vector to the first, up to signs; every vector in its place."""
    before = torch.linalg.eigh(spectrum())[1]
    matrix = near(spectrum(), 1e-3)
    found = symmetric.iterated(before, symmetric.Along.of(matrix, before))
    assert found is not None
    assert_orthonormal(found)
    along = (before.mT @ matrix @ before).diagonal(dim1=-2, dim2=-1)
    order = torch.arange(DIM - 1, -1, -1)
    moved = matrix + symmetric.SHIFT * along.max() * torch.eye(DIM)
    expected = torch.linalg.qr((moved @ before)[..., order])[0]
    signs = (expected * found[..., order]).sum(-2, keepdim=True).sign()
    assert_close(found[..., order], expected * signs)
    assert ((before * found).sum(-2) > 0.9).all()


def test_repeated_iterations_come_to_the_eigenvectors() -> None:
    vectors = torch.linalg.eigh(spectrum())[1]
    matrix = near(spectrum(), 2e-3)
    shares = []
    for _ in range(12):
        along = symmetric.Along.of(matrix, vectors)
        shares.append(float(along.off_diagonal))
        found = symmetric.iterated(vectors, along)
        assert found is not None
        vectors = found
    assert all(after < 0.8 * before for before, after in itertools.pairwise(shares[:5]))
    assert shares[-1] < 1e-3 * shares[0]


@pytest.mark.parametrize("size", [3, 5, 7])
def test_blocks_are_iterated_one_by_one(size: int) -> None:
    rows = normal(2, 1, 40, DIM)
    matrix = symmetric.sum_of_products(rows, rows, size)
    before = symmetric.eigen(matrix)[1]
    more = normal(2, 1, 4, DIM, seed=1) * 0.3
    changed = matrix + symmetric.sum_of_products(more, more, size)
    found = symmetric.iterated(before, symmetric.Along.of(changed, before))
    assert found is not None
    for start in range(0, DIM, size):
        part, width = slice(start, min(start + size, DIM)), min(size, DIM - start)
        block, q = changed[:, part, :width].clone(), before[:, part, :width]
        tops = symmetric.Along.of(changed, before).values.amax(1)
        moved = block @ q + symmetric.SHIFT * tops[:, None, None] * q
        expected = torch.linalg.qr(moved.flip(-1))[0].flip(-1)
        own = found[:, part, :width]
        assert_close(own, expected * (own * expected).sum(-2, keepdim=True).sign(), 1e-8)
    assert (symmetric._to_blocks(found)[:, -1, DIM % size or size :] == 0).all()


def test_null_vectors_stay_orthonormal_in_float32() -> None:
    """The factor of few samples has a large null space, whose vectors any other would do for."""
    rows = normal(5, 40).float()
    matrix = (rows.T @ rows)[None]
    vectors = torch.linalg.eigh(matrix)[1]
    for seed in range(30):
        more = normal(1, 40, seed=seed + 1).float()
        matrix = 0.95 * matrix + 0.05 * more.T @ more
        along = symmetric.Along.of(matrix, vectors)
        found = symmetric.iterated(vectors, along)
        vectors = torch.linalg.eigh(matrix)[1] if found is None else found
        assert_orthonormal(vectors, 1e-4)


def test_what_is_too_far_off_or_zero_is_left_to_a_decomposition() -> None:
    before = torch.linalg.eigh(spectrum())[1]
    other = spectrum(seed=3)
    assert symmetric.iterated(before, symmetric.Along.of(other, before)) is None
    nothing = torch.zeros(1, DIM, DIM).double()
    assert symmetric.iterated(before, symmetric.Along.of(nothing, before)) is None


# -- where it is used ----------------------------------------------------------------------------------


def factors_of(matrix: Tensor, other: Tensor) -> KroneckerFactors:
    return KroneckerFactors(matrix, other, torch.ones(len(matrix)).double())


def test_each_side_is_tracked_or_decomposed_by_itself() -> None:
    first, second = spectrum(), spectrum(seed=1)
    before = decompose(factors_of(first, second))
    turned, other = near(first, 1e-3), spectrum(seed=2)
    after = decompose(factors_of(turned, other), before, track=True)
    exact = decompose(factors_of(turned, other))
    assert torch.equal(after.vectors_out, exact.vectors_out)
    assert not torch.equal(after.vectors_in, exact.vectors_in)
    assert_close(after.values_in[0], (after.vectors_in.mT @ turned @ after.vectors_in)[0].diagonal())
    assert_orthonormal(after.vectors_in)


def test_a_kept_basis_is_not_iterated() -> None:
    first = spectrum()
    before = decompose(factors_of(first, first))
    after = decompose(factors_of(near(first, 1e-4), first), before, 0.1, track=True)
    assert after.vectors_in is before.vectors_in


def run(method: type[NaturalGradient], **settings: Any) -> NaturalGradient:
    model: nn.Module = mlp(sizes=(5, 6, 3))
    every = dict.fromkeys(["factors_every", "basis_every"], 1)
    if method.method.rescaling.measured:
        every["rescaling_every"] = 1
    options = {"lr": 1e-30, "momentum": 0.0, "fisher": "exact", "damping": 1e-3, **every, **settings}
    optimizer = method.natural(model, **options)
    (batch,) = vectors(1, samples=20)
    train(model, optimizer, [batch] * 4)
    return optimizer


@every_method
def test_on_the_same_batch_the_block_is_the_same(method: type[NaturalGradient]) -> None:
    tracked, exact = run(method, track_basis=True), run(method, track_basis=False)
    for name, block in statistics(tracked).items():
        assert_close(dense_block(block), dense_block(statistics(exact)[name]), 1e-6)


def test_false_decomposes_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a basis was tracked")

    monkeypatch.setattr(symmetric, "iterated", refuse)
    run(TEKFAC, track_basis=False)
    with pytest.raises(AssertionError, match="tracked"):
        run(TEKFAC, track_basis=True)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_anything_but_true_or_false_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="track_basis") as caught:
        TEKFAC.natural(nn.Linear(3, 2), track_basis=value)
    assert repr(value) in str(caught.value)
