"""Promise: checkpointed segments are trained and measured as if nothing were checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from dense import every_method
from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, everything, images, train, vectors

LAYERS = {"first", "blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2", "head"}
FISHERS = ("sampled", "empirical", "exact")


def saved(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The function, run again in the backward pass."""
    return checkpoint(function, x, use_reentrant=False)  # type: ignore[no-any-return]


def saved_without_early_stop(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The function, run again to its end in the backward pass."""
    with set_checkpoint_early_stop(False):
        return saved(function, x)


class Net(nn.Module):
    """Two blocks between two layers; `style` says which part of it is checkpointed."""

    def __init__(self, style: str, activation: Callable[[], nn.Module] = nn.Tanh, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.style = style
        self.first = nn.Linear(5, 4)
        self.blocks = nn.Sequential(*(self._block(activation, dropout) for _ in range(2)))
        self.head = nn.Linear(4, 3)
        self.double()

    def _block(self, activation: Callable[[], nn.Module], dropout: float) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 4), activation(), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "everything":
            return saved(self._all, x)
        if self.style == "everything, block by block inside":
            return saved(lambda x: self.head(self._each(torch.tanh(self.first(x)))), x)
        hidden = torch.tanh(self.first(x))
        out: Tensor = self.head(STYLES[self.style](self, hidden))
        return out

    def _all(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(torch.tanh(self.first(x))))
        return out

    def _each(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = saved(block, hidden)
        return hidden

    def _nested(self, hidden: Tensor) -> Tensor:
        """A segment within a segment within a segment."""
        inner = lambda x: saved(self.blocks[1][2:], self.blocks[1][:2](x))  # noqa: E731
        return saved(lambda x: saved(inner, self.blocks[0](x)), hidden)


STYLES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "none": lambda net, hidden: net.blocks(hidden),
    "block by block": Net._each,
    "sequential": lambda net, hidden: checkpoint_sequential(net.blocks, 2, hidden, use_reentrant=False),
    "sequential of single modules": lambda net, hidden: checkpoint_sequential(
        [module for block in net.blocks for module in block], 3, hidden, use_reentrant=False
    ),
    "nested": Net._nested,
    "one block only": lambda net, hidden: net.blocks[1](saved(net.blocks[0], hidden)),
    "without early stop": lambda net, hidden: saved_without_early_stop(net.blocks, hidden),
}
CHECKPOINTED = [
    *(style for style in STYLES if style != "none"),
    "everything",
    "everything, block by block inside",
]

every_style = pytest.mark.parametrize("style", CHECKPOINTED)
every_fisher = pytest.mark.parametrize("fisher", FISHERS)


def trained(method: type[NaturalGradient], model: nn.Module, fisher: Any) -> Any:
    """Parameters and state after four steps, two of which measure."""
    optimizer = method(
        model, lr=0.05, damping=0.1, seed=0, fisher=fisher, interval_growth=None, factors_every=2, basis_every=2
    )
    torch.manual_seed(1)  # for dropout
    train(model, optimizer, vectors(4))
    assert set(optimizer.curvature) == LAYERS
    return {**everything(model, optimizer), "curvature": optimizer.curvature.to_dense()}


@every_style
@every_fisher
def test_a_checkpointed_model_is_trained_and_measured_like_a_plain_one(fisher: Any, style: str) -> None:
    """Bit for bit: the second forward pass computes what the first did."""
    assert_identical(trained(TEKFAC, Net(style), fisher), trained(TEKFAC, Net("none"), fisher))


@every_method
def test_every_method_measures_checkpointed_segments_once(method: type[NaturalGradient]) -> None:
    plain = trained(method, Net("none"), "exact")
    for style in ("nested", "everything, block by block inside"):
        assert_identical(trained(method, Net(style), "exact"), plain)


@pytest.mark.parametrize("style", [style for style in CHECKPOINTED if "single" not in style])
@every_fisher
def test_in_place_activations_inside_a_segment_do_no_harm(fisher: Any, style: str) -> None:
    """Not at its start, though: torch itself refuses a segment that changes its own input."""
    activation = lambda: nn.ReLU(inplace=True)  # noqa: E731
    plain = trained(TEKFAC, Net("none", activation), fisher)
    assert_identical(trained(TEKFAC, Net(style, activation), fisher), plain)


@pytest.mark.parametrize("style", ["block by block", "nested", "sequential", "everything"])
@every_fisher
def test_dropout_inside_a_segment_drops_the_same_units_again(fisher: Any, style: str) -> None:
    """The generator is put back for the second forward pass (preserve_rng_state, the default)."""
    plain = trained(TEKFAC, Net("none", dropout=0.4), fisher)
    assert_identical(trained(TEKFAC, Net(style, dropout=0.4), fisher), plain)


def test_the_global_generator_is_where_it_is_without_the_optimizer() -> None:
    """Measuring runs segments again, more often than the user's backward pass would."""
    states = []
    for watched in (False, True):
        model = Net("nested", dropout=0.4)
        optimizer = TEKFAC(model, seed=0, fisher="exact") if watched else None
        torch.manual_seed(1)
        backward(model, vectors(1)[0])
        states.append(torch.get_rng_state())
        if optimizer is not None:
            optimizer.step()
            assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(*states)


def test_gradients_are_those_of_a_model_without_optimizer() -> None:
    gradients = []
    for watched in (False, True):
        model = Net("nested", lambda: nn.ReLU(inplace=True))
        optimizer = TEKFAC(model, fisher="exact") if watched else None
        backward(model, vectors(1)[0])
        gradients.append([p.grad for p in model.parameters()])
        assert optimizer is None or optimizer.num_steps == 0
    assert_identical(*gradients)


class Convolutional(nn.Module):
    """Convolutions with in-place activations inside and right after the segment."""

    def __init__(self, saving: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.saving = nn.Conv2d(1, 3, 3), saving
        self.body = nn.Sequential(
            nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 2)
        )
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = saved(self.body, hidden) if self.saving else self.body(hidden)
        out: Tensor = self.head(F.relu(hidden, inplace=True).flatten(1))
        return out


@every_fisher
def test_convolutions_in_a_segment_are_measured_alike(fisher: Any) -> None:
    states = []
    for saving in (False, True):
        model = Convolutional(saving)
        optimizer = TEKFAC(
            model, lr=0.05, damping=0.1, seed=0, fisher=fisher, interval_growth=None, factors_every=2
        )
        train(model, optimizer, images(3))
        assert set(optimizer.curvature) == {"first", "body.1", "body.3", "head"}
        states.append(everything(model, optimizer))
    assert_identical(*states)


@every_fisher
def test_micro_batches_of_a_checkpointed_model_are_not_mixed_up(fisher: Any) -> None:
    states = []
    for style in ("none", "nested"):
        model = Net(style)
        optimizer = TEKFAC(model, lr=0.05, damping=0.1, seed=0, fisher=fisher)
        first, second = vectors(2)
        logits = [model(first[0]), model(second[0])]  # both graphs are alive at once
        loss = F.cross_entropy(logits[0], first[1]) + F.cross_entropy(logits[1], second[1])
        (loss / 2).backward()
        optimizer.step()
        states.append(everything(model, optimizer))
    assert_identical(*states)


class Reentrant(nn.Module):
    """The other kind of checkpoint, behind a layer or right at the input."""

    def __init__(self, behind_a_layer: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5) if behind_a_layer else nn.Identity()
        self.body, self.head = nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.body, self.first(x), use_reentrant=True))
        return out


@every_fisher
@pytest.mark.parametrize("behind_a_layer", [True, False], ids=["behind a layer", "at the input"])
def test_the_reentrant_kind_is_refused_with_the_kind_that_works(behind_a_layer: bool, fisher: Any) -> None:
    """Otherwise the layers inside would silently stay without curvature."""
    model = Reentrant(behind_a_layer)
    optimizer = TEKFAC(model, fisher=fisher)
    x, y = vectors(1)[0]
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        train(model, optimizer, [(x.requires_grad_(), y)])


def test_a_refused_checkpoint_leaves_the_optimizer_as_it_was() -> None:
    model = Reentrant(behind_a_layer=True)
    optimizer = TEKFAC(model, fisher="exact")
    before = everything(model, optimizer)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        train(model, optimizer, vectors(1))
    optimizer.zero_grad()
    assert_identical(everything(model, optimizer), before)
