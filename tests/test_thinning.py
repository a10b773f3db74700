"""Promise: what `make test` leaves out of a product of parameters is no value and no pair of values."""

from __future__ import annotations

import itertools

import pytest

from thinning import covering

METHODS, KINDS, BIASES, FISHERS = "0123", "01234", "01", "012"
PRODUCT = [
    dict(zip(("method", "kind", "bias", "fisher"), values, strict=True))
    for values in itertools.product(METHODS, KINDS, BIASES, FISHERS)
]


def test_every_value_occurs_in_as_many_cases_as_the_longest_parameter_has() -> None:
    chosen = [PRODUCT[place] for place in covering(PRODUCT, 1)]
    assert len(chosen) == len(KINDS)
    for name, values in {"method": METHODS, "kind": KINDS, "bias": BIASES, "fisher": FISHERS}.items():
        assert {case[name] for case in chosen} == set(values)


def test_every_pair_of_values_occurs_in_few_cases() -> None:
    chosen = [PRODUCT[place] for place in covering(PRODUCT, 2)]
    assert len(METHODS) * len(KINDS) <= len(chosen) < len(PRODUCT) / 4
    for one, other in itertools.combinations(PRODUCT[0], 2):
        assert {(case[one], case[other]) for case in chosen} == {(case[one], case[other]) for case in PRODUCT}


def test_pairs_that_never_occur_are_not_asked_for() -> None:
    triangle = [case for case in PRODUCT if case["method"] <= case["kind"]]
    chosen = [triangle[place] for place in covering(triangle, 2)]
    assert {(case["method"], case["kind"]) for case in chosen} == {
        (m, k) for m in METHODS for k in KINDS if m <= k
    }


pytest_plugins = ["pytester"]
SUITE = """
import pytest

@pytest.mark.every_pair
@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("c", "xy")
@pytest.mark.parametrize("d", "xy")
def test_pairs(a, b, c, d): pass

@pytest.mark.every_value
@pytest.mark.parametrize("c", "xyz")
@pytest.mark.parametrize("d", "xy")
def test_values(c, d): pass

@pytest.mark.parametrize("c", "xyz")
def test_all(c): pass
"""


@pytest.mark.parametrize(("asked", "passed"), [("not slow", 6 + 3 + 3), ("slow", 6 + 3), ("", 12 + 6 + 3)])
def test_quick_and_slow_cases_are_all_cases(pytester: pytest.Pytester, asked: str, passed: int) -> None:
    pytester.makeconftest("from thinning import pytest_collection_modifyitems")
    pytester.makepyfile(SUITE)
    pytester.runpytest("-m", asked, "-W", "ignore").assert_outcomes(passed=passed, deselected=21 - passed)
