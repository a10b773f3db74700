"""Re-scaling: the diagonal S of the approximation in its eigenbasis, [G, d_out, d_in].

    product     S = sigma lambda_out lambda_in^T                    follows from the basis (KFAC, TKFAC)
    corrected   S = Theta, Theta_ij = E[(Q_out^T G_n Q_in)_ij^2]    measured and averaged (EKFAC, TEKFAC)

Theta (paper, Eq. etkfac2) is the best diagonal there is in a given basis: it is the diagonal of Q^T F Q,
so it minimises the Frobenius error, and its sum is the trace of F whatever the basis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.curvature.turning import Turning
from tekfac.layers.batch import RowSource
from tekfac.layers.contractions import (
    Sizes,
    gradient_first_cost,
    pairs_cost,
    project_first_cost,
    samples_per_chunk,
    sizes_of,
)
from tekfac.layers.rows import Rows


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


def second_moments(batches: Sequence[RowSource], basis: Eigenbasis, memory_budget: int) -> Tensor:
    """Theta of one or more batches of the same layer, as of one large batch, [G, d_out, d_in]."""
    return sum_of_squares(batches, basis, memory_budget) / sum(batch.num_terms for batch in batches)


def sum_of_squares(batches: Sequence[RowSource], basis: Eigenbasis, memory_budget: int) -> Tensor:
    """Sum over samples and columns of (Q_out^T G_n Q_in)^2, which Theta is the mean of, [G, d_out, d_in]."""
    total: Tensor | None = None
    for batch in batches:
        for rows in batch.chunks(samples_per_chunk(batch, memory_budget)):
            sums = _squared_projections(rows, basis)
            if rows.scale != 1:
                sums = sums * rows.scale
            if rows.tokens is None:
                total = sums if total is None else total.add_(sums)
            else:
                if total is None:
                    total = sums.new_zeros(*sums.shape[:2], rows.tokens.size)
                total.index_add_(2, rows.tokens.columns, sums)
    assert total is not None, "sum_of_squares() needs at least one batch"
    return total


def _squared_projections(rows: Rows, basis: Eigenbasis) -> Tensor:
    """Sum over columns and samples of (Q_out^T G_n Q_in)^2, by the cheapest contraction."""
    if rows.formed:
        return squares_gradient_first(rows, basis)
    return cheapest(sizes_of(rows)).squares(rows, basis)


def squares_by_pairs(rows: Rows, basis: Eigenbasis) -> Tensor:
    """The squares multiplied out, over pairs of positions: no per-sample gradient is formed.

    (sum_t u_t a_t)^2 = sum_t u_t^2 a_t^2 + 2 sum_{s<t} (u_s u_t) (a_s a_t), one product of matrices for all
    samples and pairs, whatever the number of columns. With one position the squares simply factorise; with more
    the terms may cancel but for rounding, which must not make a square negative.
    """
    inputs, gradients = _projected(rows, basis)
    if inputs.shape[2] == 1:
        return gradients.square().sum(0).flatten(1, 2).mT @ inputs.square().flatten(1, 2)
    first, second = torch.triu_indices(*2 * inputs.shape[2:3], device=inputs.device)
    weight = (1 + (first != second).to(inputs.dtype))[:, None]
    of_gradients = (gradients[..., first, :] * gradients[..., second, :]).sum(0) * weight
    of_inputs = inputs[..., first, :] * inputs[..., second, :]
    return torch.einsum("gnpo,gnpi->goi", of_gradients, of_inputs).clamp_min(0)


def squares_project_first(rows: Rows, basis: Eigenbasis) -> Tensor:
    """Project inputs and output gradients, then form the gradients in the eigenbasis."""
    inputs, gradients = _projected(rows, basis)
    if len(gradients) == 1:
        return (gradients[0].mT @ inputs).square().sum(dim=1)
    return torch.einsum("kgnto,gnti->kgnoi", gradients, inputs).square().sum(dim=(0, 2))


def squares_gradient_first(rows: Rows, basis: Eigenbasis) -> Tensor:
    """Form the per-sample gradients, then project them."""
    gradients = rows.gradients.transpose(1, 2)  # [K, N, G, d_out, d_in]
    return _for(rows, basis).project(gradients).square().sum(dim=(0, 1))


def _projected(rows: Rows, basis: Eigenbasis) -> tuple[Tensor, Tensor]:
    basis = _for(rows, basis)
    inputs = Turning(basis.vectors_in).rows_into(rows.a.flatten(1, 2)).reshape(rows.a.shape)
    gradients = Turning(basis.vectors_out).rows_into(rows.u.flatten(2, 3)).reshape(rows.u.shape)
    return inputs, gradients


def _for(rows: Rows, basis: Eigenbasis) -> Eigenbasis:
    """The basis on those columns that the rows have. Tokens leave some out; their basis is that of the axes."""
    return basis if rows.tokens is None else basis._replace(vectors_in=basis.vectors_in[:, rows.tokens.columns])


class Contraction(NamedTuple):
    """One of the ways to the same sum of squares, and what it costs."""

    squares: Callable[[Rows, Eigenbasis], Tensor]
    cost: Callable[[Sizes], int]


CONTRACTIONS = (
    Contraction(squares_by_pairs, pairs_cost),
    Contraction(squares_project_first, project_first_cost),
    Contraction(squares_gradient_first, gradient_first_cost),
)


def cheapest(sizes: Sizes) -> Contraction:
    """The contraction to take for such sizes."""
    return min(CONTRACTIONS, key=lambda contraction: contraction.cost(sizes))
