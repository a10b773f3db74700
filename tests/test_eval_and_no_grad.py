"""What is evaluated under eval(), no_grad or inference_mode records nothing and changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import assert_close, dense_block
from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, everything, mlp, train, vectors

INTERVALS = {"factors_every": 1, "basis_every": 2, "rescaling_every": 1}
OTHER = vectors(1, seed=77)[0]


def evaluated(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(OTHER[0])
    model.train()


def under(context: Callable[[], Any]) -> Callable[[nn.Module], None]:
    def run(model: nn.Module) -> None:
        with context():
            model(OTHER[0])

    return run


def differentiated_in_eval_mode(model: nn.Module) -> None:
    """Saliency: a backward pass to the input, with the model in eval mode."""
    model.eval()
    x = OTHER[0].clone().requires_grad_()
    torch.autograd.grad(F.cross_entropy(model(x), OTHER[1]), x)
    model.train()


def never_differentiated(model: nn.Module) -> None:
    model(OTHER[0])


def in_parts(model: nn.Module) -> None:
    assert isinstance(model, nn.Sequential)
    torch.autograd.grad(model[2](model[1](model[0](OTHER[0]))).sum(), model[0].weight)


SILENT: dict[str, Callable[[nn.Module], None]] = {
    "eval": evaluated,
    "no_grad": under(torch.no_grad),
    "inference_mode": under(torch.inference_mode),
    "eval with gradients": differentiated_in_eval_mode,
    "no backward": never_differentiated,
    "parts called alone": in_parts,
}


@pytest.mark.parametrize("when", ["before the step", "between forward and backward", "between steps"])
@pytest.mark.parametrize("what", SILENT)
def test_such_passes_leave_the_training_as_it_was(what: str, when: str) -> None:
    def run(disturb: Callable[[nn.Module], None]) -> Any:
        model = mlp()
        optimizer = TEKFAC.natural(model, lr=0.05, seed=0, **INTERVALS)
        for x, y in vectors(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if when == "between forward and backward":
                disturb(model)
            loss.backward()
            if when == "before the step":
                disturb(model)
            optimizer.step()
            if when == "between steps":
                disturb(model)
        return everything(model, optimizer)

    assert_identical(run(SILENT[what]), run(lambda model: None))


def after_a_training_pass(fisher: Any, forget: Callable[[nn.Module, NaturalGradient], None] | None) -> Any:
    """The training after a step, before which there was another training pass, unless forget is None."""
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.05, seed=0, fisher=fisher, **INTERVALS)
    if forget is not None:
        backward(model, OTHER)
        forget(model, optimizer)
    backward(model, vectors(1)[0])
    optimizer.step()
    train(model, optimizer, vectors(2, seed=3))
    return everything(model, optimizer)


FISHERS = ("sampled", "empirical", "exact")


@pytest.mark.parametrize("fisher", FISHERS)
def test_a_training_pass_would_not_be_silent(fisher: Any) -> None:
    """The twin of the test above that shows it can fail: the curvature is that of both passes."""
    both = after_a_training_pass(fisher, lambda model, optimizer: None)
    with pytest.raises(AssertionError, match=r"state\.0\.curvature"):
        assert_identical(both, after_a_training_pass(fisher, None))


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("who", ["model", "optimizer"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
def test_a_training_pass_whose_gradients_are_zeroed_leaves_the_training_as_it_was(
    fisher: Any, who: str, set_to_none: bool
) -> None:
    """As if the pass had never been: its statistics go with its gradients, and its drawn labels, too."""

    def forget(model: nn.Module, optimizer: NaturalGradient) -> None:
        (model if who == "model" else optimizer).zero_grad(set_to_none=set_to_none)

    assert_identical(after_a_training_pass(fisher, forget), after_a_training_pass(fisher, None))


class Mixed(nn.Module):
    """A layer, a batch norm with running statistics that are not those of a batch, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.norm(self.body(x))))
        return out


def autograd_fisher(model: Mixed, batch: tuple[Tensor, Tensor], parts: list[nn.Parameter]) -> Tensor:
    """The empirical Fisher over parameters, sample by sample, as long as no sample sees another."""
    rows = []
    for x, y in zip(*batch, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(x[None]), y[None]), parts)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return oracle.mean_outer(torch.stack(rows))


def test_a_part_in_eval_mode_is_recorded_inside_a_training_pass_as_it_works_there() -> None:
    """A batch norm with frozen statistics, as in fine-tuning, is trained: its block is the one of eval mode."""
    model, (batch,) = Mixed(), vectors(1, samples=8)
    model.norm.eval()
    weight, bias = model.norm.weight, model.norm.bias
    expected = autograd_fisher(model, batch, [weight, bias])
    units = torch.stack([expected[[c, c + 4]][:, [c, c + 4]] for c in range(4)])
    optimizer = TEKFAC.natural(model, lr=1e-30, momentum=0.0, fisher="empirical")
    train(model, optimizer, [batch])
    assert set(optimizer.curvature) == {"body", "norm", "head"}
    found = optimizer.curvature["norm"]
    assert found.shape.parameters == {"norm.weight": (4,), "norm.bias": (4,)}
    assert_close(torch.stack([dense_block(found, group=c) for c in range(4)]), units)


def test_a_linear_part_in_eval_mode_is_recorded_as_in_training_mode() -> None:
    def run(part_in_eval_mode: bool) -> Any:
        model = mlp()
        optimizer = TEKFAC.natural(model, lr=0.05, seed=0, **INTERVALS)
        model[0].train(not part_in_eval_mode)
        train(model, optimizer, vectors(3))
        assert set(optimizer.curvature) == {"0", "2"}
        return everything(model, optimizer)

    assert_identical(run(True), run(False))


def test_a_model_in_eval_mode_is_not_recorded_even_if_a_part_is_in_training_mode() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.05)
    model.eval()
    model[0].train()
    train(model, optimizer, vectors(1))
    assert not optimizer.curvature


def test_a_part_under_no_grad_is_not_recorded_inside_a_training_pass() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                hidden = self.body(x)
            out: Tensor = self.head(hidden)
            return out

    model = Frozen()
    optimizer = TEKFAC.natural(model, lr=0.05)
    before = model.body.weight.detach().clone()
    train(model, optimizer, vectors(2))
    assert set(optimizer.curvature) == {"head"}
    assert torch.equal(model.body.weight, before)


def never_seen(call: Callable[[nn.Sequential, Tensor], Tensor]) -> tuple[nn.Module, NaturalGradient]:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.05, momentum=0.0)
    for x, y in vectors(3):
        optimizer.zero_grad()
        F.cross_entropy(call(model, x), y).backward()
        optimizer.step()
    return model, optimizer


def test_a_model_that_is_only_called_in_parts_is_trained_by_sgd_and_each_layer_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "tekfac"):
        model, optimizer = never_seen(lambda m, x: m[2](m[1](m[0](x))))
    assert not optimizer.curvature
    for layer in ("'0'", "'2'"):
        assert sum(layer in record.getMessage() for record in caplog.records) == 1
    reference = mlp()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.05), vectors(3))
    assert_identical(model, reference)


def test_a_model_left_in_eval_mode_is_reported_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tekfac"):
        _, optimizer = never_seen(lambda m, x: m.eval()(x))
    assert not optimizer.curvature
    assert "training mode" in caplog.text


def test_what_was_not_seen_at_first_is_preconditioned_as_soon_as_it_is() -> None:
    """No step without a preconditioner: a first step in eval mode does not cost a whole interval."""
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.05)
    model.eval()
    train(model, optimizer, vectors(1))
    model.train()
    train(model, optimizer, vectors(1))
    assert set(optimizer.curvature) == {"0", "2"}


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad])
def test_step_itself_records_no_graph(context: Callable[[], Any]) -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.05)
    backward(model, vectors(1)[0])
    with context():
        optimizer.step()
    for parameter in model.parameters():
        assert parameter.is_leaf
        assert not optimizer.state[parameter]["momentum_buffer"].requires_grad
    for layer in optimizer.curvature.values():
        assert not layer.rescaling.requires_grad
        assert not layer.basis.vectors_in.requires_grad
