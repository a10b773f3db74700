"""Promise: optimizers come and go on one model and leave nothing behind, and two at a time do not meet."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tekfac
from dense import METHODS, every_method
from tekfac import KFAC, TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, copied, everything, mlp, vectors

LIBRARY = str(Path(tekfac.__file__).parent)
EVERY_STEP: dict[str, Any] = {"factors_every": 1, "basis_every": 1}


class Interrupted(nn.Module):
    """Calls something in the middle of its forward and of its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)
        self.in_forward: Callable[[], None] = lambda: None
        self.in_backward: Callable[[], None] = lambda: None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.in_forward()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.in_backward())  # type: ignore[no-untyped-call]
        out: Tensor = self.second(hidden)
        return out


# -- what must not be left -------------------------------------------------------------------------------


def hooks_of(model: nn.Module) -> list[str]:
    """All hooks on modules and parameters, and those that torch keeps for all modules."""
    found = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if "hook" in key and isinstance(value, dict) and value:
                found.append(f"{name}.{key}")
    for name, parameter in model.named_parameters():
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(parameter, key, None):
                found.append(f"{name}.{key}")
    for key, value in vars(torch.nn.modules.module).items():
        if key.startswith("_global_") and isinstance(value, dict) and value:
            found.append(key)
    return found


def library_calls(run: Callable[[], object]) -> list[str]:
    """Functions of the library that run meanwhile, whoever calls them: hooks on graph nodes are seen, too."""
    seen = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


def live_tensors() -> tuple[int, int]:
    """Number and bytes of the tensors that Python knows of."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return len(tensors), sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def modes() -> tuple[int, int]:
    """Depth of torch's stacks of function and dispatch modes."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def stance() -> str:
    """What torch.compile does at present."""
    return str(torch._dynamo.eval_frame._stance.stance)


def assert_untouched(model: nn.Module) -> None:
    gc.collect()
    assert hooks_of(model) == []
    assert library_calls(lambda: backward(model, vectors(1)[0])) == []
    model.zero_grad()
    assert stance() == "default"
    assert modes() == (0, 0)


# -- ways to make an optimizer and to let go of it -------------------------------------------------------


def after_a_step(method: type[NaturalGradient], model: Interrupted) -> None:
    optimizer = method.natural(model, lr=1e-6)
    backward(model, vectors(1)[0])
    optimizer.step()
    optimizer.zero_grad()


def before_any_step(method: type[NaturalGradient], model: Interrupted) -> None:
    method.natural(model)


def while_armed(method: type[NaturalGradient], model: Interrupted) -> None:
    """Every step measures, so the next forward pass would be watched."""
    optimizer = method.natural(model, lr=1e-6, **EVERY_STEP)
    backward(model, vectors(1)[0])
    optimizer.step()
    model.zero_grad()


def while_not_armed(method: type[NaturalGradient], model: Interrupted) -> None:
    optimizer = method.natural(model, lr=1e-6, factors_every=50, basis_every=50)
    for batch in vectors(2):
        backward(model, batch)
        optimizer.step()
        model.zero_grad()


def with_statistics_that_no_step_used(method: type[NaturalGradient], model: Interrupted) -> None:
    optimizer = method.natural(model)
    backward(model, vectors(1)[0])
    model.zero_grad()
    del optimizer


def in_the_middle_of_a_forward_pass(method: type[NaturalGradient], model: Interrupted) -> None:
    owned = [method.natural(model)]
    model.in_forward = owned.clear
    try:
        backward(model, vectors(1)[0])
    finally:
        model.in_forward = lambda: None
    assert not owned
    model.zero_grad()


def in_the_middle_of_a_backward_pass(method: type[NaturalGradient], model: Interrupted) -> None:
    owned = [method.natural(model)]
    model.in_backward = owned.clear
    try:
        backward(model, vectors(1)[0])
    finally:
        model.in_backward = lambda: None
    assert not owned
    model.zero_grad()


def between_forward_and_backward_pass(method: type[NaturalGradient], model: Interrupted) -> None:
    optimizer = method.natural(model)
    x, y = vectors(1)[0]
    loss = F.cross_entropy(model(x), y)
    del optimizer
    gc.collect()
    loss.backward()
    model.zero_grad()


def after_an_error(method: type[NaturalGradient], model: Interrupted) -> None:
    """The forward pass fails half way, and the user gives up."""
    optimizer = method.natural(model)

    def fail() -> None:
        raise MemoryError

    model.in_forward = fail
    try:
        with pytest.raises(MemoryError):
            model(vectors(1)[0][0])
    finally:
        model.in_forward = lambda: None
    del optimizer


ENDS: dict[str, Callable[[type[NaturalGradient], Interrupted], None]] = {
    end.__name__.replace("_", " "): end
    for end in (
        after_a_step,
        before_any_step,
        while_armed,
        while_not_armed,
        with_statistics_that_no_step_used,
        in_the_middle_of_a_forward_pass,
        in_the_middle_of_a_backward_pass,
        between_forward_and_backward_pass,
        after_an_error,
    )
}


@pytest.fixture(autouse=True, scope="module")
def what_is_there_already_is_not_looked_at() -> Iterator[None]:
    """The garbage collector runs often here, and torch alone has very many objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("end", ENDS)
@every_method
def test_an_optimizer_that_is_gone_leaves_nothing_on_the_model(method: type[NaturalGradient], end: str) -> None:
    model = Interrupted()
    ENDS[end](method, model)
    assert_untouched(model)


def test_the_checks_see_a_live_optimizer() -> None:
    """They can fail."""
    model = Interrupted()
    optimizer = TEKFAC.natural(model, **EVERY_STEP)
    assert hooks_of(model)
    assert library_calls(lambda: backward(model, vectors(1)[0]))
    assert optimizer.num_steps == 0


def test_a_step_that_will_not_measure_leaves_the_model_alone() -> None:
    """Hooks are on the model only while the next step measures."""
    model = Interrupted()
    optimizer = TEKFAC.natural(model, lr=1e-6, factors_every=3, basis_every=3, rescaling_every=3)
    for step in range(6):
        measures = step % 3 == 0
        assert bool(hooks_of(model)) == measures
        assert measures or stance() == "default"
        assert bool(library_calls(lambda: backward(model, vectors(1)[0]))) == measures
        optimizer.step()
        optimizer.zero_grad()


def test_a_hundred_optimizers_leave_no_hook_and_no_memory() -> None:
    model = Interrupted()
    ends = list(ENDS.values())

    def rounds(count: int) -> None:
        for turn in range(count):
            ends[turn % len(ends)](METHODS[turn % len(METHODS)], model)

    rounds(2 * len(ends))  # whatever is made once is made now
    tensors = live_tensors()
    tracemalloc.start()
    try:
        rounds(len(ends))
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        rounds(100)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert live_tensors() == tensors
    assert after - before < 100_000  # torch itself keeps some bytes here and there; one optimizer has 13,000
    assert_untouched(model)


def test_a_hundred_live_optimizers_that_go_together() -> None:
    model = Interrupted()
    optimizers = [TEKFAC.natural(model, lr=1e-9) for _ in range(100)]
    backward(model, vectors(1)[0])
    for optimizer in optimizers[::10]:
        optimizer.step()
    model.zero_grad()
    del optimizer
    optimizers.clear()
    assert_untouched(model)


# -- two at a time ---------------------------------------------------------------------------------------


def trained(model: nn.Module, optimizer: NaturalGradient, others: list[NaturalGradient]) -> Any:
    """Four steps of one optimizer; the others take none."""
    for batch in vectors(4):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    assert all(other.num_steps == 0 for other in others)
    return everything(model, optimizer)


@pytest.mark.parametrize("first", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("fisher", ["sampled", "empirical", "exact"])
def test_an_optimizer_does_not_notice_another_that_watches_the_same_model(fisher: Any, first: bool) -> None:
    settings: dict[str, Any] = {"lr": 0.05, "damping": 0.1, "seed": 0, "fisher": fisher, "factors_every": 2}
    model, twin = mlp(), mlp()
    before = [KFAC.natural(model, **EVERY_STEP, fisher="exact")] if first else []
    optimizer = TEKFAC.natural(model, **settings)
    after = [] if first else [KFAC.natural(model, **EVERY_STEP, fisher="exact")]
    assert_identical(
        trained(model, optimizer, before + after), trained(twin, TEKFAC.natural(twin, **settings), [])
    )


@pytest.mark.parametrize("fisher", ["sampled", "empirical"])
def test_both_measure_what_each_would_measure_alone(fisher: Any) -> None:
    """Both step after every backward pass; the second one's steps are too short to be seen."""
    moving: dict[str, Any] = {"lr": 0.05, "damping": 0.1, "seed": 0, "fisher": fisher, "factors_every": 2}
    still: dict[str, Any] = {"lr": 1e-30, "seed": 1, "fisher": fisher, **EVERY_STEP}
    model, alone, replayed = mlp(), mlp(), mlp()
    first, second = TEKFAC.natural(model, **moving), KFAC.natural(model, **still)
    of_alone, of_replayed = TEKFAC.natural(alone, **moving), KFAC.natural(replayed, **still)
    for batch in vectors(5):
        replayed.load_state_dict(copied(model.state_dict()))
        first.zero_grad()
        second.zero_grad()
        backward(model, batch)
        first.step()
        second.step()
        for other, optimizer in ((alone, of_alone), (replayed, of_replayed)):
            optimizer.zero_grad()
            backward(other, batch)
            optimizer.step()
    assert_identical(everything(model, first), everything(alone, of_alone))
    assert_identical(second.curvature.to_dense(), of_replayed.curvature.to_dense())


def test_one_of_two_goes_and_the_other_stays() -> None:
    model, twin = mlp(), mlp()
    settings: dict[str, Any] = {"lr": 0.05, "damping": 0.1, "seed": 0, **EVERY_STEP}
    leaving, staying, expected = (
        KFAC.natural(model),
        TEKFAC.natural(model, **settings),
        TEKFAC.natural(twin, **settings),
    )
    for number, batch in enumerate(vectors(4)):
        if number == 2:
            del leaving
            gc.collect()
        for m, optimizer in ((model, staying), (twin, expected)):
            optimizer.zero_grad()
            backward(m, batch)
            optimizer.step()
    assert_identical(everything(model, staying), everything(twin, expected))


def test_optimizers_of_a_model_and_of_its_part() -> None:
    """Each sees the calls of its own model alone."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = mlp(sizes=(5, 4, 4))
            self.head = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.part(x))
            return out

    torch.manual_seed(0)
    model = Whole()
    whole = KFAC.natural(model, lr=1e-9, fisher="exact", likelihood="gaussian")
    part = TEKFAC.natural(model.part, lr=1e-9, fisher="exact", likelihood="gaussian")
    backward(model, vectors(1)[0])
    whole.step()
    part.step()
    assert set(whole.curvature) == {"part.0", "part.2", "head"}
    assert set(part.curvature) == {"0", "2"}
