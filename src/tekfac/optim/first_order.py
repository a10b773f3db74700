"""What has no block: by AdamW, on the raw gradient."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tekfac.common.torch_internals import (
    move_each,
    products_of,
    quotients_by_roots,
    raise_each,
    scale_each,
    sums_of,
)
from tekfac.ranks.shards import own_part, summed_over_parts

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

    Parameters that have had equally many gradients are moved together: they are often many and small.

    Args:
        gradients: of the parameters.
        state: of the optimizer, by parameter.
        momenta: weight of the past in m, of each parameter.
        finite: a boolean on the device; where it is False averages stay as they are. None: True.
    """
    alike: dict[object, list[Tensor]] = {}
    for parameter, gradient in gradients.items():
        own = state[parameter]
        if "exp_avg" not in own:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            own["exp_avg"] = torch.zeros_like(gradient, dtype=wide)
            own["exp_avg_sq"] = torch.zeros_like(gradient, dtype=wide)
            own["averaged"] = 0
        own["averaged"] += 1
        key = (own["exp_avg"].device, own["exp_avg"].dtype, own["averaged"], momenta[parameter])
        alike.setdefault(key, []).append(parameter)
    found: dict[Tensor, Tensor] = {}
    for parameters in alike.values():
        one = parameters[0]
        new = [own_part(gradients[p]).to(state[p]["exp_avg"].dtype) for p in parameters]
        firsts, seconds = ([own_part(state[p][key]) for p in parameters] for key in ("exp_avg", "exp_avg_sq"))
        count, beta = state[one]["averaged"], momenta[one]
        _advance(firsts, seconds, new, (_share(beta, count), _share(SECOND_DECAY, count)), finite)
        directions = quotients_by_roots(firsts, seconds, _floors(parameters, seconds))
        found.update({p: d.to(gradients[p].dtype) for p, d in zip(parameters, directions, strict=True)})
    return found


def _advance(
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    new: Sequence[Tensor],
    shares: tuple[float, float],
    finite: Tensor | None,
) -> None:
    """Let averages m and v take in new gradients, all with the same shares."""
    squares = products_of(new, new)
    if finite is not None:
        new = [torch.where(finite, own, first) for own, first in zip(new, firsts, strict=True)]
        squares = [torch.where(finite, own, second) for own, second in zip(squares, seconds, strict=True)]
    move_each(firsts, new, shares[0])
    move_each(seconds, squares, shares[1])


def _floors(parameters: Sequence[Tensor], seconds: Sequence[Tensor]) -> Sequence[Tensor]:
    """What is added to the squares of every parameter: a share of their mean, over all its parts."""
    floors = summed_over_parts(sums_of(seconds), parameters)
    scale_each(floors, [EPSILON / max(1, parameter.numel()) for parameter in parameters])
    raise_each(floors, torch.finfo(seconds[0].dtype).tiny)
    return floors


def _share(decay: float, count: int) -> float:
    """The weight of the newest of so many values, so that their weights add up to 1."""
    return (1 - decay) / (1 - decay**count)
