"""Fisher blocks as objects: positive semi-definite matrices over the parameters of one layer.

    KroneckerBlock   Q diag(S) Q^T with Q = Q_out (x) Q_in     what the four methods approximate F by
    DenseBlock       F itself
    GramBlock        F = J^T J / M, known by its rows J        F itself, where rows are fewer than parameters

They act on gradient matrices [d_out, d_in], weight.reshape(d_out, -1) with the bias as last column, and
`to_dense` is over the row-major vec of that matrix. A convolution with groups has its groups one below the
other, as its weight has; its block is then block-diagonal itself. Every function of a block,
inverse and square root included, is a function of its eigenvalues, so that a kind of block says two things:
its eigenvalues, and how a function of them is applied.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

import torch
from torch import Tensor

from tekfac.curvature import symmetric
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.curvature.factors import KroneckerFactors
from tekfac.curvature.precondition import precondition
from tekfac.curvature.rescaling import product_of_eigenvalues
from tekfac.layers.shapes import LayerShape

DENSE_LIMIT = 8192
"""Rows up to which a block is formed as a matrix without being asked twice: half a GB in float64."""

CHUNK = 2**22
"""Numbers of J that are turned to float64 at a time."""

SpectralFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Block(ABC):
    """What all blocks can do. Matrices are [..., d_out, d_in] with any leading axes.

    What is returned has the block's own precision and device, whatever was given.

    Attributes:
        shape: name and sizes of the layer.
    """

    shape: LayerShape

    # -- what a kind of block says -----------------------------------------------------------------------

    @property
    @abstractmethod
    def _held(self) -> Tensor:
        """One of its tensors, for its precision and device."""

    @property
    @abstractmethod
    def _spectrum(self) -> Tensor:
        """The eigenvalues that are not 0 by construction, in the layout of the kind."""

    @abstractmethod
    def _apply(self, function: SpectralFunction, matrices: Tensor) -> Tensor:
        """function(F) applied to [..., G, d_out, d_in]."""

    # -- numbers -----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        d_out, d_in = self.matrix_shape
        kind = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({self.name!r}, {d_out} x {d_in}, {kind}, trace {self.trace():.4g})"

    @property
    def name(self) -> str:
        """Of the layer."""
        return self.shape.name

    @property
    def size(self) -> int:
        """Rows of the matrix: the number of parameters."""
        return self.shape.size

    @property
    def dtype(self) -> torch.dtype:
        """Of everything computed here."""
        return self._held.dtype

    @property
    def device(self) -> torch.device:
        """Where it is computed."""
        return self._held.device

    def trace(self) -> float:
        """Sum of the eigenvalues."""
        return float(self._spectrum.double().sum())

    def frobenius_norm(self) -> float:
        """Root of the sum of squared eigenvalues."""
        return _norm(self._spectrum)

    def eigenvalues(self) -> Tensor:
        """All eigenvalues, ascending, [size]."""
        values = self._spectrum.flatten()
        return torch.cat([values.new_zeros(self.size - len(values)), values]).sort().values

    def logdet(self, damping: float = 0.0) -> float:
        """log det(F + damping I); -inf for a singular matrix."""
        damping = checked_damping(damping)
        if damping == 0 and self._is_singular:
            return -math.inf
        values = self._spectrum.flatten()
        zeros = self.size - len(values)
        return float((values.double() + damping).log().sum()) + (zeros * math.log(damping) if zeros else 0.0)

    # -- products ----------------------------------------------------------------------------------------

    def matvec(self, matrix: Tensor) -> Tensor:
        """F vec(X), as a matrix, [..., d_out, d_in]."""
        return self._of(lambda values: values, matrix)

    def solve(self, matrix: Tensor, damping: float = 0.0) -> Tensor:
        """(F + damping I)^-1 vec(X), as a matrix, [..., d_out, d_in].

        Raises:
            ValueError: for damping 0 and a matrix that is singular in its precision.
        """
        damping = self._invertible_with(damping)
        return self._of(lambda values: 1 / (values + damping), matrix)

    def sqrt_matvec(self, matrix: Tensor, damping: float = 0.0) -> Tensor:
        """(F + damping I)^(1/2) vec(Z): from white noise Z to noise of covariance F + damping I."""
        damping = checked_damping(damping)
        return self._of(lambda values: (values + damping).sqrt(), matrix)

    def inv_sqrt_matvec(self, matrix: Tensor, damping: float = 0.0) -> Tensor:
        """(F + damping I)^(-1/2) vec(Z): to noise of covariance (F + damping I)^-1, [..., d_out, d_in].

        Raises:
            ValueError: for damping 0 and a matrix that is singular in its precision.
        """
        damping = self._invertible_with(damping)
        return self._of(lambda values: (values + damping).rsqrt(), matrix)

    def to_dense(self, limit: int = DENSE_LIMIT) -> Tensor:
        """The matrix itself, [size, size], over the row-major vec of [d_out, d_in].

        Raises:
            ValueError: for more than `limit` rows.
        """
        self._require_small(limit)
        identity = torch.eye(self.size, dtype=self.dtype, device=self.device)
        return self.matvec(identity.reshape(self.size, *self.matrix_shape)).reshape(self.size, self.size)

    # -- parameters --------------------------------------------------------------------------------------

    def to_matrix(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Tensors [..., *shape] of the layer's weight and bias as a matrix, [..., d_out, d_in].

        Raises:
            ValueError: for tensors of other shapes.
        """
        leading = tuple(weight.shape[: weight.ndim - len(self.shape.weight)])
        given = (weight,) if bias is None else (weight, bias)
        expected = [(*leading, *shape) for shape in self.shape.parameters.values()]
        if [tuple(tensor.shape) for tensor in given] != expected[: len(given)]:
            found = [list(tensor.shape) for tensor in given]
            shapes = [f"[..., {', '.join(map(str, shape))}]" for shape in self.shape.parameters.values()]
            raise ValueError(
                f"Layer {self.name!r} got tensors of shape {found}. Expected {' and '.join(shapes)}, with the "
                "same leading axes."
            )
        return self.shape.to_matrix(weight, bias).flatten(-3, -2)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """A matrix [..., d_out, d_in] as tensors of the weight and, if there is one, the bias."""
        return self.shape.from_matrix(self._split(matrix))

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Of the gradient matrix: outputs (of all groups), inputs and bias."""
        return self.shape.groups * self.shape.d_out, self.shape.d_in

    def _split(self, matrix: Tensor) -> Tensor:
        """[..., G * d_out, d_in] as [..., G, d_out, d_in]."""
        if tuple(matrix.shape[-2:]) != self.matrix_shape:
            bias = "the bias as last column" if self.shape.has_bias else "no bias"
            raise ValueError(
                f"The block of layer {self.name!r} got a matrix of shape {list(matrix.shape)}. Expected "
                f"[..., {self.matrix_shape[0]}, {self.matrix_shape[1]}]: outputs, inputs, {bias}. "
                "to_matrix(weight, bias) makes one."
            )
        sizes = self.shape.groups, self.shape.d_out, self.shape.d_in
        return matrix.detach().reshape(*matrix.shape[:-2], *sizes)

    def _taken(self, matrix: Tensor) -> Tensor:
        """[..., G * d_out, d_in] as [..., G, d_out, d_in], in the block's precision and on its device."""
        return self._split(matrix).to(device=self.device, dtype=self.dtype)

    def _of(self, function: SpectralFunction, matrix: Tensor) -> Tensor:
        return self._apply(function, self._taken(matrix)).flatten(-3, -2)

    @property
    def _is_singular(self) -> bool:
        """Whether the smallest eigenvalue is 0, as far as the precision tells."""
        values = self._spectrum
        if values.numel() < self.size:
            return True
        return float(values.min()) <= torch.finfo(self.dtype).eps * float(values.max())

    def _invertible_with(self, damping: float) -> float:
        damping = checked_damping(damping)
        if damping == 0 and self._is_singular:
            values = self.eigenvalues()
            raise ValueError(
                f"The block of layer {self.name!r} is singular: its eigenvalues go from {float(values[0]):.3g} "
                f"to {float(values[-1]):.3g}. Give a damping > 0; trace() / size, here "
                f"{self.trace() / self.size:.3g}, is the mean eigenvalue."
            )
        return damping

    def _require_small(self, limit: int) -> None:
        if self.size > limit:
            gigabytes = self.size**2 * self.dtype.itemsize / 2**30
            raise ValueError(
                f"The block of layer {self.name!r} has {self.size} rows; as a matrix it takes "
                f"{gigabytes:.1f} GiB. matvec, solve, eigenvalues, logdet and the norms never form it; to form "
                f"it anyway, to_dense(limit={self.size})."
            )


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

    def solve(self, matrix: Tensor, damping: float = 0.0) -> Tensor:
        """(F + damping I)^-1 vec(X), as a matrix, [..., d_out, d_in]; what an optimizer's step computes.

        Raises:
            ValueError: for damping 0 and a matrix that is singular in its precision.
        """
        damping = self._invertible_with(damping)
        matrices = self._taken(matrix)
        return precondition(matrices, self.basis, self.rescaling + damping).flatten(-3, -2)

    def _apply(self, function: SpectralFunction, matrices: Tensor) -> Tensor:
        return self.basis.unproject(function(self.rescaling) * self.basis.project(matrices))


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
        return _norm(self.matrices)

    def matvec(self, matrix: Tensor) -> Tensor:
        """F vec(X), as a matrix, [..., d_out, d_in]."""
        matrices = self._taken(matrix)
        products = torch.einsum("gij,...gj->...gi", self.matrices, matrices.flatten(-2))
        return products.reshape(matrix.shape)

    def to_dense(self, limit: int = DENSE_LIMIT) -> Tensor:
        """The matrix itself, [size, size]."""
        self._require_small(limit)
        dense: Tensor = torch.block_diag(*self.matrices)  # type: ignore[no-untyped-call]
        return dense

    @property
    def _held(self) -> Tensor:
        return self.matrices

    def solve(self, matrix: Tensor, damping: float = 0.0) -> Tensor:
        """(F + damping I)^-1 vec(X), as a matrix, [..., d_out, d_in].

        Raises:
            ValueError: for damping 0 and a matrix that is singular in its precision.
        """
        damping = self._invertible_with(damping)
        matrices = self._taken(matrix)
        columns = matrices.flatten(-2).reshape(-1, *self.matrices.shape[:2]).permute(1, 2, 0)  # [G, D, K]
        damped = self.matrices.clone()
        damped.diagonal(dim1=1, dim2=2).add_(damping)
        solution: Tensor = torch.linalg.solve(damped, columns)
        return solution.permute(2, 0, 1).reshape(matrix.shape)

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
        return _norm(self.gram)

    def matvec(self, matrix: Tensor) -> Tensor:
        """J^T (J vec(X)) / M, as a matrix, [..., d_out, d_in]."""
        matrices = self._taken(matrix)
        along_rows = torch.einsum("grd,...gd->...gr", self.rows, matrices.flatten(-2))
        products = torch.einsum("grd,...gr->...gd", self.rows, along_rows) / self.num_terms
        return products.reshape(matrix.shape)

    @property
    def _held(self) -> Tensor:
        return self.rows

    @cached_property
    def gram(self) -> Tensor:
        """J J^T / M in float64, [G, R, R]."""
        groups, count = self.rows.shape[:2]
        total = self.rows.new_zeros(groups, count, count, dtype=torch.float64)
        for columns in torch.split(self.rows, max(1, CHUNK // max(1, count)), dim=2):
            total += columns.double() @ columns.double().mT
        return total / self.num_terms

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


def _norm(tensor: Tensor) -> float:
    """The root of the sum of squares, summed in float64."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return float(norm)


def checked_damping(damping: float) -> float:
    """The damping as a float.

    Raises:
        ValueError: if it is no finite number, or negative.
    """
    number = damping.item() if isinstance(damping, Tensor) and damping.ndim == 0 else damping
    if not isinstance(number, Real) or isinstance(number, bool) or not 0 <= float(number) < math.inf:
        raise ValueError(f"Invalid damping: {damping!r}. Expected a number that is not negative.")
    return float(number)
