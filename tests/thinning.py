"""Which cases of a product of parameters are run every time, and which are slow.

Thousands of cases that multiply methods, layers, sharings and kinds of the Fisher hardly ever fail one by one.
Of a test that is marked `every_pair` so many cases are quick as it takes for every pair of values of two
parameters to occur together; with `every_value`, for every value to occur. All the others are marked slow.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

TOGETHER = {"every_value": 1, "every_pair": 2}

Case = Mapping[str, str]
"""The value of every parameter, by its name."""


def covering(cases: Sequence[Case], together: int) -> set[int]:
    """Places of cases in which all combinations of `together` values occur that occur in any: greedily, few."""
    combinations = [
        set(itertools.combinations(sorted(case.items()), min(together, len(case)))) for case in cases
    ]
    missing = set().union(*combinations)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda place: (len(combinations[place] & missing), -place))
        chosen.add(best)
        missing -= combinations[best]
    return chosen


@pytest.hookimpl(tryfirst=True)  # before pytest looks for slow tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what the marks `every_pair` and `every_value` leave out."""
    for mark, together in TOGETHER.items():
        products: dict[str, list[pytest.Function]] = {}
        for item in items:
            if isinstance(item, pytest.Function) and item.get_closest_marker(mark):
                products.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for product in products.values():
            quick = covering([_case(item) for item in product], together)
            for place, item in enumerate(product):
                if place not in quick:
                    item.add_marker(pytest.mark.slow)


def _case(item: pytest.Function) -> Case:
    """Parameters that one `parametrize` names together count as one."""
    return {
        str(marker.args[0]): repr([item.callspec.params[name] for name in _names(marker.args[0])])
        for marker in item.iter_markers("parametrize")
    }


def _names(argument: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in argument.split(",")] if isinstance(argument, str) else list(argument)
