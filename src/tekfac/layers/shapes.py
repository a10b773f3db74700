"""The sizes of a layer's block, and how its parameters become a matrix and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tekfac.layers.side_forms import SideForms

Layout = Literal["output first", "input first", "units"]
"""How a weight lies in memory.

    output first   [G d_out, ...]           nn.Linear, convolutions
    input first    [G c, d_out, ...]        transposed convolutions; [d_in, d_out] of tables and of x @ weight
    units          [...]                    every entry is a block of its own, with its bias beside it
"""


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer's block, and how its parameters become a matrix.

    Attributes:
        name: of the layer.
        weight: shape of the weight.
        has_bias: whether a bias is part of the block.
        groups: G, independent blocks; for the layout "units" it follows from the weight.
        layout: how the weight lies in memory.
        parameter_names: of weight and bias, as in `named_parameters`; () for name.weight and name.bias.
        block_in: the size of the blocks that the input side is kept in (see side_forms.py); None: whole.
        block_out: of the output side.
        kernel: sizes of a convolution's kernel, where the input side is kept by its frequencies, each in blocks
            over the channels, and no bias among the inputs; else ().
    """

    name: str
    weight: tuple[int, ...]
    has_bias: bool
    groups: int = 1
    layout: Layout = "output first"
    parameter_names: tuple[str, ...] = ()
    block_in: int | None = None
    block_out: int | None = None
    kernel: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.layout == "units":
            object.__setattr__(self, "groups", math.prod(self.weight))

    @property
    def d_out(self) -> int:
        """Outputs per block."""
        if self.layout == "units":
            return 1
        return self.weight[1] if self.layout == "input first" else self.weight[0] // self.groups

    @property
    def d_in(self) -> int:
        """Inputs per block, the bias's 1 included."""
        return math.prod(self.weight) // (self.groups * self.d_out) + self.has_bias

    @property
    def side_in(self) -> int:
        """The size of the input side's blocks; d_in where it is whole."""
        return self.block_in or self.d_in

    @property
    def side_out(self) -> int:
        """The size of the output side's blocks; d_out where it is whole."""
        return self.block_out or self.d_out

    @property
    def forms(self) -> SideForms:
        """In which both sides are kept."""
        return SideForms(self.block_in, self.block_out, self.kernel)

    @property
    def bias(self) -> tuple[int, ...]:
        """Shape of the bias, if there is one."""
        return self.weight if self.layout == "units" else (self.groups * self.d_out,)

    @property
    def size(self) -> int:
        """The number of parameters, which is the number of rows of the block."""
        return self.groups * self.d_out * self.d_in

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Names, as in the model's `named_parameters`, and shapes: the weight, then the bias."""
        prefix = f"{self.name}." if self.name else ""
        names = self.parameter_names or (f"{prefix}weight", f"{prefix}bias")
        return {names[0]: self.weight, names[1]: self.bias} if self.has_bias else {names[0]: self.weight}

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tensors [..., *shape] of weight and bias as one matrix per block, [..., G, d_out, d_in].

        A bias that is None counts as 0.
        """
        leading = weight.shape[: weight.ndim - len(self.weight)]
        if self.layout == "input first":
            split = weight.reshape(*leading, self.groups, self.weight[0] // self.groups, self.d_out, -1)
            matrix = split.transpose(-3, -2).flatten(-2)
        else:
            matrix = weight.reshape(*leading, self.groups, self.d_out, -1)
        if not self.has_bias:
            return matrix
        column = weight.new_zeros(*leading, *self.bias) if bias is None else bias
        return torch.cat([matrix, column.reshape(*leading, self.groups, self.d_out, 1)], dim=-1)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `to_matrix`: the weight, and the bias if there is one."""
        leading = matrix.shape[:-3]
        weight = matrix[..., :-1] if self.has_bias else matrix
        if self.layout == "input first":
            split = weight.reshape(*weight.shape[:-1], self.weight[0] // self.groups, -1)
            weight = split.transpose(-3, -2)
        shaped = weight.reshape(*leading, *self.weight)
        return (shaped, matrix[..., -1].reshape(*leading, *self.bias)) if self.has_bias else (shaped,)
