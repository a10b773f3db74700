"""Which layers are refreshed at which step: all at once, or by turns.

By turns every layer keeps its interval but has a step of its own to begin with, chosen so that no step has much
more to do than another. It follows from the layers and the settings alone: nothing of it has to be saved.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tekfac.curvature.layer_curvature import NOTHING, Due
from tekfac.layers.layer import Layer

FLOPS_OF_EIGENDECOMPOSITION = 9
"""Times d^3: what eigenvalues and eigenvectors of a d x d matrix take, roughly."""

WORTH_TURNS = 10**9
"""Operations of a whole refresh, some 20 ms, up to which watching every step costs more than it saves."""

SAMPLES = 16
"""Whose gradients are formed and projected, in the weighing of layers against each other."""


@dataclass(frozen=True)
class Intervals:
    """Steps between updates; `rescaling` is None for a method that measures none."""

    factors: int
    basis: int
    rescaling: int | None

    @property
    def shortest(self) -> int:
        """As many turns there are."""
        return min(self.factors, self.basis, self.rescaling or self.factors)

    def due(self, steps: int) -> Due:
        """What is due so many steps after a layer's turn."""
        return Due(
            factors=steps % self.factors == 0,
            basis=steps % self.basis == 0,
            rescaling=self.rescaling is not None and steps % self.rescaling == 0,
        )


class Schedule:
    """Tells what is due at every step.

    Attributes:
        turns: for each turn, the names of its layers.
    """

    def __init__(self, intervals: Intervals, layers: Mapping[str, Layer], *, by_turns: bool) -> None:
        self._intervals = intervals
        costs = {name: cost_of_refresh(layer) for name, layer in layers.items()}
        self.turns = balanced(costs, intervals.shortest if by_turns else 1)

    def due(self, step: int) -> dict[str, Due]:
        """What Algorithm 1 refreshes at a step, by layer; layers of which nothing is due are left out."""
        found: dict[str, Due] = {}
        for turn, names in enumerate(self.turns):
            due = self._intervals.due(step - turn)
            if due != NOTHING:
                found.update(dict.fromkeys(names, due))
        return found


def cost_of_refresh(layer: Layer) -> int:
    """Multiplications of a refresh, to weigh layers against each other: decompositions and projections."""
    shape = layer.shape
    sides = shape.d_in * shape.side_in**2 + shape.d_out * shape.side_out**2
    decompositions = FLOPS_OF_EIGENDECOMPOSITION * sides
    projections = 2 * SAMPLES * shape.d_in * shape.d_out * (shape.side_in + shape.side_out)
    return shape.groups * (decompositions + projections)


def balanced(costs: Mapping[str, int], turns: int) -> list[list[str]]:
    """Names over so many turns at most, the dearest first, each to the turn that has least so far."""
    turns = max(1, min(turns, len(costs)))
    heap = [(0, turn) for turn in range(turns)]
    found: list[list[str]] = [[] for _ in range(turns)]
    for name in _dearest_first(costs):
        cost, turn = heapq.heappop(heap)
        found[turn].append(name)
        heapq.heappush(heap, (cost + costs[name], turn))
    return found


def _dearest_first(costs: Mapping[str, int]) -> Iterable[str]:
    """In the order of the layers where costs are equal."""
    return sorted(costs, key=lambda name: -costs[name])
