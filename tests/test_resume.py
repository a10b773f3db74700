"""A run that was stopped and resumed, at any step, is the run that was never stopped, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dense import METHODS, statistics
from tekfac import EKFAC, KFAC, TEKFAC
from tekfac.damping import TraceBased
from tekfac.optim.natural_gradient import NaturalGradient
from training import (
    assert_identical,
    backward,
    both_steps,
    cnn,
    copied,
    everything,
    images,
    maker,
    mlp,
    saved_curvature,
    saved_whole,
    through_a_file,
    train,
    vectors,
)

Run = tuple[nn.Module, NaturalGradient, Any]
CYCLE = 6


def start(
    method: type[NaturalGradient],
    *,
    seed: int,
    step: str = "adaptive",
    fisher: str = "sampled",
    **settings: Any,
) -> Run:
    """A model, its optimizer with short intervals, and a scheduler that moves at every step."""
    model = cnn(seed=seed, dtype=torch.float32)
    intervals = {"interval_growth": None, "factors_every": 3, "basis_every": CYCLE}
    if step == "natural" and method.method.rescaling.measured:
        intervals["rescaling_every"] = 3
    torch.manual_seed(seed)
    make = maker(method, step)
    optimizer = make(model, lr=0.05, weight_decay=1e-3, fisher=fisher, **intervals, **settings)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * CYCLE, eta_min=0.01)
    return model, optimizer, scheduler


def save(run: Run) -> Any:
    return through_a_file([part.state_dict() for part in run])


def load(run: Run, saved: Any) -> None:
    for part, state in zip(run, saved, strict=True):
        part.load_state_dict(state)


def resumed_everywhere(method: type[NaturalGradient], **settings: Any) -> None:
    data = images(2 * CYCLE, dtype=torch.float32)
    run = start(method, seed=1, **settings)
    saved = []
    for batch in data:
        saved.append(save(run))
        train(run[0], run[1], [batch], scheduler=run[2])
    for stop in range(2 * CYCLE):
        other = start(method, seed=100 + stop, **settings)
        load(other, saved[stop])
        assert_identical(save(other), saved[stop])
        train(other[0], other[1], data[stop:], scheduler=other[2])
        for ours, theirs in zip(run, other, strict=True):
            assert_identical(theirs.state_dict(), ours.state_dict())


@both_steps
@pytest.mark.parametrize("method", METHODS)
def test_resuming_at_any_step_of_two_refresh_cycles_gives_the_same_bits(
    method: type[NaturalGradient], step: str
) -> None:
    resumed_everywhere(method, step=step)


@pytest.mark.parametrize("first_order_step", ["adamw", "sgd"])
def test_parameters_without_a_block_resume_too(first_order_step: str) -> None:
    resumed_everywhere(TEKFAC, first_order=["1"], first_order_step=first_order_step)


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_the_other_fishers_resume_too(fisher: str) -> None:
    resumed_everywhere(TEKFAC, fisher=fisher)


def test_clipping_and_damping_rules_of_groups_resume_too() -> None:
    resumed_everywhere(
        TEKFAC,
        step="natural",
        kl_clip=1e-3,
        param_groups=[{"params": ["4"], "damping": TraceBased(0.5), "momentum": 0.5}],
    )


def test_a_restored_damping_rule_is_the_one_that_was_saved() -> None:
    def build(damping: Any) -> NaturalGradient:
        return TEKFAC(mlp(), damping=damping)

    saved = through_a_file(build(TraceBased(0.5)).state_dict())
    optimizer = build(1e-3)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["damping"] == TraceBased(0.5)


def test_the_state_is_in_torchs_own_format_with_names_beside_the_indices() -> None:
    model = cnn()
    optimizer = TEKFAC(model, lr=0.01)
    train(model, optimizer, images(1))
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups"}
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    assert [i for group in state["param_groups"] for i in group["params"]] == list(range(len(names)))
    assert set(state["state"]) == set(range(len(names)))
    assert all(own["step"] == 1 for own in state["state"].values())
    assert set(saved_curvature(state)) == {"0.weight", "4.weight"}


def test_a_state_of_another_format_is_refused_by_its_number() -> None:
    optimizer = TEKFAC(cnn(), lr=0.01)
    state = optimizer.state_dict()
    state["param_groups"][0]["tekfac"]["format"] = 0
    with pytest.raises(ValueError, match="has format 0, this version of tekfac reads format 4"):
        optimizer.load_state_dict(state)


def test_the_state_holds_everything_a_later_step_depends_on() -> None:
    model = cnn()
    optimizer = TEKFAC.natural(model, lr=0.01)
    train(model, optimizer, images(1))
    state = optimizer.state_dict()
    for curvature in saved_curvature(state).values():
        assert {"moments", "basis", "theta"} <= set(curvature)
        assert curvature["moments"]["weight"] == curvature["theta"]["weight"] == 1.0
    whole = saved_whole(state)
    assert whole["num_steps"] == 1
    assert isinstance(whole["sampling"]["state"], torch.Tensor)


def test_a_state_loaded_into_a_used_optimizer_replaces_all_it_had() -> None:
    """As when a diverged run goes back to its last good checkpoint."""
    data = images(8)
    run, other = (cnn(), cnn(seed=5))
    optimizer, used = (
        TEKFAC(m, lr=0.05, interval_growth=None, factors_every=2, basis_every=4) for m in (run, other)
    )
    train(run, optimizer, data[:4])
    saved = copied([run.state_dict(), optimizer.state_dict()])
    train(other, used, images(7, seed=9))
    other.load_state_dict(saved[0])
    used.load_state_dict(saved[1])
    train(run, optimizer, data[4:])
    train(other, used, data[4:])
    assert_identical(everything(other, used), everything(run, optimizer))


def test_a_backward_pass_made_before_loading_is_forgotten() -> None:
    data = vectors(3)
    run, other = mlp(), mlp(seed=5)
    optimizer, used = (TEKFAC(m, lr=0.05, factors_every=1, basis_every=1) for m in (run, other))
    train(run, optimizer, data[:1])
    backward(other, vectors(1, seed=8)[0])  # captured, never stepped
    other.load_state_dict(run.state_dict())
    used.load_state_dict(copied(optimizer.state_dict()))
    train(run, optimizer, data[1:])
    train(other, used, data[1:])
    assert_identical(everything(other, used), everything(run, optimizer))


def test_a_state_saved_before_the_first_step_can_be_loaded() -> None:
    data = vectors(3)
    run, other = mlp(), mlp(seed=7)
    optimizer, fresh = TEKFAC(run, lr=0.05, seed=1), TEKFAC(other, lr=0.2, seed=2)
    other.load_state_dict(run.state_dict())
    fresh.load_state_dict(through_a_file(optimizer.state_dict()))
    train(run, optimizer, data)
    train(other, fresh, data)
    assert_identical(everything(other, fresh), everything(run, optimizer))


class WithUnusedBranch(nn.Module):
    """A head that only later phases of training use, beside the one in use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.later = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return out


def test_a_layer_that_was_never_used_does_not_keep_a_state_from_loading() -> None:
    model, other = WithUnusedBranch().double(), WithUnusedBranch().double()
    optimizer, resumed = TEKFAC(model, lr=0.05), TEKFAC(other, lr=0.05)
    train(model, optimizer, vectors(2))
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_identical(resumed, optimizer)


def test_a_frozen_first_layer_does_not_keep_a_state_from_loading() -> None:
    model, other = mlp(sizes=(5, 4, 4, 3)), mlp(sizes=(5, 4, 4, 3))
    for m in (model, other):
        m[0].requires_grad_(False)
    optimizer, resumed = TEKFAC(model, lr=0.05), TEKFAC(other, lr=0.05)
    train(model, optimizer, vectors(2))
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_identical(resumed, optimizer)


def test_a_group_added_later_is_saved_and_loaded() -> None:
    """A parameter of the loss, say, that the model does not own."""
    data = vectors(4)

    def start_with_temperature() -> tuple[nn.Module, nn.Parameter, NaturalGradient]:
        model, temperature = mlp(), nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = TEKFAC(model, lr=0.05)
        optimizer.add_param_group({"params": [temperature], "lr": 0.1})
        return model, temperature, optimizer

    def scaled(t: nn.Parameter) -> Any:
        return lambda logits, y: nn.functional.cross_entropy(logits * t, y)

    model, t, optimizer = start_with_temperature()
    train(model, optimizer, data[:2], scaled(t))
    other, other_t, resumed = start_with_temperature()
    other.load_state_dict(copied(model.state_dict()))
    other_t.data.copy_(t.data)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, optimizer, data[2:], scaled(t))
    train(other, resumed, data[2:], scaled(other_t))
    assert t.data != 1
    assert_identical(everything(other, resumed), everything(model, optimizer))
    assert torch.equal(t, other_t)


def refused(optimizer: NaturalGradient, model: nn.Module, state: Any) -> str:
    """The message of the refusal; nothing may have changed."""
    before = everything(model, optimizer)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - each test looks at the message
        optimizer.load_state_dict(state)
    assert_identical(everything(model, optimizer), before)
    return str(error.value)


def trained(model: nn.Module, method: type[NaturalGradient] = TEKFAC) -> NaturalGradient:
    optimizer = method(model, lr=0.05)
    train(model, optimizer, vectors(2))
    return optimizer


def test_a_wider_network_is_refused_and_the_differing_layers_named() -> None:
    model = mlp(sizes=(5, 4, 4, 3))
    message = refused(trained(model), model, trained(mlp(sizes=(5, 4, 7, 3))).state_dict())
    assert "'2'" in message
    assert "'4'" in message
    assert "layer '0'" not in message
    assert "[1, 4, 5]" in message  # ours
    assert "[1, 7, 5]" in message  # the saved one


def test_missing_and_additional_layers_are_named() -> None:
    deeper, model = mlp(sizes=(5, 4, 3, 3)), mlp(sizes=(5, 4, 3))
    assert "layer '4' is in the saved state only" in refused(
        trained(model), model, trained(deeper).state_dict()
    )
    assert "layer '4' is not in the saved state" in refused(
        trained(deeper), deeper, trained(model).state_dict()
    )


def test_other_groups_are_refused() -> None:
    model = mlp()
    grouped = TEKFAC(mlp(), lr=0.05, param_groups=[{"params": ["0"], "lr": 0.1}])
    message = refused(trained(model), model, grouped.state_dict())
    assert "param groups" in message


def test_a_state_of_another_method_is_refused() -> None:
    model = mlp()
    message = refused(trained(model, EKFAC), model, trained(mlp(), KFAC).state_dict())
    assert "KFAC" in message
    assert "EKFAC" in message


def test_a_state_of_another_optimizer_is_refused() -> None:
    model, sgd = mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1)
    assert "not the state of a tekfac optimizer" in refused(trained(model), model, sgd.state_dict())


def test_curvature_loaded_from_a_live_optimizer_is_a_copy() -> None:
    model, other = mlp(), mlp()
    optimizer, second = trained(model), TEKFAC(other, lr=0.05)
    second.load_state_dict(optimizer.state_dict())
    for layer in statistics(second).values():
        layer.moments.values.input.zero_()
        layer.basis.vectors_in.zero_()
        layer.rescaling.zero_()
    for layer in statistics(optimizer).values():
        assert layer.moments.values.input.any()
        assert layer.basis.vectors_in.any()
        assert layer.rescaling.any()


@both_steps
@pytest.mark.parametrize("fisher", ["auto", "sampled"])
def test_a_state_in_the_middle_of_accumulation_is_that_of_the_last_step(step: str, fisher: Any) -> None:
    """Whoever goes on from it makes the batch anew, as its gradients are in no state."""
    ends = []
    for stop in (None, 0, 2, 3):
        make = maker(TEKFAC, step)
        settings: dict[str, Any] = {
            "lr": 0.01,
            "seed": 0,
            "fisher": fisher,
            "factors_every": 2,
            "basis_every": 2,
        }
        model, taken = cnn(), 0
        before = {name: own.clone() for name, own in model.named_buffers()}  # which passes move, whatever comes
        optimizer = make(model, **settings)
        while taken < 5:
            optimizer.zero_grad()
            halves = images(2, seed=taken)
            backward(model, halves[0])
            if taken == stop:
                state, stop = through_a_file(optimizer.state_dict()), None
                weights = copied(model.state_dict())
                model = cnn(seed=7)
                model.load_state_dict({**weights, **before})
                optimizer = make(model, **settings)
                optimizer.load_state_dict(state)
                continue
            backward(model, halves[1])
            optimizer.step()
            before = {name: own.clone() for name, own in model.named_buffers()}
            taken += 1
        ends.append(everything(model, optimizer))
    for end in ends[1:]:
        assert_identical(ends[0], end)
