"""The Kronecker-factored eigenbasis: decompose the factors, move gradients in and out of it.

With Q_in, Q_out the eigenvectors (in columns) of the two factors, the approximation is diagonal in the
basis Q_in (x) Q_out (paper, Eqs. ekfac1 and etkfac1), and in matrix form

    project      Q_out^T X Q_in
    unproject    Q_out  X Q_in^T
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tekfac.curvature import symmetric
from tekfac.curvature.factors import KroneckerFactors


class Eigenbasis(NamedTuple):
    """Eigenvectors and eigenvalues of both factors, and the scale they were read with.

    Attributes:
        vectors_in: Q_in, [G, d_in, d_in], or in the cheaper form of a large side (see symmetric.py).
        vectors_out: Q_out, [G, d_out, d_out], likewise.
        values_in: eigenvalues of the input factor, ascending (in every block), not negative, [G, d_in].
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
        return symmetric.into(self.vectors_in, symmetric.into(self.vectors_out, matrix.mT).mT)

    def unproject(self, matrix: Tensor) -> Tensor:
        """Back from the eigenbasis, [..., G, d_out, d_in]."""
        return symmetric.out_of(self.vectors_in, symmetric.out_of(self.vectors_out, matrix.mT).mT)


def decompose(factors: KroneckerFactors) -> Eigenbasis:
    """The eigenbasis of the factors.

    Raises:
        DecompositionError: if a factor defeats every attempt of `symmetric.symmetric_eigen`.
    """
    values_in, vectors_in = symmetric.eigen(factors.input)
    values_out, vectors_out = symmetric.eigen(factors.output)
    return Eigenbasis(vectors_in, vectors_out, values_in, values_out, factors.scale)


def standard_basis(factors: KroneckerFactors) -> Eigenbasis:
    """The basis of coordinate axes, with the factors' diagonals as eigenvalues.

    What is used where a first decomposition failed: the approximation is then diagonal in the
    parameters themselves, as Adam's is.
    """
    values_in, vectors_in = symmetric.axes(factors.input)
    values_out, vectors_out = symmetric.axes(factors.output)
    return Eigenbasis(vectors_in, vectors_out, values_in, values_out, factors.scale)
