"""Layer adapters: what a module computes, written as s[n, t] = W a[n, t].

An adapter turns what a module received and what came back for its output into rows (see rows.py), and
`.grad` into a gradient matrix with the bias as last column. Nothing else in the library asks for a
module's type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer's block, and how its parameters become a matrix.

    Attributes:
        name: of the layer.
        weight: shape of the weight, [groups * d_out, ...].
        has_bias: whether a bias is part of the block.
        groups: G, independent blocks.
    """

    name: str
    weight: tuple[int, ...]
    has_bias: bool
    groups: int = 1

    @property
    def d_out(self) -> int:
        """Outputs per block."""
        return self.weight[0] // self.groups

    @property
    def d_in(self) -> int:
        """Inputs per block, the bias's 1 included."""
        return math.prod(self.weight[1:]) + self.has_bias

    @property
    def size(self) -> int:
        """The number of parameters, which is the number of rows of the block."""
        return self.weight[0] * self.d_in

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Names, as in the model's `named_parameters`, and shapes: the weight, then the bias."""
        prefix = f"{self.name}." if self.name else ""
        weight = {f"{prefix}weight": self.weight}
        return {**weight, f"{prefix}bias": self.weight[:1]} if self.has_bias else weight

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tensors [..., *shape] of weight and bias as one matrix per block, [..., G, d_out, d_in].

        A bias that is None counts as 0.
        """
        leading = weight.shape[: weight.ndim - len(self.weight)]
        matrix = weight.reshape(*leading, self.groups, self.d_out, -1)
        if not self.has_bias:
            return matrix
        column = weight.new_zeros(*leading, self.weight[0]) if bias is None else bias
        return torch.cat([matrix, column.reshape(*leading, self.groups, self.d_out, 1)], dim=-1)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `to_matrix`: the weight, and the bias if there is one."""
        leading = matrix.shape[:-3]
        if not self.has_bias:
            return (matrix.reshape(*leading, *self.weight),)
        return (
            matrix[..., :-1].reshape(*leading, *self.weight),
            matrix[..., -1].reshape(*leading, self.weight[0]),
        )


@dataclass(frozen=True)
class Layer:
    """One block owner: a module, or several that share weight and bias.

    Attributes:
        name: the (first) module's name in the model.
        modules: the modules that use these parameters.
        weight: [d_out_total, ...].
        bias: [d_out_total], or None where the layer has none, or none that is trained.
    """

    name: str
    modules: tuple[nn.Module, ...]
    weight: nn.Parameter
    bias: nn.Parameter | None

    @cached_property
    def shape(self) -> LayerShape:
        """The sizes of its block."""
        module = self.modules[0]
        groups = module.groups if isinstance(module, CONVOLUTIONS) else 1
        return LayerShape(self.name, tuple(self.weight.shape), self.bias is not None, groups)

    @property
    def is_convolution(self) -> bool:
        """Whether the paper's rule for convolutions applies."""
        return isinstance(self.modules[0], CONVOLUTIONS)

    @property
    def unbatched_ndim(self) -> int:
        """The number of axes of a single, unbatched input."""
        return self.weight.ndim - 1

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Weight, and bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def dtype(self) -> torch.dtype:
        """Of the curvature: float64 for float64 parameters, float32 otherwise."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tensors shaped like weight and bias as one matrix per block, [G, d_out, d_in]."""
        return self.shape.to_matrix(weight, bias).to(self.dtype)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `to_matrix`: tensors shaped and typed like `parameters`."""
        parts = zip(self.shape.from_matrix(matrix), self.parameters, strict=True)
        return tuple(part.to(parameter.dtype) for part, parameter in parts)

    def input_rows(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """What the module received, [N, ...], as rows a [G, N, T, d_in]."""
        inputs = inputs.to(self.dtype)
        if isinstance(module, CONVOLUTIONS):
            rows = patches(inputs, module)
        else:
            rows = inputs.reshape(1, len(inputs), -1, inputs.shape[-1])
        if self.bias is None:
            return rows
        return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1)

    def output_rows(self, module: nn.Module, gradients: Tensor) -> Tensor:
        """Gradients of the module's output, [K, N, ...], as rows u [K, G, N, T, d_out]."""
        gradients = gradients.to(self.dtype)
        columns, samples = gradients.shape[:2]
        if isinstance(module, CONVOLUTIONS):
            split = gradients.reshape(columns, samples, self.shape.groups, self.shape.d_out, -1)
            return split.permute(0, 2, 1, 4, 3)
        return gradients.reshape(columns, 1, samples, -1, self.shape.d_out)


LINEAR = (nn.Linear,)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SUPPORTED = LINEAR + CONVOLUTIONS


def computes_like_its_base(module: nn.Module) -> bool:
    """Whether a module of a supported type, or derived from one, computes what that type does."""
    base = next(kind for kind in SUPPORTED if isinstance(module, kind))
    methods = ("forward", "_conv_forward") if issubclass(base, CONVOLUTIONS) else ("forward",)
    return all(
        getattr(type(module), method) is getattr(base, method) and method not in vars(module)
        for method in methods
    )


def patches(inputs: Tensor, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Tensor:
    """Convolution patches [G, N, T, (C_in / G) * kernel size], laid out like `weight.reshape(d_out, -1)`."""
    spatial = len(module.kernel_size)
    padded = _pad(inputs, module)
    windows = padded
    for axis, (size, step, spread) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True), start=2
    ):
        windows = windows.unfold(axis, (size - 1) * spread + 1, step)[..., ::spread]
    # windows: [N, C, *positions, *kernel]
    samples, channels = windows.shape[:2]
    windows = windows.reshape(samples, module.groups, channels // module.groups, *windows.shape[2:])
    positions = range(3, 3 + spatial)
    kernel = range(3 + spatial, 3 + 2 * spatial)
    windows = windows.permute(1, 0, *positions, 2, *kernel)
    num_positions = windows.shape[2 : 2 + spatial].numel()
    return windows.reshape(module.groups, samples, num_positions, -1)


def _pad(inputs: Tensor, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Tensor:
    """The inputs with the module's own padding around them."""
    if module.padding == "valid":
        return inputs
    if module.padding == "same":
        totals = [spread * (size - 1) for size, spread in zip(module.kernel_size, module.dilation, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(int(side), int(side)) for side in module.padding]
    amounts = [amount for before_after in reversed(sides) for amount in before_after]
    if not any(amounts):
        return inputs
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(inputs, amounts, mode=mode)
