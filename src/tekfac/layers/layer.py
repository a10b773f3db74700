"""Layers: the parameters that share a block, and the modules that use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tekfac.layers.kinds.base import LayerKind
from tekfac.layers.shapes import LayerShape


class Use(NamedTuple):
    """A module that uses a layer's parameters.

    Attributes:
        module: the module.
        kind: how modules of its type use their parameters.
        part: which of the kind's parts the layer is.
    """

    module: nn.Module
    kind: LayerKind
    part: int


@dataclass(frozen=True)
class Layer:
    """One block owner: the weight, and perhaps the bias, of a module, or of several that share them.

    Attributes:
        name: the (first) module's name in the model, and that of the part if the module has several.
        uses: the modules that use these parameters.
        weight: shaped as `shape` says.
        bias: None where the layer has none, or none that is trained.
        shape: the sizes of its block.
        dtype: of the curvature.
        is_table: whether inputs are numbers of the weight's rows.
        is_tied: whether the weight is a table of embeddings and an output projection at once. Rows of the two
            uses are of different kinds.
    """

    name: str
    uses: tuple[Use, ...]
    weight: nn.Parameter
    bias: nn.Parameter | None
    shape: LayerShape
    dtype: torch.dtype
    is_table: bool = False
    is_tied: bool = False

    @property
    def is_convolution(self) -> bool:
        """Whether the paper's rule for the damping of convolutions applies."""
        return self.uses[0].kind.is_convolution

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Weight, and bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def is_same_as(self, other: Layer) -> bool:
        """Whether both are blocks of the same parameters, used by the same modules, in the same form."""
        parameters = [id(p) for p in self.parameters] == [id(p) for p in other.parameters]
        form = (self.shape, self.dtype) == (other.shape, other.dtype)
        return parameters and form and self.has_same_uses_as(other)

    def has_same_uses_as(self, other: Layer) -> bool:
        """Whether both belong to the same weight, used by the same modules."""
        uses = [(id(u.module), u.part) for u in self.uses] == [(id(u.module), u.part) for u in other.uses]
        return self.weight is other.weight and uses

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tensors shaped like weight and bias as one matrix per block, [G, d_out, d_in]."""
        return self.shape.to_matrix(weight, bias).to(self.dtype)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `to_matrix`: tensors shaped and typed like `parameters`."""
        parts = zip(self.shape.from_matrix(matrix), self.parameters, strict=True)
        return tuple(part.to(parameter.dtype) for part, parameter in parts)
