"""Running averages of tensors. They know nothing of curvature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

Values = TypeVar("Values", bound=tuple[Tensor, ...])


@dataclass(frozen=True)
class Average(Generic[Values]):
    """An exponentially weighted mean that is right from its first value on.

    After values x_1 .. x_k with decay b it holds sum b^(k-i) x_i / sum b^(k-i): the usual exponential
    average started at zero, divided by 1 - b^k. Decay 0 keeps the last value; decay 1 would be the
    arithmetic mean. The decay may be another one at every update.

    Attributes:
        values: the mean, a (named) tuple of tensors.
        weight: sum of the values' weights w_i, of which the last is 1; with one decay w_i = b^(k-i).
        squares: sum of w_i^2.
    """

    values: Values
    weight: float
    squares: float

    @classmethod
    def of(cls, values: Values) -> Average[Values]:
        """The average of a single observation."""
        return cls(values, 1.0, 1.0)

    @property
    def measurements(self) -> float:
        """So many independent observations would have a mean with as little noise.

        (sum w_i)^2 / sum w_i^2: 1 after the first; with one decay b, (1 + b) / (1 - b) in the end.
        """
        return self.weight**2 / self.squares

    def updated(self, new: Values, decay: float) -> Average[Values]:
        """The average after one more observation; `decay` is the weight of the past."""
        weight = decay * self.weight + 1.0
        blended = (old.lerp(value, 1.0 / weight) for old, value in zip(self.values, new, strict=True))
        return Average(_rebuild(self.values, blended), weight, decay**2 * self.squares + 1.0)

    def holding(self, values: Values) -> Average[Values]:
        """Other values, of the same weights."""
        return replace(self, values=values)


def _rebuild(like: Values, tensors: Iterable[Tensor]) -> Values:
    make: Callable[[Iterable[Tensor]], Values] = getattr(type(like), "_make", type(like))
    return make(tensors)
