"""Convolutions: at every output position a patch of the input is multiplied by the same matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad

from tekfac.layers.kinds.base import Part, RowForm, SimpleKind, own_bias, with_ones
from tekfac.layers.shapes import LayerShape

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

_WEIGHT_GRADIENT: Mapping[int, Callable[..., Tensor]] = {
    1: grad.conv1d_weight,
    2: grad.conv2d_weight,
    3: grad.conv3d_weight,
}
"""By the number of spatial axes."""


@dataclass(frozen=True)
class ConvolutionKind(SimpleKind):
    """nn.Conv1d, 2d and 3d, transposed or not; each of the convolution's groups is a block."""

    methods: ClassVar[tuple[str, ...]] = ("forward", "_conv_forward")
    is_convolution = True

    def parts(self, module: nn.Module) -> tuple[Part, ...]:
        """The only one."""
        bias = own_bias(module, self.bias)
        return (Part(self.weight, bias, groups=module.groups, layout=self.layout),)  # type: ignore[arg-type]

    def form(self, module: nn.Module) -> RowForm:
        """Patches, by the module's own geometry."""
        return PatchRows(module)


@dataclass(frozen=True)
class TransposedConvolutionKind(ConvolutionKind):
    """nn.ConvTranspose1d, 2d and 3d: a convolution, by the kernel turned round, of the spread input."""

    methods: ClassVar[tuple[str, ...]] = ("forward",)


class PatchRows(RowForm):
    """Rows are patches of the input, positions those of the output."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.trailing = module.weight.ndim - 1

    def rows(self, shape: LayerShape, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """One row per output position."""
        split = gradients.reshape(*gradients.shape[:2], shape.groups, shape.d_out, -1)
        return self._patches(shape, inputs, gradients)[None], split.permute(0, 2, 1, 4, 3)

    def gradient(self, shape: LayerShape, inputs: Tensor, gradients: Tensor) -> Tensor:
        """As the backward pass of a convolution computes it: nothing is unfolded."""
        module = self._module
        if isinstance(module, Transposed):
            return super().gradient(shape, inputs, gradients)
        padding = module.padding
        if module.padding_mode != "zeros" or isinstance(padding, str):
            inputs, padding = _pad(inputs, module), 0
        of_weight = _WEIGHT_GRADIENT[module.weight.ndim - 2]
        size, rest = module.weight.shape, (module.stride, padding, module.dilation, module.groups)
        found = [of_weight(inputs, size, gradient, *rest)[None] for gradient in gradients]
        whole = found[0] if len(found) == 1 else torch.cat(found)
        weight = whole.reshape(len(found), shape.groups, shape.d_out, -1)
        if not shape.has_bias:
            return weight
        bias = gradients.reshape(len(found), len(inputs), shape.groups, shape.d_out, -1).sum(dim=(1, 4))
        return torch.cat([weight, bias[..., None]], dim=-1)

    def _patches(self, shape: LayerShape, inputs: Tensor, gradients: Tensor) -> Tensor:
        module = self._module
        if isinstance(module, Transposed):
            return with_ones(transposed_patches(inputs, module, tuple(gradients.shape[3:])), shape)
        if isinstance(module, nn.Conv3d):
            return with_ones(patches(inputs, module), shape)
        patches_first = unfolded(inputs, module)
        columns = patches_first.reshape(len(inputs), module.groups, -1, patches_first.shape[-1])  # [N, G, d, T]
        if shape.has_bias:
            columns = F.pad(columns, (0, 0, 0, 1), value=1.0)
        return columns.permute(1, 0, 3, 2)


def patches(inputs: Tensor, module: Convolution) -> Tensor:
    """Convolution patches [G, N, T, (C_in / G) * kernel size], laid out like `weight.reshape(d_out, -1)`."""
    windows = _windows(_pad(inputs, module), module.kernel_size, module.stride, module.dilation)
    return _as_rows(windows, module.groups, len(module.kernel_size))


def unfolded(inputs: Tensor, module: nn.Conv1d | nn.Conv2d) -> Tensor:
    """The same patches as they come quickest, [N, C_in * kernel size, T]: coordinates first, then positions."""
    padded = _pad(inputs, module)
    if isinstance(module, nn.Conv1d):
        return F.unfold(
            padded[:, :, None],
            (1, *module.kernel_size),
            dilation=(1, *module.dilation),
            stride=(1, *module.stride),
        )
    return F.unfold(padded, module.kernel_size, dilation=module.dilation, stride=module.stride)


def transposed_patches(inputs: Tensor, module: Transposed, positions: tuple[int, ...]) -> Tensor:
    """What each output position is computed from, [G, N, T, (C_in / G) * kernel size].

    Output p takes kernel entry k from input q where p = q stride - padding + k dilation. So the inputs are set
    apart by stride - 1 zeros and surrounded by dilation (kernel - 1) - padding of them, and windows of that,
    turned round, are the rows.

    Args:
        inputs: [N, C_in, ...].
        module: the transposed convolution.
        positions: sizes of the output, which `output_padding` or `output_size` may have made larger.
    """
    spatial = len(positions)
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    sizes = inputs.shape[2:]
    spread = inputs.new_zeros(
        *inputs.shape[:2], *((size - 1) * step + 1 for size, step in zip(sizes, stride, strict=True))
    )
    at_inputs = (slice(None), slice(None), *(slice(None, None, step) for step in stride))
    spread[at_inputs] = inputs
    amounts: list[int] = []
    for axis in reversed(range(spatial)):
        reach = dilation[axis] * (kernel[axis] - 1)
        before = reach - int(module.padding[axis])
        after = positions[axis] + reach - before - spread.shape[2 + axis]
        amounts += [before, after]
    windows = _windows(F.pad(spread, amounts), kernel, (1,) * spatial, dilation)
    turned = windows.flip(dims=tuple(range(-spatial, 0)))
    return _as_rows(turned, module.groups, spatial)


def _windows(
    padded: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """[N, C, *positions, *kernel]."""
    for axis, (size, step, spread) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        padded = padded.unfold(axis, (size - 1) * spread + 1, step)[..., ::spread]
    return padded


def _as_rows(windows: Tensor, groups: int, spatial: int) -> Tensor:
    """[N, C, *positions, *kernel] as [G, N, T, C / G * kernel]."""
    split = windows.reshape(len(windows), groups, -1, *windows.shape[2:])
    positions, kernel = range(3, 3 + spatial), range(3 + spatial, 3 + 2 * spatial)
    return split.permute(1, 0, *positions, 2, *kernel).flatten(2 + spatial).flatten(2, 1 + spatial)


def _pad(inputs: Tensor, module: Convolution) -> Tensor:
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
