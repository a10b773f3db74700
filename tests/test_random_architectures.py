"""Promise: any network is trained, or refused with an error that says why.

Random networks of layers of all kinds, in odd sizes, with residual connections, shared modules and frozen
parameters, down to a batch of one. A network is a list of words; one that fails is printed as such.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, everything, maker, through_a_file

pytestmark = pytest.mark.slow

NETWORKS, STEPS = 560, 5
SEEN_IN_A_STEP = 1e-3
"""Gradients that are smaller may move a parameter by less than its last bit."""


# -- a network in words ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A module and how it stands in its network.

    Attributes:
        kind: the name of what makes it, in a table below.
        width: of what it gives, in features or channels; that of its input where it is used in another way.
        number: what else there is to choose: a kernel, groups, heads.
        bias: whether it has one.
        frozen: which of its parameters are not trained: none, all, the weights or the biases.
        use: how it is used: once, beside its input, or twice in a row (where its sizes admit that).
    """

    kind: str
    width: int
    number: int
    bias: bool
    frozen: str
    use: str


@dataclass(frozen=True)
class Architecture:
    """What a network sees, its parts in their order, its loss, and the step that it is trained with."""

    sees: str
    samples: int
    size: int
    channels: int
    parts: tuple[Part, ...]
    loss: str
    step: str
    seed: int


Maker = Callable[[int, Part], nn.Module]
"""A module of so many features or channels."""


def divisor(number: int, *of: int) -> int:
    """The largest one up to a number."""
    return max(k for k in range(1, number + 1) if math.gcd(k, *of) == k)


def conv(module: Any, depthwise: bool = False) -> Maker:
    def make(d: int, part: Part) -> nn.Module:
        width = max(1, part.width // d) * d if depthwise else part.width
        groups = d if depthwise else divisor(part.number, d, width)
        size, stride = part.number, 2 if part.number == 2 else 1
        made: nn.Module = module(
            d, width, size, padding=size // 2, groups=groups, bias=part.bias, stride=stride
        )
        return made

    return make


def norm(module: Any) -> Maker:
    return lambda d, part: module(d)


class First(nn.Module):
    """A module that gives several values, of which the first goes on."""

    def __init__(self, module: nn.Module, inputs: int = 1) -> None:
        super().__init__()
        self.module, self.inputs = module, inputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(*[x] * self.inputs)[0]
        return out


def recurrent(module: Any) -> Maker:
    return lambda d, part: First(
        module(
            d,
            part.width,
            num_layers=part.number % 2 + 1,
            bias=part.bias,
            bidirectional=part.use == "once",
            batch_first=True,
        )
    )


def attention(d: int, part: Part) -> nn.Module:
    heads = divisor(part.number, d)
    return First(nn.MultiheadAttention(d, heads, bias=part.bias, batch_first=True), inputs=3)


def encoder(d: int, part: Part) -> nn.Module:
    heads = divisor(part.number, d)
    return nn.TransformerEncoderLayer(d, heads, part.width, dropout=0.0, bias=part.bias, batch_first=True)


VECTORS: dict[str, Maker] = {
    "linear": lambda d, part: nn.Linear(d, part.width, bias=part.bias),
    "layer norm": lambda d, part: nn.LayerNorm(d, bias=part.bias),
    "RMS norm": norm(nn.RMSNorm),
    "PReLU": lambda d, part: nn.PReLU(),
}
OF_VECTORS: dict[str, Maker] = {**VECTORS, "batch norm": norm(nn.BatchNorm1d)}
OF_SEQUENCES: dict[str, Maker] = {
    **VECTORS,
    "attention": attention,
    "encoder": encoder,
    "RNN": recurrent(nn.RNN),
    "LSTM": recurrent(nn.LSTM),
    "GRU": recurrent(nn.GRU),
}
OF_SIGNALS: dict[str, Maker] = {
    "conv": conv(nn.Conv1d),
    "depthwise": conv(nn.Conv1d, depthwise=True),
    "transposed": conv(nn.ConvTranspose1d),
    "batch norm": norm(nn.BatchNorm1d),
    "group norm": lambda d, part: nn.GroupNorm(divisor(part.number, d), d),
    "instance norm": lambda d, part: nn.InstanceNorm1d(d, affine=part.bias),
}
OF_IMAGES: dict[str, Maker] = {
    "conv": conv(nn.Conv2d),
    "depthwise": conv(nn.Conv2d, depthwise=True),
    "transposed": conv(nn.ConvTranspose2d),
    "batch norm": norm(nn.BatchNorm2d),
    "group norm": OF_SIGNALS["group norm"],
    "instance norm": lambda d, part: nn.InstanceNorm2d(d, affine=part.bias),
}
SEEN: dict[str, dict[str, Maker]] = {
    "vectors": OF_VECTORS,
    "sequences": OF_SEQUENCES,
    "words": OF_SEQUENCES,
    "signals": OF_SIGNALS,
    "images": OF_IMAGES,
}
WORDS = 11
"""In the vocabulary."""


KINDS = [(sees, kind) for sees, kinds in SEEN.items() for kind in kinds]


def architecture(number: int) -> Architecture:
    """One of many; the first parts of those that follow each other are of all kinds in turn."""
    draw = random.Random(number)
    sees, first = KINDS[number % len(KINDS)]

    def part(kind: str) -> Part:
        return Part(
            kind=kind,
            width=draw.randint(1, 7),
            number=draw.randint(1, 3),
            bias=draw.random() < 0.5,
            frozen=draw.choice(["none", "none", "none", "all", "weights", "biases"]),
            use=draw.choice(["once", "once", "beside its input", "twice"]),
        )

    return Architecture(
        sees=sees,
        samples=draw.choice([1, 2, 5, 8]),
        size=draw.randint(1, 5),
        channels=draw.randint(1, 6),
        parts=tuple(part(kind) for kind in [first, *draw.choices(list(SEEN[sees]), k=draw.randint(0, 2))]),
        loss=draw.choice(["cross-entropy", "squares", "binary", "at every position"]),
        step=draw.choice(["adaptive", "natural"]),
        seed=draw.randint(0, 99),
    )


class Network(nn.Module):
    """As the words say: every part is followed by tanh, and the mean over positions by a linear head."""

    def __init__(self, words: Architecture) -> None:
        super().__init__()
        self.words = words
        self.embedding = nn.Embedding(WORDS, words.channels) if words.sees == "words" else nn.Identity()
        self.parts = nn.ModuleList()
        x = self.embedding(words_or_numbers(words, 0))
        with torch.no_grad():
            for part in words.parts:
                width = part.width if part.use == "once" else self._features(x)
                module = SEEN[words.sees][part.kind](self._features(x), replace(part, width=width))
                freeze(module, part.frozen)
                self.parts.append(module)
                x = self._through(module, part, x)
        self.head = nn.Linear(self._features(x), 3)

    def _features(self, x: Tensor) -> int:
        return x.shape[1 if self.words.sees in ("signals", "images") else -1]

    def _through(self, module: nn.Module, part: Part, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(module(x))
        if out.shape != x.shape or part.use == "once":
            return out
        return x + out if part.use == "beside its input" else torch.tanh(module(out))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for module, part in zip(self.parts, self.words.parts, strict=True):
            x = self._through(module, part, x)
        if self.words.sees in ("signals", "images"):
            x = x.flatten(2).transpose(1, 2)
        if self.words.loss != "at every position" and x.dim() > 2:
            x = x.mean(1)
        out: Tensor = self.head(x)
        return out


def freeze(module: nn.Module, which: str) -> None:
    for name, parameter in module.named_parameters():
        is_bias = "bias" in name
        if which == "all" or which == ("biases" if is_bias else "weights"):
            parameter.requires_grad_(False)


def words_or_numbers(words: Architecture, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * words.seed + step)
    n, size, channels = words.samples, words.size, words.channels
    if words.sees == "words":
        return torch.randint(WORDS, (n, size), generator=generator)
    shapes = {
        "vectors": (n, channels),
        "sequences": (n, size, channels),
        "signals": (n, channels, size),
        "images": (n, channels, size, size + 1),
    }
    return torch.randn(shapes[words.sees], generator=generator)


def loss_of(words: Architecture, out: Tensor) -> Tensor:
    rows = out.flatten(0, -2)
    labels = torch.arange(len(rows)) % 3
    if words.loss == "squares":
        return F.mse_loss(rows, F.one_hot(labels, 3).float())
    if words.loss == "binary":
        return F.binary_cross_entropy_with_logits(rows, F.one_hot(labels, 3).float())
    return F.cross_entropy(rows, labels)


# -- and its training ------------------------------------------------------------------------------------


def built(words: Architecture) -> Network | None:
    """The network; None where torch itself cannot make it, or run it, or where nothing is left of its input."""
    torch.manual_seed(words.seed)
    try:
        model = Network(words)
        loss = loss_of(words, model(words_or_numbers(words, 0)))
        loss.backward()
    except (ValueError, RuntimeError):
        return None
    model.zero_grad()
    return model if bool(loss.isfinite()) else None


def trained(model: Network, optimizer: NaturalGradient, steps: Sequence[int]) -> list[float]:
    """The losses before steps; random numbers of the model depend on the step alone."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of(model.words, model(words_or_numbers(model.words, step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def resumed(words: Architecture, make: Callable[[nn.Module], NaturalGradient], first: Any, left: int) -> Any:
    """Everything at the end of a run that takes the last steps, from a saved state of another one."""
    model = built(words)
    assert model is not None
    optimizer = make(model)
    saved = through_a_file(first)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    trained(model, optimizer, range(STEPS - left, STEPS))
    return everything(model, optimizer)


def train_or_refuse(words: Architecture, make: Callable[[nn.Module], NaturalGradient]) -> str:
    """What becomes of a network: "trained", "refused: " and why, or "none" where there is none."""
    model = built(words)
    if model is None:
        return "none"
    before = {name: own.detach().clone() for name, own in model.named_parameters()}
    try:
        optimizer = make(model)
        losses = trained(model, optimizer, range(STEPS - 2))
    except (ValueError, TypeError) as error:
        return f"refused: {error}"
    is_resumed = words.seed % 8 == 0
    halfway = everything(model, optimizer) if is_resumed else None
    losses += trained(model, optimizer, range(STEPS - 2, STEPS))
    assert all(map(math.isfinite, losses))
    assert (optimizer.num_steps, optimizer.skipped_steps) == (STEPS, 0)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        moved = not torch.equal(parameter, before[name])
        assert not moved or parameter.requires_grad, name
        assert moved or parameter.grad is None or parameter.grad.abs().max() < SEEN_IN_A_STEP, name
    if is_resumed:
        assert_identical(resumed(words, make, halfway, 2), everything(model, optimizer))
    return "trained"


@pytest.mark.parametrize("method", METHODS)
def test_it_is_trained_or_refused(method: type[NaturalGradient]) -> None:
    """By every method the same networks; every layer is measured at every second step."""
    clocks: dict[str, Any] = {"interval_growth": None, "factors_every": 2, "basis_every": 2}
    found: dict[Architecture, str] = {}
    for words in map(architecture, range(NETWORKS)):
        is_measured = words.step == "natural" and method.method.rescaling.measured
        own = {**clocks, "rescaling_every": 2} if is_measured else clocks
        make = partial(maker(method, words.step), lr=1e-3, seed=0, **own)
        try:
            found[words] = train_or_refuse(words, make)
        except Exception as error:
            error.add_note(f"This network: {words}")
            raise
    others = {words: what for words, what in found.items() if what not in ("trained", "none")}
    assert all(len(what) > len("refused: ") + 20 for what in others.values()), others
    assert list(found.values()).count("trained") >= 500


def test_the_networks_are_of_all_kinds() -> None:
    drawn = [architecture(number) for number in range(NETWORKS)]
    assert {(words.sees, part.kind) for words in drawn for part in words.parts} == set(KINDS)
    assert len(set(drawn)) == NETWORKS
