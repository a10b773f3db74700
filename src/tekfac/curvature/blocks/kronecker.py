"""The block that a method makes: diagonal in the eigenbasis of two Kronecker factors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from tekfac.curvature import symmetric
from tekfac.curvature.blocks.block import Block, SpectralFunction
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.curvature.factors import KroneckerFactors
from tekfac.curvature.precondition import precondition
from tekfac.curvature.rescaling import product_of_eigenvalues


@dataclass(frozen=True, eq=False, repr=False)
class KroneckerBlock(Block):
    """Q diag(S) Q^T, Q = Q_out (x) Q_in: the approximation that a method makes.

    Attributes:
        basis: Q_in and Q_out, with the factors' eigenvalues and scale.
        theta: S where it was measured in the basis, [G, d_out, d_in]; None where it is the product of the
            factors' eigenvalues.
    """

    basis: Eigenbasis
    theta: Tensor | None = None

    @cached_property
    def rescaling(self) -> Tensor:
        """S, [G, d_out, d_in]."""
        return product_of_eigenvalues(self.basis) if self.theta is None else self.theta

    @property
    def factors(self) -> KroneckerFactors:
        """The two factors, put together again from their eigenvectors and eigenvalues."""
        basis = self.basis
        return KroneckerFactors(
            symmetric.recomposed(basis.vectors_in, basis.values_in),
            symmetric.recomposed(basis.vectors_out, basis.values_out),
            basis.scale,
        )

    @property
    def _held(self) -> Tensor:
        return self.basis.vectors_in

    @property
    def _spectrum(self) -> Tensor:
        return self.rescaling

    def _apply(self, function: SpectralFunction, matrices: Tensor) -> Tensor:
        return self.basis.unproject(function(self.rescaling) * self.basis.project(matrices))

    def _solution(self, matrices: Tensor, damping: float) -> Tensor:
        """What an optimizer's step computes."""
        return precondition(matrices, self.basis, self.rescaling + damping)
