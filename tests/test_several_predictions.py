"""A model with several predictions is one: its Fisher is the sum of theirs, weighed as their losses are."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, dense_block, gradient_step, normal, oracle_block, seeded, statistics
from several_heads import (
    ANSWERS,
    BOXES,
    CLASSES,
    KINDS,
    LOSSES,
    Heads,
    N,
    empirical_samples,
    exact_samples,
    layers,
)
from tekfac import KFAC, TEKFAC
from tekfac.capture.awaiting import Awaited
from tekfac.likelihoods import Bernoulli, Categorical, Gaussian
from tekfac.optim.natural_gradient import NaturalGradient


def total(names: tuple[str, ...], weights: dict[str, float]) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda out: torch.stack([weights[name] * LOSSES[name](out[name]) for name in names]).sum()


def stepped(
    method: type[NaturalGradient], model: nn.Module, loss: Callable[[Any], Tensor], x: Tensor, **settings: Any
) -> NaturalGradient:
    optimizer = method.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, **settings)
    gradient_step(optimizer, model, loss, x)
    return optimizer


def assert_blocks(
    optimizer: NaturalGradient, model: nn.Module, samples: Callable[[str], oracle.Samples]
) -> None:
    """Every layer's block is the oracle's: re-scaled in the basis that was found, which may be turned."""
    method = type(optimizer)
    for layer in layers(model):
        of_layer, block = samples(layer), statistics(optimizer)[layer]
        sharing = "exact" if "exact" in method.method.factors.sharings else "expand"
        expected = oracle_block(method, of_layer, sharing)
        if method.method.rescaling.measured:
            fisher = oracle.exact_fisher(of_layer.gradients[:, 0])
            q_out, q_in = block.basis.vectors_out[0].contiguous(), block.basis.vectors_in[0].contiguous()
            assert_close(block.rescaling[0], oracle.theta(fisher, q_out, q_in))
            assert_close(torch.trace(dense_block(block)), torch.trace(expected))
        else:
            assert_close(dense_block(block), expected)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("names", [("cls", "yes"), ("cls", "box"), ("cls", "yes", "box")], ids="+".join)
@pytest.mark.parametrize("method", METHODS)
def test_the_exact_fisher_is_the_sum_over_predictions(
    method: type[NaturalGradient], names: tuple[str, ...], shared: bool
) -> None:
    model = seeded(lambda: Heads(names, shared=shared).double())
    x, ones = normal(N, 5), dict.fromkeys(names, 1.0)
    optimizer = stepped(method, model, total(names, ones), x, fisher="exact")
    assert_blocks(optimizer, model, lambda layer: exact_samples(model, x, layer, ones))
    kinds = {name: type(likelihood).__name__.lower() for name, likelihood in optimizer.likelihoods.items()}
    assert kinds == {name: KINDS[name] for name in names}


@pytest.mark.parametrize("method", METHODS)
def test_losses_are_weighed_as_their_gradients_tell(method: type[NaturalGradient]) -> None:
    """Beside the heaviest; a scale of the whole loss does not matter."""
    names = ("cls", "yes")
    model = seeded(lambda: Heads(names, shared=True).double())
    x = normal(N, 5)
    optimizer = stepped(method, model, total(names, {"cls": 3e4, "yes": 12e4}), x, fisher="exact")
    weights = {"cls": 0.25, "yes": 1.0}
    assert_blocks(optimizer, model, lambda layer: exact_samples(model, x, layer, weights))


@pytest.mark.parametrize("method", METHODS)
def test_two_halves_of_a_batch_are_one(method: type[NaturalGradient]) -> None:
    names = ("cls", "yes", "box")
    model = seeded(lambda: Heads(names, shared=True).double())
    x, ones = normal(N, 5), dict.fromkeys(names, 1.0)
    optimizer = method.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, fisher="exact")
    for part in (slice(0, 3), slice(3, N)):
        out = model(x[part])
        losses = (
            F.cross_entropy(out["cls"], CLASSES[part]),
            F.binary_cross_entropy_with_logits(out["yes"], ANSWERS[part].double()),
            F.mse_loss(out["box"], BOXES[part]),
        )
        torch.stack(losses).sum().backward()
    optimizer.step()
    assert_blocks(optimizer, model, lambda layer: exact_samples(model, x, layer, ones))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_the_empirical_fisher_is_that_of_all_losses_together(
    method: type[NaturalGradient], shared: bool
) -> None:
    """Of a sample's gradient as it comes by: no pass but the user's own."""
    names = ("cls", "yes", "box")
    model = seeded(lambda: Heads(names, shared=shared).double())
    x, weights = normal(N, 5), {"cls": 1.0, "yes": 0.5, "box": 2.0}
    optimizer = stepped(method, model, total(names, weights), x, fisher="empirical")
    assert_blocks(optimizer, model, lambda layer: empirical_samples(model, x, layer, weights))


@pytest.mark.parametrize("method", METHODS)
def test_gradients_collected_by_autograd_grad_are_measured_together_too(
    method: type[NaturalGradient],
) -> None:
    names, ones = ("cls", "yes", "box"), dict.fromkeys(("cls", "yes", "box"), 1.0)
    model = seeded(lambda: Heads(names, shared=True).double())
    x, parameters = normal(N, 5), list(model.parameters())
    optimizer = method.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, fisher="empirical")
    gradients = torch.autograd.grad(total(names, ones)(model(x)), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    optimizer.step()
    assert_blocks(optimizer, model, lambda layer: empirical_samples(model, x, layer, ones))


class Counting(torch.autograd.Function):
    """The identity; counts the backward passes that come by."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Counting.passes += 1
        return gradient


def test_the_default_needs_no_pass_but_the_users_own() -> None:
    class Counted(Heads):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            common = Counting.apply(torch.tanh(self.trunks["all"](x)))
            return {name: head(common) for name, head in self.heads.items()}

    model = seeded(lambda: Counted(("cls", "box"), shared=True).double())
    optimizer = TEKFAC(model)
    for _ in range(3):
        Counting.passes = 0
        gradient_step(optimizer, model, total(("cls", "box"), {"cls": 1.0, "box": 1.0}), normal(N, 5))
        assert Counting.passes == 1
    assert set(optimizer.curvature) == set(layers(model))


def span_model() -> nn.Module:
    """As for question answering: start and end from one layer, unbound."""

    class Span(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            start, end = self.head(torch.tanh(self.body(x))).unbind(-1)
            return start, end

    return seeded(lambda: Span().double())


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_one_layer_may_give_several_predictions(fisher: Any) -> None:
    """They count as those of one loss over both, twice as large as its mean."""
    x, starts, ends = normal(N, 4, 2), torch.arange(N) % 4, (torch.arange(N) + 1) % 4
    model = span_model()
    optimizer = stepped(
        TEKFAC,
        model,
        lambda out: F.cross_entropy(out[0], starts) + F.cross_entropy(out[1], ends),
        x,
        fisher=fisher,
    )
    joint = nn.Sequential(model, Stacked())
    alike = stepped(
        TEKFAC,
        joint,
        lambda out: F.cross_entropy(out.flatten(0, 1), torch.stack([starts, ends], 1).flatten()),
        x,
        fisher=fisher,
        likelihood=Categorical(class_dim=2),
    )
    for layer in ("body", "head"):
        assert_close(
            torch.trace(dense_block(statistics(optimizer)[layer])),
            2 * torch.trace(dense_block(statistics(alike)[f"0.{layer}"])),
        )


class Stacked(nn.Module):
    """[N, T], [N, T] -> [N, 2, T]."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return torch.stack(both, 1)


# -- which tensors are predictions -----------------------------------------------------------------------


def test_what_gets_no_gradient_does_not_count() -> None:
    names = ("cls", "yes")
    x = normal(N, 5)
    blocks = []
    for used in (names, ("cls",)):
        model = seeded(lambda: Heads(names, shared=True).double())
        loss = total(("cls",), {"cls": 1.0})
        kept = {"heads.cls", "trunks.all"}
        settings = {} if used == names else {"outputs": lambda out: out["cls"]}
        optimizer = stepped(TEKFAC, model, loss, x, fisher="exact", **settings)
        assert set(optimizer.curvature) == kept
        blocks.append(dense_block(statistics(optimizer)["trunks.all"]))
    assert_close(blocks[0], blocks[1])


@dataclass
class Coded:
    picture: Tensor
    mean: Tensor
    spread: Tensor
    loss: Tensor | None = None


def test_what_another_prediction_is_made_of_is_not_one_itself() -> None:
    """As in a variational autoencoder, where codes have a term of the loss, too."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread, self.decoder = nn.Linear(5, 2), nn.Linear(5, 2), nn.Linear(2, 5)

        def forward(self, x: Tensor) -> Coded:
            mean, spread = self.mean(x), self.spread(x)
            picture = self.decoder(mean + spread.exp() * 0.5)
            return Coded(picture, mean, spread, picture.square().mean())

    model, x = seeded(lambda: Coder().double()), normal(N, 5)

    def loss(out: Coded) -> Tensor:
        reconstruction = F.binary_cross_entropy_with_logits(out.picture, (x > 0).double())
        return reconstruction + out.mean.square().mean() - out.spread.mean()

    for fisher in ("exact", "empirical"):
        optimizer = stepped(TEKFAC, model, loss, x, fisher=fisher)
        assert optimizer.likelihoods == {"picture": Bernoulli()}
        assert set(optimizer.curvature) == {"mean", "spread", "decoder"}


def test_losses_may_have_backward_passes_of_their_own() -> None:
    names, x = ("cls", "yes"), normal(N, 5)
    model = seeded(lambda: Heads(names, shared=True).double())
    ones = dict.fromkeys(names, 1.0)
    optimizer = TEKFAC.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, fisher="exact")
    out = model(x)
    LOSSES["cls"](out["cls"]).backward(retain_graph=True)
    LOSSES["yes"](out["yes"]).backward()
    optimizer.step()
    assert_blocks(optimizer, model, lambda layer: exact_samples(model, x, layer, ones))


def test_a_prediction_may_be_the_input_of_a_loss_of_several() -> None:
    """A loss that mixes predictions belongs to none of the likelihoods, and is trained all the same."""
    model, x = seeded(lambda: Heads(("cls", "yes"), shared=True).double()), normal(N, 5)
    optimizer = TEKFAC(model, lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        out = model(x)
        loss = (out["cls"].sum(1) * out["yes"].sum(1) - 1).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert set(optimizer.curvature) == set(layers(model))


def test_a_graph_that_is_dropped_is_freed() -> None:
    model, x = seeded(lambda: Heads(("cls", "yes", "box"), shared=True).double()), normal(N, 5)
    optimizer = TEKFAC(model)
    out = model(x)
    assert waiting() == 3
    del out
    gc.collect()
    assert waiting() == 0
    assert optimizer.num_steps == 0


def waiting() -> int:
    """Predictions whose gradients are waited for."""
    return sum(type(own) is Awaited for own in gc.get_objects())


# -- likelihoods by name ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_likelihoods_may_be_set_by_name_and_the_others_are_found(method: type[NaturalGradient]) -> None:
    names = ("cls", "yes", "box")
    model, x = seeded(lambda: Heads(names, shared=True).double()), normal(N, 5)
    ones = dict.fromkeys(names, 1.0)
    settings = {"fisher": "exact", "likelihood": {"box": Gaussian(0.5), "yes": "auto"}}
    optimizer = stepped(method, model, total(names, ones), x, **settings)
    assert_blocks(optimizer, model, lambda layer: exact_samples(model, x, layer, ones))
    assert optimizer.likelihoods["box"] == Gaussian(0.5)


def test_a_name_that_is_not_there_is_refused() -> None:
    model = seeded(lambda: Heads(("cls", "box"), shared=True).double())
    optimizer = TEKFAC(model, likelihood={"boxes": "gaussian"})
    with pytest.raises(ValueError, match=r"names 'boxes', but .* are 'cls', 'box'"):
        model(normal(N, 5))
    assert optimizer.num_steps == 0


def test_a_shape_that_a_likelihood_cannot_read_is_refused_by_the_name_of_the_prediction() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = self.body(x)
            return out[:, :3], out[:, 3]

    model = seeded(lambda: Two().double())
    optimizer = TEKFAC(model, likelihood="categorical")
    out = model(normal(N, 5))
    with pytest.raises(ValueError, match=r"Of the prediction '1': .*outputs of shape \[7\].*likelihood=\{'1'"):
        (F.cross_entropy(out[0], CLASSES) + out[1].square().mean()).backward()
    assert optimizer.num_steps == 0


@pytest.mark.parametrize(("value", "message"), [({}, "Invalid likelihood"), ({"a": "poisson"}, "'poisson'")])
def test_other_settings_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KFAC(nn.Linear(2, 2), likelihood=value)
