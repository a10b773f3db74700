"""Tables of vectors: nn.Embedding.

An input picks a row of the table. Written s = W a, a is one-hot and as long as the table, so that the input
side is kept as a diagonal, and of a few samples only the entries that occur are formed (rows.Tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from tekfac.layers.kinds.base import Part, RowForm, SimpleKind
from tekfac.layers.shapes import LayerShape, Layout


@dataclass(frozen=True)
class TableKind(SimpleKind):
    """y[n, ...] = weight[x[n, ...]], perhaps times a number.

    Attributes:
        scale: (module) -> what looked-up vectors are multiplied by; None: nothing.
    """

    bias: str | None = None
    layout: Layout = "input first"
    scale: Callable[[nn.Module], float | Tensor] | None = None

    def parts(self, module: nn.Module) -> tuple[Part, ...]:
        """The only one."""
        return (Part(self.weight, layout=self.layout, table=True),)

    def problem(self, module: nn.Module) -> str | None:
        """Options that make the gradient something else than that of a look-up."""
        if getattr(module, "scale_grad_by_freq", False):
            return "scale_grad_by_freq=True divides its gradient by counts"
        if getattr(module, "max_norm", None) is not None:
            return "max_norm changes the weight in the forward pass"
        return None

    def form(self, module: nn.Module) -> RowForm:
        """Numbers of rows instead of one-hot vectors."""
        scale = 1.0 if self.scale is None else float(self.scale(module))
        return TokenRows(getattr(module, "padding_idx", None), scale)


class TokenRows(RowForm):
    """a are numbers of the table's rows, [1, 1, N, T, 1], u are gradients of what was looked up.

    In a layer whose matrix has the table's rows as outputs (a table that is an output projection, too) the
    roles are exchanged, and the one-hot vectors are formed.
    """

    trailing = 0

    def __init__(self, padding_idx: int | None, scale: float) -> None:
        self._padding_idx = padding_idx
        self._scale = scale

    def positions(self, shape: LayerShape, gradient: Tensor, samples: int) -> int:
        """One for every look-up."""
        return gradient.numel() // (gradient.shape[-1] * samples)

    def rows(self, shape: LayerShape, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """One row per look-up; those of the padding index get no gradient, as in autograd."""
        samples = len(inputs)
        tokens = inputs.long().reshape(1, 1, samples, -1, 1)
        looked_up = self._scale * gradients.reshape(len(gradients), 1, samples, -1, gradients.shape[-1])
        if self._padding_idx is not None:
            looked_up = looked_up * (tokens != self._padding_idx)
        if shape.layout == "input first":
            return tokens, looked_up
        without_bias = F.pad(looked_up, (0, int(shape.has_bias)))
        return without_bias, F.one_hot(tokens[..., 0], shape.weight[0]).to(gradients.dtype)
