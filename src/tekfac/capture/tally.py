"""How much the Fisher of each prediction counts beside the others': terms of its loss, and the loss's weight.

    F = sum over predictions of weight / terms * (sum over samples of g g^T)

docs/mathematics.md, section 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Tally:
    """What was counted of a prediction.

    Attributes:
        terms: M, of its loss.
        weights: of its loss, as far as gradients told; their sum.
        told: how many they are.
    """

    terms: int = 0
    weights: float = 0.0
    told: int = 0

    def plus(self, other: Tally) -> Tally:
        """Of both."""
        return Tally(self.terms + other.terms, self.weights + other.weights, self.told + other.told)


class Share(NamedTuple):
    """What a sum over the samples of a prediction is multiplied by, to be its part of F.

    Attributes:
        weight: of its loss beside the heaviest; 1 where it is not known.
        terms: M, that it is divided by; at least 1.
    """

    weight: float
    terms: int


Shares = Mapping[str, Share]
"""By the name of the prediction, or of several whose gradients were measured together."""


def shares_of(tallies: Mapping[str, Tally]) -> dict[str, Share]:
    """The share of each."""
    known = {name: tally.weights / tally.told for name, tally in tallies.items() if tally.told}
    heaviest = max(known.values(), default=1.0)
    return {
        name: Share(known[name] / heaviest if name in known else 1.0, max(1, tally.terms))
        for name, tally in tallies.items()
    }


def merged(first: Mapping[str, Tally], second: Mapping[str, Tally]) -> dict[str, Tally]:
    """What both have counted."""
    names = dict.fromkeys([*first, *second])
    return {name: first.get(name, Tally()).plus(second.get(name, Tally())) for name in names}
