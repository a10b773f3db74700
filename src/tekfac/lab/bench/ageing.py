"""An optimizer as it is after hundreds of steps, without taking them.

What a measurement costs depends on how much the running averages hold already: the more, the fewer samples are
measured, and the less a basis has changed; and intervals are shorter at first. Nearly all steps of a training
run are late ones.
"""

from __future__ import annotations

from dataclasses import replace

from tekfac.curvature.averages import Average, Values
from tekfac.lab.bench.contestants import Stepping
from tekfac.optim.natural_gradient import NaturalGradient


def with_full_intervals(optimizer: Stepping) -> None:
    """Give an optimizer of ours the intervals that it has in the end: so it has cycles."""
    if isinstance(optimizer, NaturalGradient):
        optimizer._settings = replace(optimizer._settings, interval_growth=None)
        optimizer._schedule = optimizer._new_schedule()
        optimizer._arm()


def age(optimizer: Stepping) -> None:
    """Give the averages of an optimizer of ours the weights that they have in the end."""
    if isinstance(optimizer, NaturalGradient):
        settings = optimizer._settings
        past = optimizer._recipe.past_factors(settings.factors_every)
        past_theta = optimizer._recipe.past_rescaling(settings.rescaling_every)
        optimizer._network.blocks = {
            name: replace(
                block,
                moments=_aged(block.moments, past),
                theta=None if block.theta is None else _aged(block.theta, past_theta),
            )
            for name, block in optimizer._network.blocks.items()
        }
        optimizer._arm()


def _aged(average: Average[Values], decay: float) -> Average[Values]:
    return replace(average, weight=1 / (1 - decay), squares=1 / (1 - decay**2))
