"""TEKFAC as it comes beside Adam at the best of three learning rates: what the examples of losses share.

Nothing is tuned for TEKFAC: it is `TEKFAC(model)`, with its default learning rate and the momentum that both
have, and it is told nothing of the loss. Adam is trained with each of three learning rates.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

from torch import nn
from torch.optim import Adam, Optimizer

from tekfac import TEKFAC

SEEDS, ADAM_RATES = range(3), (1e-3, 3e-3, 1e-2)

Make = Callable[[nn.Module], Optimizer]
"""Makes the optimizer of a model: the one line that changes."""

Train = Callable[[Make, int], float]
"""Trains with an optimizer that is made so, and a seed; gives what came out, the lower the better."""


class Comparison(NamedTuple):
    """What came out with each seed.

    Attributes:
        tekfac: of TEKFAC.
        adam: of Adam, by its learning rate.
        optimizers: every TEKFAC that was made.
    """

    tekfac: list[float]
    adam: dict[float, list[float]]
    optimizers: list[TEKFAC]

    @property
    def best_adam(self) -> list[float]:
        """Of Adam with the learning rate that is best over all seeds."""
        return min(self.adam.values(), key=mean)


def compare(train: Train, what: str, *, momentum: float = 0.9) -> Comparison:
    """Train with both, and print what came out.

    Args:
        train: of the example.
        what: comes out, in words.
        momentum: of both optimizers.
    """
    optimizers: list[TEKFAC] = []

    def tekfac(model: nn.Module) -> Optimizer:
        optimizers.append(TEKFAC(model, momentum=momentum))
        return optimizers[-1]

    def adam(lr: float) -> Make:
        return lambda model: Adam(model.parameters(), lr=lr, betas=(momentum, 0.999))

    ours = [train(tekfac, seed) for seed in SEEDS]
    theirs = {lr: [train(adam(lr), seed) for seed in SEEDS] for lr in ADAM_RATES}
    print(f"With {len(SEEDS)} seeds, {what}:")
    for name, values in {"TEKFAC": ours, **{f"Adam, lr={lr:g}": own for lr, own in theirs.items()}}.items():
        print(f"  {name:14}" + "".join(f"{value:10.4g}" for value in values))
    for optimizer in optimizers[: len(optimizers) // len(SEEDS)]:
        print(f"Found: {optimizer.likelihoods}")
    return Comparison(ours, theirs, optimizers)


def mean_of_last(values: list[float], share: float) -> float:
    """The mean of the last part of what was noted at each step."""
    return mean(values[-max(1, round(share * len(values))) :])
