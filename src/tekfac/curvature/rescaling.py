"""Re-scaling: the diagonal S of the approximation in its eigenbasis, [G, d_out, d_in].

    product     S = sigma lambda_out lambda_in^T                    follows from the basis (KFAC, TKFAC)
    corrected   S = Theta, Theta_ij = E[(Q_out^T G_n Q_in)_ij^2]    measured and averaged (EKFAC, TEKFAC)

Theta (paper, Eq. etkfac2) is the best diagonal there is in a given basis: it is the diagonal of Q^T F Q,
so it minimises the Frobenius error, and its sum is the trace of F whatever the basis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tekfac.curvature import symmetric
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.layers.batch import LayerBatch
from tekfac.layers.rows import Rows, samples_within


@dataclass(frozen=True)
class RescalingRule:
    """One of the two choices of re-scaling.

    Attributes:
        name: for messages.
        measured: whether S is measured in the basis and averaged, or follows from the basis.
    """

    name: str
    measured: bool


PRODUCT = RescalingRule("the product of eigenvalues", measured=False)
CORRECTED = RescalingRule("the corrected second moments", measured=True)


def product_of_eigenvalues(basis: Eigenbasis) -> Tensor:
    """sigma lambda_out lambda_in^T, [G, d_out, d_in]."""
    scaled = basis.scale[:, None] * basis.values_out
    return scaled[:, :, None] * basis.values_in[:, None, :]


def second_moments(batches: Sequence[LayerBatch], basis: Eigenbasis, memory_budget: int) -> Tensor:
    """Theta of one or more batches of the same layer, as of one large batch, [G, d_out, d_in]."""
    return sum_of_squares(batches, basis, memory_budget) / sum(batch.num_terms for batch in batches)


def sum_of_squares(batches: Sequence[LayerBatch], basis: Eigenbasis, memory_budget: int) -> Tensor:
    """Sum over samples and columns of (Q_out^T G_n Q_in)^2, which Theta is the mean of, [G, d_out, d_in]."""
    total: Tensor | None = None
    for batch in batches:
        for rows in batch.chunks(_chunk_size(batch, memory_budget)):
            sums = _squared_projections(rows, basis)
            if rows.tokens is None:
                total = sums if total is None else total.add_(sums)
            else:
                if total is None:
                    total = sums.new_zeros(*sums.shape[:2], rows.tokens.size)
                total.index_add_(2, rows.tokens.columns, sums)
    assert total is not None, "sum_of_squares() needs at least one batch"
    return total


def rotated(theta: Tensor, old: Eigenbasis, new: Eigenbasis) -> Tensor:
    """Theta of the old basis as seen in the new one, [G, d_out, d_in].

    The diagonal, in the new basis, of the approximation held so far. Trace and positivity are kept, and
    a mere permutation or change of signs of the eigenvectors is undone exactly.
    """
    turn_out = symmetric.squared_overlap(old.vectors_out, new.vectors_out)
    turn_in = symmetric.squared_overlap(old.vectors_in, new.vectors_in)
    return symmetric.into(turn_in, symmetric.into(turn_out, theta.mT).mT)


def _squared_projections(rows: Rows, basis: Eigenbasis) -> Tensor:
    """Sum over columns and samples of (Q_out^T G_n Q_in)^2, by the cheapest contraction."""
    positions, d_in = rows.a.shape[2:]
    columns, d_out = rows.u.shape[0], rows.u.shape[-1]
    if positions == 1:
        return squares_of_single_position(rows, basis)
    sizes = (positions, d_in, d_out, columns)
    if project_first_cost(*sizes) <= gradient_first_cost(*sizes):
        return squares_project_first(rows, basis)
    return squares_gradient_first(rows, basis)


def project_first_cost(positions: int, d_in: int, d_out: int, columns: int) -> int:
    """Multiplications per sample of `squares_project_first`."""
    return positions * (d_in**2 + columns * d_out * (d_out + d_in))


def gradient_first_cost(positions: int, d_in: int, d_out: int, columns: int) -> int:
    """Multiplications per sample of `squares_gradient_first`."""
    return columns * d_in * d_out * (positions + d_in + d_out)


def squares_of_single_position(rows: Rows, basis: Eigenbasis) -> Tensor:
    """T = 1: the squares factorise, no per-sample gradient is formed."""
    inputs, gradients = _projected(rows, basis)
    return torch.einsum("kgnto,gnti->goi", gradients.square(), inputs.square())


def squares_project_first(rows: Rows, basis: Eigenbasis) -> Tensor:
    """Project inputs and output gradients, then form the gradients in the eigenbasis."""
    inputs, gradients = _projected(rows, basis)
    return torch.einsum("kgnto,gnti->kgnoi", gradients, inputs).square().sum(dim=(0, 2))


def squares_gradient_first(rows: Rows, basis: Eigenbasis) -> Tensor:
    """Form the per-sample gradients, then project them."""
    gradients = rows.gradients().transpose(1, 2)  # [K, N, G, d_out, d_in]
    return _for(rows, basis).project(gradients).square().sum(dim=(0, 1))


def _projected(rows: Rows, basis: Eigenbasis) -> tuple[Tensor, Tensor]:
    basis = _for(rows, basis)
    inputs = symmetric.into(basis.vectors_in, rows.a.flatten(1, 2)).reshape(rows.a.shape)
    gradients = symmetric.into(basis.vectors_out, rows.u.flatten(2, 3)).reshape(rows.u.shape)
    return inputs, gradients


def _for(rows: Rows, basis: Eigenbasis) -> Eigenbasis:
    """The basis on those columns that the rows have. Tokens leave some out; their basis is that of the axes."""
    return basis if rows.tokens is None else basis._replace(vectors_in=basis.vectors_in[:, rows.tokens.columns])


def _chunk_size(batch: LayerBatch, memory_budget: int) -> int:
    """Samples per chunk such that rows and per-sample gradients, projected and not, fit the budget."""
    columns, groups, _, positions, d_in, d_out = batch.shape
    rows = 2 * positions * (d_in + columns * d_out)
    gradients = 2 * columns * d_in * d_out
    return samples_within(memory_budget, groups * (rows + gradients))
