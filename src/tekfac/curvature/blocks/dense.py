"""The exact block where it is small enough to be formed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tekfac.curvature import symmetric
from tekfac.curvature.blocks.block import DENSE_LIMIT, Block, SpectralFunction, norm_of


@dataclass(frozen=True, eq=False, repr=False)
class DenseBlock(Block):
    """A block as a matrix.

    Attributes:
        matrices: [G, d_out * d_in, d_out * d_in], over the row-major vec of each group's matrix.
    """

    matrices: Tensor

    def trace(self) -> float:
        """Sum of the diagonal."""
        return float(self.matrices.diagonal(dim1=1, dim2=2).double().sum())

    def frobenius_norm(self) -> float:
        """Of the matrix itself."""
        return norm_of(self.matrices)

    def to_dense(self, limit: int = DENSE_LIMIT) -> Tensor:
        """The matrix itself, [size, size]."""
        self._require_small(limit)
        dense: Tensor = torch.block_diag(*self.matrices)  # type: ignore[no-untyped-call]
        return dense

    @property
    def _held(self) -> Tensor:
        return self.matrices

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        return symmetric.symmetric_eigen(self.matrices)

    @cached_property
    def _spectrum(self) -> Tensor:
        values: Tensor = torch.linalg.eigvalsh(0.5 * (self.matrices + self.matrices.mT))
        return values.clamp_min(0)

    def _apply(self, function: SpectralFunction, matrices: Tensor) -> Tensor:
        values, vectors = self._eigen
        coordinates = torch.einsum("gij,...gi->...gj", vectors, matrices.flatten(-2))
        turned = torch.einsum("gij,...gj->...gi", vectors, function(values) * coordinates)
        return turned.reshape(matrices.shape)

    def _product(self, matrices: Tensor) -> Tensor:
        products = torch.einsum("gij,...gj->...gi", self.matrices, matrices.flatten(-2))
        return products.reshape(matrices.shape)

    def _solution(self, matrices: Tensor, damping: float) -> Tensor:
        columns = matrices.flatten(-2).reshape(-1, *self.matrices.shape[:2]).permute(1, 2, 0)  # [G, D, K]
        damped = self.matrices.clone()
        damped.diagonal(dim1=1, dim2=2).add_(damping)
        solution: Tensor = torch.linalg.solve(damped, columns)
        return solution.permute(2, 0, 1).reshape(matrices.shape)
