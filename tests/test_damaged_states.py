"""Promise: a saved state that was damaged or edited is refused by its place, and nothing is loaded."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dense import METHODS
from tekfac import KFAC, TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, cnn, copied, differences, everything, images, maker, train

NAN, INFINITY = float("nan"), float("inf")


def trained(method: type[NaturalGradient] = TEKFAC, step: str = "adaptive", seed: int = 0) -> tuple[Any, Any]:
    model = cnn(seed=seed)
    more = {"likelihood": "categorical"} if step == "natural" else {}
    optimizer = maker(method, step)(model, lr=0.01, seed=seed, **more)
    train(model, optimizer, images(3))
    return model, optimizer


STATES = {
    f"{method.__name__}, {step}": (method, step) for method in METHODS for step in ("adaptive", "natural")
}


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    return {name: trained(*made)[1].state_dict() for name, made in STATES.items()}


def at(state: Any, *path: Any) -> Any:
    for key in path:
        state = state[key]
    return state


WHOLE = ("param_groups", 0, "tekfac")
OF_LAYER = ("state", 0)

Change = Callable[[Any], Any]
CHANGES: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "lr is no number": (("param_groups", 0, "lr"), NAN, r"param_groups\[0\]\['lr'\] is nan"),
    "lr is endless": (("param_groups", 0, "lr"), INFINITY, r"param_groups\[0\]\['lr'\] is inf"),
    "lr is a word": (("param_groups", 0, "lr"), "high", r"param_groups\[0\]\['lr'\] is 'high'"),
    "momentum": (("param_groups", 0, "momentum"), 7, r"\['momentum'\] is 7"),
    "weight decay": (("param_groups", 0, "weight_decay"), -0.1, r"\['weight_decay'\] is -0.1"),
    "damping": (("param_groups", 0, "damping"), -1.0, r"\['damping'\] cannot be read"),
    "a rule": (("param_groups", 0, "damping"), {"rule": "Nobodys"}, r"\['damping'\] cannot be read"),
    "names": (("param_groups", 0, "param_names"), ["0.weight"], "a name for each parameter"),
    "steps": ((*WHOLE, "num_steps"), -5, r"\['num_steps'\] is -5"),
    "half a step": ((*WHOLE, "num_steps"), 1.5, r"\['num_steps'\] is 1.5"),
    "attempts": ((*WHOLE, "attempts"), {"0": "many"}, r"\['attempts'\]\['0'\] is 'many'"),
    "turns": ((*WHOLE, "turns"), "sometimes", r"\['turns'\] is 'sometimes'"),
    "rates": ((*WHOLE, "highest_lr"), [NAN], r"\['highest_lr'\] is nan"),
    "likelihoods": ((*WHOLE, "likelihoods"), "{", r"\['likelihoods'\] cannot be read"),
    "a likelihood": ((*WHOLE, "likelihoods"), '{"": [1, ["zipf", {}]]}', "cannot be read"),
    "a generator": (
        (*WHOLE, "choosing", "state"),
        torch.zeros(3, dtype=torch.uint8),
        "choosing.*cannot be read",
    ),
    "a seed": ((*WHOLE, "sampling", "seed"), None, r"sampling'\]\['seed'\] is None"),
    "the whole": (WHOLE, [], "format None"),
    "state": (("state",), [], "state is"),
    "groups": (("param_groups",), {}, "param_groups is"),
    "curvature": ((*OF_LAYER, "curvature"), None, "curvature of layer '0' is None"),
    "a basis": ((*OF_LAYER, "curvature", "basis"), {}, "basis.vectors_in of layer '0' is None"),
    "a count": ((*OF_LAYER, "step"), -1, "'step' of '0.weight' is -1"),
    "a weight": ((*OF_LAYER, "curvature", "moments", "weight"), 0.0, "weight of moments of layer '0' is 0.0"),
}
"""Where something is put in the place of what is there, and what is told."""


def refused(optimizer: NaturalGradient, model: Any, state: Any, told: str) -> None:
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=told):
        optimizer.load_state_dict(state)
    assert_identical(before, everything(model, optimizer))


@pytest.mark.parametrize("name", CHANGES)
def test_one_wrong_value_is_told_by_its_place(name: str, states: dict[str, Any]) -> None:
    (*path, last), value, told = CHANGES[name]
    state = copied(states["TEKFAC, adaptive"])
    at(state, *path)[last] = value
    model, optimizer = trained(seed=1)
    refused(optimizer, model, state, told)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a state."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and path[-1:] != ("params",):
        items = enumerate(value)
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("name", STATES)
def test_tensors_of_another_shape_or_with_a_number_that_is_none_are_refused(
    name: str, states: dict[str, Any]
) -> None:
    model, optimizer = trained(*STATES[name], seed=1)
    tensors = [p for p in places(states[name]) if isinstance(at(states[name], *p), Tensor)]
    assert len(tensors) > 10
    for path in (path for path in tensors if path[-1] != "state"):
        for damage in (lambda t: t[..., :-1], lambda t: t.clone().index_fill_(0, torch.tensor(0), NAN)):
            state = copied(states[name])
            at(state, *path[:-1])[path[-1]] = damage(at(state, *path))
            refused(optimizer, model, state, "damaged|architecture")


@pytest.mark.parametrize("name", STATES)
def test_whatever_is_missing_nothing_is_half_loaded(name: str, states: dict[str, Any]) -> None:
    """It is refused as a ValueError, or was not needed: then all is loaded."""
    model, optimizer = trained(*STATES[name], seed=1)
    before, kept = everything(model, optimizer), optimizer.state_dict()
    for path in places(states[name]):
        state = copied(states[name])
        del at(state, *path[:-1])[path[-1]]
        try:
            optimizer.load_state_dict(state)
        except ValueError:
            assert not differences(before, everything(model, optimizer)), path
        else:
            train(model, optimizer, images(1))
            model, optimizer = trained(*STATES[name], seed=1)
            assert not differences(before, everything(model, optimizer))
    optimizer.load_state_dict(kept)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_random_damage_is_refused_or_changes_nothing_of_the_promise(name: str, states: dict[str, Any]) -> None:
    """No other error, no half load, no step that crashes afterwards."""
    generator = random.Random(len(name))
    model, optimizer = trained(*STATES[name], seed=1)
    before = everything(model, optimizer)
    everywhere = list(places(states[name]))
    strange: list[Any] = [None, -1, 0, 2.5, NAN, INFINITY, "text", [], {}, torch.zeros(2), True, b"bytes"]
    for _ in range(150):
        state = copied(states[name])
        path = generator.choice(everywhere)
        at(state, *path[:-1])[path[-1]] = copy.copy(generator.choice(strange))
        try:
            optimizer.load_state_dict(state)
        except ValueError:
            assert not differences(before, everything(model, optimizer)), path
        else:
            train(model, optimizer, images(1))
            model, optimizer = trained(*STATES[name], seed=1)


def test_another_fisher_or_reduction_is_not_averaged_with_the_saved_one() -> None:
    saved = TEKFAC(cnn(), fisher="empirical").state_dict()
    for setting in ({"fisher": "sampled"}, {"loss_reduction": "sum"}):
        ((key, value),) = setting.items()
        optimizer = TEKFAC(cnn(), **setting)
        with pytest.raises(ValueError, match=f"taken with {key}=.*has {key}={value!r}"):
            optimizer.load_state_dict(saved)
    TEKFAC(cnn()).load_state_dict(saved)  # which may well be what "auto" is here


def test_a_state_is_loaded_whole() -> None:
    model, optimizer = trained(KFAC)
    other_model, other = trained(KFAC, seed=1)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(copied(optimizer.state_dict()))
    assert_identical(everything(model, optimizer), everything(other_model, other))
