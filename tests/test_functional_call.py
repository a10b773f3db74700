"""Promise: `functional_call` with the model's own tensors is `model(x)`; with others it is not measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from dense import every_method
from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, cnn, everything, images, mlp, vectors

Forward = Callable[[nn.Module, Tensor], Tensor]


def plainly(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


def with_its_own_parameters(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = functional_call(model, dict(model.named_parameters()), (x,))
    return out


def with_its_own_parameters_and_buffers(model: nn.Module, x: Tensor) -> Tensor:
    tensors = (dict(model.named_parameters()), dict(model.named_buffers()))
    out: Tensor = functional_call(model, tensors, args=(x,))
    return out


def with_some_of_its_own(model: nn.Module, x: Tensor) -> Tensor:
    name, parameter = next(model.named_parameters())
    out: Tensor = functional_call(model, {name: parameter}, (x,))
    return out


OWN: dict[str, Forward] = {
    "parameters": with_its_own_parameters,
    "parameters and buffers": with_its_own_parameters_and_buffers,
    "some of them": with_some_of_its_own,
}


def copies(model: nn.Module, requires_grad: bool) -> dict[str, Tensor]:
    """Foreign tensors: the same numbers, but not the model's."""
    return {name: p.detach().clone().requires_grad_(requires_grad) for name, p in model.named_parameters()}


def trained(
    method: type[NaturalGradient],
    forward: Forward,
    fisher: Any = "sampled",
    build: Any = mlp,
    data: Any = vectors,
) -> Any:
    """Parameters and state after four steps, two of which measure."""
    model = build()
    optimizer = method(
        model, lr=0.05, damping=0.1, seed=0, fisher=fisher, interval_growth=None, factors_every=2, basis_every=2
    )
    for x, y in data(4):
        optimizer.zero_grad()
        F.cross_entropy(forward(model, x), y).backward()
        optimizer.step()
    assert len(optimizer.curvature) >= 2
    return {**everything(model, optimizer), "curvature": optimizer.curvature.to_dense()}


@pytest.mark.parametrize("how", OWN)
@every_method
def test_the_models_own_tensors_give_the_same_run(method: type[NaturalGradient], how: str) -> None:
    assert_identical(trained(method, OWN[how]), trained(method, plainly))


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_every_fisher_is_measured_alike(fisher: Any) -> None:
    assert_identical(trained(TEKFAC, with_its_own_parameters, fisher), trained(TEKFAC, plainly, fisher))


def test_convolutions_and_buffers_are_no_exception() -> None:
    states = [
        trained(TEKFAC, forward, build=cnn, data=images)
        for forward in (with_its_own_parameters_and_buffers, plainly)
    ]
    assert_identical(*states)


def foreign_with_gradients(model: nn.Module, x: Tensor, y: Tensor) -> None:
    tensors = copies(model, requires_grad=True)
    F.cross_entropy(functional_call(model, tensors, (x,)), y).backward()
    assert all(tensor.grad is not None for tensor in tensors.values())


def foreign_without_gradients(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Only the input has a gradient."""
    x = x.clone().requires_grad_()
    F.cross_entropy(functional_call(model, copies(model, requires_grad=False), (x,)), y).backward()
    assert x.grad is not None


def foreign_without_a_backward_pass(model: nn.Module, x: Tensor, y: Tensor) -> None:
    functional_call(model, copies(model, requires_grad=True), (x,))


def foreign_and_differentiable(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """As in meta-learning: tensors one step away from the model's, with a graph of their own."""
    start = copies(model, requires_grad=True)
    inner = F.cross_entropy(functional_call(model, start, (x,)), y)
    gradients = torch.autograd.grad(inner, list(start.values()), create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(start.items(), gradients, strict=True)}
    F.cross_entropy(functional_call(model, moved, (x,)), y).backward()


FOREIGN: dict[str, Callable[[nn.Module, Tensor, Tensor], None]] = {
    "with gradients": foreign_with_gradients,
    "without gradients": foreign_without_gradients,
    "without a backward pass": foreign_without_a_backward_pass,
    "one differentiable step away": foreign_and_differentiable,
}


@pytest.mark.every_pair
@pytest.mark.parametrize("fisher", ["sampled", "empirical", "exact"])
@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("when", ["before the backward pass", "after the backward pass"])
def test_foreign_tensors_leave_no_trace(when: str, foreign: str, fisher: Any) -> None:
    """The run, drawn labels included, is that without them: the plain passes are measured as usual."""
    states = []
    for looks in (False, True):
        model = mlp()
        optimizer = TEKFAC(
            model, lr=0.05, damping=0.1, seed=0, fisher=fisher, interval_growth=None, factors_every=2
        )
        other = vectors(1, seed=9)[0]
        for x, y in vectors(4):
            optimizer.zero_grad()
            if looks and when == "before the backward pass":
                FOREIGN[foreign](model, *other)
            F.cross_entropy(model(x), y).backward()
            if looks and when == "after the backward pass":
                FOREIGN[foreign](model, *other)
            optimizer.step()
        states.append(everything(model, optimizer))
    assert_identical(*states)


def test_a_step_after_foreign_tensors_alone_has_nothing_to_measure() -> None:
    model = mlp()
    optimizer = TEKFAC(model, lr=0.05, fisher="exact")
    before = everything(model, optimizer)["model"]
    foreign_with_gradients(model, *vectors(1)[0])
    optimizer.step()
    assert not optimizer.curvature
    assert_identical(everything(model, optimizer)["model"], before)
    F.cross_entropy(model(vectors(1)[0][0]), vectors(1)[0][1]).backward()
    optimizer.step()
    assert set(optimizer.curvature) == {"0", "2"}


def loss_of(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]:
    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    return loss


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "grad": lambda model, x, y: grad(loss_of(model))(copies(model, False), x[0], y[0]),
    "vmap of grad": lambda model, x, y: vmap(grad(loss_of(model)), (None, 0, 0))(copies(model, False), x, y),
    "vmap": lambda model, x, y: vmap(loss_of(model), (None, 0, 0))(copies(model, False), x, y),
    "grad of its own tensors": lambda model, x, y: grad(loss_of(model))(
        dict(model.named_parameters()), x[0], y[0]
    ),
    "jacrev": lambda model, x, y: jacrev(loss_of(model))(copies(model, False), x[0], y[0]),
    "jacrev of jacrev": lambda model, x, y: jacrev(jacrev(loss_of(model), argnums=1), argnums=1)(
        copies(model, False), x[0], y[0]
    ),
    "an ensemble": lambda model, x, y: vmap(
        lambda tensors: functional_call(model, tensors, (x,)), randomness="different"
    )({name: torch.stack([p, 2 * p]) for name, p in copies(model, False).items()}),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_over_functional_call_work_and_leave_no_trace(transform: str) -> None:
    x, y = vectors(1, seed=9)[0]
    expected = TRANSFORMS[transform](mlp(), x, y)
    states = []
    for looks in (False, True):
        model = mlp()
        optimizer = TEKFAC(model, lr=0.05, damping=0.1, seed=0, interval_growth=None, factors_every=2)
        if looks:
            assert_identical(TRANSFORMS[transform](model, x, y), expected)
        for batch in vectors(3):
            optimizer.zero_grad()
            logits = model(batch[0])
            if looks:  # while a graph waits for its backward pass
                TRANSFORMS[transform](model, x, y)
            F.cross_entropy(logits, batch[1]).backward()
            if looks:
                TRANSFORMS[transform](model, x, y)
            optimizer.step()
        states.append(everything(model, optimizer))
    assert_identical(*states)
