"""Models may return a tensor, a dict, a tuple, a dataclass with .logits, or anything with a selector."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from tekfac import TEKFAC
from tekfac.likelihoods import OutputShapeError
from training import assert_identical, everything, vectors

Pair = namedtuple("Pair", ["logits", "features"])


@dataclass
class Output:
    features: Tensor
    logits: Tensor
    loss: Tensor | None = None


class Wrapped(nn.Module):
    """Returns its logits in whatever `wrap` makes of them."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.wrap = nn.Linear(5, 4), nn.Linear(4, 3), wrap
        self.double()

    def forward(self, x: Tensor) -> Any:
        features = torch.tanh(self.body(x))
        return self.wrap(self.head(features), features)


def run(wrap: Callable[[Tensor, Tensor], Any], unwrap: Callable[[Any], Tensor], **settings: Any) -> Any:
    model = Wrapped(wrap)
    optimizer = TEKFAC.natural(model, lr=0.05, seed=0, factors_every=2, **settings)
    for x, y in vectors(3):
        optimizer.zero_grad()
        F.cross_entropy(unwrap(model(x)), y).backward()
        optimizer.step()
    assert set(optimizer.curvature) == {"body", "head"}
    return state_of(model, optimizer)


def state_of(model: nn.Module, optimizer: TEKFAC) -> Any:
    """Of model and optimizer, whatever the predictions are called."""
    state = everything(model, optimizer)
    found = json.loads(state["optimizer"]["param_groups"][0]["tekfac"].pop("likelihoods"))
    (state["found"],) = found.values()
    return state


def plain() -> Any:
    return run(lambda z, h: z, lambda out: out)


FOUND: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda z, h: {"features": h, "logits": z}, lambda out: out["logits"]),
    "ordered dict": (lambda z, h: OrderedDict(features=h, logits=z), lambda out: out["logits"]),
    "dict with one entry": (lambda z, h: {"scores": z}, lambda out: out["scores"]),
    "tuple": (lambda z, h: (z, h), lambda out: out[0]),
    "list": (lambda z, h: [z, h], lambda out: out[0]),
    "tuple that starts with None": (lambda z, h: (None, z), lambda out: out[1]),
    "named tuple": (lambda z, h: Pair(z, h), lambda out: out.logits),
    "named tuple, logits not first": (
        lambda z, h: namedtuple("P", "features logits")(h, z),
        lambda out: out.logits,
    ),
    "dataclass": (lambda z, h: Output(h, z), lambda out: out.logits),
}


@pytest.mark.parametrize("kind", FOUND)
def test_the_logits_are_found_and_training_is_as_with_a_plain_tensor(kind: str) -> None:
    assert_identical(run(*FOUND[kind]), plain())


def test_a_selector_finds_them_anywhere_else() -> None:
    assert_identical(
        run(
            lambda z, h: {"out": [h, {"scores": z}]},
            lambda out: out["out"][1]["scores"],
            outputs=lambda out: out["out"][1]["scores"],
        ),
        plain(),
    )


def test_a_selector_is_preferred_to_what_would_be_found() -> None:
    assert_identical(run(lambda z, h: (h, z), lambda out: out[1], outputs=lambda out: out[1]), plain())


def test_a_loss_computed_inside_the_model_is_no_hindrance() -> None:
    class WithLoss(Wrapped):
        def forward(self, x: Tensor, labels: Tensor) -> Output:  # type: ignore[override]
            features = torch.tanh(self.body(x))
            logits = self.head(features)
            return Output(features, logits, F.cross_entropy(logits, labels))

    model = WithLoss(lambda z, h: z)
    optimizer = TEKFAC.natural(model, lr=0.05, seed=0, factors_every=2)
    for x, y in vectors(3):
        optimizer.zero_grad()
        loss = model(x=x, labels=y).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
    assert_identical(state_of(model, optimizer), plain())


def test_a_layer_called_with_a_keyword_is_recorded() -> None:
    class Keyword(Wrapped):
        def forward(self, x: Tensor) -> Any:
            out: Tensor = self.head(input=torch.tanh(self.body(input=x)))
            return out

    model = Keyword(lambda z, h: z)
    optimizer = TEKFAC.natural(model, lr=0.05, seed=0, factors_every=2)
    for x, y in vectors(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_identical(state_of(model, optimizer), plain())


unreadable = pytest.mark.parametrize(
    "wrap",
    [lambda z, h: {"a": "z"}, lambda z, h: "text", lambda z, h: None, lambda z, h: (None, "text")],
)


@unreadable
def test_what_cannot_be_read_is_refused_with_the_way_out(wrap: Callable[[Tensor, Tensor], Any]) -> None:
    model = Wrapped(wrap)
    optimizer = TEKFAC.natural(model)
    with pytest.raises(OutputShapeError, match="outputs=lambda"):
        model(vectors(1)[0][0])
    assert optimizer.num_steps == 0


@unreadable
def test_by_default_what_cannot_be_read_is_trained_by_first_order(
    wrap: Callable[[Tensor, Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As an optimizer would that asks for nothing: a loss may be taken of what a model keeps to itself."""
    kept: list[Tensor] = []

    def keeping(z: Tensor, h: Tensor) -> Any:
        kept.append(z)
        return wrap(z, h)

    model = Wrapped(keeping)
    optimizer = TEKFAC(model)
    before = model.head.weight.detach().clone()
    for x, y in vectors(3):
        optimizer.zero_grad()
        model(x)
        F.cross_entropy(kept[-1], y).backward()
        optimizer.step()
    assert optimizer.num_steps == 3
    assert not optimizer.curvature
    assert not torch.equal(model.head.weight, before)
    (message,) = (r.getMessage() for r in caplog.records if "layer 'body'" in r.getMessage())
    assert "no tensors of predictions in what the model returned" in message


def shifted(z: Tensor, h: Tensor) -> Any:
    return Independent(Normal(z, h.exp().mean(1, keepdim=True)), 1)


OBJECTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], set[str]]] = {
    "a distribution": (lambda z, h: Normal(z, z.exp()), {"loc", "scale"}),
    "one made of others": (shifted, {"base_dist.loc", "base_dist.scale"}),
    "a namespace": (lambda z, h: SimpleNamespace(scores=z, about="text"), {"scores"}),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_tensors_that_an_object_has_are_predictions(kind: str) -> None:
    wrap, names = OBJECTS[kind]
    model = Wrapped(wrap)
    optimizer = TEKFAC(model)
    x, y = vectors(1)[0]
    out = model(x)
    if kind == "a namespace":
        loss = F.cross_entropy(out.scores, y)
    else:
        loss = -out.log_prob(torch.ones(len(x), 3, dtype=x.dtype)).mean()
    loss.backward()
    optimizer.step()
    assert set(optimizer.curvature) == {"body", "head"}
    assert names.issuperset(optimizer.likelihoods)
    assert optimizer.likelihoods


def test_a_loss_before_the_predictions_is_passed_over() -> None:
    model = Wrapped(lambda z, h: (z.logsumexp(1).mean(), z))
    optimizer = TEKFAC.natural(model)
    x, y = vectors(1)[0]
    F.cross_entropy(model(x)[1], y).backward()
    optimizer.step()
    assert optimizer.curvature


def test_a_function_that_gives_no_tensor_is_refused() -> None:
    model = Wrapped(lambda z, h: (z, z))
    optimizer = TEKFAC.natural(model, outputs=lambda returned: "logits")
    with pytest.raises(OutputShapeError, match=r"outputs= gave a str. Expected a tensor"):
        model(vectors(1)[0][0])
    assert optimizer.num_steps == 0


def test_the_fields_of_what_a_model_returned_are_named() -> None:
    @dataclass
    class Found:
        scores: str

    model = Wrapped(lambda z, h: Found("none"))
    optimizer = TEKFAC.natural(model)
    with pytest.raises(OutputShapeError, match=r"a Found with fields \['scores'\]"):
        model(vectors(1)[0][0])
    assert optimizer.num_steps == 0


def test_predictions_that_got_no_gradient_are_said_to_be_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = Wrapped(lambda z, h: (z, z + 0))
    optimizer = TEKFAC.natural(model, outputs=lambda returned: torch.cat([returned[0], returned[1]]))
    x, y = vectors(1)[0]
    F.cross_entropy(model(x)[0], y).backward()
    optimizer.step()
    assert "got no gradient from the loss" in caplog.text
    assert not optimizer.curvature


@pytest.mark.parametrize("outputs", [None, lambda returned: returned[0]])
def test_a_head_that_the_chosen_predictions_do_not_depend_on_is_trained_by_its_raw_gradient(
    outputs: Any,
) -> None:
    class TwoHeads(Wrapped):
        def __init__(self) -> None:
            super().__init__(lambda z, h: z)
            self.auxiliary = nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Any:
            features = torch.tanh(self.body(x))
            return self.head(features), self.auxiliary(features)

    model = TwoHeads()
    optimizer = TEKFAC.natural(model, lr=0.25, momentum=0.0, outputs=outputs)
    x, y = vectors(1)[0]
    start = model.auxiliary.weight.detach().clone()
    logits, more = model(x)
    (F.cross_entropy(logits, y) + F.cross_entropy(more, y)).backward()
    optimizer.step()
    raw = torch.equal(model.auxiliary.weight, start - 0.25 * model.auxiliary.weight.grad)
    assert raw == (outputs is not None)
    assert set(optimizer.curvature) == {"body", "head"} | ({"auxiliary"} if outputs is None else set())
