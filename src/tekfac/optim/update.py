"""From directions to parameters: KL clip, momentum, decoupled weight decay. Pure of curvature."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tekfac.common.torch_internals import add_to_each, multiply_each


def kl_coefficient(terms: Iterable[tuple[float, Tensor, Tensor]], kl_clip: float) -> Tensor:
    """min(1, sqrt(c / sum lr^2 g.Pg)) for (lr, gradient g, preconditioned gradient Pg); a scalar.

    With P the inverse of the damped curvature, lr^2 g.Pg bounds twice the change of the predictions, as a
    Kullback-Leibler divergence to second order, that a single step along Pg makes. After scaling it is at
    most c. With the highest lr of a schedule the direction depends on no other, and steps follow the schedule.
    """
    total = torch.stack([lr**2 * torch.sum(_wide(g) * _wide(direction)) for lr, g, direction in terms]).sum()
    return (kl_clip / total.clamp_min(torch.finfo(total.dtype).tiny)).sqrt().clamp_max(1)


def _wide(tensor: Tensor) -> Tensor:
    """In a precision whose range sums of squares do not leave: float16 ends at 65504."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def apply_update(
    parameters: Sequence[Tensor],
    directions: Sequence[Tensor],
    velocities: Sequence[Tensor],
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    stretch: float = 1.0,
    finite: Tensor | None = None,
) -> None:
    """v <- momentum v + direction;  w <- (1 - lr weight_decay) w - lr stretch v, in place.

    The learning rate stays outside the velocity: a change of it acts at once and does not re-scale
    what was gathered. `velocities` may hold fresh zeros; without momentum it is not used.

    Args:
        parameters: w.
        directions: one for each.
        velocities: v, one for each.
        lr: the learning rate.
        momentum: weight of the past in the velocity.
        weight_decay: decoupled.
        stretch: what directions are multiplied by, and weight decay is not.
        finite: a boolean on the device; where it is False everything stays as it is. None: True.
    """
    if not parameters:
        return
    before = None if finite is None else [tensor.clone() for tensor in (*parameters, *velocities)]
    steps = directions
    if momentum:
        steps = velocities
        multiply_each(steps, momentum)
        add_to_each(steps, directions)
    if weight_decay:
        multiply_each(parameters, 1 - lr * weight_decay)
    add_to_each(parameters, steps, -lr * stretch)
    if finite is not None and before is not None:
        for tensor, old in zip((*parameters, *velocities), before, strict=True):
            tensor.copy_(torch.where(finite, tensor, old))
