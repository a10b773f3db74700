"""damping=LevenbergMarquardt(): step(closure) moves as an exact quadratic model says, and only down."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS, assert_close, normal
from tekfac import TEKFAC
from tekfac.damping import RAISED, LevenbergMarquardt
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.optim.quadratic_model import QuadraticModel
from training import assert_identical, cnn, copied, everything, images, mlp, saved_whole, through_a_file

N = 9
LABELS, NUMBERS = torch.arange(N) % 3, normal(N, 3, seed=4)

Loss = Callable[[Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "classes": lambda z: F.cross_entropy(z, LABELS, weight=torch.tensor([1.0, 3.0, 0.5]).double()),
    "numbers": lambda z: 3 * F.mse_loss(z, NUMBERS),
}


def closure_of(
    model: nn.Module, optimizer: NaturalGradient, loss: Loss, inputs: Tensor | None = None
) -> Callable[[], Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(normal(N, 5) if inputs is None else inputs))
        value.backward()
        return value

    return closure


def made(model: nn.Module, method: type[NaturalGradient] = TEKFAC, **settings: Any) -> NaturalGradient:
    rule = settings.pop("damping", LevenbergMarquardt(0.1))
    return method.natural(model, damping=rule, seed=0, **settings)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def dense_model(model: nn.Module, loss: Loss, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and Gauss-Newton matrix of the loss, from the definitions."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [parameter.shape for parameter in model.parameters()]
    sizes = [parameter.numel() for parameter in model.parameters()]

    def predictions(w: Tensor) -> Tensor:
        parts = {n: part.view(shape) for n, part, shape in zip(names, w.split(sizes), shapes, strict=True)}
        return torch.func.functional_call(model, parts, (inputs,)).flatten()

    w, shape = vector(model), model(inputs).shape
    jacobian = torch.autograd.functional.jacobian(predictions, w)
    z = predictions(w).detach()
    slope = torch.autograd.functional.jacobian(lambda own: loss(own.view(shape)), z)
    hessian = torch.autograd.functional.hessian(lambda own: loss(own.view(shape)), z)
    return jacobian.T @ slope, jacobian.T @ hessian @ jacobian


# -- the model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_the_quadratic_model_is_that_of_the_gauss_newton_matrix(name: str) -> None:
    model, loss, inputs = mlp(), LOSSES[name], normal(N, 5)
    gradient, matrix = dense_model(model, loss, inputs)
    outputs = model(inputs)
    value = loss(outputs)
    value.backward(retain_graph=True)
    moves = [{p: normal(*p.shape, seed=10 * k + i) for i, p in enumerate(model.parameters())} for k in range(3)]
    del moves[1][next(model.parameters())]  # a move need not be one of all parameters
    dense = torch.stack(
        [torch.cat([own.get(p, torch.zeros_like(p)).flatten() for p in model.parameters()]) for own in moves]
    )
    gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
    found = QuadraticModel.along(moves, value, [outputs], gradients)
    assert_close(found.slopes, dense @ gradient)
    assert_close(found.curvatures, dense @ matrix @ dense.T)
    assert_close(found.lengths, dense @ dense.T)
    damped = dense @ (matrix + 0.3 * torch.eye(len(matrix)).double()) @ dense.T
    assert_close(found.best(0.3), -torch.linalg.solve(damped, dense @ gradient), 1e-8)
    shares = torch.tensor([0.2, -1.0, 0.7]).double()
    assert_close(found.change(shares, 0.3), shares @ (dense @ gradient) + 0.5 * shares @ damped @ shares)


def test_a_move_that_changes_nothing_is_left_alone() -> None:
    """Two moves of which one repeats the other have no unique share each, and no move has none."""
    model = mlp()
    outputs = model(normal(N, 5))
    value = LOSSES["numbers"](outputs)
    value.backward(retain_graph=True)
    gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
    nothing = {p: torch.zeros_like(p) for p in gradients}
    twice = QuadraticModel.along([gradients, gradients, nothing], value, [outputs], gradients)
    once = QuadraticModel.along([gradients], value, [outputs], gradients)
    shares = twice.best(1e-9)
    assert shares[2] == 0
    assert_close(shares.sum(), once.best(1e-9)[0], 1e-6)


# -- a step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_one_undamped_step_lands_on_the_solution_of_least_squares(method: type[NaturalGradient]) -> None:
    model = nn.Linear(5, 3).double()
    inputs = normal(N, 5)
    nothing = 1e-26  # its root, too, which KFAC and TKFAC add to each factor
    optimizer = made(model, method, damping=LevenbergMarquardt(nothing, least=nothing), fisher="exact")
    optimizer.step(closure_of(model, optimizer, lambda z: 3 * F.mse_loss(z, NUMBERS)))
    rows = torch.cat([inputs, torch.ones(N, 1).double()], 1)
    solution = torch.linalg.lstsq(rows, NUMBERS).solution.T
    assert_close(torch.cat([model.weight, model.bias[:, None]], 1).detach(), solution)
    assert optimizer.reduction_ratio == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("method", METHODS)
def test_steps_are_the_best_along_the_direction_and_the_last_step(
    method: type[NaturalGradient], name: str
) -> None:
    """By the dense Gauss-Newton matrix; and rho and lambda follow from the losses before and after."""
    model, loss, inputs = mlp(), LOSSES[name], normal(N, 5)
    optimizer = made(model, method)
    moves: list[Tensor] = []
    for _ in range(3):
        before, gradient_and_matrix = vector(model), dense_model(model, loss, inputs)
        gradient, matrix = gradient_and_matrix
        damping = optimizer.param_groups[0]["damping"].damping
        height = loss(model(inputs)).item()
        optimizer.step(closure_of(model, optimizer, loss))
        # The direction, by the damping that the step was taken with: the optimizer's own blocks.
        direction = preconditioned(optimizer, model, damping)
        along = torch.stack([direction, *moves[-1:]])
        damped = along @ (matrix + damping * torch.eye(len(matrix)).double()) @ along.T
        shares = -torch.linalg.solve(damped, along @ gradient)
        move = vector(model) - before
        assert_close(move, shares @ along, 1e-7)
        foretold = float(gradient @ move + 0.5 * move @ matrix @ move + 0.5 * damping * move @ move)
        ratio = (loss(model(inputs)).item() - height) / foretold
        assert optimizer.reduction_ratio == pytest.approx(ratio, rel=1e-6)
        omega = 0.8 if ratio > 0.75 else 1 / 0.8 if ratio < 0.25 else 1.0
        assert optimizer.param_groups[0]["damping"].damping == pytest.approx(damping * omega)
        moves.append(move)


@pytest.mark.parametrize("step", ["model", "lr"])
def test_a_step_that_raises_the_loss_is_not_taken(step: Any) -> None:
    """Where the loss is not what it was, the model foretells nothing; more damping is tried, and kept."""
    model, calls = mlp(), []

    def loss(z: Tensor) -> Tensor:
        calls.append(z)
        return F.mse_loss(z, NUMBERS) + (0 if torch.is_grad_enabled() else 100)

    optimizer = made(model, damping=LevenbergMarquardt(0.1, tries=3, step=step), lr=0.1)
    before = vector(model)
    optimizer.step(closure_of(model, optimizer, loss))
    assert torch.equal(vector(model), before)
    assert optimizer.num_steps == 1
    assert optimizer.rejected_steps == 3
    assert len(calls) == 4
    assert math.isnan(optimizer.reduction_ratio)
    assert optimizer.param_groups[0]["damping"].damping == pytest.approx(0.1 * RAISED**3)


def test_a_step_of_a_rate_of_ones_own_is_shortened_by_damping_until_the_loss_falls() -> None:
    model = mlp()
    optimizer = made(model, damping=LevenbergMarquardt(1e-3, step="lr", tries=20), lr=1e4, momentum=0.5)
    losses = [optimizer.step(closure_of(model, optimizer, LOSSES["numbers"])).item() for _ in range(10)]
    assert optimizer.rejected_steps
    assert all(after <= before for before, after in itertools.pairwise(losses))
    assert losses[-1] < losses[0]


def test_steps_of_ones_own_rate_and_momentum_are_those_of_the_natural_gradient() -> None:
    """With a lambda that stays, of which nobody asks whether it should."""
    ends = []
    for damping in (0.1, LevenbergMarquardt(0.1, step="lr", every=10**6)):
        model = mlp()
        optimizer = made(model, damping=damping, lr=1e-2, momentum=0.7, factors_every=2, basis_every=2)
        optimizer.step(closure_of(model, optimizer, LOSSES["numbers"]))  # which is looked at
        if isinstance(damping, LevenbergMarquardt):
            optimizer._damp_all_by(damping)
        for _ in range(4):
            optimizer.step(closure_of(model, optimizer, LOSSES["numbers"]))
        ends.append(vector(model))
    assert_close(*ends)


def test_the_loss_is_looked_at_as_often_as_asked_for() -> None:
    model = mlp()
    optimizer = made(model, damping=LevenbergMarquardt(0.1, every=3))
    looked = []

    def loss(z: Tensor) -> Tensor:
        looked.append(not torch.is_grad_enabled())
        return LOSSES["numbers"](z)

    for _ in range(6):
        optimizer.step(closure_of(model, optimizer, loss))
    assert looked == [False, True, False, False, False, True, False, False]
    assert LevenbergMarquardt(1.0, omega=0.5, every=3).after(1.0).damping == 1 / 8
    assert LevenbergMarquardt(1.0, omega=0.5, every=3).after(0.1).damping == 8
    assert LevenbergMarquardt(1.0, omega=0.5, every=3).after(0.5).damping == 1


def test_the_first_damping_is_the_mean_of_the_curvature() -> None:
    model = mlp()
    optimizer = made(model, damping=LevenbergMarquardt(every=10**6, omega=0.999))
    optimizer._num_steps = 1  # at which nobody looks, so that it stays
    optimizer.step(closure_of(model, optimizer, LOSSES["classes"]))
    mean = sum(float(block.trace()) for block in optimizer.curvature.values()) / len(vector(model))
    assert optimizer.param_groups[0]["damping"].damping == pytest.approx(mean)


# -- what the second look leaves behind --------------------------------------------------------------------


class WithRandomNumbers(nn.Module):
    """Dropout, and a norm that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(cnn(), nn.Linear(3, 8).double(), nn.Dropout(0.5), nn.Linear(8, 3).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def test_it_leaves_nothing_behind() -> None:
    """A norm's statistics, gradients and random numbers are those of a closure that was called once."""
    (x, y), state, seen = images(1)[0], [], []
    for look in (1, 10**6):
        model = WithRandomNumbers()
        optimizer = made(model, damping=LevenbergMarquardt(0.1, every=look))
        optimizer._num_steps = 1  # so that only the first of both looks
        torch.manual_seed(1)

        def closure(model: nn.Module = model, optimizer: NaturalGradient = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            seen.append(loss.item())
            loss.backward()
            return loss

        optimizer.step(closure)
        gradients = [p.grad for p in model.parameters()]
        state.append([torch.rand(3), *model.state_dict().values(), *gradients])
    assert len(seen) == 3
    assert seen[0] == seen[2]
    assert_identical(*state)


def test_the_second_look_draws_the_same_random_numbers() -> None:
    """With a step of nothing the loss is the same, dropout or not."""
    model, seen = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3).double()), []
    optimizer = made(model, damping=LevenbergMarquardt(1e300, step="lr"), lr=1e-30)

    def loss(z: Tensor) -> Tensor:
        seen.append(F.cross_entropy(z, LABELS).item())
        return F.cross_entropy(z, LABELS)

    optimizer.step(closure_of(model, optimizer, loss))
    assert seen[0] == seen[1]


def test_a_run_that_is_resumed_is_the_same() -> None:
    ends = []
    for stop in (None, 3):
        model = mlp()
        optimizer = made(model, damping=LevenbergMarquardt())
        for step in range(6):
            if step == stop:
                state, weights = through_a_file(optimizer.state_dict()), copied(model.state_dict())
                assert saved_whole(state)["rejected_steps"] == optimizer.rejected_steps
                model = mlp(seed=7)
                model.load_state_dict(weights)
                optimizer = made(model, damping=LevenbergMarquardt())
                optimizer.load_state_dict(state)
            optimizer.step(closure_of(model, optimizer, LOSSES["classes"]))
        ends.append(everything(model, optimizer))
    assert_identical(*ends)


@pytest.mark.parametrize("step", ["model", "lr"])
def test_a_step_is_rejected_in_a_network_with_batch_norms(step: Any) -> None:
    """Whose statistics the graph of the first look has saved, and the second look moves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    optimizer = made(model, damping=LevenbergMarquardt(1e-9, step=step), lr=30.0)
    for _ in range(3):
        optimizer.step(closure_of(model, optimizer, LOSSES["classes"]))
    assert optimizer.rejected_steps
    assert optimizer.skipped_steps == 0


# -- any closure -------------------------------------------------------------------------------------------


class Attentive(nn.Module):
    """Attention, whose fused kernels have no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.head = nn.Linear(5, 12).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).view(3, 3, 3, 4).unbind(2)
        return self.head(F.scaled_dot_product_attention(query, key, value)).flatten(0, 1)  # type: ignore[no-any-return]


def test_attention_is_differentiated_twice() -> None:
    model = Attentive()
    optimizer = made(model)
    values = [optimizer.step(closure_of(model, optimizer, LOSSES["classes"])) for _ in range(5)]
    assert values[-1] < values[0]
    assert "into" in optimizer.curvature


@pytest.mark.parametrize("step", ["model", "lr"])
def test_an_equation_of_derivatives_with_a_boundary_is_solved(step: Any) -> None:
    """u' = u with u(0) = 1: its loss needs a graph in the second look, too."""
    model = mlp(sizes=(1, 8, 1))
    optimizer = made(model, damping=LevenbergMarquardt(step=step), lr=0.3)
    places, start = torch.linspace(0, 1, 9).double()[:, None], torch.zeros(1, 1).double()

    def closure() -> Tensor:
        optimizer.zero_grad()
        x = places.clone().requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        loss = (slope - u).square().mean() + F.mse_loss(model(start), torch.ones(1, 1).double())
        loss.backward()
        return loss

    values = [float(optimizer.step(closure).detach()) for _ in range(40)]
    assert values[-1] < 0.05 * values[0]


def test_an_error_while_a_step_is_tried_leaves_the_damping_as_it_was() -> None:
    model, calls = mlp(), []
    optimizer = made(model, damping=LevenbergMarquardt(1e-9, step="lr"), lr=1e3)
    inner = closure_of(model, optimizer, LOSSES["classes"])

    def failing() -> Any:
        calls.append(1)
        if len(calls) == 3:  # the second try
            raise KeyboardInterrupt
        return inner()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(failing)
    assert optimizer.param_groups[0]["damping"] == LevenbergMarquardt(1e-9, step="lr")


def test_several_backward_passes_are_one_loss() -> None:
    """Micro-batches, each with its share of the loss."""
    x, ends = normal(N, 5), []
    for parts in (1, 3):
        model = mlp()
        optimizer = made(model, fisher="exact")

        def closure(
            model: nn.Module = model, optimizer: NaturalGradient = optimizer, parts: int = parts
        ) -> float:
            optimizer.zero_grad()
            total = 0.0
            for own, labels in zip(x.chunk(parts), LABELS.chunk(parts), strict=True):
                loss = F.cross_entropy(model(own), labels) / parts
                loss.backward()
                total += loss.item()
            return total

        for _ in range(3):
            optimizer.step(closure)
        ends.append(vector(model))
    assert_close(*ends, 1e-8)


class TwoHeads(nn.Module):
    """A prediction, one that is made of it, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.other = mlp(sizes=(5, 4, 4)), mlp(sizes=(4, 3)), mlp(sizes=(4, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        common = self.trunk(x)
        logits = self.head(common)
        return logits, logits.log_softmax(-1), self.other(common)


def test_a_loss_may_be_of_several_predictions() -> None:
    """As if it were of all of them, side by side: the step is the same whichever are given."""
    targets, ends = normal(N, 2, seed=8), []
    for by_logits in (True, False):
        model = TwoHeads()
        optimizer = made(model, fisher="empirical")

        def loss(z: Any, by_logits: bool = by_logits) -> Tensor:
            ours = F.cross_entropy(z[0], LABELS) if by_logits else F.nll_loss(z[1], LABELS)
            return ours + F.mse_loss(z[2], targets)

        values = [optimizer.step(closure_of(model, optimizer, loss)).item() for _ in range(4)]
        assert values == sorted(values, reverse=True)
        assert optimizer.reduction_ratio == pytest.approx(1, abs=0.5)
        ends.append(values[1])
    assert ends[0] == pytest.approx(ends[1], rel=0.1)


def test_a_compiled_model_runs_as_it_was_written() -> None:
    ends = []
    for compiled in (False, True):
        model = mlp()
        called = torch.compile(model, backend="eager") if compiled else model
        optimizer = made(called)
        for _ in range(2):
            optimizer.step(closure_of(called, optimizer, LOSSES["numbers"]))
        ends.append(vector(model))
    assert_close(*ends)


def test_what_has_no_block_moves_by_a_share_of_its_own() -> None:
    """A direction beside that of the blocks, which are scaled otherwise."""
    model = nn.Sequential(mlp(sizes=(5, 4)), nn.LayerNorm(4).double(), mlp(sizes=(4, 3)))
    optimizer = made(model, precondition_norms=False)
    values = [optimizer.step(closure_of(model, optimizer, LOSSES["classes"])).item() for _ in range(30)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.1 * values[0]


# -- what does not go --------------------------------------------------------------------------------------


def test_it_needs_a_closure() -> None:
    model = mlp()
    optimizer = made(model)
    F.mse_loss(model(normal(N, 5)), NUMBERS).backward()
    with pytest.raises(ValueError, match=r"before and after a step. Expected step\(closure\)"):
        optimizer.step()


def test_a_closure_has_a_backward_pass_and_a_loss_of_the_predictions() -> None:
    model = mlp()
    optimizer = made(model)
    with pytest.raises(RuntimeError, match=r"did not call loss.backward\(\)"):
        optimizer.step(lambda: F.mse_loss(model(normal(N, 5)), NUMBERS))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model[0](normal(N, 5)).square().mean()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="is no function of the predictions"):
        optimizer.step(closure)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"weight_decay": 0.1}, "weight_decay"),
        ({"kl_clip": 1e-3}, "kl_clip"),
        ({"power": 0.5}, "another step"),
        ({"first_order_step": "adamw"}, "another step"),
        ({"grad_scaler": torch.amp.GradScaler("cpu", enabled=False)}, "grad_scaler"),
        ({"param_groups": [{"params": "0", "damping": 0.1}]}, "param groups with other damping"),
    ],
)
def test_settings_that_it_does_not_go_with_are_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=f"does not go with {what}.*Expected TEKFAC.natural"):
        made(mlp(), **settings)


def test_the_default_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected TEKFAC.natural\(model, damping=LevenbergMarquardt"):
        TEKFAC(mlp(), damping=LevenbergMarquardt())


@pytest.mark.parametrize(
    "wrong",
    [{"damping": 0.0}, {"omega": 1.0}, {"every": 0}, {"tries": 0}, {"least": -1.0}, {"step": "line search"}],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        LevenbergMarquardt(**wrong)


def test_a_loss_that_is_not_finite_skips_the_step() -> None:
    model = mlp()
    optimizer = made(model)
    before = vector(model)
    optimizer.step(closure_of(model, optimizer, lambda z: LOSSES["numbers"](z) * math.nan))
    assert optimizer.skipped_steps == 1
    assert torch.equal(vector(model), before)


def preconditioned(optimizer: NaturalGradient, model: nn.Module, damping: float) -> Tensor:
    """The preconditioned gradient, by the blocks as objects; gradients are still those of the step."""
    now = optimizer.param_groups[0]["damping"]
    optimizer._damp_all_by(LevenbergMarquardt(damping))
    raw = {p: p.grad for p in model.parameters() if p.grad is not None}
    natural, _ = optimizer._natural(raw, optimizer._damping_rules(), None)
    optimizer._damp_all_by(now)
    return torch.cat([natural[p].flatten() for p in model.parameters()]).clone()
