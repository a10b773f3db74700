"""The gradient of the mean loss over a data set, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tekfac.layers.layer import Layer
from tekfac.ranks.group import Ranks, added_by_name

Gradients = Mapping[Tensor, Tensor | None]
"""By parameter."""


class MeanGradient:
    """A mean over loss terms, which every prediction has of its own."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        self._layers = layers
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._terms: dict[str, int] = {}

    def add(self, part: str, gradients: Gradients, *, weight: int, terms: int) -> None:
        """Take in one batch of the data.

        Args:
            part: of the loss, by the name of its prediction.
            gradients: of the part.
            weight: what makes of them sums over terms.
            terms: how many these are.
        """
        self._terms[part] = self._terms.get(part, 0) + terms
        sums = self._sums.setdefault(part, {})
        for name, layer in self._layers.items():
            of_weight = gradients.get(layer.weight)
            if of_weight is not None:
                bias = None if layer.bias is None else gradients.get(layer.bias)
                total = layer.to_matrix(of_weight, bias).double() * weight
                sums[name] = total + sums.get(name, 0)

    def add_up(self, ranks: Ranks, device: torch.device) -> None:
        """Take in what the other processes have seen; all of them have to call this."""
        named = {(part, name): own for part, sums in self._sums.items() for name, own in sums.items()}
        everywhere = ranks.gather(self._terms)
        self._terms = {
            part: sum(own.get(part, 0) for own in everywhere)
            for part in dict.fromkeys(part for own in everywhere for part in own)
        }
        self._sums = {part: {} for part in self._terms}
        for (part, name), total in added_by_name(named, ranks, device).items():
            self._sums[part][name] = total

    def matrices(self) -> dict[str, Tensor]:
        """The gradient of each layer that has one, as matrices [G, d_out, d_in]."""
        found: dict[str, Tensor] = {}
        for part, sums in self._sums.items():
            for name, total in sums.items():
                found[name] = total / max(1, self._terms[part]) + found.get(name, 0)
        return found
