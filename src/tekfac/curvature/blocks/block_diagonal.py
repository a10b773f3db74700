"""The block-diagonal matrix of a network: blocks by layer name, and their products with parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from tekfac.common.arrays import Array, as_given, formed_array, is_array, to_tensor
from tekfac.common.extras import require
from tekfac.curvature.blocks.block import DENSE_LIMIT, Block, checked_damping, require_shapes

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

AnyBlock = TypeVar("AnyBlock", bound=Block, covariant=True)

Damping = float | Mapping[str, float]
"""One number for all layers, or one for each, by layer name."""


class BlockDiagonal(Mapping[str, AnyBlock], Generic[AnyBlock]):
    """Fisher blocks by layer name, and the matrix that has them on its diagonal.

    The matrix acts on dicts of tensors named and shaped like the parameters of its layers
    (`{"conv1.weight": ..., "conv1.bias": ...}`), or on vectors: the same tensors flattened and concatenated
    in the order of `parameters`, which is the model's. NumPy arrays instead of tensors give arrays back.

    Attributes:
        metadata: how the blocks were made: plain values, saved with them.
    """

    def __init__(self, blocks: Iterable[AnyBlock], metadata: Mapping[str, Any] | None = None) -> None:
        given = list(blocks)
        self._blocks = {block.name: block for block in given}
        if len(self._blocks) < len(given):
            raise ValueError(f"Two blocks of the same layer: {[block.name for block in given]}.")
        self.metadata: Mapping[str, Any] = MappingProxyType(dict(metadata or {}))

    def __getitem__(self, name: str) -> AnyBlock:
        try:
            return self._blocks[name]
        except KeyError:
            names = ", ".join(map(repr, self._blocks)) or "none yet"
            raise KeyError(f"No block of a layer {name!r}. The layers with a block: {names}.") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        blocks = ", ".join(f"{name!r}: {type(b).__name__} of {b.size} rows" for name, b in self.items())
        return f"BlockDiagonal({{{blocks}}})"

    # -- numbers -----------------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters it acts on, in order."""
        return {name: shape for block in self.values() for name, shape in block.shape.parameters.items()}

    @property
    def size(self) -> int:
        """Rows of the whole matrix."""
        return sum(block.size for block in self.values())

    @property
    def dtype(self) -> torch.dtype:
        """The widest of the blocks'."""
        double = any(block.dtype == torch.float64 for block in self.values())
        return torch.float64 if double else torch.float32

    def trace(self) -> float:
        """Sum of the eigenvalues."""
        return sum(block.trace() for block in self.values())

    def frobenius_norm(self) -> float:
        """Root of the sum of squared eigenvalues."""
        return math.hypot(*(block.frobenius_norm() for block in self.values()))

    def eigenvalues(self) -> Tensor:
        """All eigenvalues, ascending, [size]."""
        return torch.cat([block.eigenvalues() for block in self.values()]).sort().values

    def logdet(self, damping: Damping = 0.0) -> float:
        """log det(F + damping I); -inf for a singular matrix."""
        return sum(block.logdet(self._damping_of(block, damping)) for block in self.values())

    # -- products ----------------------------------------------------------------------------------------

    def matvec(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """F v for tensors named and shaped [..., *shape] like the parameters."""
        return self._on_dict(lambda block, matrix: block.matvec(matrix), tensors)

    def solve(self, tensors: Mapping[str, Array], damping: Damping = 0.0) -> dict[str, Array]:
        """(F + damping I)^-1 v for tensors named and shaped [..., *shape] like the parameters."""
        return self._on_dict(lambda b, matrix: b.solve(matrix, self._damping_of(b, damping)), tensors)

    def sqrt_matvec(self, tensors: Mapping[str, Array], damping: Damping = 0.0) -> dict[str, Array]:
        """(F + damping I)^(1/2) z: from white noise to noise of covariance F + damping I."""
        return self._on_dict(lambda b, matrix: b.sqrt_matvec(matrix, self._damping_of(b, damping)), tensors)

    def inv_sqrt_matvec(self, tensors: Mapping[str, Array], damping: Damping = 0.0) -> dict[str, Array]:
        """(F + damping I)^(-1/2) z: from white noise to noise of covariance (F + damping I)^-1."""
        return self._on_dict(lambda b, matrix: b.inv_sqrt_matvec(matrix, self._damping_of(b, damping)), tensors)

    def to_vector(self, tensors: Mapping[str, Array]) -> Array:
        """The tensors [..., *shape], flattened and concatenated in the order of `parameters`, [..., size]."""
        self._require_names(tensors)
        parts = [(to_tensor(tensors[name]), len(shape)) for name, shape in self.parameters.items()]
        vector = torch.cat([part.flatten(part.ndim - own_axes) for part, own_axes in parts], -1)
        return as_given(vector, next(iter(tensors.values())))

    def from_vector(self, vector: Array) -> dict[str, Array]:
        """The tensors, by name, that a vector [..., size] is made of."""
        given = to_tensor(vector)
        if given.shape[-1] != self.size:
            raise ValueError(
                f"Got a vector of {given.shape[-1]} numbers. Expected {self.size}, one per parameter."
            )
        shapes = self.parameters
        parts = torch.split(given, [math.prod(shape) for shape in shapes.values()], dim=-1)
        return {
            name: as_given(part.reshape(*given.shape[:-1], *shape), vector)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def to_dense(self, limit: int = DENSE_LIMIT) -> Tensor:
        """The whole matrix, [size, size], in the order of `to_vector`.

        Raises:
            ValueError: for more than `limit` rows.
        """
        if self.size > limit:
            raise ValueError(
                f"The matrix has {self.size} rows, the limit is {limit}. matvec, solve and linear_operator "
                "never form it; each block has a to_dense, too. To form it anyway: "
                f"to_dense(limit={self.size})."
            )
        identity = torch.eye(self.size, dtype=self.dtype)
        return self.to_vector(self.matvec(self.from_vector(identity)))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return formed_array(self.to_dense, dtype, copy)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: made again of its blocks and metadata."""
        return type(self), (list(self.values()), dict(self.metadata))

    # -- dicts -------------------------------------------------------------------------------------------

    def select(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Those of a model's tensors (parameters, gradients) that the matrix acts on."""
        return {name: tensors[name] for name in self.parameters if tensors.get(name) is not None}

    def inner(self, first: Mapping[str, Array], second: Mapping[str, Array]) -> Array:
        """The inner products of tensors [..., *shape], summed over all parameters, [...]."""
        products = to_tensor(self.to_vector(first)) * to_tensor(self.to_vector(second))
        return as_given(products.sum(-1), next(iter(first.values())))

    def white_noise(self, *leading: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Independent standard normal numbers, named and shaped [*leading, *shape] like the parameters.

        `sqrt_matvec` and `inv_sqrt_matvec` turn it into noise of covariance F + damping I, or its inverse.
        """
        drawn_on, noise = None if generator is None else generator.device, {}
        for block in self.values():
            for name, shape in block.shape.parameters.items():
                drawn = torch.randn(*leading, *shape, generator=generator, dtype=block.dtype, device=drawn_on)
                noise[name] = drawn.to(block.device)
        return noise

    # -- SciPy -------------------------------------------------------------------------------------------

    def linear_operator(self, damping: Damping = 0.0) -> Any:
        """F + damping I as a `scipy.sparse.linalg.LinearOperator` on vectors."""
        dampings = {block.name: checked_damping(self._damping_of(block, damping)) for block in self.values()}

        def product(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            products = self.matvec(tensors)
            for block in self.values():
                for name in block.shape.parameters:
                    products[name] += dampings[block.name] * tensors[name].to(products[name])
            return products

        return self._operator(product)

    def inverse_linear_operator(self, damping: Damping = 0.0) -> Any:
        """(F + damping I)^-1 as a `scipy.sparse.linalg.LinearOperator`: a preconditioner for its solvers."""
        return self._operator(lambda tensors: self.solve(tensors, damping))

    def _operator(self, product: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Any:
        linalg = require("scipy.sparse.linalg", "A linear operator")

        def on_columns(columns: Any) -> Any:
            """[size] or [size, k], as SciPy has it."""
            vectors = to_tensor(columns).to(self.dtype)
            products = self.to_vector(product(self.from_vector(vectors.movedim(0, -1))))
            return products.movedim(-1, 0).cpu().numpy()

        products = dict.fromkeys(("matvec", "rmatvec", "matmat", "rmatmat"), on_columns)
        dtype = str(self.dtype).removeprefix("torch.")
        return linalg.LinearOperator((self.size, self.size), dtype=dtype, **products)

    # -- helpers -----------------------------------------------------------------------------------------

    def _on_dict(
        self, function: Callable[[Block, Tensor], Tensor], tensors: Mapping[str, Array]
    ) -> dict[str, Array]:
        self._require_names(tensors)
        products: dict[str, Array] = {}
        for block in self.values():
            names = list(block.shape.parameters)
            matrix = block.to_matrix(*(to_tensor(tensors[name]) for name in names))
            parts = block.from_matrix(function(block, matrix))
            for name, part in zip(names, parts, strict=True):
                products[name] = as_given(part, tensors[name])
        return products

    def _require_names(self, tensors: Mapping[str, Array]) -> None:
        if not isinstance(tensors, Mapping):
            raise TypeError(
                f"Got a {type(tensors).__name__}. Expected a dict of tensors, by the names of parameters; "
                "from_vector() makes one of a vector."
            )
        shapes = self.parameters
        missing = [name for name in shapes if tensors.get(name) is None]
        unknown = [name for name in tensors if name not in shapes]
        if missing or unknown:
            problems = [f"missing: {', '.join(missing)}"] if missing else []
            problems += [f"of no block: {', '.join(unknown)}"] if unknown else []
            raise ValueError(
                f"Expected one tensor for each parameter of the blocks ({'; '.join(problems)}). "
                "BlockDiagonal.parameters has their names and shapes."
            )
        if not (
            all(isinstance(tensors[name], Tensor) for name in shapes)
            or all(is_array(tensors[name]) for name in shapes)
        ):
            types = ", ".join(f"{name} a {type(tensors[name]).__name__}" for name in shapes)
            raise TypeError(f"Expected tensors, or NumPy arrays, for all parameters. Got {types}.")
        require_shapes(tensors, shapes)

    def _damping_of(self, block: Block, damping: Damping) -> float:
        if not isinstance(damping, Mapping):
            return damping
        unknown = [name for name in damping if name not in self]
        if unknown:
            raise ValueError(
                f"The damping names {unknown}, which have no block. Those that have: {list(self)}."
            )
        if block.name not in damping:
            raise ValueError(f"The damping of layer {block.name!r} is missing; it names {list(damping)}.")
        return damping[block.name]
