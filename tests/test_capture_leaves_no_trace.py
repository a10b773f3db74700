"""Watching a model leaves nothing behind: no graph, no hook, nothing in copies or under torch.func.

Hooks are on the model only while the next step measures.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from dense import METHODS
from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, cnn, everything, images, mlp, saved_curvature, train, vectors

EVERY_STEP = {"factors_every": 1, "basis_every": 1, "rescaling_every": 1}


class Token:
    """Something that a graph node holds, to see when the node is freed."""


class Marked(torch.autograd.Function):
    """The identity, with a token in its node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: weakref.WeakSet[Token]) -> Tensor:
        ctx.token = Token()
        tokens.add(ctx.token)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class Traced(nn.Module):
    """Every graph, from the first layer to the outputs, holds a token."""

    def __init__(self, wrap: Callable[[Tensor, nn.Module], Any] = lambda logits, last: logits) -> None:
        super().__init__()
        self.body, self.head, self.last, self.wrap = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(3, 3), wrap
        self.fail = False
        self.tokens: weakref.WeakSet[Token] = weakref.WeakSet()
        self.double()

    def forward(self, x: Tensor) -> Any:
        hidden: Tensor = Marked.apply(torch.tanh(self.body(x)), self.tokens)  # type: ignore[no-untyped-call]
        if self.fail:
            raise MemoryError("the user's forward pass failed")
        return self.wrap(self.head(hidden), self.last)


def graphs_alive(model: Traced) -> int:
    gc.collect()
    return len(model.tokens)


OUTPUTS: dict[str, Callable[[Tensor, nn.Module], Any]] = {
    "the logits of a layer": lambda logits, last: logits,
    "something computed from them": lambda logits, last: logits * 2,
    "a view of them": lambda logits, last: logits[:, :2],
    "one of several parts": lambda logits, last: logits.split(2, dim=1)[0],
    "logits that another layer goes on from": lambda logits, last: {
        "logits": logits,
        "refined": last(logits),
    },
    "logits beside another head's": lambda logits, last: (logits, last(logits.detach())),
}


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_forward_pass_without_a_backward_pass_keeps_no_graph_alive(outputs: str) -> None:
    model = Traced(OUTPUTS[outputs])
    optimizer = TEKFAC.natural(model)
    returned = model(vectors(1)[0][0])
    assert graphs_alive(model) == 1
    del returned
    assert graphs_alive(model) == 0
    assert optimizer.num_steps == 0


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_dropped_graph_is_freed_at_once_and_does_not_wait_for_the_garbage_collector(outputs: str) -> None:
    model = Traced(OUTPUTS[outputs])
    optimizer = TEKFAC.natural(model)
    gc.collect()
    gc.disable()
    try:
        returned = model(vectors(1)[0][0])
        assert len(model.tokens) == 1
        del returned
        assert len(model.tokens) == 0
    finally:
        gc.enable()
    assert optimizer.num_steps == 0


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_after_a_step_no_graph_is_alive(outputs: str) -> None:
    model = Traced(OUTPUTS[outputs])
    optimizer = TEKFAC.natural(model)
    returned = model(vectors(1)[0][0])
    logits = (
        returned if isinstance(returned, Tensor) else returned["logits" if isinstance(returned, dict) else 0]
    )
    F.cross_entropy(logits, torch.zeros(6, dtype=torch.long)).backward()
    optimizer.step()
    del returned, logits
    assert graphs_alive(model) == 0
    assert "body" in optimizer.curvature


def test_a_forward_pass_that_fails_keeps_no_graph_alive() -> None:
    """A loop that catches the error, and goes on with a smaller batch, needs the memory."""
    model = Traced()
    optimizer = TEKFAC.natural(model)
    model.fail = True
    with pytest.raises(MemoryError):
        model(vectors(1)[0][0])
    assert graphs_alive(model) == 0
    model.fail = False
    train(model, optimizer, vectors(2))
    assert optimizer.num_steps == 2


def test_captured_inputs_are_let_go_after_the_step() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model)
    storages = []

    def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        storages.append(weakref.ref(args[0].untyped_storage()))

    handle = model[2].register_forward_pre_hook(watch)
    backward(model, vectors(1)[0])
    optimizer.step()
    handle.remove()
    gc.collect()
    assert storages
    assert all(storage() is None for storage in storages)


# -- hooks ---------------------------------------------------------------------------------------------


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("steps", [0, 2], ids=["before training", "after training"])
def test_a_deleted_optimizer_leaves_no_hook(method: type[NaturalGradient], steps: int) -> None:
    """Not even one that was about to measure."""
    model = cnn()
    optimizer = method.natural(model, factors_every=1)
    train(model, optimizer, images(steps))
    assert hooks(model) > 0
    del optimizer
    gc.collect()
    assert hooks(model) == 0
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), images(1))


@pytest.mark.parametrize("method", METHODS)
def test_hooks_are_on_the_model_only_while_the_next_step_measures(method: type[NaturalGradient]) -> None:
    model = cnn()
    intervals = {"factors_every": 3, "basis_every": 6}
    if method.method.rescaling.measured:
        intervals["rescaling_every"] = 4
    optimizer = method.natural(model, lr=0.01, damping=0.1, **intervals)
    assert hooks(model) > 0
    watched = []
    for step, batch in enumerate(images(13)):
        during = []
        handle = model[4].register_forward_pre_hook(lambda *_, during=during: during.append(hooks(model) - 1))
        train(model, optimizer, [batch])
        handle.remove()
        watched.append(during[0] > 0)
        due = [(step + 1) % interval == 0 for interval in intervals.values()]
        assert (hooks(model) > 0) == any(due)
    assert watched == [any(step % interval == 0 for interval in intervals.values()) for step in range(13)]
    assert watched.count(False) > 5


@pytest.mark.parametrize("method", METHODS)
def test_with_the_default_intervals_there_is_no_hook_after_the_first_step(
    method: type[NaturalGradient],
) -> None:
    model = cnn()
    optimizer = method.natural(model)
    assert hooks(model) > 0
    train(model, optimizer, images(1))
    assert hooks(model) == 0
    assert set(optimizer.curvature) == {"0", "1", "4"}


def test_hooks_of_the_user_stay_where_they_are() -> None:
    model, calls = mlp(), []
    model[0].register_forward_hook(lambda *_: calls.append("before"))
    optimizer = TEKFAC.natural(model, lr=0.05, factors_every=2, rescaling_every=2)
    model[0].register_forward_hook(lambda *_: calls.append("after"))
    train(model, optimizer, vectors(4))
    assert calls == ["before", "after"] * 4
    del optimizer
    gc.collect()
    assert hooks(model) == 2


def test_an_optimizer_that_could_not_be_made_leaves_no_hook() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="lr"):
        TEKFAC.natural(model, lr=-1.0)
    gc.collect()
    assert hooks(model) == 0


def test_an_optimizer_deleted_between_forward_and_backward_does_no_harm() -> None:
    model, twin = mlp(), mlp()
    optimizer = TEKFAC.natural(model)
    loss = F.cross_entropy(model(vectors(1)[0][0]), vectors(1)[0][1])
    del optimizer
    gc.collect()
    loss.backward()
    backward(twin, vectors(1)[0])
    assert_identical(*({n: p.grad for n, p in m.named_parameters()} for m in (model, twin)))


def test_a_second_optimizer_of_the_same_model_does_not_disturb_the_first() -> None:
    def run(second: bool) -> Any:
        model = mlp()
        optimizer = TEKFAC.natural(model, lr=0.05, seed=0, **EVERY_STEP)
        other = TEKFAC.natural(model, lr=1e-30, fisher="exact", **EVERY_STEP) if second else None
        for batch in vectors(3):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            if other is not None:
                assert set(other.curvature) in (set(), {"0", "2"})
        return everything(model, optimizer)

    assert_identical(run(second=True), run(second=False))


def test_the_optimizers_of_two_models_know_nothing_of_each_other() -> None:
    """A generator and a discriminator, say."""
    first, second = mlp(), mlp(seed=1, sizes=(3, 4, 3))
    one, two = TEKFAC.natural(first, lr=0.05), TEKFAC.natural(second, lr=0.05)
    x, y = vectors(1)[0]
    F.cross_entropy(second(first(x)), y).backward()
    one.step()
    two.step()
    assert set(one.curvature) == set(two.curvature) == {"0", "2"}
    assert one.curvature["0"].rescaling.shape == (1, 4, 6)
    assert two.curvature["0"].rescaling.shape == (1, 4, 4)


# -- copies --------------------------------------------------------------------------------------------


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("when", ["before training", "in the middle of a step", "after training"])
def test_a_copied_or_saved_model_is_a_model_that_nobody_watches(
    duplicate: Callable[[nn.Module], nn.Module], when: str
) -> None:
    def run(copying: bool) -> Any:
        model = mlp()
        optimizer = TEKFAC.natural(model, lr=0.05, seed=0, **EVERY_STEP)
        assert hooks(model) > 0
        if when == "after training":
            train(model, optimizer, vectors(2))
        if when == "in the middle of a step":
            backward(model, vectors(1)[0])
        if copying:
            duplicate_and_use(model, optimizer)
        if when == "in the middle of a step":  # what was captured of it is still there
            optimizer.step()
        train(model, optimizer, vectors(2, seed=6))
        return everything(model, optimizer)

    def duplicate_and_use(model: nn.Module, optimizer: NaturalGradient) -> None:
        twin = duplicate(model)
        before = everything(model, optimizer)
        assert_identical(twin, model)
        x, y = vectors(1, seed=5)[0]
        assert torch.equal(twin(x), model(x))
        train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), [(x, y)])
        assert_identical(everything(model, optimizer), before)
        own = TEKFAC.natural(twin, lr=0.05)
        train(twin, own, [(x, y)])
        assert set(own.curvature) == {"0", "2"}
        assert_identical(everything(model, optimizer), before)

    assert_identical(run(copying=True), run(copying=False))


def test_a_copy_outlives_the_optimizer() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model)
    twin = copy.deepcopy(model)
    del optimizer
    gc.collect()
    train(twin, TEKFAC.natural(twin, lr=0.05), vectors(1))


# -- torch.func and checkpoints ------------------------------------------------------------------------


def per_sample_gradients(model: nn.Module) -> dict[str, Tensor]:
    x, y = vectors(1)[0]
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)  # type: ignore[no-any-return]


def test_per_sample_gradients_of_a_watched_model_are_those_of_any_other() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.05, seed=0, **EVERY_STEP)
    assert_identical(per_sample_gradients(model), per_sample_gradients(mlp()))
    twin = mlp()
    other = TEKFAC.natural(twin, lr=0.05, seed=0, **EVERY_STEP)
    for batch in vectors(2):
        train(model, optimizer, [batch])
        per_sample_gradients(model)
        train(twin, other, [batch])
    assert_identical(everything(model, optimizer), everything(twin, other))


@pytest.mark.parametrize("transform", [torch.func.jacrev, lambda f: torch.func.jacrev(torch.func.jacrev(f))])
def test_other_transforms_work_on_a_watched_model(transform: Any) -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model)
    x = vectors(1)[0][0]

    def outputs(weight: Tensor) -> Tensor:
        return functional_call(model, {"2.weight": weight}, (x,)).sum()  # type: ignore[no-any-return]

    transform(outputs)(model[2].weight.detach())
    backward(model, vectors(1)[0])
    optimizer.step()
    assert set(optimizer.curvature) == {"0", "2"}


class Checkpointed(nn.Module):
    def __init__(self, saving: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.head, self.saving = nn.Linear(4, 3), saving
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.body, x, use_reentrant=False) if self.saving else self.body(x)
        out: Tensor = self.head(hidden)
        return out


@pytest.mark.parametrize("fisher", ["sampled", "empirical", "exact"])
def test_checkpointed_segments_are_measured_as_the_others_are(fisher: Any) -> None:
    states = []
    for saving in (False, True):
        model = Checkpointed(saving)
        optimizer = TEKFAC.natural(model, lr=0.05, seed=0, fisher=fisher, factors_every=2)
        train(model, optimizer, vectors(3))
        states.append(everything(model, optimizer))
    assert_identical(*states)
    assert set(saved_curvature(states[0]["optimizer"])) == {"body.0.weight", "body.2.weight", "head.weight"}


@pytest.mark.parametrize("by", ["inputs", "parameters"])
def test_a_gradient_penalty_is_differentiated_as_without_the_optimizer(by: str) -> None:
    """A backward pass through a backward pass."""
    results = []
    for watched in (False, True):
        model = mlp()
        optimizer = TEKFAC.natural(model) if watched else None
        x, y = vectors(1)[0]
        x = x.requires_grad_()
        loss = F.cross_entropy(model(x), y)
        origin = [x] if by == "inputs" else list(model.parameters())
        slopes = torch.autograd.grad(loss, origin, create_graph=True)
        (loss + sum(slope.square().sum() for slope in slopes)).backward()
        if optimizer is not None:
            assert optimizer.num_steps == 0
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_identical(*results)
