"""Untuned, at the default settings, a run ends no worse than Adam's at its own: what new users try first.

Each of these diverged, or stood still for ever, with the natural gradient's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import mean

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac import TEKFAC

pytestmark = pytest.mark.slow

Loss = Callable[[], Tensor]
Optimizers = Callable[..., torch.optim.Optimizer]


def adam(model: nn.Module, likelihood: str = "") -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def ours(model: nn.Module, likelihood: str = "categorical") -> torch.optim.Optimizer:
    return TEKFAC(model, seed=0, likelihood=likelihood)


def ended(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Iterator[Loss], steps: int) -> float:
    """The mean loss of the last tenth of the steps."""
    found = []
    for _, loss in zip(range(steps), losses, strict=False):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        found.append(value.item())
    return mean(found[-steps // 10 :])


def digits() -> tuple[Tensor, Tensor]:
    sklearn = pytest.importorskip("sklearn.datasets")
    images, labels = sklearn.load_digits(return_X_y=True)
    return torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels)


def batches(*data: Tensor, size: int = 64) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(len(data[0]), (size,), generator=generator)
        yield tuple(part[chosen] for part in data)


def classified(model: nn.Module, data: tuple[Tensor, Tensor]) -> Iterator[Loss]:
    for x, y in batches(*data):
        yield lambda x=x, y=y: F.cross_entropy(model(x), y)  # type: ignore[misc]


# -- the cases: a model, its losses, steps -----------------------------------------------------------------


def unscaled_targets() -> tuple[nn.Module, Iterator[Loss], int]:
    """y = 10 x + 14, by a small network."""
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(256, 1)

    def losses() -> Iterator[Loss]:
        for inputs, targets in batches(x, 10 * x + 14):
            yield lambda x=inputs, y=targets: F.mse_loss(model(x), y)  # type: ignore[misc]

    return model, losses(), 400


def deep_relu() -> tuple[nn.Module, Iterator[Loss], int]:
    """Nine layers of width 64, where factors have large null spaces."""
    widths = (64, *[64] * 8, 10)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    return model, classified(model, digits()), 300


class Adapted(nn.Module):
    """A frozen layer with a small detour of low rank, which starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


def adapters() -> tuple[nn.Module, Iterator[Loss], int]:
    model = nn.Sequential(Adapted(nn.Linear(64, 64)), nn.ReLU(), Adapted(nn.Linear(64, 10)))
    return model, classified(model, digits()), 300


class Cells(nn.Module):
    """A cell, step by step over the rows of an image: it has no block."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 32), x.new_zeros(len(x), 32)
        for row in x.unflatten(1, (8, 8)).unbind(1):
            state = self.cell(row, state)
        out: Tensor = self.head(state[0])
        return out


def lstm_cell() -> tuple[nn.Module, Iterator[Loss], int]:
    model = Cells()
    return model, classified(model, digits()), 300


class Bag(nn.Module):
    """The mean of some embeddings, which has no block, then a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        brightest = x.topk(12).indices
        out: Tensor = self.head(torch.relu(self.bag(brightest)))
        return out


def embedding_bag() -> tuple[nn.Module, Iterator[Loss], int]:
    model = Bag()
    return model, classified(model, digits()), 300


class Scaled(nn.Module):
    """A layer of the user's own, with weights that no module of a known type has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(64, 48) / 8), nn.Parameter(torch.zeros(48))
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(x @ self.weight + self.shift))
        return out


def own_layer() -> tuple[nn.Module, Iterator[Loss], int]:
    model = Scaled()
    return model, classified(model, digits()), 300


def tiny_bert() -> tuple[nn.Module, Iterator[Loss], int]:
    """Hugging Face's own initialisation, whose weights are small: everything is nearly zero at first."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=17,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=10,
    )
    model = transformers.BertForSequenceClassification(config)

    def losses() -> Iterator[Loss]:
        images, labels = digits()
        for x, y in batches((images * 16).long(), labels):
            yield lambda x=x, y=y: F.cross_entropy(model(x).logits, y)  # type: ignore[misc]

    return model, losses(), 300


CASES = (unscaled_targets, deep_relu, adapters, lstm_cell, embedding_bag, own_layer, tiny_bert)


@pytest.mark.parametrize("case", CASES)
def test_it_ends_at_or_below_adams_loss(case: Callable[[], tuple[nn.Module, Iterator[Loss], int]]) -> None:
    ends = []
    likelihood = "gaussian" if case is unscaled_targets else "categorical"
    for make in (adam, ours):
        torch.manual_seed(0)
        model, losses, steps = case()
        ends.append(ended(model, make(model, likelihood), losses, steps))
    assert ends[1] <= ends[0], f"Adam {ends[0]:.4f}, TEKFAC {ends[1]:.4f}"


def distance(make: Callable[[nn.Module], torch.optim.Optimizer], seed: int) -> float:
    """Noise into points on a circle, against a network that tells them from real ones: how far they end off."""
    torch.manual_seed(seed)
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    made_by, judged_by = (make(model) for model in (maker, judge))
    for _ in range(600):
        angles = 2 * torch.pi * torch.rand(64)
        real, fake = torch.stack([angles.cos(), angles.sin()], 1), maker(torch.randn(64, 4))
        judged_by.zero_grad()
        logits = judge(torch.cat([real, fake.detach()]))
        labels = torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])
        F.binary_cross_entropy_with_logits(logits, labels).backward()
        judged_by.step()
        made_by.zero_grad()
        verdict = judge(maker(torch.randn(64, 4)))
        F.binary_cross_entropy_with_logits(verdict, torch.ones(64, 1)).backward()
        made_by.step()
    with torch.no_grad():
        return float((maker(torch.randn(1000, 4)).norm(dim=1) - 1).abs().mean())


@pytest.mark.parametrize("seed", range(3))
def test_a_pair_of_adversaries_settles_with_the_momentum_that_they_usually_have(seed: int) -> None:
    """With more of it they chase each other round and round, by Adam or by TEKFAC."""
    usual = distance(lambda model: torch.optim.Adam(model.parameters(), betas=(0.5, 0.999)), seed)
    found = distance(lambda model: TEKFAC(model, momentum=0.5, likelihood="bernoulli", seed=0), seed)
    assert found <= 0.5 * min(usual, distance(adam, seed))


def test_a_pair_of_adversaries_stays_alive_at_the_default_momentum() -> None:
    """Each of them diverged with the natural gradient's defaults: NaN."""
    assert distance(lambda model: ours(model, "bernoulli"), 0) < 5
