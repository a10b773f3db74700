"""Symmetric matrices over a layer's inputs or outputs, whole or in a cheaper form: build, decompose.

    whole         [G, d, d]
    blocks        [G, d, b]    a block diagonal with blocks of b, of each row the part that lies in its block
    diagonal      [G, d, 1]
    frequencies   [G, *kernel, C, b]    the inputs of a convolution: blocks of b channels for every frequency

So the shape tells the form. The last axis is the size b of the blocks (the last block may be smaller, and its
rows are padded by zeros; those over channels are all equal). By frequencies, in coordinates that are turned as
frequencies.py does, a side is [G, d, b], blocks as any others. Moments, factors and eigenvectors of a side have
the same form. Which form a side gets is decided in layers/side_forms.py. See docs/mathematics.md, section 10.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tekfac.common.memory import is_out_of_memory
from tekfac.curvature import frequencies

logger = logging.getLogger("tekfac")

WORTH_HALVING = 192
"""Dimensions from which leaving out half of a symmetric product takes less time than the calls for it."""

STRIPS = 4
"""In which it is computed, from the diagonal on."""

SHIFT = 1e-3
"""Of the largest eigenvalue, added to all of them in an iteration, so that null vectors stay where they are."""

LEAST_KEPT = 0.1
"""Of a vector's length that has to be orthogonal to those before it: else float32 would not do."""

FEW = 16
"""Dimensions up to which calls take longer than their arithmetic."""

JITTERS = (1e-6, 1e-4, 1e-2)
"""Multiples of the mean eigenvalue that are tried, in turn, on the diagonal of a stubborn matrix."""


class DecompositionError(ArithmeticError):
    """No attempt at an eigendecomposition gave a finite, orthogonal result."""


# -- building ------------------------------------------------------------------------------------------


def in_blocks(matrix: Tensor) -> Tensor:
    """A side in any form as [G, d, b]: by frequencies, in the coordinates that are turned; a view."""
    return matrix.flatten(1, -2) if matrix.ndim > 3 else matrix


def sum_of_products(x: Tensor, y: Tensor, block_size: int, kernel: tuple[int, ...] = ()) -> Tensor:
    """Sum over rows of x y^T, as far as the form keeps it; rows are [..., G, N, T, d].

    Where x is y itself, about half of a large whole side follows from the other half.

    Args:
        x: rows.
        y: as many.
        block_size: b; d: whole.
        kernel: of the form by frequencies; (): of another form.
    """
    dim, is_square = x.shape[-1], x is y
    if kernel:
        return _products_of_frequencies(x, y, block_size, kernel)
    if block_size == 1:
        return torch.einsum("...gnti,...gnti->gi", x, y)[..., None]
    if block_size == dim:
        return _product(x, y, is_square=is_square)
    found = x.new_zeros(x.shape[-4], dim, block_size)
    for start in range(0, dim, block_size):
        part = slice(start, min(start + block_size, dim))
        block = _product(x[..., part], y[..., part], is_square=is_square)
        found[:, part, : part.stop - start] = block
    return found


def _products_of_frequencies(x: Tensor, y: Tensor, block_size: int, kernel: tuple[int, ...]) -> Tensor:
    """Sum over rows of x y^T, [G, *kernel, C, b]."""
    groups, dim = x.shape[-4], x.shape[-1]

    def split(rows: Tensor) -> Tensor:
        """[G, P C / b, rows, b]."""
        flat = rows.movedim(-4, 0).reshape(groups, count, dim)
        found = frequencies.split(flat, waves)
        blocks = found.view(*found.shape[:3], found.shape[3] // block_size, block_size)
        return blocks.transpose(2, 3).flatten(1, 2)

    count, waves = x.numel() // (groups * dim), frequencies.transform(kernel, x)
    x, y = _as_they_lie(x, y)
    of_x = split(x)
    of_y = of_x if x is y else split(y)
    channels = dim // len(waves)
    return (of_x.mT @ of_y).view(groups, *kernel, channels, block_size)


def _product(x: Tensor, y: Tensor, *, is_square: bool) -> Tensor:
    """Sum over rows of x y^T, whole, [G, d, d].

    Rows that do not lie one after the other, as unfolded patches, are multiplied sample by sample where they
    are many: to lay them out would take longer than the product.
    """
    x, y = _as_they_lie(*(rows[0] if rows.ndim == 5 and len(rows) == 1 else rows for rows in (x, y)))
    if not _lies_flat(x) and x.shape[-2] >= x.shape[-1]:
        products = x.mT @ y  # [..., G, N, d, d]
        return products.sum(dim=(*range(x.ndim - 4), -3))
    x, y = x.flatten(-3, -2), y.flatten(-3, -2)
    if x.ndim > 3:
        return torch.einsum("...gri,...grj->gij", x, y)
    return _squared(x) if is_square and x.shape[0] == 1 and x.shape[-1] >= WORTH_HALVING else x.mT @ y


def _as_they_lie(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both with samples and positions exchanged, where they follow one another in memory so."""
    if _lies_flat(x) or not _lies_flat(x.transpose(-3, -2)):
        return x, y
    turned = x.transpose(-3, -2)
    return turned, turned if y is x else y.transpose(-3, -2)


def _lies_flat(rows: Tensor) -> bool:
    """Whether rows [..., N, T, d] are [..., N T, d] without a copy."""
    samples, positions, _ = rows.shape[-3:]
    return samples == 1 or positions == 1 or rows.stride(-3) == positions * rows.stride(-2)


def _squared(rows: Tensor) -> Tensor:
    """x^T x of rows [1, R, d], by strips, of which only what lies on or above the diagonal is multiplied."""
    dim = rows.shape[-1]
    (x,), found = rows, rows.new_empty(dim, dim)
    strips = [slice(dim * place // STRIPS, dim * (place + 1) // STRIPS) for place in range(STRIPS)]
    for strip in strips:
        torch.mm(x[:, strip].T, x[:, strip.start :], out=found[strip, strip.start :])
    for strip in strips:
        square = found[strip, strip]
        square.add_(square.T.clone()).mul_(0.5)  # processors may round the two halves differently
        found[strip.stop :, strip] = found[strip, strip.stop :].T
    return found[None]


def trace(matrix: Tensor) -> Tensor:
    """The trace of every group, [G]."""
    return diagonal_of(matrix).sum(-1)


def unit_trace(matrix: Tensor) -> Tensor:
    """The matrix divided by its trace; I / d where that is 0 (a layer no gradient reaches)."""
    traces = trace(matrix).reshape(-1, *[1] * (matrix.ndim - 1))
    unit = matrix / traces.clamp_min(torch.finfo(matrix.dtype).tiny)
    if bool((traces > 0).all()):
        return unit
    return torch.where(traces > 0, unit, identity_like(matrix) / in_blocks(matrix).shape[1])


def identity_like(matrix: Tensor) -> Tensor:
    """The identity, in the form of the matrix."""
    groups, dim, size = in_blocks(matrix).shape
    eye = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    found = eye.repeat(math.ceil(dim / size), 1)[:dim].expand(groups, dim, size).contiguous()
    return found.view(matrix.shape)


def diagonal_of(matrix: Tensor) -> Tensor:
    """The diagonal, [G, d]; by frequencies, in the coordinates that are turned."""
    matrix = in_blocks(matrix)
    _, dim, size = matrix.shape
    if size == dim:
        return matrix.diagonal(dim1=-2, dim2=-1)
    return _to_blocks(matrix).diagonal(dim1=-2, dim2=-1).flatten(1)[:, :dim]


def part(matrix: Tensor, groups: tuple[int, int], rows: tuple[int, int]) -> Tensor:
    """Whole blocks of a side, [g, d, b], the first and the end of its groups and rows given; all: as it is."""
    sides = in_blocks(matrix)
    if (groups, rows) == ((0, sides.shape[0]), (0, sides.shape[1])):
        return matrix
    return sides[slice(*groups), slice(*rows), : rows[1] - rows[0]]


def triangles(matrix: Tensor) -> Tensor:
    """The upper triangles of a side's blocks, [G n, b (b + 1) / 2]."""
    blocks = _to_blocks(in_blocks(matrix)).flatten(0, 1)
    rows, columns = torch.triu_indices(*blocks.shape[1:], device=matrix.device)
    return blocks[:, rows, columns]


def of_triangles(upper: Tensor, shape: torch.Size) -> Tensor:
    """The side, in the form that its shape tells, whose triangles these are."""
    size, dim = shape[-1], math.prod(shape[1:-1])
    rows, columns = torch.triu_indices(size, size, device=upper.device)
    blocks = upper.new_empty(len(upper), size, size)
    blocks[:, rows, columns] = upper
    blocks[:, columns, rows] = upper
    return _to_rows(blocks.view(shape[0], -1, size, size), dim).view(shape)


# -- decomposing ---------------------------------------------------------------------------------------


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [G, d] (not negative, ascending in each block) and eigenvectors, in the form of the matrix.

    Raises:
        DecompositionError: if a block defeats every attempt of `symmetric_eigen`.
    """
    _, dim, size = in_blocks(matrix).shape
    if size == 1:
        return axes(matrix)
    if size == dim:
        return symmetric_eigen(matrix)
    blocks = _to_blocks(in_blocks(matrix))
    last = dim - size * (blocks.shape[1] - 1)
    if last == size:
        values, vectors = symmetric_eigen(blocks)
        return values.flatten(1), vectors.reshape(matrix.shape)
    values, vectors = symmetric_eigen(blocks[:, :-1])
    last_values, last_vectors = symmetric_eigen(blocks[:, -1, :last, :last])
    all_vectors = torch.cat([vectors.flatten(1, 2), F.pad(last_vectors, (0, size - last))], dim=1)
    return torch.cat([values.flatten(1), last_values], dim=1), all_vectors


class Along(NamedTuple):
    """A matrix M along given orthonormal vectors Q.

    Attributes:
        product: M Q, [G, d, b].
        values: the diagonal of Q^T M Q, [G, d], not negative.
        off_diagonal: the off-diagonal part's share of the Frobenius norm of Q^T M Q, [G]. That is the norm of
            M, so that no other product is needed. In float32 a share below 1e-3 is rounding.
    """

    product: Tensor
    values: Tensor
    off_diagonal: Tensor

    @classmethod
    def of(cls, matrix: Tensor, vectors: Tensor) -> Along:
        """Look at a matrix."""
        matrix, vectors = in_blocks(matrix), in_blocks(vectors)
        _, dim, size = matrix.shape
        product = _times(matrix, vectors)
        diagonal = product * vectors
        values = diagonal.sum(-2) if size == dim else _to_blocks(diagonal).sum(-2).flatten(1)[:, :dim]
        whole = torch.linalg.vector_norm(matrix, dim=(1, 2))
        share = (1 - (values / whole[:, None]).square().sum(1)).clamp_min(0).sqrt()
        return cls(product, values.clamp_min(0), share)


def iterated(vectors: Tensor, along: Along) -> Tensor | None:
    """Better eigenvectors: one step of orthogonal iteration, Q R = (M + shift) Q, each vector in its place.

    The vectors are orthogonalised from the last, that of the largest eigenvalue in a decomposition, to the
    first. By Cholesky's decomposition of their products that takes two products of matrices and little more. It
    is exact enough where they are nearly orthogonal, which the decomposition shows.

    Returns:
        The vectors, in their form; None where the steps are too large for that, or the matrix is zero.
    """
    _, dim, size = in_blocks(vectors).shape
    tops = along.values.amax(dim=1)[:, None, None]
    moved = torch.addcmul(along.product, in_blocks(vectors), SHIFT * tops)
    moved = (moved if size == dim else _to_blocks(moved)).flip(-1)
    grams = moved.mT @ moved
    squares = grams.diagonal(dim1=-2, dim2=-1)
    lengths = torch.where(squares > 0, squares, 1).sqrt()  # vectors that only fill up the last block have none
    grams = grams / (lengths[..., None] * lengths[..., None, :])
    grams.diagonal(dim1=-2, dim2=-1).clamp_min_(1)
    lower, failed = torch.linalg.cholesky_ex(grams)
    kept = lower.diagonal(dim1=-2, dim2=-1)
    if not bool((kept > LEAST_KEPT).all() & (failed == 0).all() & (tops > 0).all()):
        return None
    upper = lower.mT * lengths[..., None, :]
    turned = torch.linalg.solve_triangular(upper, moved, upper=True, left=False).flip(-1)
    return turned if size == dim else _to_rows(turned, dim).view(vectors.shape)


def _times(matrix: Tensor, vectors: Tensor) -> Tensor:
    """M Q, all of them [G, d, b]."""
    _, dim, size = matrix.shape
    if size == dim:
        return matrix @ vectors
    return _to_rows(_to_blocks(matrix) @ _to_blocks(vectors), dim)


def axes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonal (not negative) and the coordinate axes, instead of eigenvalues and eigenvectors."""
    return diagonal_of(matrix).clamp_min(0).contiguous(), identity_like(matrix)


def recomposed(vectors: Tensor, values: Tensor) -> Tensor:
    """Q diag(values) Q^T, in the form of Q."""
    _, dim, size = in_blocks(vectors).shape
    if size == dim:
        return (vectors * values[:, None, :]) @ vectors.mT
    blocks = _to_blocks(in_blocks(vectors))
    return _to_rows((blocks * _cut(values, size)[:, :, None, :]) @ blocks.mT, dim).view(vectors.shape)


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [..., d] (clamped at 0) and eigenvectors [..., d, d] of positive semi-definite matrices.

    A decomposition that fails is tried again in float64, then with a growing multiple of the identity
    added (which does not move exact eigenvectors); the log says so for those who read on.

    Raises:
        DecompositionError: if all of these fail.
    """
    unit = _power_of_two_above(matrix)  # LAPACK would divide tiny matrices by some number, and round
    scaled = matrix / unit
    attempts = [(matrix.dtype, 0.0)]
    if matrix.dtype != torch.float64:
        attempts.append((torch.float64, 0.0))
    attempts += [(torch.float64, jitter) for jitter in JITTERS]
    for dtype, jitter in attempts:
        how = f"in {str(dtype).removeprefix('torch.')} with jitter {jitter:g}"
        candidate = scaled.to(dtype)
        added: Tensor | float = 0.0
        if jitter:
            added = jitter * candidate.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
            candidate = candidate + torch.diag_embed(added.expand(candidate.shape[:-1]))
        try:
            values, vectors = torch.linalg.eigh(candidate)
        except RuntimeError as error:  # torch.linalg.LinAlgError is one
            if is_out_of_memory(error):
                raise
            logger.info("Eigendecomposition of a %s matrix failed %s: %s", tuple(matrix.shape), how, error)
            continue
        if bool(_error_of(vectors) + 0 * values.sum() <= torch.finfo(dtype).eps ** 0.5):
            values = (values - added).clamp_min(0).to(matrix.dtype) * unit[..., 0]
            return values, vectors.to(matrix.dtype)
        problem = "gave numbers that are not finite, or no orthogonal vectors,"
        logger.info("Eigendecomposition of a %s matrix %s %s", tuple(matrix.shape), problem, how)
    raise DecompositionError(
        f"No eigendecomposition of a {tuple(matrix.shape)} matrix succeeded, not in float64 and not "
        f"with {JITTERS[-1]:g} of its mean eigenvalue added to the diagonal."
    )


def _error_of(vectors: Tensor) -> Tensor:
    """How far the largest entry of Q^T Q x is from that of x, for one x that is 0 nowhere; NaN where Q is.

    All products of the vectors with each other would take a tenth of a decomposition's time.
    """
    dim = vectors.shape[-1]
    if not vectors.numel():
        return vectors.sum()
    x = _probe(dim, vectors.dtype, vectors.device)
    if dim > FEW and vectors.numel() > dim**2:  # where many products with a vector each take longer
        there_and_back = (vectors * (vectors * x.mT).sum(-1, keepdim=True)).sum(-2)[..., None]
    else:
        there_and_back = vectors.mT @ (vectors @ x)
    error: Tensor = torch.linalg.vector_norm(there_and_back - x, torch.inf)
    return error


@functools.lru_cache(maxsize=256)
def _probe(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers between 1 and 2 in size, of changing signs, no two of them alike, [d, 1]."""
    places = torch.arange(dim, dtype=torch.float64)
    found = (1 + (places * 0.6180339887) % 1) * (1 - 2 * ((places * 0.7548776662) % 1 < 0.5).double())
    return found[:, None].to(device, dtype)


def _power_of_two_above(matrix: Tensor) -> Tensor:
    """The next power of two above all entries of each matrix, or 1 for zeros, [..., 1, 1].

    The largest entry of a positive semi-definite matrix lies on its diagonal.
    """
    if not matrix.numel():
        return matrix.new_ones(*matrix.shape[:-2], 1, 1)
    largest = matrix.diagonal(dim1=-2, dim2=-1).amax(dim=-1)[..., None, None]
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


def overlap(old: Tensor, new: Tensor) -> Tensor:
    """Q_old^T Q_new, [G, d, b]: by frequencies no less, as both are turned alike."""
    old, new = in_blocks(old), in_blocks(new)
    _, dim, size = old.shape
    if size == dim:
        return old.mT @ new
    return _to_rows(_to_blocks(old).mT @ _to_blocks(new), dim)


# -- between the forms ---------------------------------------------------------------------------------


def _cut(x: Tensor, size: int) -> Tensor:
    """[..., d] as [..., n, b]: n blocks, the last one padded by zeros."""
    blocks = math.ceil(x.shape[-1] / size)
    return F.pad(x, (0, blocks * size - x.shape[-1])).reshape(*x.shape[:-1], blocks, size)


def _to_blocks(matrix: Tensor) -> Tensor:
    """[G, d, b] as [G, n, b, b]."""
    _, dim, size = matrix.shape
    blocks = math.ceil(dim / size)
    return F.pad(matrix, (0, 0, 0, blocks * size - dim)).reshape(-1, blocks, size, size)


def _to_rows(blocks: Tensor, dim: int) -> Tensor:
    """The inverse of `_to_blocks`."""
    return blocks.flatten(1, 2)[:, :dim].contiguous()
