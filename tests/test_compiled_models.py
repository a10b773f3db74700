"""Promise: a compiled model is trained like the same model in eager mode, whichever was made first.

Steps that measure run eagerly; all others run the compiled code, which has no break and is not compiled again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tekfac import KFAC, TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, copied, differences

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, which differ between versions

STEPS = 7
ORDERS = ("compiled, then optimizer", "optimizer, then compiled", "optimizer of the compiled model")
every_order = pytest.mark.parametrize("order", ORDERS)
both_methods = pytest.mark.parametrize("method", [KFAC, TEKFAC])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    gc.collect()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def settings_of(method: type[NaturalGradient]) -> dict[str, Any]:
    """Steps 0, 3 and 6 measure."""
    return {"factors_every": 3, "basis_every": 3, "interval_growth": None, "seed": 0, "lr": 0.01}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)).double()


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.compiled = 0
        self.run = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*arguments: Any) -> Any:
            self.run += 1
            return graph.forward(*arguments)

        return run


def made(
    method: type[NaturalGradient], model: nn.Module, order: str, **how: Any
) -> tuple[nn.Module, NaturalGradient]:
    """What is called in the loop, and its optimizer."""
    settings = settings_of(method)
    if order == "eager":
        return model, method(model, **settings)
    if order == "optimizer, then compiled":
        optimizer = method(model, **settings)
        return torch.compile(model, **how), optimizer  # type: ignore[return-value]
    compiled: Any = torch.compile(model, **how)
    return compiled, method(compiled if order == "optimizer of the compiled model" else model, **settings)


def batches(count: int, samples: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (samples,), generator=generator),
        )
        for _ in range(count)
    ]


def losses(
    called: nn.Module,
    optimizer: NaturalGradient,
    count: int = STEPS,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Of a loop as a user writes it."""
    told = []
    for x, y in batches(count):
        optimizer.zero_grad()
        loss = cross_entropy(called(x), y)
        loss.backward()
        optimizer.step()
        told.append(loss.item())
        after_step()
    return told


def eager_losses(method: type[NaturalGradient]) -> list[float]:
    return losses(*made(method, network(), "eager"))


@every_order
@both_methods
def test_losses_are_those_of_the_eager_model(method: type[NaturalGradient], order: str) -> None:
    called, optimizer = made(method, network(), order, backend="aot_eager")
    assert losses(called, optimizer) == pytest.approx(eager_losses(method), rel=1e-12)
    assert len(optimizer.curvature) == 2
    assert optimizer.num_steps == STEPS


@pytest.mark.slow
def test_losses_by_the_default_compiler_are_those_of_the_eager_model() -> None:
    called, optimizer = made(TEKFAC, network(), "optimizer, then compiled", backend="inductor")
    assert losses(called, optimizer) == pytest.approx(eager_losses(TEKFAC), rel=1e-10)


@every_order
@both_methods
def test_the_whole_graph_is_compiled_on_all_steps_that_do_not_measure(
    method: type[NaturalGradient], order: str
) -> None:
    """fullgraph=True allows no break, over a whole run; measured steps do not run compiled code."""
    backend = Counting()
    called, optimizer = made(method, network(), order, backend=backend, fullgraph=True)
    runs = []
    told = losses(called, optimizer, after_step=lambda: runs.append(backend.run))
    assert told == pytest.approx(eager_losses(method), rel=1e-12)
    assert runs == [0, 1, 2, 2, 3, 4, 4]
    assert backend.compiled == 1


@every_order
@both_methods
def test_nothing_is_compiled_again_after_the_first_steps(method: type[NaturalGradient], order: str) -> None:
    backend = Counting()
    called, optimizer = made(method, network(), order, backend=backend)
    compiled = []
    losses(called, optimizer, count=20, after_step=lambda: compiled.append(backend.compiled))
    assert compiled[-1] == compiled[2] > 0  # step 0 measures; two warm up
    assert compiled[-1] <= 2


def test_frames_are_compiled_once_by_torchs_own_count() -> None:
    called, optimizer = made(TEKFAC, network(), "compiled, then optimizer", backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    seen = []
    losses(
        called,
        optimizer,
        count=20,
        after_step=lambda: seen.append(
            (torch._dynamo.utils.counters["frames"]["total"], len(torch._dynamo.utils.counters["graph_break"]))
        ),
    )
    assert seen[-1] == seen[2]
    assert seen[-1][1] == 0


def test_evaluation_in_between_runs_as_compiled() -> None:
    backend = Counting()
    model = network()
    called, optimizer = made(TEKFAC, model, "optimizer, then compiled", backend=backend, fullgraph=True)
    x = batches(1)[0][0]

    def evaluate() -> None:
        with torch.no_grad():
            assert torch.allclose(called(x), nn.Sequential.forward(model, x))

    assert losses(called, optimizer, after_step=evaluate) == pytest.approx(eager_losses(TEKFAC), rel=1e-12)


@every_order
def test_names_in_the_state_are_those_of_the_model_itself(order: str) -> None:
    called, optimizer = made(TEKFAC, network(), order, backend="aot_eager")
    losses(called, optimizer)
    assert set(optimizer.curvature) == {"0", "2"}
    assert list(optimizer.curvature.parameters) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert "_orig_mod" not in "".join(keys_of(optimizer.state_dict()))


def keys_of(state: Any) -> list[str]:
    """All keys and strings in a nested state."""
    if isinstance(state, dict):
        return [str(key) for key in state] + [name for value in state.values() for name in keys_of(value)]
    if isinstance(state, list | tuple):
        return [name for value in state for name in keys_of(value)]
    return [state] if isinstance(state, str) else []


@pytest.mark.parametrize("saved_by", ["eager", *ORDERS])
@pytest.mark.parametrize("loaded_by", ["eager", "optimizer of the compiled model"])
def test_the_state_goes_from_compiled_to_plain_and_back(saved_by: str, loaded_by: str) -> None:
    model = network()
    called, optimizer = made(TEKFAC, model, saved_by, backend="aot_eager")
    losses(called, optimizer)
    state = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = network()
    other.load_state_dict(state["model"])
    called_after, loaded = made(TEKFAC, other, loaded_by, backend="aot_eager")
    loaded.load_state_dict(state["optimizer"])
    assert_identical(loaded, state["optimizer"])
    assert losses(called_after, loaded, 4) == pytest.approx(losses(called, optimizer, 4), rel=1e-12)


class Own(nn.Module):
    """A module of the user's own; torch compiles none of its own containers in place with fullgraph=True."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_model_compiled_in_place_is_trained_alike(first: str) -> None:
    backend = Counting()
    model = Own(network())
    if first == "model":
        model.compile(backend=backend, fullgraph=True)
    optimizer = TEKFAC(model, **settings_of(TEKFAC))
    if first == "optimizer":
        model.compile(backend=backend, fullgraph=True)
    assert losses(model, optimizer) == pytest.approx(eager_losses(TEKFAC), rel=1e-12)
    assert (backend.compiled, backend.run) == (1, 4)
    assert set(optimizer.curvature) == {"layers.0", "layers.2"}


class WithBody(nn.Module):
    """The network in two parts, the first of which may be compiled."""

    def __init__(self, compile_body: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        whole = network()
        self.body, self.head = compile_body(nn.Sequential(whole[0], whole[1])), whole[2]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


@both_methods
def test_a_compiled_part_of_a_model_is_trained_alike(method: type[NaturalGradient]) -> None:
    backend = Counting()
    model = WithBody(lambda body: torch.compile(body, backend=backend, fullgraph=True))  # type: ignore[return-value]
    optimizer = method(model, **settings_of(method))
    assert losses(model, optimizer) == pytest.approx(eager_losses(method), rel=1e-12)
    assert (backend.compiled, backend.run) == (1, 4)
    assert set(optimizer.curvature) == {"body.0", "head"}
    assert "_orig_mod" not in "".join(keys_of(optimizer.state_dict()))
    plain = WithBody(lambda body: body)
    other = method(plain, **settings_of(method))
    other.load_state_dict(optimizer.state_dict())
    assert not differences(other.state_dict(), optimizer.state_dict())


def test_a_part_that_is_compiled_in_place_is_trained_alike() -> None:
    backend = Counting()
    model = WithBody(Own)
    optimizer = TEKFAC(model, **settings_of(TEKFAC))
    model.body.compile(backend=backend, fullgraph=True)
    assert losses(model, optimizer) == pytest.approx(eager_losses(TEKFAC), rel=1e-12)
    assert (backend.compiled, backend.run) == (1, 4)


def test_the_compiler_is_back_when_the_optimizer_is_gone() -> None:
    """Measured steps run everything eagerly; an optimizer that was deleted before one must not leave it so."""
    backend = Counting()
    other: Any = torch.compile(network(), backend=backend, fullgraph=True)
    model = network()
    optimizer = TEKFAC(model, factors_every=1)
    losses(model, optimizer, 2)
    del optimizer
    gc.collect()
    other(batches(1)[0][0])
    assert backend.run == 1


def runs_compiled(backend: Counting, function: Any) -> bool:
    """Whether a call of a compiled function runs compiled code."""
    before = backend.run
    function(batches(1)[0][0])
    return backend.run > before


@pytest.mark.parametrize("order", ["eager", *ORDERS])
def test_other_compiled_functions_stay_compiled_once_it_is_known_how_the_model_is_called(order: str) -> None:
    """Of a compiled model that is known from the start; of a plain one, after its first pass."""
    backend = Counting()
    other: Any = torch.compile(network(), backend=backend)
    called, optimizer = made(TEKFAC, network(), order, backend="eager")
    optimizer._settings = replace(optimizer._settings, factors_every=1)  # every step is waited for
    if order == "optimizer of the compiled model":
        assert runs_compiled(backend, other)
    x, y = batches(1)[0]
    loss = cross_entropy(called(x), y)
    if order in ("eager", "optimizer of the compiled model"):
        assert runs_compiled(backend, other)
    loss.backward()
    optimizer.step()
    assert optimizer._capture.armed
    assert runs_compiled(backend, other) == (order in ("eager", "optimizer of the compiled model"))
    assert len(optimizer.curvature) == 2


def test_a_model_that_is_compiled_in_the_middle_of_training_is_measured_again() -> None:
    model = network()
    optimizer = TEKFAC(model, **settings_of(TEKFAC))
    losses(model, optimizer, 4)
    called: Any = torch.compile(model, backend="eager")
    before = optimizer.curvature["0"].to_dense()
    losses(called, optimizer, 6)
    assert not torch.equal(optimizer.curvature["0"].to_dense(), before)


def test_a_stance_of_the_users_is_put_back_with_all_of_its_settings() -> None:
    with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        before = torch._dynamo.eval_frame._stance
        model = network()
        losses(model, TEKFAC(model, **settings_of(TEKFAC)), 2)
        assert torch._dynamo.eval_frame._stance == before
