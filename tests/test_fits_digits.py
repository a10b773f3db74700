"""Promise: each of the four methods fits a real problem, with a CNN and with an MLP."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dense import METHODS
from tekfac.optim.natural_gradient import NaturalGradient


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def digits() -> tuple[Tensor, Tensor]:
    raw = load_digits()
    images, labels = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16, torch.tensor(raw.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


@pytest.mark.parametrize("make_model", [cnn, mlp])
@pytest.mark.parametrize("method", METHODS)
def test_digits_are_learned_in_six_epochs(method: type[NaturalGradient], make_model: type[nn.Module]) -> None:
    images, labels = digits()
    train, test = slice(360, None), slice(0, 360)
    torch.manual_seed(0)
    model = make_model()
    optimizer = method.natural(model, lr=3e-3, kl_clip=1e-3, factors_every=10, basis_every=10)
    order = torch.Generator().manual_seed(0)
    for _ in range(6):
        for batch in torch.randperm(len(images) - 360, generator=order).split(64):
            optimizer.zero_grad()
            cross_entropy(model(images[train][batch]), labels[train][batch]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).double().mean()
    assert optimizer.skipped_steps == 0
    assert accuracy > 0.93
