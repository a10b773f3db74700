"""Layers may take turns: each at its interval, none left out, no step with much more to do than another."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from dense import every_method, seeded, statistics
from tekfac import TEKFAC
from tekfac.common.balance import balanced
from tekfac.curvature.layer_curvature import Due
from tekfac.optim import natural_gradient
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.optim.schedule import Intervals, Schedule, cost_of_refresh
from training import assert_identical, everything, mlp, train, vectors

SIZES = (5, 9, 7, 6, 4, 3)
EVERY = 4


def clocks(method: type[NaturalGradient], every: int = EVERY) -> dict[str, int]:
    names = ["factors_every", "basis_every", *(["rescaling_every"] if method.method.rescaling.measured else [])]
    return dict.fromkeys(names, every)


def start(method: type[NaturalGradient] = TEKFAC, **settings: Any) -> tuple[nn.Module, NaturalGradient]:
    model = mlp(sizes=SIZES)
    settings = {"lr": 0.05, "turns": True, "fisher": "empirical", "seed": 0, **clocks(method), **settings}
    return model, method.natural(model, **settings)


# -- the plan ------------------------------------------------------------------------------------------


def test_no_turn_has_more_than_the_mean_and_the_dearest_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 3, 10, 57):
        costs = {str(i): int(c) for i, c in enumerate(torch.randint(1, 1000, (count,), generator=generator))}
        for turns in (1, 2, 10, 100):
            found = balanced(costs, turns)
            assert sorted(name for names in found for name in names) == sorted(costs)
            assert len(found) == turns
            assert sum(map(bool, found)) == min(turns, count)
            largest = max(sum(costs[name] for name in names) for names in found)
            assert largest <= sum(costs.values()) / min(turns, count) + max(costs.values())


def test_every_layer_has_its_turn_once_in_an_interval() -> None:
    _, optimizer = start()
    schedule = Schedule(Intervals(EVERY, 2 * EVERY, EVERY), optimizer._layers, by_turns=True)
    for begin in (0, 3, 17):
        dues = [schedule.due(step) for step in range(begin, begin + 2 * EVERY)]
        factors = Counter(name for due in dues for name, own in due.items() if own.factors)
        basis = Counter(name for due in dues for name, own in due.items() if own.basis)
        assert factors == dict.fromkeys(optimizer._layers, 2)
        assert basis == dict.fromkeys(optimizer._layers, 1)


def test_all_at_once_is_one_turn() -> None:
    _, optimizer = start(turns=False)
    due = Due(factors=True, basis=True, rescaling=True)
    assert optimizer._schedule.due(0) == dict.fromkeys(optimizer._layers, due)
    assert optimizer._schedule.due(1) == {}


# -- the run -------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_at_each_step_only_the_layers_whose_turn_it_is_change(
    method: type[NaturalGradient], fisher: str
) -> None:
    model, optimizer = start(method, fisher=fisher)
    train(model, optimizer, vectors(1))
    assert set(statistics(optimizer)) == set(optimizer._layers)  # the first step measures all
    changed = []
    for step, batch in enumerate(vectors(2 * EVERY, seed=5), start=1):
        before = dict(statistics(optimizer))
        hooked = {name for name, layer in optimizer._layers.items() if layer.uses[0].module._forward_hooks}
        train(model, optimizer, [batch])
        now = {name for name, block in statistics(optimizer).items() if block is not before[name]}
        assert now == hooked == set(optimizer._schedule.due(step))
        changed.append(now)
    assert changed[:EVERY] == changed[EVERY:]
    assert sorted(name for names in changed[:EVERY] for name in names) == sorted(optimizer._layers)


@every_method
def test_with_an_interval_of_one_turns_are_all_at_once(method: type[NaturalGradient]) -> None:
    runs = []
    for turns in (True, False):
        model, optimizer = start(method, turns=turns, **clocks(method, 1))
        train(model, optimizer, vectors(4))
        whole = everything(model, optimizer)
        del whole["optimizer"]["param_groups"][0]["tekfac"]["turns"]
        runs.append(whole)
    assert_identical(*runs)


@pytest.mark.parametrize("stop", range(1, 2 * EVERY))
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_a_run_that_is_resumed_at_any_step_is_the_same(stop: int, fisher: str) -> None:
    runs = []
    for stops in (None, stop):
        model, optimizer = start(fisher=fisher)
        for step, batch in enumerate(vectors(2 * EVERY + 1)):
            if step == stops:
                state, weights = optimizer.state_dict(), model.state_dict()
                model, optimizer = start(fisher=fisher)
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            train(model, optimizer, [batch])
        runs.append(everything(model, optimizer))
    assert_identical(*runs)


# -- on their own --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "worth", "expected"),
    [
        ({"fisher": "empirical"}, 0, True),
        ({"fisher": "empirical"}, 10**12, False),
        ({"fisher": "sampled"}, 0, False),
        ({"fisher": "sampled", "turns": True}, 10**12, True),
        ({"fisher": "empirical", "turns": False}, 0, False),
    ],
)
def test_turns_are_taken_where_they_are_for_nothing(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], worth: int, expected: bool
) -> None:
    monkeypatch.setattr(natural_gradient, "WORTH_TURNS", worth)
    model, optimizer = start(**{"turns": "auto", **settings})
    train(model, optimizer, vectors(1))
    assert (len(optimizer._schedule.turns) > 1) is expected
    whole = optimizer.state_dict()["param_groups"][0]["tekfac"]
    assert whole["turns"] is expected


def test_compiled_models_are_measured_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run eagerly on every step that is watched: with turns that would be all of them."""
    monkeypatch.setattr(natural_gradient, "WORTH_TURNS", 0)
    model = mlp(sizes=SIZES)
    model[0].compile(backend="eager")
    optimizer = TEKFAC.natural(model, fisher="empirical", **clocks(TEKFAC))
    train(model, optimizer, vectors(1))
    assert len(optimizer._schedule.turns) == 1


def test_a_loaded_state_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(natural_gradient, "WORTH_TURNS", 0)
    model, optimizer = start(turns="auto")
    train(model, optimizer, vectors(3))
    monkeypatch.setattr(natural_gradient, "WORTH_TURNS", 10**12)
    _, other = start(turns="auto")
    other.load_state_dict(optimizer.state_dict())
    assert other._schedule.turns == optimizer._schedule.turns
    assert len(other._schedule.turns) > 1


@pytest.mark.parametrize("value", ["on", 1, None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="turns") as caught:
        TEKFAC.natural(nn.Linear(3, 2), turns=value)
    assert repr(value) in str(caught.value)


def test_costs_grow_with_what_is_decomposed() -> None:
    layers = TEKFAC.natural(
        seeded(lambda: nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 40))), max_dim=20
    )._layers
    small, large = (cost_of_refresh(layer) for layer in layers.values())
    assert small == 9 * (11**3 + 10**3) + 2 * 16 * 11 * 10 * 21
    assert large == 9 * (11**3 + 40 * 20**2) + 2 * 16 * 11 * 40 * 31
