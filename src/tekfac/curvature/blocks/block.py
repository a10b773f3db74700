"""What all Fisher blocks can do, of which a kind of block says how.

They act on gradient matrices [d_out, d_in], weight.reshape(d_out, -1) with the bias as last column, and
`to_dense` is over the row-major vec of that matrix. A convolution with groups has its groups one below the
other, as its weight has; its block is then block-diagonal itself. Every function of a block,
inverse and square root included, is a function of its eigenvalues, so that a kind of block says two things:
its eigenvalues, and how a function of them is applied. It may also say how a product or a solution is had for
less.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tekfac.common.arrays import Array, as_given, formed_array, to_tensor
from tekfac.layers.shapes import LayerShape

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

DENSE_LIMIT = 8192
"""Rows up to which a block is formed as a matrix without being asked twice: half a GB in float64."""

SpectralFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Block(ABC):
    """What all blocks can do. Matrices are [..., d_out, d_in] with any leading axes.

    What is returned has the block's own precision and device, whatever was given; for a NumPy array it is an
    array, too.

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

    def _product(self, matrices: Tensor) -> Tensor:
        """F applied to [..., G, d_out, d_in]."""
        return self._apply(lambda values: values, matrices)

    def _solution(self, matrices: Tensor, damping: float) -> Tensor:
        """(F + damping I)^-1 applied to [..., G, d_out, d_in]; that it exists has been checked."""
        return self._apply(lambda values: 1 / (values + damping), matrices)

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
        return norm_of(self._spectrum)

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

    def matvec(self, matrix: Array) -> Array:
        """F vec(X), as a matrix, [..., d_out, d_in]."""
        return self._on(self._product, matrix)

    def solve(self, matrix: Array, damping: float = 0.0) -> Array:
        """(F + damping I)^-1 vec(X), as a matrix, [..., d_out, d_in].

        Raises:
            ValueError: for damping 0 and a matrix that is singular in its precision.
        """
        damping = self._invertible_with(damping)
        return self._on(lambda matrices: self._solution(matrices, damping), matrix)

    def sqrt_matvec(self, matrix: Array, damping: float = 0.0) -> Array:
        """(F + damping I)^(1/2) vec(Z): from white noise Z to noise of covariance F + damping I."""
        damping = checked_damping(damping)
        return self._on(lambda m: self._apply(lambda values: (values + damping).sqrt(), m), matrix)

    def inv_sqrt_matvec(self, matrix: Array, damping: float = 0.0) -> Array:
        """(F + damping I)^(-1/2) vec(Z): to noise of covariance (F + damping I)^-1, [..., d_out, d_in].

        Raises:
            ValueError: for damping 0 and a matrix that is singular in its precision.
        """
        damping = self._invertible_with(damping)
        return self._on(lambda m: self._apply(lambda values: (values + damping).rsqrt(), m), matrix)

    def to_dense(self, limit: int = DENSE_LIMIT) -> Tensor:
        """The matrix itself, [size, size], over the row-major vec of [d_out, d_in].

        Raises:
            ValueError: for more than `limit` rows.
        """
        self._require_small(limit)
        identity = torch.eye(self.size, dtype=self.dtype, device=self.device)
        return self.matvec(identity.reshape(self.size, *self.matrix_shape)).reshape(self.size, self.size)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return formed_array(self.to_dense, dtype, copy)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: the fields alone. What was computed of them is computed anew."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    # -- parameters --------------------------------------------------------------------------------------

    def to_matrix(self, weight: Array, bias: Array | None = None) -> Array:
        """Tensors [..., *shape] of the layer's weight and bias as a matrix, [..., d_out, d_in].

        Raises:
            ValueError: for tensors of other shapes.
        """
        given = [to_tensor(part) for part in (weight, bias) if part is not None]
        shapes = dict(list(self.shape.parameters.items())[: len(given)])
        if len(given) > len(shapes):
            raise ValueError(f"Layer {self.name!r} has no bias. Expected the weight alone.")
        require_shapes(dict(zip(shapes, given, strict=True)), shapes)
        matrix = self.shape.to_matrix(given[0], None if bias is None else given[1])
        return as_given(matrix.flatten(-3, -2), weight)

    def from_matrix(self, matrix: Array) -> tuple[Array, ...]:
        """A matrix [..., d_out, d_in] as tensors of the weight and, if there is one, the bias."""
        return tuple(as_given(part, matrix) for part in self.shape.from_matrix(self._split(to_tensor(matrix))))

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

    def _on(self, function: Callable[[Tensor], Tensor], matrix: Array) -> Array:
        """A function of [..., G, d_out, d_in], in the block's precision and on its device, for a matrix."""
        matrices = self._split(to_tensor(matrix)).to(device=self.device, dtype=self.dtype)
        return as_given(function(matrices).flatten(-3, -2), matrix)

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


def require_shapes(tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError for tensors, by name, that are not [..., *shape], or differ in their leading axes."""
    leading = {}
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape)
        leading[name] = found[: len(found) - len(shape)]
        if found != (*leading[name], *shape):
            expected = ", ".join(map(str, shape))
            raise ValueError(f"{name} has shape {list(found)}. Expected [..., {expected}].")
    if len(set(leading.values())) > 1:
        axes = ", ".join(f"{name} {list(own)}" for name, own in leading.items())
        raise ValueError(f"The tensors differ in their leading axes: {axes}. Expected the same for all.")


def norm_of(tensor: Tensor) -> float:
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
