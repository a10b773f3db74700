"""Promise: whatever the loss, TEKFAC as it comes ends no higher than Adam with the same learning rate.

Nothing is told of any of them. Those that have a likelihood are known by it, and the others by none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import mean
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac import TEKFAC
from tekfac.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Unknown

CLASSES = Categorical(class_dim=1)
SQUARES = Gaussian(0.5, masked=True)


class Task(NamedTuple):
    """A model, its loss on the next batch, the likelihoods that it has, and how many steps are taken."""

    model: nn.Module
    loss: Callable[[], Tensor]
    found: dict[str, Likelihood]
    steps: int = 100


def network(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


class Digits:
    """Batches of scikit-learn's digits, as vectors [N, 64] with labels [N]."""

    def __init__(self) -> None:
        datasets = pytest.importorskip("sklearn.datasets")
        images, labels = datasets.load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)

    def batch(self, size: int = 64) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.images), (size,))
        return self.images[chosen], self.labels[chosen]

    def of(self, labels: Tensor) -> Tensor:
        """An image of each label."""
        return torch.stack([self.images[self.labels == label][int(torch.randint(170, ()))] for label in labels])


DIGITS = Digits()


def disturbed(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.3) + 0.1 * torch.randn_like(x)


# -- contrastive losses ------------------------------------------------------------------------------------


def of_two_views(first: Tensor, second: Tensor) -> Tensor:
    """SimCLR's: each view is to know the other one among all."""
    z = F.normalize(torch.cat([first, second]), dim=1)
    alike = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(alike, torch.arange(len(z)).roll(len(first)))


def views_in_two_calls() -> Task:
    model = network(64, 64, 16)

    def loss() -> Tensor:
        x, _ = DIGITS.batch()
        return of_two_views(model(disturbed(x)), model(disturbed(x)))

    return Task(model, loss, {"": Unknown()}, steps=60)


def views_in_one_call() -> Task:
    model = network(64, 64, 16)

    def loss() -> Tensor:
        x, _ = DIGITS.batch()
        return of_two_views(*model(torch.cat([disturbed(x), disturbed(x)])).chunk(2))

    return Task(model, loss, {"": Unknown()}, steps=60)


class Towers(nn.Module):
    """Images and labels into one space, and the temperature that their products are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.label = network(64, 64, 16), nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16))
        self.sharpness = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = (F.normalize(tower, dim=1) for tower in (self.image(images), self.label(labels)))
        return *both, self.sharpness.exp()


def two_towers() -> Task:
    model = Towers()

    def loss() -> Tensor:
        a, b, sharpness = model(*DIGITS.batch(32))
        alike, pairs = sharpness * a @ b.T, torch.arange(32)
        return (F.cross_entropy(alike, pairs) + F.cross_entropy(alike.T, pairs)) / 2

    return Task(model, loss, {"0": Unknown(), "1": Unknown()}, steps=60)


def triplets() -> Task:
    model = network(64, 64, 16)

    def loss() -> Tensor:
        labels = torch.randint(10, (24,))
        others = (labels + torch.randint(1, 10, (24,))) % 10
        return F.triplet_margin_loss(*(model(DIGITS.of(own)) for own in (labels, labels, others)))

    return Task(model, loss, {"": Unknown()}, steps=60)


# -- sequences, equations ----------------------------------------------------------------------------------


class Reader(nn.Module):
    """Rows of two digits [N, 8, T] -> log-probabilities of what stands there [T, N, C], as CTC wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 32, 3, padding=1)
        self.recurrent, self.head = nn.GRU(32, 32, batch_first=True), nn.Linear(32, 11)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.recurrent(torch.relu(self.convolution(x)).mT)
        return self.head(out).log_softmax(-1).transpose(0, 1)  # type: ignore[no-any-return]


def transcription() -> Task:
    model = Reader()

    def loss() -> Tensor:
        (x, y), (x2, y2) = DIGITS.batch(24), DIGITS.batch(24)
        pairs = torch.cat([x.view(-1, 8, 8), x2.view(-1, 8, 8)], 2)
        lengths = torch.full((24,), 16), torch.full((24,), 2)
        return F.ctc_loss(model(pairs), torch.stack([y, y2], 1) + 1, *lengths)

    return Task(model, loss, {"": Unknown()}, steps=150)


def physics() -> Task:
    """u'' = f with u = 0 at both ends: the loss is made of derivatives by the inputs."""
    model = network(1, 32, 32, 1, activation=nn.Tanh)

    def derivative(u: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(u.sum(), x, create_graph=True)[0]

    def loss() -> Tensor:
        x = (2 * torch.rand(64, 1)).requires_grad_()
        u = x * (2 - x) * model(x)
        return F.mse_loss(derivative(derivative(u, x), x), -(math.pi**2) * (math.pi * x.detach()).sin())

    return Task(model, loss, {"": Unknown()}, steps=150)


# -- distributions -----------------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    """Logits of pixels [N, 64], and the codes' means and log-variances [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.spread = network(64, 64, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.decoder = network(4, 64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = torch.relu(self.encoder(x))
        mean, spread = self.mean(features), self.spread(features)
        return self.decoder(mean + (spread / 2).exp() * torch.randn_like(mean)), mean, spread


def variational() -> Task:
    model = Autoencoder()

    def loss() -> Tensor:
        x, _ = DIGITS.batch()
        pixels, mean_, spread = model(x)
        misfit = F.binary_cross_entropy_with_logits(pixels, x, reduction="sum")
        return (misfit - 0.5 * (1 + spread - mean_.square() - spread.exp()).sum()) / len(x)

    return Task(model, loss, {"0": Bernoulli()}, steps=300)


class Mixture(nn.Module):
    """Weights, means and log-widths of five Gaussians [N, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network(1, 32, 32, activation=nn.Tanh)
        self.weight, self.mean, self.width = (nn.Linear(32, 5) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = torch.tanh(self.body(x))
        return {name: getattr(self, name)(features) for name in ("weight", "mean", "width")}


def mixture_density() -> Task:
    model = Mixture()

    def loss() -> Tensor:
        y = torch.rand(128, 1)
        out = model(y + 0.3 * (2 * math.pi * y).sin() + 0.05 * torch.randn_like(y))
        squares = ((y - out["mean"]) / out["width"].exp()).square()
        return -(out["weight"].log_softmax(1) - out["width"] - squares / 2).logsumexp(1).mean()

    return Task(model, loss, dict.fromkeys(("weight", "mean", "width"), Unknown()), steps=200)


# -- classes, in other ways --------------------------------------------------------------------------------


LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of logits, images and labels."""


def of_digits(loss_of: LossOf, found: Likelihood, outputs: int = 10) -> Task:
    model = network(64, 32, outputs)

    def loss() -> Tensor:
        x, y = DIGITS.batch()
        return loss_of(model(x), x, y)

    return Task(model, loss, {"": found})


def distillation() -> Task:
    teacher = network(64, 10)
    teacher[0].weight.data *= 8

    def loss_of(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = (teacher(x) / 2).softmax(1)
        return 2 * F.kl_div((z / 2).log_softmax(1), soft, reduction="batchmean") + F.cross_entropy(
            z, soft.argmax(1)
        )

    return of_digits(loss_of, Unknown())


def soft_labels() -> Task:
    def loss_of(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.kl_div(z.log_softmax(1), 0.9 * F.one_hot(y, 10) + 0.01, reduction="batchmean")

    return of_digits(loss_of, CLASSES)


def ordinal() -> Task:
    def loss_of(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(z, (y[:, None] > torch.arange(9)).float())

    return of_digits(loss_of, Bernoulli(), outputs=9)


def margins() -> Task:
    return of_digits(lambda z, x, y: F.multi_margin_loss(z, y), Unknown())


def focal() -> Task:
    def loss_of(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(z, y, reduction="none")
        return ((1 - (-each).exp()).square() * each).mean()

    return of_digits(loss_of, Unknown())


# -- the comparison ----------------------------------------------------------------------------------------

TASKS: tuple[Callable[[], Task], ...] = (
    *(views_in_two_calls, views_in_one_call, two_towers, triplets),
    *(transcription, physics, variational, mixture_density),
    *(distillation, soft_labels, ordinal, margins, focal),
)

RATE = 3e-3


def end(start: Callable[[], Task], make: Callable[[nn.Module], torch.optim.Optimizer], seed: int) -> float:
    """The mean loss of the last tenth of the steps."""
    torch.manual_seed(seed)
    task = start()
    optimizer = make(task.model)
    losses = []
    for _ in range(task.steps):
        optimizer.zero_grad()
        loss = task.loss()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if isinstance(optimizer, TEKFAC):
        assert optimizer.likelihoods == task.found
        assert set(optimizer.curvature) == set(optimizer._layers)
    return mean(losses[-task.steps // 10 :])


def ends(start: Callable[[], Task], seed: int) -> tuple[float, float]:
    """Of TEKFAC and of Adam."""
    ours = end(start, lambda model: TEKFAC(model, lr=RATE), seed)
    return ours, end(start, lambda model: torch.optim.Adam(model.parameters(), lr=RATE), seed)


@pytest.mark.parametrize("start", TASKS)
def test_it_ends_at_or_below_adam_with_the_same_learning_rate(start: Callable[[], Task]) -> None:
    ours, adams = ends(start, 0)
    assert ours <= adams


@pytest.mark.slow
@pytest.mark.parametrize("start", TASKS)
def test_so_it_does_over_seeds(start: Callable[[], Task]) -> None:
    ours, adams = (mean(own) for own in zip(*(ends(start, seed) for seed in range(1, 5)), strict=True))
    assert ours <= adams
