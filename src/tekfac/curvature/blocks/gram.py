"""The exact block by its rows, where they are fewer than the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tekfac.curvature import symmetric
from tekfac.curvature.blocks.block import Block, SpectralFunction, norm_of

CHUNK = 2**22
"""Numbers of J that are turned to float64 at a time."""


@dataclass(frozen=True, eq=False, repr=False)
class GramBlock(Block):
    """F = J^T J / M by its rows: exact, and never formed.

    The eigenvalues that are not 0 are those of the Gram matrix J J^T / M, and its eigenvectors W give those of
    F as J^T W, up to their lengths.

    Attributes:
        rows: J, the gradients of all samples and columns, [G, R, d_out * d_in].
        num_terms: M.
    """

    rows: Tensor
    num_terms: int

    def trace(self) -> float:
        """Mean squared length of the rows."""
        return float(self.rows.double().square().sum()) / self.num_terms

    def frobenius_norm(self) -> float:
        """Of the Gram matrix, which is F's."""
        return norm_of(self.gram)

    @cached_property
    def gram(self) -> Tensor:
        """J J^T / M in float64, [G, R, R]."""
        groups, count = self.rows.shape[:2]
        total = self.rows.new_zeros(groups, count, count, dtype=torch.float64)
        for columns in torch.split(self.rows, max(1, CHUNK // max(1, count)), dim=2):
            total += columns.double() @ columns.double().mT
        return total / self.num_terms

    @property
    def _held(self) -> Tensor:
        return self.rows

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        """At most d_out * d_in eigenvalues of each group, [G, r], and eigenvectors of F, [G, d, r]; float64."""
        values, vectors = symmetric.symmetric_eigen(self.gram)
        rank = min(self.rows.shape[1:])
        values, vectors = values[:, -rank:], vectors[:, :, -rank:]
        significant = values > self.rows.shape[1] * torch.finfo(torch.float64).eps * values[:, -1:]
        values = torch.where(significant, values, 0.0)
        lengths = torch.where(significant, values * self.num_terms, torch.inf).sqrt()
        return values, (self.rows.double().mT @ vectors).div_(lengths[:, None, :])

    @property
    def _spectrum(self) -> Tensor:
        return self._eigen[0].to(self.dtype)

    def _apply(self, function: SpectralFunction, matrices: Tensor) -> Tensor:
        values, vectors = self._eigen
        flat = matrices.flatten(-2).double()
        coordinates = torch.einsum("gdr,...gd->...gr", vectors, flat)
        inside = torch.einsum("gdr,...gr->...gd", vectors, function(values) * coordinates)
        if values.shape[1] < flat.shape[-1] or not bool((values > 0).all()):
            projected = torch.einsum("gdr,...gr->...gd", vectors, coordinates)
            inside = inside + function(values.new_zeros(())) * (flat - projected)
        return inside.to(self.dtype).reshape(matrices.shape)

    def _product(self, matrices: Tensor) -> Tensor:
        """J^T (J vec(X)) / M."""
        along_rows = torch.einsum("grd,...gd->...gr", self.rows, matrices.flatten(-2))
        products = torch.einsum("grd,...gr->...gd", self.rows, along_rows) / self.num_terms
        return products.reshape(matrices.shape)
