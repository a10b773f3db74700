"""The Kronecker-factored eigenbasis: decompose the factors, move gradients in and out of it.

With Q_in, Q_out the eigenvectors (in columns) of the two factors, the approximation is diagonal in the
basis Q_in (x) Q_out (paper, Eqs. ekfac1 and etkfac1), and in matrix form

    project      Q_out^T X Q_in
    unproject    Q_out  X Q_in^T
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from tekfac.factors import KroneckerFactors

logger = logging.getLogger("tekfac")

JITTERS = (1e-6, 1e-4, 1e-2)
"""Multiples of the mean eigenvalue that are tried, in turn, on the diagonal of a stubborn matrix."""


class DecompositionError(ArithmeticError):
    """No attempt at an eigendecomposition gave a finite, orthogonal result."""


class Eigenbasis(NamedTuple):
    """Eigenvectors and eigenvalues of both factors, and the scale they were read with.

    Attributes:
        vectors_in: Q_in, [G, d_in, d_in].
        vectors_out: Q_out, [G, d_out, d_out].
        values_in: eigenvalues of the input factor, ascending, not negative, [G, d_in].
        values_out: eigenvalues of the output factor, [G, d_out].
        scale: sigma, [G].
    """

    vectors_in: Tensor
    vectors_out: Tensor
    values_in: Tensor
    values_out: Tensor
    scale: Tensor

    def project(self, matrix: Tensor) -> Tensor:
        """Coordinates in the eigenbasis of gradient matrices [..., G, d_out, d_in]."""
        return self.vectors_out.mT @ matrix @ self.vectors_in

    def unproject(self, matrix: Tensor) -> Tensor:
        """Back from the eigenbasis, [..., G, d_out, d_in]."""
        return self.vectors_out @ matrix @ self.vectors_in.mT


def decompose(factors: KroneckerFactors) -> Eigenbasis:
    """The eigenbasis of the factors.

    Raises:
        DecompositionError: if a factor defeats every attempt of `symmetric_eigen`.
    """
    values_in, vectors_in = symmetric_eigen(factors.input)
    values_out, vectors_out = symmetric_eigen(factors.output)
    return Eigenbasis(vectors_in, vectors_out, values_in, values_out, factors.scale)


def standard_basis(factors: KroneckerFactors) -> Eigenbasis:
    """The basis of coordinate axes, with the factors' diagonals as eigenvalues.

    What is used where a first decomposition failed: the approximation is then diagonal in the
    parameters themselves, as Adam's is.
    """
    eye_in = torch.eye(factors.input.shape[-1], dtype=factors.input.dtype, device=factors.input.device)
    eye_out = torch.eye(factors.output.shape[-1], dtype=factors.output.dtype, device=factors.output.device)
    return Eigenbasis(
        eye_in.expand_as(factors.input).contiguous(),
        eye_out.expand_as(factors.output).contiguous(),
        factors.input.diagonal(dim1=-2, dim2=-1).clamp_min(0).contiguous(),
        factors.output.diagonal(dim1=-2, dim2=-1).clamp_min(0).contiguous(),
        factors.scale,
    )


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [..., d] (clamped at 0) and eigenvectors [..., d, d] of positive semi-definite matrices.

    A decomposition that fails is tried again in float64, then with a growing multiple of the identity
    added (which does not move exact eigenvectors).

    Raises:
        DecompositionError: if all of these fail.
    """
    symmetric = 0.5 * (matrix + matrix.mT)
    attempts = [(matrix.dtype, 0.0)]
    if matrix.dtype != torch.float64:
        attempts.append((torch.float64, 0.0))
    attempts += [(torch.float64, jitter) for jitter in JITTERS]
    for dtype, jitter in attempts:
        how = f"in {str(dtype).removeprefix('torch.')} with jitter {jitter:g}"
        candidate = symmetric.to(dtype)
        added = jitter * candidate.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
        if jitter:
            candidate = candidate + torch.diag_embed(added.expand(candidate.shape[:-1]))
        try:
            values, vectors = torch.linalg.eigh(candidate)
        except RuntimeError as error:  # torch.linalg.LinAlgError is one
            logger.warning("Eigendecomposition of a %s matrix failed %s: %s", tuple(matrix.shape), how, error)
            continue
        if bool(torch.isfinite(values).all() & torch.isfinite(vectors).all()):
            return (values - added).clamp_min(0).to(matrix.dtype), vectors.to(matrix.dtype)
        logger.warning("Eigendecomposition of a %s matrix gave non-finite numbers %s", tuple(matrix.shape), how)
    raise DecompositionError(
        f"No eigendecomposition of a {tuple(matrix.shape)} matrix succeeded, not in float64 and not "
        f"with {JITTERS[-1]:g} of its mean eigenvalue added to the diagonal."
    )
