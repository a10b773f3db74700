"""What `guard=` takes: when training counts as diverged, and what is done then."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from tekfac.common.checks import require_whole


class DivergenceError(ArithmeticError):
    """Training has diverged as often as its guard was to put up with."""


@dataclass(frozen=True)
class Guard:
    """Goes back to the last good snapshot where training diverges, and on from there with shorter steps.

    Attributes:
        spike: so many times its usual distance from its running mean a loss has to lie above that, and by half
            of it, to count as bad. A loss that is not finite does, and so does a step that is skipped.
        patience: bad steps in a row after which it acts; at once where parameters are not finite any more.
        every: steps between two snapshots.
        step: what all later steps are multiplied by each time it acts, in (0, 1].
        damping: what is added to S is multiplied by this each time, at least 1.
        at_most: times that it acts; then it goes back once more, and step() raises DivergenceError.
    """

    spike: float = 10.0
    patience: int = 3
    every: int = 100
    step: float = 0.5
    damping: float = 1.0
    at_most: int = 10

    def __post_init__(self) -> None:
        _require_number("spike", self.spike, 0.0, math.inf, "a positive number")
        require_whole("patience", self.patience, "of steps, at least 1")
        require_whole("every", self.every, "of steps, at least 1")
        _require_number("step", self.step, 0.0, 1.0, "a number in (0, 1]")
        if not isinstance(self.damping, Real) or not 1 <= self.damping < math.inf:
            raise ValueError(f"Invalid damping: {self.damping!r}. Expected a number of at least 1.")
        require_whole("at_most", self.at_most, "of times, at least 1")


def _require_number(name: str, value: Any, above: float, highest: float, expected: str) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not above < value <= highest or math.isinf(value):
        raise ValueError(f"Invalid {name}: {value!r}. Expected {expected}.")


def as_guard(value: Any) -> Guard | None:
    """What a `guard` setting means: True is Guard(), False is none.

    Raises:
        ValueError: for anything else than these and a Guard.
    """
    if isinstance(value, bool):
        return Guard() if value else None
    if isinstance(value, Guard):
        return value
    raise ValueError(f"Invalid guard: {value!r}. Expected True, False or a tekfac.guard.Guard.")
