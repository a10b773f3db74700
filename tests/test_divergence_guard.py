"""Promise: with a guard, training that diverges goes back to its last good snapshot, exactly, and on from it.

It is off unless it is asked for, and gives up with an error after as many times as it was told.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dense import METHODS
from processes import run_together
from tekfac import KFAC, TEKFAC
from tekfac.damping import LevenbergMarquardt, Tikhonov
from tekfac.guard import DivergenceError, Guard
from tekfac.optim.divergence import Losses, Raised, raised
from tekfac.optim.natural_gradient import NaturalGradient
from training import (
    Batch,
    assert_identical,
    backward,
    both_steps,
    cnn,
    copied,
    everything,
    images,
    maker,
    mlp,
    saved_whole,
    through_a_file,
    train,
    vectors,
)

QUICK = Guard(patience=1, every=4)
SETTINGS: dict[str, Any] = {
    "lr": 0.01,
    "seed": 0,
    "interval_growth": None,
    "factors_every": 3,
    "basis_every": 3,
}
NAN = math.nan


def step(model: nn.Module, optimizer: NaturalGradient, batch: Batch, factor: float = 1.0) -> float:
    """A step whose loss is told, multiplied by a factor."""
    optimizer.zero_grad()
    loss = backward(model, batch, lambda out, y: F.cross_entropy(out, y) * factor)
    optimizer.report_loss(loss)
    optimizer.step()
    return float(loss)


def of_model(state: Any) -> Any:
    return (
        state["model"],
        {**saved_whole(state["optimizer"]), "skipped_steps": 0, "guard": 0},
        state["optimizer"]["state"],
    )


# -- what counts as divergence ---------------------------------------------------------------------------


@pytest.mark.every_pair
@pytest.mark.parametrize("factor", [NAN, math.inf, 1e3], ids=str)
@both_steps
@pytest.mark.parametrize("method", METHODS)
def test_after_it_has_gone_back_the_run_is_that_of_a_checkpoint_with_shorter_steps(
    method: type[NaturalGradient], step: str, factor: float
) -> None:
    """The checkpoint is of step 12; the loss is bad at the 15th, three batches of which are lost."""
    make, data, take = maker(method, step), images(24), globals()["step"]
    model = cnn()
    optimizer = make(model, guard=QUICK, fisher="sampled", **SETTINGS)
    for place, batch in enumerate(data):
        if place == 12:
            saved = through_a_file([model.state_dict(), optimizer.state_dict()])
        take(model, optimizer, batch, factor if place == 15 else 1.0)
        if place == 15:
            assert (optimizer.guard_actions, optimizer.num_steps) == (1, 12)
    assert optimizer.num_steps == 20

    other = cnn(seed=9)
    other.load_state_dict(saved[0])
    saved_whole(saved[1])["guard"]["step"] = 0.5
    resumed = make(other, guard=QUICK, **{**SETTINGS, "lr": 1.0, "seed": 99}, fisher="sampled")
    resumed.load_state_dict(saved[1])
    for batch in data[16:]:
        take(other, resumed, batch)
    for a, b in zip(of_model(everything(model, optimizer)), of_model(everything(other, resumed)), strict=True):
        assert_identical(a, b)


def test_buffers_go_back_too() -> None:
    model = cnn()
    optimizer = TEKFAC(model, guard=QUICK, **SETTINGS)
    for batch in images(13):
        step(model, optimizer, batch)
    before = copied(model.state_dict())
    step(model, optimizer, (images(1)[0][0] * 1e6, images(1)[0][1]), NAN)
    assert optimizer.num_steps == 12
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert float(model[1].running_mean.abs().max()) < 10


def test_a_closure_tells_its_loss() -> None:
    model = mlp()
    optimizer = TEKFAC(model, guard=QUICK, **SETTINGS)

    def closure(factor: float = 1.0) -> Callable[[], float]:
        def evaluate() -> float:
            optimizer.zero_grad()
            return float(backward(model, vectors(1)[0])) * factor

        return evaluate

    for _ in range(13):
        optimizer.step(closure())
    assert math.isnan(optimizer.step(closure(NAN)))
    assert (optimizer.guard_actions, optimizer.num_steps) == (1, 12)


def test_steps_that_are_skipped_count_where_no_loss_is_told() -> None:
    model = mlp()
    optimizer = TEKFAC(model, guard=Guard(every=4), **SETTINGS)
    train(model, optimizer, vectors(10))
    for count in range(1, 4):
        train(model, optimizer, vectors(1), lambda out, y: F.cross_entropy(out, y) * NAN)
        assert optimizer.skipped_steps == count
        assert optimizer.guard_actions == (count == 3)
    assert optimizer.num_steps == 8
    train(model, optimizer, vectors(1))
    assert optimizer.num_steps == 9


def test_parameters_that_are_not_finite_are_left_at_once() -> None:
    model = mlp()
    optimizer = TEKFAC(model, guard=Guard(every=4), **SETTINGS)
    train(model, optimizer, vectors(10))
    with torch.no_grad():
        model[0].weight[0, 0] = NAN
    train(model, optimizer, vectors(1))
    assert (optimizer.guard_actions, optimizer.num_steps) == (1, 8)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_patience_waits_for_as_many_bad_losses_in_a_row() -> None:
    model = mlp()
    optimizer = TEKFAC(model, guard=Guard(patience=2, every=4), **SETTINGS)
    for batch in vectors(13):
        step(model, optimizer, batch)
    for factor, actions in ((1e3, 0), (1.0, 0), (1e3, 0), (NAN, 1)):
        step(model, optimizer, vectors(1)[0], factor)
        assert optimizer.guard_actions == actions


def test_the_first_step_can_be_gone_back_to() -> None:
    model = mlp()
    before = copied(model.state_dict())
    optimizer = TEKFAC(model, guard=QUICK, **SETTINGS)
    step(model, optimizer, vectors(1)[0])
    step(model, optimizer, vectors(1)[0], NAN)
    assert optimizer.num_steps == 0
    assert_identical(before, copied(model.state_dict()))


def test_a_snapshot_whose_loss_turns_out_bad_is_not_gone_back_to() -> None:
    """The step before the fifth one ruins the weights, and a snapshot is taken after it."""
    model = mlp()
    optimizer = TEKFAC(model, guard=QUICK, **SETTINGS)
    for batch in vectors(16):
        step(model, optimizer, batch)
    assert optimizer.num_steps == 16  # where one was just taken
    step(model, optimizer, vectors(1)[0], NAN)
    assert optimizer.num_steps == 12


def test_a_run_that_goes_well_is_not_touched() -> None:
    ends = []
    for guard in (False, True, Guard(every=1, patience=1)):
        model = mlp()
        optimizer = TEKFAC(model, guard=guard, **SETTINGS)
        for batch in vectors(40):
            step(model, optimizer, batch)
        assert optimizer.guard_actions == 0
        ends.append(of_model(everything(model, optimizer)))
    for end in ends[1:]:
        for a, b in zip(ends[0], end, strict=True):
            assert_identical(a, b)


def test_noise_is_no_spike_and_what_stands_out_of_it_is_one() -> None:
    losses, generator = Losses(), torch.Generator().manual_seed(0)
    for place in range(2000):
        loss = 5 / (1 + place / 100) + 0.3 * float(torch.randn((), generator=generator))
        assert losses.is_good(loss, 10.0), place
        losses.add(loss)
    assert not losses.is_good(losses.mean + 5, 10.0)
    assert not losses.is_good(NAN, 10.0)
    assert losses.is_good(-1e9, 10.0)


# -- what it does then -----------------------------------------------------------------------------------


def test_steps_are_shorter_each_time_also_under_a_schedule() -> None:
    model = mlp()
    optimizer = TEKFAC(model, guard=Guard(patience=1, every=4, step=0.1), **SETTINGS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)

    def moved() -> float:
        before = model[0].weight.detach().clone()
        step(model, optimizer, vectors(1)[0])
        schedule.step()
        return float((model[0].weight.detach() - before).norm())

    for batch in vectors(13):
        step(model, optimizer, batch)
    state = everything(model, optimizer)
    for _ in range(2):
        step(model, optimizer, vectors(1)[0], NAN)
    assert optimizer.guard_actions == 2
    shorter = moved()
    model.load_state_dict(state["model"])
    other = TEKFAC(model, **SETTINGS)
    other.load_state_dict(state["optimizer"])
    before = model[0].weight.detach().clone()
    step(model, other, vectors(1)[0])
    assert shorter < 0.03 * float((model[0].weight.detach() - before).norm())


def test_a_schedule_keeps_its_place() -> None:
    model = mlp()
    optimizer = TEKFAC(model, guard=QUICK, **SETTINGS)
    for place, batch in enumerate(vectors(13)):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + place)
        step(model, optimizer, batch)
    step(model, optimizer, vectors(1)[0], NAN)
    assert optimizer.param_groups[0]["lr"] == 0.01 / 13


@both_steps
@pytest.mark.parametrize("method", METHODS)
def test_damping_is_raised_where_that_is_asked_for(method: type[NaturalGradient], step: str) -> None:
    model, take = mlp(), globals()["step"]
    guard = Guard(patience=1, every=4, step=1.0, damping=10.0)
    optimizer = maker(method, step)(model, guard=guard, **SETTINGS)
    for batch in vectors(13):
        take(model, optimizer, batch)
    snapshot = optimizer._watch.good
    assert snapshot is not None
    take(model, optimizer, vectors(1)[0], NAN)
    raised_now = optimizer.signals()
    optimizer._watch.losses.damping, optimizer._rules_of = 1.0, []
    for name, signals in optimizer.signals().items():
        assert raised_now[name].damping == pytest.approx(10 * signals.damping)
    take(model, optimizer, vectors(1)[0])


def test_a_multiple_of_one_is_the_rule_itself() -> None:
    rule = Tikhonov(0.1)
    assert raised(rule, 1.0) is rule
    assert raised(rule, 2.0) == Raised(rule, 2.0)


def test_each_action_is_told_and_after_the_last_it_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = TEKFAC(model, guard=Guard(patience=1, every=4, at_most=2), **SETTINGS)
    for batch in vectors(13):
        step(model, optimizer, batch)
    good = copied(optimizer._watch.good.model)  # type: ignore[union-attr]
    caplog.clear()
    for count in (1, 2):
        step(model, optimizer, vectors(1)[0], NAN)
        assert optimizer.guard_actions == count
        message = caplog.records[-1].getMessage()
        assert f"to the snapshot of step 12 (time {count}): the loss is nan" in message
        assert f"Steps are {0.5**count:g} times as long now" in message
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    with pytest.raises(DivergenceError, match=r"acted 2 times.*snapshot of step 12.*lower lr"):
        step(model, optimizer, vectors(1)[0], NAN)
    assert_identical(good, copied(dict(model.named_parameters())))
    assert optimizer.guard_actions == 2


def test_skipped_steps_stay_counted() -> None:
    model = mlp()
    optimizer = TEKFAC(model, guard=Guard(every=4, patience=2), **SETTINGS)
    train(model, optimizer, vectors(5))
    train(model, optimizer, vectors(4), lambda out, y: F.cross_entropy(out, y) * NAN)
    assert (optimizer.skipped_steps, optimizer.guard_actions) == (4, 2)


# -- state, settings, several processes ------------------------------------------------------------------


def test_counts_are_saved_and_snapshots_are_not() -> None:
    model = mlp()
    optimizer = TEKFAC(model, guard=QUICK, **SETTINGS)
    for batch in vectors(13):
        step(model, optimizer, batch)
    step(model, optimizer, vectors(1)[0], NAN)
    state = through_a_file(optimizer.state_dict())
    saved = saved_whole(state)["guard"]
    assert saved.keys() == set(Losses.__annotations__)
    assert (saved["actions"], saved["step"]) == (1, 0.5)
    other = TEKFAC(mlp(), guard=QUICK, **SETTINGS)
    other.load_state_dict(state)
    assert other.guard_actions == 1
    assert_identical(other, optimizer)
    saved_whole(state).pop("guard")
    other.load_state_dict(state)
    assert other.guard_actions == 0
    plain = TEKFAC(mlp(), **SETTINGS)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.guard_actions == 0


@pytest.mark.parametrize(
    ("entry", "value"), [("step", 0.0), ("actions", -1), ("mean", NAN), ("distance", -1.0), ("more", 1)]
)
def test_damaged_counts_are_refused(entry: str, value: Any) -> None:
    state = TEKFAC(mlp(), guard=True).state_dict()
    saved_whole(state)["guard"][entry] = value
    with pytest.raises(ValueError, match=r"\['guard'\]"):
        TEKFAC(mlp(), guard=True).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"spike": 0}, "Invalid spike: 0"),
        ({"patience": 0}, "Invalid patience: 0"),
        ({"every": 2.5}, "Invalid every: 2.5"),
        ({"step": 1.5}, r"Invalid step: 1.5. Expected a number in \(0, 1\]"),
        ({"damping": 0.5}, "Invalid damping: 0.5"),
        ({"at_most": 0}, "Invalid at_most: 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Guard(**settings)


def test_what_is_no_guard_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Invalid guard: 'yes'. Expected True, False or a tekfac.guard.Guard"):
        TEKFAC(mlp(), guard="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not go with guard"):
        TEKFAC.natural(mlp(), damping=LevenbergMarquardt(), guard=True)


def test_a_loss_that_is_no_single_number_is_refused_and_no_step_taken() -> None:
    model = mlp()
    optimizer = TEKFAC(model, guard=True)
    for loss, told in ((torch.zeros(2), r"a tensor \[2\]"), ("low", "'low'")):
        backward(model, vectors(1)[0])
        optimizer.report_loss(loss)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"Invalid loss: {told}. Expected a single number"):
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer.num_steps == 0


def test_without_a_guard_a_loss_that_is_told_is_not_looked_at() -> None:
    model = mlp()
    optimizer = KFAC(model)
    optimizer.report_loss(torch.empty((), device="meta"))  # which cannot be read
    train(model, optimizer, vectors(1))
    assert (optimizer.num_steps, optimizer.guard_actions) == (1, 0)


def test_layers_that_were_frozen_since_the_snapshot_are_no_obstacle() -> None:
    model = mlp()
    optimizer = TEKFAC(model, guard=QUICK, **SETTINGS)
    for batch in vectors(13):
        step(model, optimizer, batch)
    model[0].bias.requires_grad = False
    step(model, optimizer, vectors(1)[0])
    step(model, optimizer, vectors(1)[0], NAN)
    assert optimizer.guard_actions == 1
    assert optimizer.num_steps == 13


def _with_a_bad_loss_in_one(rank: int, world: int) -> Any:
    model = mlp(dtype=torch.float32)
    optimizer = TEKFAC(model, guard=QUICK, **SETTINGS)
    for place, batch in enumerate(vectors(16, dtype=torch.float32)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.report_loss(loss * NAN if (rank, place) == (1, 13) else loss)
        optimizer.step()
    return optimizer.guard_actions, optimizer.num_steps, copied(dict(model.named_parameters()))


@pytest.mark.slow
def test_processes_go_back_together(tmp_path: Path) -> None:
    first, second = run_together(2, tmp_path, _with_a_bad_loss_in_one)
    assert first[:2] == second[:2] == (1, 14)
    assert_identical(first[2], second[2])
