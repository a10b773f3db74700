"""The likelihood is found from the loss, said once, kept, and looked at again; one that is set always wins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import assert_close, dense_block, normal, statistics
from tekfac import TEKFAC
from tekfac.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Unknown
from training import assert_identical, both_steps, copied, everything, maker, mlp, through_a_file

N = 12
LABELS, ANSWERS, NUMBERS = torch.arange(N) % 3, (normal(N, 3, seed=3) > 0).double(), normal(N, 3, seed=4)

Loss = Callable[[Tensor], Tensor]

LOSSES: dict[str, tuple[Loss, Likelihood]] = {
    "cross entropy": (lambda z: F.cross_entropy(z, LABELS), Categorical(class_dim=1)),
    "yes or no": (lambda z: F.binary_cross_entropy_with_logits(z, ANSWERS), Bernoulli()),
    "squares": (lambda z: F.mse_loss(z, NUMBERS), Gaussian(0.5, masked=True)),
    "hinge": (lambda z: F.multi_margin_loss(z, LABELS), Unknown()),
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, count: int = 1) -> list[float]:
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        value = loss(model(normal(N, 5)))
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "likelihood" in r.getMessage()]


@both_steps
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_found_and_said_once(name: str, step: str, caplog: pytest.LogCaptureFixture) -> None:
    loss, likelihood = LOSSES[name]
    model = mlp()
    optimizer = maker(TEKFAC, step)(model, lr=1e-2)
    assert optimizer.likelihoods == {}
    with caplog.at_level(logging.INFO, "tekfac"):
        steps(model, optimizer, loss, 5)
    assert optimizer.likelihoods == {"": likelihood}
    found = said(caplog)
    assert sum(message.startswith("The loss is that of ") for message in found) == 1
    assert len(found) == (2 if name == "hinge" and step == "natural" else 1)


def test_a_model_may_be_called_several_times_for_one_loss() -> None:
    """Of two samples at a time: too few for the gradient alone to tell."""
    x = normal(N, 5)
    for name, (loss, likelihood) in LOSSES.items():
        model = mlp()
        optimizer = TEKFAC(model)
        loss(torch.cat([model(part) for part in x.split(2)])).backward()
        optimizer.step()
        assert optimizer.likelihoods == ({} if name == "hinge" else {"": likelihood})


@pytest.mark.parametrize("name", ["cross entropy", "yes or no"])
def test_what_was_found_is_measured_as_what_is_set(name: str) -> None:
    loss, likelihood = LOSSES[name]
    states = []
    for setting in ("auto", likelihood):
        model = mlp()
        optimizer = TEKFAC.natural(model, lr=1e-2, seed=0, likelihood=setting)
        steps(model, optimizer, loss, 3)
        states.append(copied(model.state_dict()))
    assert_identical(*states)


def test_a_regression_is_measured_by_drawn_labels_and_everything_else_by_its_own() -> None:
    for name, settings in (("squares", {"fisher": "sampled"}), ("cross entropy", {"fisher": "empirical"})):
        states = []
        for given in ({}, settings):
            model = mlp()
            steps(model, TEKFAC(model, lr=1e-2, seed=0, **given), LOSSES[name][0], 3)
            states.append(copied(model.state_dict()))
        assert_identical(*states)


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_without_a_likelihood_training_gradients_are_measured(
    fisher: Any, caplog: pytest.LogCaptureFixture
) -> None:
    states = []
    for wanted in (fisher, "empirical"):
        model = mlp()
        steps(model, TEKFAC.natural(model, lr=1e-2, seed=0, fisher=wanted), LOSSES["hinge"][0], 3)
        states.append(copied(model.state_dict()))
    assert_identical(*states)
    assert sum("no labels to go by" in r.getMessage() for r in caplog.records) == 1


def test_a_likelihood_that_is_set_wins_and_a_wrong_one_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    loss, _ = LOSSES["squares"]
    model = mlp()
    optimizer = TEKFAC(model, likelihood="bernoulli")
    steps(model, optimizer, loss, 4)
    assert optimizer.likelihoods == {"": Bernoulli()}
    (message,) = said(caplog)
    assert "that of a gaussian likelihood, but likelihood='bernoulli' was set" in message


def test_the_loss_is_looked_at_again(caplog: pytest.LogCaptureFixture) -> None:
    """Now and then: a run may go on with another loss."""
    model = mlp()
    optimizer = TEKFAC(model, factors_every=1, basis_every=1)
    steps(model, optimizer, LOSSES["cross entropy"][0], 3)
    steps(model, optimizer, LOSSES["squares"][0], 13)
    assert isinstance(optimizer.likelihoods[""], Gaussian)
    (message,) = said(caplog)
    assert (
        "no longer that of a categorical likelihood, with classes along axis 1, but that of a gaussian"
        in message
    )


class Twice:
    """The loss of a model that is called twice in a step: of an answer, and of how much another one differs."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, z: Tensor) -> Tensor:
        other = self.model(normal(N, 5, seed=7))
        return F.cross_entropy(z, LABELS) + (z - other).square().mean()


class Labelled(Twice):
    """The same of two calls with a likelihood each."""

    def __call__(self, z: Tensor) -> Tensor:
        return F.cross_entropy(z, LABELS) + F.mse_loss(self.model(normal(N, 5, seed=7)), NUMBERS)


@pytest.mark.parametrize("losses", [Twice, Labelled])
def test_losses_of_several_kinds_of_a_model_that_is_called_twice_are_of_none(
    losses: type[Twice], caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    optimizer = TEKFAC(model, lr=1e-2)
    with caplog.at_level(logging.INFO, "tekfac"):
        values = steps(model, optimizer, losses(model), 9)
    assert optimizer.likelihoods == {"": Unknown()}
    assert len(said(caplog)) == 1
    assert values[-1] < values[0]


def test_two_calls_with_the_same_kind_of_loss_have_its_likelihood() -> None:
    model = mlp()
    optimizer = TEKFAC(model, lr=1e-2)
    more = normal(N, 5, seed=7)
    steps(model, optimizer, lambda z: F.cross_entropy(z, LABELS) + F.cross_entropy(model(more), LABELS), 3)
    assert optimizer.likelihoods == {"": Categorical(class_dim=1)}


def test_a_batch_that_says_nothing_leaves_it_open() -> None:
    model = mlp()
    optimizer = TEKFAC(model, first_interval=1)
    steps(model, optimizer, lambda z: 0.0 * F.cross_entropy(z, LABELS))
    assert optimizer.likelihoods == {}
    steps(model, optimizer, LOSSES["cross entropy"][0])
    assert optimizer.likelihoods == {"": Categorical(class_dim=1)}


@pytest.mark.parametrize("name", LOSSES)
def test_it_is_part_of_the_state(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss, likelihood = LOSSES[name]
    model, twin = mlp(), mlp()
    optimizer = TEKFAC(model, lr=1e-2, seed=0)
    steps(model, optimizer, loss, 2)
    twin.load_state_dict(model.state_dict())
    other = TEKFAC(twin, lr=1e-2, seed=1)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.likelihoods == {"": likelihood}
    with caplog.at_level(logging.INFO, "tekfac"):
        steps(model, optimizer, loss, 3)
        steps(twin, other, loss, 3)
    assert said(caplog) == []
    assert_identical(everything(model, optimizer), everything(twin, other))


def test_a_state_from_before_there_was_any_is_read() -> None:
    model = mlp()
    optimizer = TEKFAC(model)
    steps(model, optimizer, LOSSES["squares"][0])
    state = copied(optimizer.state_dict())
    del state["param_groups"][0]["tekfac"]["likelihoods"]
    optimizer.load_state_dict(state)
    assert optimizer.likelihoods == {}


# -- losses that are not of predictions alone --------------------------------------------------------------


class LossOnly(nn.Module):
    """Returns its loss and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), LABELS)


def test_a_model_that_returns_its_loss_is_measured_by_the_samples_of_its_layers() -> None:
    whole, parts = LossOnly(), LossOnly()
    optimizer = TEKFAC.natural(whole, lr=1e-30, momentum=0.0, fisher="empirical")
    steps(whole, optimizer, lambda loss: loss)
    plain = TEKFAC.natural(parts.net, lr=1e-30, momentum=0.0, fisher="empirical")
    steps(parts.net, plain, LOSSES["cross entropy"][0])
    for layer in ("0", "2"):
        assert_close(dense_block(statistics(optimizer)[f"net.{layer}"]), dense_block(statistics(plain)[layer]))
    assert optimizer.likelihoods == {"": Unknown()}


def test_layers_whose_samples_cannot_be_told_apart_are_left_out_unless_a_fisher_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.tanh(self.body(x.flip(0).reshape(4, 3, 5)[:, :2].reshape(8, 5)))
            out: Tensor = self.head(rows.mean(0) + torch.zeros(N, 1, dtype=rows.dtype))
            return out

    torch.manual_seed(0)
    model = Mixed().double()
    optimizer = TEKFAC(model, lr=1e-2)
    losses = steps(model, optimizer, distance, 20)
    assert losses[-1] < losses[0]
    assert set(optimizer.curvature) == {"head"}
    assert "'body'" in caplog.text
    asked = TEKFAC(model, fisher="empirical")
    with pytest.raises(ValueError, match="'body' cannot be told apart"):
        steps(model, asked, distance)


def distance(outputs: Tensor) -> Tensor:
    return (outputs - 1).abs().mean()
