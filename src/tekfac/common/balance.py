"""Work over places, so that no place has much more of it than another."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TypeVar

Job = TypeVar("Job")


def balanced(costs: Mapping[Job, int], places: int) -> list[list[Job]]:
    """Jobs over so many places, the dearest first, each to the place that has least so far.

    Where costs are equal they come in the order of the mapping.
    """
    heap = [(0, place) for place in range(places)]
    found: list[list[Job]] = [[] for _ in range(places)]
    for job in sorted(costs, key=lambda one: -costs[one]):
        cost, place = heapq.heappop(heap)
        found[place].append(job)
        heapq.heappush(heap, (cost + costs[job], place))
    return found
