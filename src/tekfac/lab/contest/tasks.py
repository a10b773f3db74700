"""The tasks: a network, its batches, a loss to train on and a score on data that were kept back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac.lab import models
from tekfac.lab.contest.text import standard_library, windows
from tekfac.lab.data.batches import Batches
from tekfac.lab.data.images import DataSet, Images
from tekfac.lab.data.loading import load
from tekfac.lab.gpt import GPT

Kept = Literal["tuning", "test"]
"""Two parts of the data that are not trained on: to choose learning rates by, and to report."""

Batch = tuple[Tensor, Tensor]

SPLIT_SEED = 4096
"""Of the one order in which images are divided."""

SCORED_AT_A_TIME = 250


class Training(NamedTuple):
    """A task with a seed of its own.

    Attributes:
        model: to be trained.
        batch: that of a step: inputs, targets.
        loss: of the model's outputs and the targets.
        score: on data that were kept back; less is better.
    """

    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Kept], float]


@dataclass(frozen=True)
class Task:
    """What optimizers compete in.

    Attributes:
        name: for the command line.
        about: in a few words.
        steps: of a run.
        measure: what the score is.
        likelihood: of the model's outputs, for methods that draw labels.
        prepare: makes a training of a seed, from the folder with the image data.
        warmup: share of the steps in which the learning rate rises.
        final: share of the learning rate that is left in the end, after a cosine.
    """

    name: str
    about: str
    steps: int
    measure: str
    prepare: Callable[[int, Path | None], Training]
    likelihood: str = "categorical"
    warmup: float = 0.05
    final: float = 0.1

    def rising(self, step: int, steps: int) -> float:
        """The part of the learning rate, at a step of so many, that a linear start leaves."""
        return min(1.0, (step + 1) / max(1.0, self.warmup * steps))

    def share_of_lr(self, step: int, steps: int) -> float:
        """Of the learning rate, at a step of so many: a linear start, then a cosine."""
        falling = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return self.rising(step, steps) * (self.final + (1 - self.final) * falling)


# -- text ----------------------------------------------------------------------------------------------------


def _gpt(seed: int, folder: Path | None, *, context: int = 128, batch: int = 32) -> Training:
    """The next character, by a small GPT."""
    text = standard_library()
    parts = {"tuning": torch.cat(list(text.tuning)), "test": torch.cat(list(text.test))}
    training = torch.cat(list(text.training))
    torch.manual_seed(seed)
    model = GPT(text.symbols, context=context, width=64, depth=4, heads=4)

    def batch_of(step: int) -> Batch:
        return windows(training, batch, context, generator_of(seed, step))

    def score(kept: Kept) -> float:
        return scored(model, windows(parts[kept], 128, context, generator_of(0, 0)), _of_symbols)

    return Training(model, batch_of, _of_symbols, score)


def _of_symbols(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of every position."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Classifier(nn.Module):
    """Which of some texts a piece is from: embeddings, an encoder, the mean over positions, a head."""

    def __init__(self, symbols: int, classes: int, *, context: int, width: int, depth: int) -> None:
        super().__init__()
        self.symbol, self.position = nn.Embedding(symbols, width), nn.Embedding(context, width)
        block = partial(nn.TransformerEncoderLayer, width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, symbols: Tensor) -> Tensor:
        """[N, T] -> logits [N, classes]."""
        x = self.symbol(symbols) + self.position(torch.arange(symbols.shape[1]).expand_as(symbols))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))  # type: ignore[no-any-return]


def _classifier(seed: int, folder: Path | None, *, context: int = 64, batch: int = 64) -> Training:
    """Which module of the library a piece of source is from."""
    text = standard_library()
    torch.manual_seed(seed)
    model = Classifier(text.symbols, len(text.training), context=context, width=64, depth=2)

    def pieces(part: Kept | None, count: int, generator: torch.Generator) -> Batch:
        sources = text.training if part is None else getattr(text, part)
        labels = torch.randint(len(sources), (count,), generator=generator)
        found = [windows(sources[label], 1, context, generator)[0] for label in labels]
        return torch.cat(found), labels

    def score(kept: Kept) -> float:
        return scored(model, pieces(kept, 2000, generator_of(0, 0)), F.cross_entropy)

    return Training(model, lambda step: pieces(None, batch, generator_of(seed, step)), F.cross_entropy, score)


# -- images --------------------------------------------------------------------------------------------------


def _images(
    seed: int, folder: Path | None, *, data: str, train: int, make: Callable[[], nn.Module], augment: bool
) -> Training:
    """Classes of images; the score is the share of errors, in percent."""
    images, kept_back = _divided(data, folder, train)
    batches = _batches(images, images.train, 128, seed, augment=augment, shuffle=True)
    torch.manual_seed(seed)
    model = make()

    def score(kept: Kept) -> float:
        test = _batches(images, kept_back[kept], SCORED_AT_A_TIME, 0, augment=False, shuffle=False)
        wrong = 0
        with _evaluating(model):
            for inputs, labels in test.epoch(0):
                wrong += int((model(inputs).argmax(1) != labels).sum())
        return 100 * wrong / len(kept_back[kept])

    def batch_of(step: int) -> Batch:
        return batches.batch(*divmod(step, len(batches)))

    return Training(model, batch_of, F.cross_entropy, score)


def _plain_cnn() -> nn.Module:
    """Six convolutions and no norm, with He's initialisation.

    With torch's own, signals fade from layer to layer: AdamW and SGD stay at chance for hundreds of steps, and
    there is no result of theirs to be reached.
    """
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)):
        convolution = nn.Conv2d(before, after, 3, stride, 1)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        layers += [convolution, nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10))


def _half_resnet() -> nn.Module:
    return models.build("resnet20-he", options={"width": 8}, channels=3, classes=10, size=32)


EDGE = 16
"""Of the pictures that are encoded."""


def _autoencoder(seed: int, folder: Path | None, *, batch: int = 128) -> Training:
    """Grey pictures of house numbers through sixteen numbers and back, by ten linear layers."""
    images, kept_back = _divided("svhn", folder, 9000)
    training = _grey(images.train)
    torch.manual_seed(seed)
    widths = (EDGE**2, 256, 128, 64, 32, 16, 32, 64, 128, 256, EDGE**2)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])

    def batch_of(step: int) -> Batch:
        chosen = torch.randint(len(training), (batch,), generator=generator_of(seed, step))
        return training[chosen], training[chosen]

    def score(kept: Kept) -> float:
        pictures = _grey(kept_back[kept])
        return scored(model, (pictures, pictures), F.mse_loss)

    return Training(model, batch_of, F.mse_loss, score)


def _grey(images: Images) -> Tensor:
    """[N, EDGE^2], each picture with mean 0, and deviation 1 over all."""
    grey = F.interpolate(images.pixels.float().mean(1, keepdim=True), (EDGE, EDGE), mode="area").flatten(1)
    grey = grey - grey.mean(dim=1, keepdim=True)
    return grey / grey.std()


def _divided(name: str, folder: Path | None, train: int) -> tuple[DataSet, dict[Kept, Images]]:
    """So many training images, a tenth as many others to tune on, and up to 4,000 to test on."""
    images = load(name, folder, allow_partial=True)
    order = torch.randperm(len(images.train), generator=torch.Generator().manual_seed(SPLIT_SEED))
    wanted = train + train // 10
    if wanted > len(order):
        raise ValueError(f"{name} has {len(order):,} training images here; this task needs {wanted:,}.")
    kept: dict[Kept, Images] = {
        "tuning": images.train.chosen(order[train:wanted]),
        "test": images.test.part(min(4000, len(images.test))),
    }
    return replace(images, train=images.train.chosen(order[:train])), kept


def _batches(data: DataSet, images: Images, size: int, seed: int, *, augment: bool, shuffle: bool) -> Batches:
    return Batches(
        images, mean=data.mean, std=data.std, batch_size=size, seed=seed, augment=augment, shuffle=shuffle
    )


# -- what all need -------------------------------------------------------------------------------------------


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients, and the model as it is used; then as it is trained again."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def scored(model: nn.Module, data: Batch, loss: Callable[[Tensor, Tensor], Tensor]) -> float:
    """The mean loss, some samples at a time."""
    total = 0.0
    with _evaluating(model):
        for inputs, targets in zip(*(torch.split(part, SCORED_AT_A_TIME) for part in data), strict=True):
            total += float(loss(model(inputs), targets)) * len(inputs)
    return total / len(data[0])


def generator_of(seed: int, step: int) -> torch.Generator:
    """That of a step's batch."""
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)


NATS, ERRORS = "loss, nats", "errors, %"

TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("gpt", "a small GPT on source text", 1000, NATS, _gpt),
        Task(
            "resnet",
            "half of He's ResNet20 on 10,000 images of CIFAR-10",
            474,
            ERRORS,
            partial(_images, data="cifar10", train=10_000, make=_half_resnet, augment=True),
            final=0.0,
        ),
        Task(
            "cnn",
            "six convolutions without norms on 9,000 images of SVHN",
            426,
            ERRORS,
            partial(_images, data="svhn", train=9_000, make=_plain_cnn, augment=False),
            final=0.0,
        ),
        Task("classifier", "a text classifier by an encoder", 600, NATS, _classifier),
        Task(
            "autoencoder",
            "ten linear layers on grey pictures of SVHN",
            600,
            "mean squared error",
            _autoencoder,
            likelihood="gaussian",
        ),
    )
}
