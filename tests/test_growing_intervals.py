"""Curvature is measured often at first: intervals grow with the steps, up to what they were asked to be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from torch import nn

from dense import statistics
from tekfac import TEKFAC, TKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.optim.schedule import Clock, Intervals, Schedule
from training import assert_identical, everything, mlp, train, vectors

SIZES = (5, 9, 7, 6, 4, 3)


def times(clock: Clock, steps: int) -> list[int]:
    return sorted({clock.latest(step) for step in range(steps)})


def start(**settings: Any) -> tuple[nn.Module, NaturalGradient]:
    model = mlp(sizes=SIZES)
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
    if len(early) > 1:  # where both meet, no interval is shorter than the one before, or twice as long as asked
        assert early[-1] - early[-2] <= late[0] - early[-1] < 2 * every


def test_the_first_of_the_default() -> None:
    assert times(Clock(50, 0.1), 60) == [*range(21), 22, 24, 26, 28, 30, 33, 36, 39, 42, 46, 50, 55]


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


@pytest.mark.parametrize("by_turns", [False, True])
@pytest.mark.parametrize("intervals", [(10, 10, None), (5, 10, 10), (4, 12, 6), (50, 50, None)])
def test_every_layer_is_refreshed_as_often_as_the_clock_strikes_and_told_since_when(
    intervals: tuple[int, int, int | None], by_turns: bool
) -> None:
    _, optimizer = start()
    schedule = Schedule(Intervals(*intervals, growth=0.2), optimizer._layers, by_turns=by_turns)
    last: dict[str, int] = {}
    counts = dict.fromkeys(optimizer._layers, 0)
    for step in range(200):
        for name, due in schedule.due(step).items():
            if due.factors:
                assert due.age_of_factors == step - last.get(name, step - 1)
                last[name] = step
                counts[name] += 1
    whole = len(times(Clock(intervals[0], 0.2), 200))
    assert all(whole - 1 <= count <= whole for count in counts.values())  # a turn may come after the end


def test_turns_share_what_lies_before_the_next_round() -> None:
    _, optimizer = start()
    schedule = Schedule(Intervals(20, 20, None, 0.2), optimizer._layers, by_turns=True)
    assert len(schedule.turns) == len(optimizer._layers) == 5
    assert all(schedule.due(step).keys() == optimizer._layers.keys() for step in range(10))
    late = [len(schedule.due(step)) for step in range(200, 220)]
    assert sum(late) == 5
    assert max(late) == 1


# -- the run -------------------------------------------------------------------------------------------


def test_the_past_counts_by_the_steps_that_lie_between() -> None:
    model, optimizer = start(factor_decay=0.9, factors_every=10, basis_every=10, interval_growth=0.5)
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
    model, optimizer = start(factors_every=4, basis_every=4, interval_growth=0.5)
    found = []
    for batch in vectors(14):
        train(model, optimizer, [batch])
        found.append(optimizer.steps_since_refresh)
    clock = Clock(4, 0.5)
    assert found == [step - clock.latest(step) for step in range(14)]


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
