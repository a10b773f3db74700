"""An optimizer as it is after hundreds of steps, without taking them.

What a measurement costs depends on how much the running averages hold already: the more, the fewer samples are
measured, and the less a basis has changed. Nearly all steps of a training run are late ones.
"""

from __future__ import annotations

from dataclasses import replace

from tekfac.curvature.layer_curvature import LayerCurvature
from tekfac.lab.bench.contestants import Stepping
from tekfac.optim.natural_gradient import NaturalGradient


def age(optimizer: Stepping) -> None:
    """Give the averages of an optimizer of ours the weight that they have in the end."""
    if isinstance(optimizer, NaturalGradient):
        recipe = optimizer._recipe
        blocks = optimizer._network.blocks
        optimizer._network.blocks = {
            name: _aged(block, recipe.factor_decay, recipe.rescaling_decay) for name, block in blocks.items()
        }
        optimizer._arm()


def _aged(block: LayerCurvature, factor_decay: float, rescaling_decay: float) -> LayerCurvature:
    theta = None if block.theta is None else replace(block.theta, weight=1 / (1 - rescaling_decay))
    return replace(block, moments=replace(block.moments, weight=1 / (1 - factor_decay)), theta=theta)
