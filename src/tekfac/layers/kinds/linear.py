"""Layers that multiply rows by a matrix: nn.Linear, and whatever is like it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tekfac.layers.kinds.base import LinearRows, RowForm, SimpleKind


@dataclass(frozen=True)
class LinearKind(SimpleKind):
    """y[n, ..., :] = W x[n, ..., :] + b, with any axes between the samples and the features.

    Attributes:
        layout: "output first" for a weight [d_out, d_in], "input first" for [d_in, d_out] (y = x @ weight).
        inputs: (module, *args, **kwargs) -> what the weight is multiplied with, [N, ..., d_in], where that is
            not the module's first argument; called with what the module was called with.
    """

    inputs: Callable[..., Tensor] | None = None

    def keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the weight is multiplied with."""
        if self.inputs is None:
            return super().keep(module, args, kwargs)
        return {"input": self.inputs(module, *args, **kwargs)}

    def form(self, module: nn.Module) -> RowForm:
        """Rows as they are."""
        return LinearRows()
