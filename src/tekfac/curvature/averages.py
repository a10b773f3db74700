"""Running averages of tensors. They know nothing of curvature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

Values = TypeVar("Values", bound=tuple[Tensor, ...])


@dataclass(frozen=True)
class Average(Generic[Values]):
    """An exponentially weighted mean that is right from its first value on.

    After values x_1 .. x_k with decay b it holds sum b^(k-i) x_i / sum b^(k-i): the usual exponential
    average started at zero, divided by 1 - b^k. Decay 0 keeps the last value; decay 1 would be the
    arithmetic mean.

    Attributes:
        values: the mean, a (named) tuple of tensors.
        weight: sum of b^(k-i).
    """

    values: Values
    weight: float

    @classmethod
    def of(cls, values: Values) -> Average[Values]:
        """The average of a single observation."""
        return cls(values, 1.0)

    def measurements(self, decay: float) -> float:
        """So many independent observations would have a mean with as little noise.

        (sum w_i)^2 / sum w_i^2 for the weights w_i = b^(k-i): 1 after the first, (1 + b) / (1 - b) in the end.
        """
        squares = (1 - (1 - (1 - decay) * self.weight) ** 2) / (1 - decay**2)
        return self.weight**2 / squares

    def updated(self, new: Values, decay: float) -> Average[Values]:
        """The average after one more observation; `decay` is the weight of the past."""
        weight = decay * self.weight + 1.0
        blended = (old.lerp(value, 1.0 / weight) for old, value in zip(self.values, new, strict=True))
        return Average(_rebuild(self.values, blended), weight)


def _rebuild(like: Values, tensors: Iterable[Tensor]) -> Values:
    make: Callable[[Iterable[Tensor]], Values] = getattr(type(like), "_make", type(like))
    return make(tensors)
