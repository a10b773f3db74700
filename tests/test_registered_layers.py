"""Promise: a layer type of your own is preconditioned once a few lines say what kind of layer it is."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tekfac
from blocks_oracle import (
    DAMPING,
    EVERY,
    OWN,
    Case,
    Part,
    Tape,
    assert_blocks_and_step,
    assert_rows_give_autograds_gradients,
    net_case,
    places,
    with_one,
)
from dense import normal
from tekfac import TEKFAC
from tekfac.layers import LinearKind, UnitKind

SAMPLES = 14


class Conv1D(nn.Module):
    """y = x W + b with W [in, out], as language models of the first generation have it."""

    def __init__(self, d_out: int, d_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_in, d_out))
        self.bias = nn.Parameter(torch.zeros(d_out))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.weight.shape[1])
        x = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class ScaleAndShift(nn.Module):
    """y = gain * x + offset, for every feature."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))
        self.offset = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x + self.offset


class Gain(nn.Module):
    """y = gain[c] * log(1 + x^2) for channels [N, C, ...]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * x.square().log1p().movedim(1, -1)).movedim(-1, 1)


class OfTwo(nn.Module):
    """y = W [left, right] + b: a linear layer with two inputs."""

    def __init__(self, d_left: int, d_right: int, d_out: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(d_out, d_left + d_right))
        self.offset = nn.Parameter(torch.zeros(d_out))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.linear(torch.cat([left, right], -1), self.matrix, self.offset)


def register(layer: type[nn.Module], kind: Any) -> None:
    """The one place that knows how a type is registered."""
    tekfac.register_layer(layer, kind)


def register_all() -> None:
    register(Conv1D, LinearKind(layout="input first"))
    register(ScaleAndShift, UnitKind(weight="gain", bias="offset"))
    register(Gain, UnitKind(weight="gain", bias=None, normalise=lambda _, x: x.square().log1p(), channels=True))
    register(
        OfTwo,
        LinearKind(weight="matrix", bias="offset", inputs=lambda _, left, right: torch.cat([left, right], -1)),
    )


def conv1d_case(*shape: int) -> Case:
    index = places({"weight": (4, 3), "bias": (3,)})
    matrix = torch.cat([index["weight"].T, index["bias"][:, None]], 1)
    return net_case(
        Conv1D(3, 4),
        normal(SAMPLES, *shape),
        lambda layer, tape, x: tape.linear("layer", x, layer.weight.T, layer.bias),
        {"layer": (["layer.weight", "layer.bias"], [Part("layer", matrix)])},
    )


def scale_case() -> Case:
    return net_case(
        ScaleAndShift(4),
        normal(SAMPLES, 3, 4),
        lambda layer, tape, x: tape.scaled("layer", x, layer.gain, layer.offset),
        {
            "layer": (
                ["layer.gain", "layer.offset"],
                [Part("layer", torch.arange(8).reshape(2, 4).T, units=True)],
            )
        },
    )


def gain_case() -> Case:
    def written(layer: Gain, tape: Tape, x: Tensor) -> Tensor:
        return tape.scaled("layer", (1 + x * x).log().movedim(1, -1), layer.gain, None).movedim(-1, 1)

    part = Part("layer", torch.arange(3)[:, None], units=True)
    return net_case(Gain(3), normal(SAMPLES, 3, 2, 2), written, {"layer": (["layer.gain"], [part])})


def of_two_case() -> Case:
    def written(layer: OfTwo, tape: Tape, left: Tensor, right: Tensor) -> Tensor:
        s = left @ layer.matrix[:, :2].T + right @ layer.matrix[:, 2:].T + layer.offset
        return tape.keep("layer", with_one(torch.cat([left, right], -1)), s)

    index = places({"matrix": (3, 5), "offset": (3,)})
    matrix = torch.cat([index["matrix"], index["offset"][:, None]], 1)
    layers = {"layer": (["layer.matrix", "layer.offset"], [Part("layer", matrix)])}
    return net_case(OfTwo(2, 3, 3), (normal(SAMPLES, 3, 2), normal(SAMPLES, 3, 3, seed=1)), written, layers)


CASES = {
    "weight [in, out], vectors": lambda: conv1d_case(4),
    "weight [in, out], sequences": lambda: conv1d_case(5, 4),
    "scale and shift": scale_case,
    "gain of channels": gain_case,
    "two inputs": of_two_case,
}


@cache
def case_of(kind: str) -> Case:
    return CASES[kind]()


@pytest.mark.parametrize("kind", CASES)
def test_the_rows_written_out_give_autograds_gradients(kind: str) -> None:
    assert_rows_give_autograds_gradients(case_of(kind))


@pytest.mark.parametrize("kind", CASES)
def test_blocks_and_steps_are_those_of_the_definitions(kind: str) -> None:
    register_all()
    assert_blocks_and_step(case_of(kind), EVERY if "sequences" in kind else OWN)


def test_a_type_that_is_not_registered_is_left_to_first_order_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Unknown(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    register_all()
    model = nn.Sequential(Unknown(3, 4), nn.Tanh(), nn.Linear(3, 3))
    with caplog.at_level(logging.INFO, "tekfac"):
        optimizer = TEKFAC.natural(model, damping=DAMPING)
    assert "'0.weight'" in caplog.text
    F.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
    optimizer.step()
    assert set(optimizer.curvature) == {"2"}


def test_a_derived_class_with_the_same_forward_is_of_the_same_kind() -> None:
    class Derived(Conv1D):
        """Nothing else."""

    register_all()
    model = nn.Sequential(Derived(3, 4), nn.Tanh(), nn.Linear(3, 3))
    optimizer = TEKFAC.natural(model, damping=DAMPING)
    F.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()
    optimizer.step()
    assert set(optimizer.curvature) == {"0", "2"}


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (3, LinearKind()),
        ("Conv1D", LinearKind()),
        (dict, LinearKind()),
        (Conv1D, "linear"),
        (Conv1D, LinearKind),
    ],
)
def test_what_is_no_type_or_no_kind_is_refused_by_name(what: Any, kind: Any) -> None:
    with pytest.raises(TypeError, match=r"register.*[Ee]xpected") as caught:
        register(what, kind)
    assert repr(what) in str(caught.value)
