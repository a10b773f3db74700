"""A plain step never waits for the device: nothing is read from it, non-finite numbers are dealt with there.

On the meta device tensors have no data: whatever asks for a number, or copies to the host, raises. No
accelerator was at hand; what happens on the device itself was tested on the CPU, by the same code.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS, every_method, seeded
from tekfac.curvature import stacks
from tekfac.optim import model_layers
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, both_steps, everything, maker, train


class Net(nn.Module):
    """Layers of several kinds, small ones of equal size, one in blocks, and a parameter of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3)
        self.first, self.second, self.wide = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 40)
        self.head = nn.Linear(40, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.convolution(x))).flatten(1)
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        out: Tensor = self.scale * self.head(torch.tanh(self.wide(x)))
        return out


SETTINGS = {"lr": 0.01, "weight_decay": 1e-3, "max_dim": 16, "seed": 0, "interval_growth": None}


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 1, 3, 3, generator=generator).double(), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def start(
    method: type[NaturalGradient], step: str = "adaptive", **settings: Any
) -> tuple[nn.Module, NaturalGradient]:
    model = seeded(Net)
    return model, maker(method, step)(
        model,
        **{**SETTINGS, **settings},
    )


def on_meta(value: Any) -> Any:
    """Values with all their tensors moved to the meta device."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: on_meta(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, tuple):
        moved = (on_meta(part) for part in value)
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value


@every_method
@pytest.mark.parametrize(
    ("step", "settings"),
    [
        *(
            (step, own)
            for step in ("adaptive", "natural")
            for own in ({}, {"momentum": 0.0}, {"damping": None})
        ),
        ("natural", {"kl_clip": 1e-3}),
    ],
    ids=str,
)
def test_plain_steps_run_where_tensors_have_no_data(
    monkeypatch: pytest.MonkeyPatch, method: type[NaturalGradient], step: str, settings: dict[str, Any]
) -> None:
    model, optimizer = start(method, step, **settings)
    train(model, optimizer, batches(1))
    monkeypatch.setattr(model_layers, "_require_data", lambda *_: None)
    monkeypatch.setattr(stacks, "GIVEN_BACK", 1)
    empty = seeded(Net).to("meta")
    other = maker(method, step)(
        empty,
        **{**SETTINGS, **settings},
    )
    other._network.blocks = {name: on_meta(block) for name, block in optimizer._network.blocks.items()}
    other._num_steps = 1
    other._arm()
    for _ in range(3):
        other.zero_grad()
        F.cross_entropy(
            empty(torch.empty(8, 1, 3, 3, device="meta").double()), torch.empty(8, device="meta").long()
        ).backward()
        other.step()
    assert other._num_steps == 4
    with pytest.raises((NotImplementedError, RuntimeError), match=r"meta|Meta"):
        int(other.num_steps)  # to ask is to wait


def test_the_meta_device_raises_when_asked() -> None:
    """So that the test above can fail."""
    with pytest.raises(RuntimeError):
        bool(torch.ones((), device="meta") > 0)


# -- on the device, tried on the CPU -------------------------------------------------------------------


def deferred(optimizer: NaturalGradient) -> NaturalGradient:
    optimizer._skipping.deferred = True
    return optimizer


@both_steps
@pytest.mark.parametrize("method", METHODS)
def test_finite_steps_are_those_that_are_looked_at(method: type[NaturalGradient], step: str) -> None:
    runs = []
    for later in (False, True):
        model, optimizer = start(method, step)
        if later:
            deferred(optimizer)
        train(model, optimizer, batches(4))
        runs.append(everything(model, optimizer))
    assert_identical(*runs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted_later(
    bad: float, momentum: float, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []
    for broken in (False, True):
        model, optimizer = start(METHODS[-1], momentum=momentum)
        deferred(optimizer)
        first, second, third = batches(3)
        train(model, optimizer, [first, second])
        if broken:
            weights = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            model.head.weight.grad.fill_(bad)  # type: ignore[union-attr]
            optimizer.step()
            assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
            assert not caplog.records
            assert optimizer.skipped_steps == 1
            assert "1 steps since the last look were not finite" in caplog.text
        train(model, optimizer, [third])
        whole = everything(model, optimizer)
        whole["optimizer"]["param_groups"][0]["tekfac"].pop("skipped_steps")
        runs.append(whole)
    assert_identical(*runs)


def test_a_step_that_measures_looks_at_once() -> None:
    model, optimizer = start(METHODS[0], factors_every=2, basis_every=2)
    deferred(optimizer)
    train(model, optimizer, batches(2))
    (x, y) = batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    model.head.weight.grad.fill_(math.nan)  # type: ignore[union-attr]
    optimizer.step()
    assert optimizer._skipped_steps == 1
    assert optimizer._num_steps == 2
