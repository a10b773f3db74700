"""Curvature is measured often at first: intervals grow with the steps, up to what they were asked to be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from dense import statistics
from tekfac import TEKFAC, TKFAC
from tekfac.common.balance import balanced
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.optim.schedule import (
    CALLS,
    CALLS_OF_PASSES,
    LONGEST_AT_FIRST,
    Clock,
    Intervals,
    Schedule,
    cost_of_refresh,
    first_interval,
    mixed,
)
from training import assert_identical, everything, mlp, saved_whole, through_a_file, train, vectors

SIZES = (5, 9, 7, 6, 4, 3)
MANY = (5, 9, 7, 6, 4, 5, 6, 7, 8, 9, 8, 7, 3)


def times(clock: Clock, steps: int) -> list[int]:
    return sorted({clock.latest(step) for step in range(steps)})


def start(sizes: Sequence[int] = SIZES, **settings: Any) -> tuple[nn.Module, NaturalGradient]:
    model = mlp(sizes=sizes)
    return model, TEKFAC(model, **{"seed": 0, "lr": 1e-3, **settings})


# -- the clock -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("growth", [0.01, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("every", [1, 2, 7, 10, 50])
def test_intervals_are_a_share_of_the_steps_so_far_and_no_longer_than_asked(every: int, growth: float) -> None:
    clock = Clock(every, growth)
    found = times(clock, 20 * every + int(2 * every / growth))
    early = [time for time in found if time <= clock.early[-1]]
    for before, after in pairwise(early):
        assert after - before == min(every, max(1, int(growth * before)))
    late = found[len(early) :]
    assert late
    assert all(time % every == 0 for time in late)
    assert all(after - before == every for before, after in pairwise(late))
    if len(early) > 1:  # where both meet, no interval is shorter than the one before, or longer than asked
        assert early[-1] - early[-2] <= late[0] - early[-1] <= every


def test_the_first_of_the_default() -> None:
    assert times(Clock(50, 0.1), 60) == [*range(21), 22, 24, 26, 28, 30, 33, 36, 39, 42, 46, 50, 55]


@pytest.mark.parametrize("least", [2, 3, 5])
def test_the_first_may_be_longer_than_a_step(least: int) -> None:
    found = times(Clock(50, 0.1, least), 500)
    assert found[:3] == [0, least, 2 * least]
    early = [time for time in found if time <= Clock(50, 0.1, least).early[-1]]
    assert all(b - a == max(least, int(0.1 * a)) for a, b in pairwise(early))


@pytest.mark.parametrize("every", [1, 3, 10])
def test_without_growth_they_are_the_multiples(every: int) -> None:
    assert times(Clock(every), 50) == list(range(0, 50, every))


@pytest.mark.parametrize("clock", [Clock(10), Clock(10, 0.2), Clock(7, 0.05), Clock(1, 0.1)])
def test_what_follows_a_time_is_the_next_of_them(clock: Clock) -> None:
    for before, after in pairwise(times(clock, 300)):
        for step in range(before, after):
            assert clock.latest(step) == before
            assert clock.following(step) == after


# -- the plan ------------------------------------------------------------------------------------------


INTERVALS = [
    (10, 10, None),
    (5, 10, 10),
    (4, 12, 6),
    (50, 50, None),
    (10, 50, None),
    (50, 10, None),
    (25, 50, 7),
]


@pytest.mark.parametrize("growth", [None, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("by_turns", [False, True])
@pytest.mark.parametrize("intervals", INTERVALS)
def test_every_layer_is_refreshed_as_often_as_asked_and_told_since_when(
    intervals: tuple[int, int, int | None], by_turns: bool, growth: float | None
) -> None:
    _, optimizer = start(sizes=MANY)
    schedule = Schedule(Intervals(*intervals, growth=growth), optimizer._layers, by_turns=by_turns)
    dues = [schedule.due(step) for step in range(1300)]
    for part, every in zip(("factors", "basis", "rescaling"), intervals, strict=True):
        for name in optimizer._layers:
            own = {step: due[name] for step, due in enumerate(dues) if name in due and getattr(due[name], part)}
            if every is None:
                assert not own
                continue
            ages = {after: after - before for before, after in pairwise([0, *(step for step in own if step)])}
            assert max(ages.values()) < 2 * every
            assert all(ages[step] == every for step in ages if step > 1260)
            if part != "basis":
                assert {step: getattr(due, f"age_of_{part}") for step, due in own.items() if step} == ages
            if growth is not None:  # all of the first steps, and as many as the clock has
                assert {*range(min(every, 10))} <= own.keys() | {0}
                assert len(own) >= len(times(Clock(every, growth), 1250)) * 0.6


@pytest.mark.parametrize("intervals", [(10, 50, None), (10, 20, 40), (4, 12, 8)])
def test_bases_are_renewed_when_factors_are(intervals: tuple[int, int, int | None]) -> None:
    _, optimizer = start(sizes=MANY)
    schedule = Schedule(Intervals(*intervals, growth=0.1), optimizer._layers, by_turns=True)
    for step in range(600):
        assert all(due.factors for due in schedule.due(step).values() if due.basis or due.rescaling)


def test_a_short_round_has_dear_and_cheap_layers_at_every_step() -> None:
    """Turns that come together are not the dearest ones."""
    costs = {str(i): cost for i, cost in enumerate([1000] * 8 + [200] * 6 + [40] * 6 + [5] * 6)}
    turns = mixed(balanced(costs, len(costs)))
    assert sorted(turns) == sorted([name] for name in costs)
    assert turns[0] == ["0"]
    for length in (2, 4, 8):
        loads = [0] * length
        for turn, (name,) in enumerate(turns):
            loads[turn * length // len(turns)] += costs[name]
        assert max(loads) <= sum(costs.values()) / length + 1000


def test_turns_share_what_lies_before_the_next_round() -> None:
    _, optimizer = start()
    schedule = Schedule(Intervals(20, 20, None, 0.2), optimizer._layers, by_turns=True)
    assert len(schedule.turns) == len(optimizer._layers) == 5
    assert all(schedule.due(step).keys() == optimizer._layers.keys() for step in range(10))
    late = [len(schedule.due(step)) for step in range(200, 220)]
    assert sum(late) == 5
    assert max(late) == 1


# -- how long the first of them are --------------------------------------------------------------------


def test_where_measuring_is_dear_the_first_are_longer() -> None:
    _, optimizer = start()
    layers = list(optimizer._layers.values())
    price = sum(map(cost_of_refresh, layers)) + CALLS * len(layers)

    def where_it_takes(times_as_long: float) -> int:
        return first_interval(layers, (price / times_as_long - CALLS_OF_PASSES * len(layers)) / 3)

    assert [where_it_takes(times) for times in (0.1, 1, 3, 6, 9, 15, 100)] == [
        1,
        1,
        1,
        2,
        3,
        5,
        LONGEST_AT_FIRST,
    ]


def test_it_is_known_after_the_first_step_and_kept() -> None:
    model, optimizer = start()
    assert optimizer._least is None
    batches = vectors(14)
    train(model, optimizer, batches[:1])
    least = optimizer._least
    assert least is not None
    assert least > 1  # a step has next to nothing to do
    assert saved_whole(through_a_file(optimizer.state_dict()))["first_interval"] == least
    found = []
    for step, batch in enumerate(batches[1:], start=1):
        if optimizer._capture.armed:
            found.append(step)
        train(model, optimizer, [batch])
    assert found == list(range(least, 14, least))
    assert_identical(*runs_with(None), *runs_with(4))


def test_where_layers_are_frozen_the_first_are_short() -> None:
    """What they do is not seen, and may be most of a step; perhaps no layer is trained at all."""
    for trained in (["2"], []):
        model = mlp(sizes=SIZES)
        for name, module in model.named_children():
            module.requires_grad_(name in trained)
        scale = nn.Parameter(torch.ones(3).double())
        model.register_parameter("scale", scale)
        optimizer = TEKFAC(model, seed=0)
        for x, y in vectors(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x) * scale, y).backward()
            optimizer.step()
        assert optimizer._least == 1


def test_it_is_open_until_something_is_measured() -> None:
    model, optimizer = start()
    for training in (False, True):
        model.train(training)
        x, y = vectors(1)[0]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert (optimizer._least is None) == (not training)


def runs_with(stop: int | None) -> list[Any]:
    """A run with what "auto" finds, perhaps resumed."""
    model, optimizer = start()
    for step, batch in enumerate(vectors(12)):
        if step == stop:
            state, weights = through_a_file(optimizer.state_dict()), model.state_dict()
            model, optimizer = start()
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        train(model, optimizer, [batch])
    return [everything(model, optimizer)]


def test_it_can_be_set() -> None:
    model, optimizer = start(first_interval=2)
    measured = []
    for batch in vectors(7):
        measured.append(optimizer._capture.armed)
        train(model, optimizer, [batch])
    assert measured == [True, False, True, False, True, False, True]


@pytest.mark.parametrize("interval", [0, 1.5, "seldom", True])
def test_what_is_no_number_of_steps_is_refused(interval: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="first_interval"):
        start(first_interval=interval)


# -- the run -------------------------------------------------------------------------------------------


def test_the_past_counts_by_the_steps_that_lie_between() -> None:
    model, optimizer = start(
        factor_decay=0.9, factors_every=10, basis_every=10, interval_growth=0.5, first_interval=1
    )
    seen = times(Clock(10, 0.5), 30)
    train(model, optimizer, vectors(30))
    weights = [0.9 ** (seen[-1] - time) for time in seen]
    for block in statistics(optimizer).values():
        assert block.moments.weight == pytest.approx(sum(weights))
        assert block.moments.measurements == pytest.approx(sum(weights) ** 2 / sum(w**2 for w in weights))


def test_an_interval_counts_as_ten_steps_at_most() -> None:
    model, optimizer = start(factors_every=15, basis_every=15, interval_growth=None)
    train(model, optimizer, vectors(16))
    assert all(block.moments.weight == 1 + 0.95**10 for block in statistics(optimizer).values())


def test_staleness_follows_the_clock() -> None:
    model, optimizer = start(factors_every=4, basis_every=4, interval_growth=0.5, first_interval=1)
    found = []
    for batch in vectors(14):
        train(model, optimizer, [batch])
        found.append(optimizer.steps_since_refresh)
    assert found == [0, 0, 0, 0, 0, 1, 0, 1, 2, 0, 1, 2, 0, 1]  # due at 0 to 4, 6, 9, 12


@pytest.mark.parametrize("stop", [1, 4, 9, 13])
@pytest.mark.parametrize("turns", [False, True])
def test_a_run_that_is_resumed_at_any_step_is_the_same(stop: int, turns: bool) -> None:
    runs = []
    settings = {"factors_every": 6, "basis_every": 6, "interval_growth": 0.4, "turns": turns}
    for stops in (None, stop):
        model, optimizer = start(**settings)
        for step, batch in enumerate(vectors(16)):
            if step == stops:
                state, weights = optimizer.state_dict(), model.state_dict()
                model, optimizer = start(**settings)
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            train(model, optimizer, [batch])
        runs.append(everything(model, optimizer))
    assert_identical(*runs)


@pytest.mark.parametrize("make", [TEKFAC.paper, TKFAC.natural])
def test_the_paper_knows_no_growth(make: Any) -> None:
    optimizer = make(mlp(), likelihood="categorical")
    assert optimizer._settings.interval_growth is None


@pytest.mark.parametrize("growth", [0, -0.1, 1.5, "often", True, float("nan")])
def test_what_is_no_share_is_refused(growth: Any) -> None:
    with pytest.raises(ValueError, match=r"interval_growth: .*Expected a number from 0.001 to 1"):
        start(interval_growth=growth)
