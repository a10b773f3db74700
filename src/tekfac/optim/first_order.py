"""What has no block: by AdamW, on the raw gradient."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

SECOND_DECAY = 0.95
"""Weight of the past in the squares, per step."""

EPSILON = 1e-8
"""Of the mean square, added to every square: Adam's epsilon, which does not depend on the loss's scale here."""


def adam_directions(
    gradients: Mapping[Tensor, Tensor],
    state: MutableMapping[Tensor, dict[str, Any]],
    momenta: Mapping[Tensor, float],
    finite: Tensor | None,
) -> dict[Tensor, Tensor]:
    """m / sqrt(v) of every parameter, and its averages m, v brought up to date in its state.

    Args:
        gradients: of the parameters.
        state: of the optimizer, by parameter.
        momenta: weight of the past in m, of each parameter.
        finite: a boolean on the device; where it is False averages stay as they are. None: True.
    """
    found = {}
    for parameter, gradient in gradients.items():
        own = state[parameter]
        if "exp_avg" not in own:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            own["exp_avg"] = torch.zeros_like(gradient, dtype=wide)
            own["exp_avg_sq"] = torch.zeros_like(gradient, dtype=wide)
            own["averaged"] = 0
        first, second = own["exp_avg"], own["exp_avg_sq"]
        new = gradient.to(first.dtype)
        squares = new.square()
        if finite is not None:
            new, squares = torch.where(finite, new, first), torch.where(finite, squares, second)
        own["averaged"] += 1
        first.lerp_(new, _share(momenta[parameter], own["averaged"]))
        second.lerp_(squares, _share(SECOND_DECAY, own["averaged"]))
        floor = (EPSILON * second.mean()).clamp_min(torch.finfo(second.dtype).tiny)
        found[parameter] = (first / (second + floor).sqrt()).to(gradient.dtype)
    return found


def _share(decay: float, count: int) -> float:
    """The weight of the newest of so many values, so that their weights add up to 1."""
    return (1 - decay) / (1 - decay**count)
