"""Promise: a layer that the model gets later is preconditioned once `add_param_group` has named it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense import assert_close, every_method
from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, everything, through_a_file, vectors

LR, NEW_LR, DAMPING = 0.5, 0.25, 0.1


class Growing(nn.Module):
    """Two layers; whatever `new` is put between them is used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        new = self._modules.get("new")
        if isinstance(new, nn.Conv1d):
            hidden = new(hidden[:, None])[:, 0]
        elif isinstance(new, nn.Embedding):
            hidden = hidden * new((x[:, :1] > 0).long().sum(1))
        elif new is not None:
            hidden = new(hidden)
        if "scale" in self._parameters:
            hidden = hidden * self.scale
        out: Tensor = self.head(torch.tanh(hidden))
        return out


KINDS = {
    "linear": lambda: nn.Linear(5, 5),
    "linear without bias": lambda: nn.Linear(5, 5, bias=False),
    "convolution": lambda: nn.Conv1d(1, 1, 3, padding=1),
    "embedding": lambda: nn.Embedding(2, 5),
    "layer norm": lambda: nn.LayerNorm(5),
    "batch norm": lambda: nn.BatchNorm1d(5),
}


def new_layer(kind: str, seed: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return KINDS[kind]().double()


def every_step(method: type[NaturalGradient]) -> dict[str, Any]:
    clock = {"factors_every": 1, "basis_every": 1, "fisher": "exact"}
    return {**clock, "rescaling_every": 1} if method.method.rescaling.measured else clock


def one_step(model: nn.Module, optimizer: NaturalGradient, seed: int = 1) -> dict[str, Tensor]:
    """How far each parameter moves."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    backward(model, vectors(1, samples=12, seed=seed)[0])
    optimizer.step()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def assert_preconditioned(model: nn.Module, optimizer: NaturalGradient, moved: dict[str, Tensor]) -> None:
    """Everything moved along (F + damping I)^-1 g, the new layer with its own learning rate."""
    assert set(optimizer.curvature) == {"body", "head", "new"}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected = optimizer.curvature.solve(gradients, damping=DAMPING)
    assert set(expected) == set(moved)
    for name in moved:
        assert_close(moved[name], (NEW_LR if name.startswith("new.") else LR) * expected[name])


@pytest.mark.parametrize("kind", KINDS)
@every_method
def test_a_new_layer_is_preconditioned_from_the_next_measured_step(
    method: type[NaturalGradient], kind: str
) -> None:
    model = Growing()
    optimizer = method.natural(model, lr=LR, momentum=0.0, damping=DAMPING, **every_step(method))
    one_step(model, optimizer)
    assert set(optimizer.curvature) == {"body", "head"}
    model.new = new_layer(kind)
    optimizer.add_param_group({"params": model.new.parameters(), "lr": NEW_LR})
    assert_preconditioned(model, optimizer, one_step(model, optimizer, seed=2))
    assert_preconditioned(model, optimizer, one_step(model, optimizer, seed=3))


@every_method
def test_its_curvature_is_that_in_an_optimizer_made_for_the_grown_model(method: type[NaturalGradient]) -> None:
    model = Growing()
    optimizer = method.natural(model, lr=LR, momentum=0.0, damping=DAMPING, **every_step(method))
    one_step(model, optimizer)
    model.new = new_layer("linear")
    optimizer.add_param_group({"params": model.new.parameters(), "lr": NEW_LR})
    twin = Growing()
    twin.new = new_layer("linear")
    twin.load_state_dict(model.state_dict())
    other = method.natural(twin, lr=LR, momentum=0.0, damping=DAMPING, **every_step(method))
    one_step(model, optimizer, seed=2)
    one_step(twin, other, seed=2)
    assert_close(optimizer.curvature["new"].to_dense(), other.curvature["new"].to_dense())


def test_steps_that_do_not_measure_come_between() -> None:
    """Measured are steps 0 and 3; the layer comes after step 0. At step 3 at the latest it has its block."""
    model = Growing()
    clock = {"factors_every": 3, "basis_every": 3, "rescaling_every": 3}
    optimizer = TEKFAC.natural(model, lr=LR, momentum=0.0, damping=DAMPING, fisher="exact", **clock)
    one_step(model, optimizer)
    model.new = new_layer("linear")
    optimizer.add_param_group({"params": model.new.parameters(), "lr": NEW_LR})
    for seed in (2, 3):
        moved = one_step(model, optimizer, seed)
        assert all(bool(distance.any()) for distance in moved.values())
    assert_preconditioned(model, optimizer, one_step(model, optimizer, seed=4))
    assert_preconditioned(model, optimizer, one_step(model, optimizer, seed=5))


def test_what_is_known_of_the_other_layers_stays() -> None:
    model, twin = Growing(), Growing()
    optimizers = [TEKFAC.natural(m, lr=LR, damping=DAMPING, seed=0, factors_every=5) for m in (model, twin)]
    for m, optimizer in zip((model, twin), optimizers, strict=True):
        for seed in range(2):
            one_step(m, optimizer, seed)
    before = optimizers[0].curvature.to_dense()
    model.new = nn.Identity()  # the networks stay the same function
    model.unused = new_layer("linear")
    optimizers[0].add_param_group({"params": model.unused.parameters()})
    assert_identical(optimizers[0].curvature.to_dense(), before)
    assert optimizers[0].num_steps == 2
    for m, optimizer in zip((model, twin), optimizers, strict=True):
        for seed in range(2, 7):
            one_step(m, optimizer, seed)
    for layer in ("body", "head"):
        assert_identical(getattr(model, layer), getattr(twin, layer))
        assert_identical(*(o.curvature[layer].to_dense() for o in optimizers))
    assert "unused" not in optimizers[0].curvature


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tekfac"]


@pytest.mark.parametrize("of_the_model", [True, False], ids=["of the model", "of nobody"])
def test_a_parameter_of_no_layer_is_first_order_and_named_once(
    of_the_model: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Growing()
    optimizer = TEKFAC.natural(model, lr=LR, momentum=0.0, damping=DAMPING, **every_step(TEKFAC))
    one_step(model, optimizer)
    scale = nn.Parameter(torch.full((5,), 1.5, dtype=torch.float64))
    if of_the_model:
        model.scale = scale
    caplog.clear()
    with caplog.at_level(logging.INFO, "tekfac"):
        optimizer.add_param_group({"params": [scale], "lr": NEW_LR})
        before = scale.detach().clone()
        for seed in range(2, 5):
            optimizer.zero_grad()
            backward(model, vectors(1, seed=seed)[0])
            if not of_the_model:
                scale.grad = torch.ones_like(scale)
            gradient = scale.grad
            assert gradient is not None
            optimizer.step()
            assert_close(scale.detach(), before - NEW_LR * gradient)
            before = scale.detach().clone()
    assert set(optimizer.curvature) == {"body", "head"}
    told = [message for message in messages(caplog) if "momentum SGD" in message or "first" in message.lower()]
    assert len(told) == 1
    assert ("scale" in told[0]) or not of_the_model


def test_a_new_layer_that_is_preconditioned_is_not_said_to_be_first_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Growing()
    optimizer = TEKFAC.natural(model, lr=LR, damping=DAMPING, **every_step(TEKFAC))
    one_step(model, optimizer)
    caplog.clear()
    with caplog.at_level(logging.INFO, "tekfac"):
        model.new = new_layer("linear")
        optimizer.add_param_group({"params": model.new.parameters()})
        for seed in (2, 3):
            one_step(model, optimizer, seed)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_new_group_may_be_first_order_on_request() -> None:
    model = Growing()
    optimizer = TEKFAC.natural(model, lr=LR, momentum=0.0, damping=DAMPING, **every_step(TEKFAC))
    one_step(model, optimizer)
    model.new = new_layer("linear")
    optimizer.add_param_group({"params": model.new.parameters(), "lr": NEW_LR, "first_order": True})
    moved = one_step(model, optimizer, seed=2)
    assert set(optimizer.curvature) == {"body", "head"}
    assert_close(moved["new.weight"], NEW_LR * model.new.weight.grad)


def test_a_new_group_has_a_damping_of_its_own() -> None:
    model = Growing()
    optimizer = TEKFAC.natural(model, lr=LR, momentum=0.0, damping=DAMPING, **every_step(TEKFAC))
    one_step(model, optimizer)
    model.new = new_layer("linear")
    optimizer.add_param_group({"params": model.new.parameters(), "lr": NEW_LR, "damping": 3.0})
    moved = one_step(model, optimizer, seed=2)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    dampings = {"body": DAMPING, "head": DAMPING, "new": 3.0}
    expected = optimizer.curvature.solve(gradients, damping=dampings)
    assert_close(moved["new.weight"], NEW_LR * expected["new.weight"])
    assert_close(moved["body.weight"], LR * expected["body.weight"])


@pytest.mark.parametrize("step", ["natural", "default"])
@pytest.mark.parametrize("how", ["the same way", "with the same groups at once"])
@pytest.mark.parametrize("kind", ["linear", "convolution", "layer norm"])
def test_the_state_loads_into_an_optimizer_of_the_grown_model(kind: str, how: str, step: str) -> None:
    settings: dict[str, Any] = {"lr": LR, "damping": DAMPING, "seed": 0, "factors_every": 2, "basis_every": 2}
    make: Any = TEKFAC.natural if step == "natural" else TEKFAC
    model = Growing()
    optimizer = make(model, **settings)
    for seed in range(3):
        one_step(model, optimizer, seed)
    model.new = new_layer(kind)
    optimizer.add_param_group({"params": model.new.parameters(), "lr": NEW_LR})
    for seed in range(3, 6):
        one_step(model, optimizer, seed)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    other = Growing()
    if how == "the same way":
        resumed = make(other, **settings)
        other.new = new_layer(kind, seed=7)
        resumed.add_param_group({"params": other.new.parameters(), "lr": NEW_LR})
    else:
        other.new = new_layer(kind, seed=7)
        groups = [{"params": [other.body, other.head]}, {"params": other.new, "lr": NEW_LR}]
        resumed = make(other, **settings, param_groups=groups)
    assert ("new" in optimizer.curvature) == (step == "natural" or kind != "layer norm")
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert_identical(resumed, saved["optimizer"])
    for seed in range(6, 9):
        one_step(model, optimizer, seed)
        one_step(other, resumed, seed)
    assert list(resumed.curvature) == list(optimizer.curvature)
    assert_identical(everything(other, resumed), everything(model, optimizer))
