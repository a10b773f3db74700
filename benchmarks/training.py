"""A training loop for comparing optimizers, and the small networks they are compared on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass
class Curve:
    """What a run left: after each epoch the mean training loss, the test accuracy and the seconds so far."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def epochs_to(self, accuracy: float) -> int | None:
        """The first epoch (from 1) whose test accuracy is at least this."""
        return next((i for i, value in enumerate(self.accuracy, start=1) if value >= accuracy), None)


@dataclass(frozen=True)
class Data:
    """Training and test images and labels."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def train(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizer],
    data: Data,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
) -> Curve:
    """Train from scratch; the seed fixes the start and the order of the data."""
    torch.manual_seed(seed)
    model = make_model()
    optimizer = make_optimizer(model)
    steps = epochs * (len(data.images) // batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    order = torch.Generator().manual_seed(seed)
    curve, seconds = Curve(), 0.0
    for _ in range(epochs):
        start, total, count = time.perf_counter(), 0.0, 0
        for indices in torch.randperm(len(data.images), generator=order).split(batch_size):
            if len(indices) < batch_size:
                continue
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.images[indices]), data.labels[indices])
            loss.backward()
            optimizer.step()
            scheduler.step()
            total, count = total + loss.item(), count + 1
        seconds += time.perf_counter() - start
        curve.loss.append(total / count)
        curve.accuracy.append(accuracy(model, data.test_images, data.test_labels))
        curve.seconds.append(seconds)
    return curve


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of right predictions, in eval mode."""
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(x).argmax(1) == y).sum())
            for x, y in zip(images.split(500), labels.split(500), strict=True)
        )
    model.train()
    return right / len(images)


def mlp(inputs: int, classes: int) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes)
    )


def cnn(channels: int, classes: int, size: int, width: int = 16) -> nn.Module:
    """Three convolutions with batch norm, two fully connected layers."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(inplace=True),
        nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2 if size < 16 else 4),
        nn.Flatten(),
        nn.Linear(4 * width * (4 if size < 16 else 16), 64),
        nn.ReLU(inplace=True),
        nn.Linear(64, classes),
    )
