"""Oracle 31 and the order: precondition, KL clip, momentum, weight decay, learning rate, each as defined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, dense_block
from tekfac import EKFAC, TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, cnn, copied, everything, images, mlp, train, vectors

DAMPING = 0.1


def natural_gradients(model: nn.Module, optimizer: NaturalGradient) -> dict[str, Tensor]:
    """(F_hat + damping I)^-1 applied to .grad, by dense solves."""
    found = {}
    for name, block in optimizer.curvature.items():
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        gradient = torch.cat([module.weight.grad, module.bias.grad[:, None]], 1)  # type: ignore[list-item,index]
        solved = oracle.damped_solve(dense_block(block), DAMPING, gradient)
        found |= {f"{name}.weight": solved[:, :-1], f"{name}.bias": solved[:, -1]}
    return found


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kl_clip", [None, 1e-6, 1e3])
@pytest.mark.parametrize("method", METHODS)
def test_steps_follow_the_order_of_the_reference(method: type[NaturalGradient], kl_clip: float | None) -> None:
    """P g; clip it for the highest rate so far; v = momentum v + P g; w = (1 - lr decay) w - lr v."""
    momentum, decay = 0.8, 0.3
    model = mlp()
    optimizer = method.natural(
        model,
        lr=1.0,
        momentum=momentum,
        weight_decay=decay,
        damping=DAMPING,
        kl_clip=kl_clip,
        factors_every=2,
    )
    velocity = {name: torch.zeros_like(p) for name, p in parameters(model).items()}
    highest = 0.0
    for lr, batch in zip((0.1, 0.1, 0.02, 0.3), vectors(4), strict=True):
        before = parameters(model)
        optimizer.param_groups[0]["lr"] = lr
        train(model, optimizer, [batch])
        directions, raw = natural_gradients(model, optimizer), gradients(model)
        size = sum(float((raw[name] * d).sum()) for name, d in directions.items())
        highest = max(highest, lr)
        coefficient = 1.0 if kl_clip is None else min(1.0, (kl_clip / (highest**2 * size)) ** 0.5)
        assert kl_clip != 1e-6 or coefficient < 1
        for name, after in parameters(model).items():
            velocity[name] = momentum * velocity[name] + coefficient * directions[name]
            assert_close(after, (1 - lr * decay) * before[name] - lr * velocity[name], rtol=1e-9)


# -- the KL clip ---------------------------------------------------------------------------------------


def clipped_step(
    kl_clip: float | None, lr: float = 0.5, **settings: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with its gradients, and what one step without momentum added to the parameters."""
    model = mlp()
    optimizer = TEKFAC.natural(
        model, lr=lr, momentum=0.0, damping=DAMPING, kl_clip=kl_clip, fisher="exact", **settings
    )
    before = parameters(model)
    train(model, optimizer, vectors(1))
    return model, {name: after - before[name] for name, after in parameters(model).items()}


@pytest.mark.parametrize("stretch", [1.0, 3.0])
@pytest.mark.parametrize("kl_clip", [1e-1, 1e-3, 1e-6])
def test_an_active_clip_is_met_with_equality(kl_clip: float, stretch: float) -> None:
    """lr^2 coef^2 sum g.Pg = c, also for a step that is stretched, and the direction stays the same."""
    model, free = clipped_step(None, step_scale=stretch)
    _, bound = clipped_step(kl_clip, step_scale=stretch)
    raw = gradients(model)
    steps = {name: 0.5 * stretch * step for name, step in free.items()}
    unclipped = sum(-(raw[name] * step).sum() for name, step in steps.items())  # lr^2 sum g.Pg
    assert unclipped > kl_clip
    ratios = torch.cat([(bound[name] / free[name]).flatten() for name in free])
    assert_close(ratios, torch.full_like(ratios, float(ratios.mean())), rtol=1e-6)
    assert_close(ratios.mean() ** 2 * unclipped, torch.tensor(kl_clip).double(), rtol=1e-6)


def test_a_clip_that_is_not_reached_changes_not_one_bit() -> None:
    assert_identical(clipped_step(1e6)[1], clipped_step(None)[1])


def test_the_clip_knows_the_rate_of_each_group() -> None:
    groups = [{"params": ["0"], "lr": 0.25}]
    kl_clip = 1e-3
    model, free = clipped_step(None, param_groups=groups)
    _, bound = clipped_step(kl_clip, param_groups=groups)
    rates = {name: 0.25 if name.startswith("0") else 0.5 for name in free}
    raw = gradients(model)
    unclipped = sum(-rates[name] * (raw[name] * step).sum() for name, step in free.items())
    coefficient = (bound["2.weight"] / free["2.weight"]).mean()
    assert_close(coefficient**2 * unclipped, torch.tensor(kl_clip).double(), rtol=1e-6)
    assert_close((bound["0.weight"] / free["0.weight"]).mean(), coefficient, rtol=1e-6)


@pytest.mark.parametrize("first_order", [[], [nn.BatchNorm2d]], ids=["no norm", "all norms"])
def test_the_clip_leaves_first_order_parameters_alone(first_order: Any) -> None:
    """And a norm that is preconditioned is clipped as other layers are."""
    steps = []
    for kl_clip in (None, 1e-9):
        model = cnn()
        optimizer = EKFAC.natural(
            model,
            lr=0.5,
            momentum=0.0,
            kl_clip=kl_clip,
            damping=DAMPING,
            seed=0,
            first_order=first_order,
        )
        before = parameters(model)
        train(model, optimizer, images(1))
        steps.append({name: after - before[name] for name, after in parameters(model).items()})
    free, bound = steps
    clipped = {"0.weight", "0.bias", "4.weight", "4.bias"}
    norms = {"1.weight", "1.bias"}
    assert set(free) == clipped | norms
    for name in norms if first_order else ():
        assert torch.equal(free[name], bound[name])
        assert float(free[name].norm()) > 0
    coefficient = bound["4.weight"].norm() / free["4.weight"].norm()
    assert float(coefficient) < 1e-2
    for name in clipped if first_order else clipped | norms:
        assert_close(bound[name], coefficient * free[name], rtol=1e-6)


# -- momentum ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_change_of_the_rate_does_not_rescale_what_momentum_has_gathered(
    method: type[NaturalGradient],
) -> None:
    results = []
    for second_rate in (0.1, 0.01):
        model = mlp()
        optimizer = method.natural(model, lr=0.1, damping=DAMPING, seed=0)
        first, second = vectors(2)
        train(model, optimizer, [first])
        optimizer.param_groups[0]["lr"] = second_rate
        before = parameters(model)
        train(model, optimizer, [second])
        buffers = {n: optimizer.state[p]["momentum_buffer"].clone() for n, p in model.named_parameters()}
        results.append((buffers, {n: p - before[n] for n, p in parameters(model).items()}))
    (buffers, steps), (other_buffers, other_steps) = results
    assert_identical(buffers, other_buffers)
    for name, step in steps.items():
        assert_close(other_steps[name], 0.1 * step, rtol=1e-9)


def test_without_momentum_no_buffer_is_kept() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.1, momentum=0.0)
    train(model, optimizer, vectors(2))
    assert not any("momentum_buffer" in own for own in optimizer.state_dict()["state"].values())


# -- weight decay --------------------------------------------------------------------------------------


def test_weight_decay_is_decoupled() -> None:
    """It is neither preconditioned nor gathered by momentum: a zero gradient only shrinks the weights."""
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.1, weight_decay=0.5, momentum=0.9)
    for factor in (0.95, 0.95**2):
        start = parameters(mlp())
        optimizer.zero_grad()
        backward(model, vectors(1)[0])
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for name, value in parameters(model).items():
            assert_close(value, factor * start[name], rtol=1e-14)
    for state in optimizer.state.values():
        assert not state["momentum_buffer"].any()


def test_a_parameter_without_a_gradient_is_not_decayed() -> None:
    """As in torch.optim.SGD."""
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.1, weight_decay=0.5)
    train(model, optimizer, vectors(1))
    optimizer.zero_grad()
    backward(model, vectors(1)[0])
    model[0].weight.grad = None
    before = parameters(model)
    optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])


def test_gradients_are_left_as_the_user_sees_them() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.1, weight_decay=0.5, kl_clip=1e-3)
    backward(model, vectors(1)[0])
    before = gradients(model)
    optimizer.step()
    assert_identical(gradients(model), before)


def test_zeroed_gradients_train_as_those_set_to_none() -> None:
    states = []
    for set_to_none in (False, True):
        model = mlp()
        optimizer = TEKFAC.natural(model, lr=0.1, seed=0)
        for batch in vectors(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model, batch)
            optimizer.step()
        states.append(copied(everything(model, optimizer)))
    assert_identical(*states)
