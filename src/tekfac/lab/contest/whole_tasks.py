"""Tasks with all data at every step, whose score is the training loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac.common.extras import require
from tekfac.lab.contest.tasks import Batch, Kept, Task, Training, scored
from tekfac.lab.data.digits import read_digits

STEPS = 1000
"""Of a run of a first-order method."""


def _training(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Callable[..., Tensor]) -> Training:
    """On all data at every step, and scored on the same."""
    batch: Batch = inputs, targets

    def score(kept: Kept) -> float:
        return scored(model, batch, loss)

    return Training(model, lambda step: batch, loss, score)


def _layers(widths: Sequence[int], seed: int) -> nn.Sequential:
    """Linear layers with tanh between them, with Glorot's initialisation."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        linear = nn.Linear(before, after)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _of_pixels(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of an image: the sum over its pixels."""
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / len(outputs)


def _autoencoder(seed: int, folder: Path | None) -> Training:
    """Handwritten digits through eight numbers and back."""
    images = read_digits()[0].flatten(1)
    return _training(_layers((64, 128, 64, 32, 8, 32, 64, 128, 64), seed), images, images, _of_pixels)


def _function(seed: int, folder: Path | None) -> Training:
    """Friedman's first function of ten numbers, at 1,000 places, by three linear layers."""
    make = require("sklearn.datasets", "This task").make_friedman1
    inputs, targets = (torch.tensor(own, dtype=torch.float32) for own in make(1000, noise=0.0, random_state=0))
    targets = (targets - targets.mean()) / targets.std()
    return _training(_layers((10, 32, 32, 1), seed), 2 * inputs - 1, targets[:, None], F.mse_loss)


AUTO = "auto"
"""Likelihoods are found from the loss."""

WHOLE: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("digits-codes", "a deep autoencoder on all digits", STEPS, "nats per image", _autoencoder, AUTO),
        Task("function", "a regression on all of 1,000 places", STEPS, "mean squared error", _function, AUTO),
    )
}
"""By name."""
