"""What `tekfac fisher` looks at when it is given no network: a small CNN, trained on handwritten digits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tekfac.lab.data.digits import read_digits
from tekfac.optimizers import TEKFAC


def network() -> nn.Module:
    """Three convolutions and two fully connected layers, each of a size that its exact block can be formed."""
    layers = {
        "conv1": nn.Conv2d(1, 8, 3, padding=1),
        "norm1": nn.BatchNorm2d(8),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(8, 16, 3, stride=2, padding=1),
        "norm2": nn.BatchNorm2d(16),
        "relu2": nn.ReLU(),
        "conv3": nn.Conv2d(16, 16, 3, stride=2, padding=1),
        "norm3": nn.BatchNorm2d(16),
        "relu3": nn.ReLU(),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(64, 20),
        "relu4": nn.ReLU(),
        "fc2": nn.Linear(20, 10),
    }
    return nn.Sequential(OrderedDict(layers))


def training(model: nn.Module, epochs: int, seed: int) -> Iterator[tuple[int, float]]:
    """Train; the number of epochs done and the share of right answers, from the untrained network on."""
    images, labels = read_digits(next(model.parameters()).dtype)
    order = torch.Generator().manual_seed(seed)
    optimizer = TEKFAC.natural(
        model,
        lr=1e-3,
        kl_clip=1e-3,
        factors_every=10,
        basis_every=10,
        rescaling_every=10,
        seed=seed,
        process_group="alone",  # each process trains it by itself, on the same batches
    )
    for epoch in range(epochs + 1):
        if epoch:
            model.train()
            for batch in torch.split(torch.randperm(len(images), generator=order), 64):
                optimizer.zero_grad()
                F.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        model.eval()
        with torch.no_grad():
            yield epoch, float((model(images).argmax(1) == labels).double().mean())
