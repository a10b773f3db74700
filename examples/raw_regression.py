"""A regression on targets as they come, from 25 to 346: nothing is scaled but the optimizer's own steps.

A network learns scikit-learn's diabetes data by its mean squared error, which starts at about 30,000. That the
loss is a regression's is found from it.

Run: python examples/raw_regression.py (eight seconds)
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from beside_adam import Comparison, Make, compare

STEPS, BATCH = 500, 64


def patients() -> tuple[Tensor, Tensor]:
    """What is known of 442 patients [N, 10], and how their disease went on in a year [N, 1]."""
    inputs, targets = load_diabetes(return_X_y=True)
    inputs, targets = (torch.tensor(own, dtype=torch.float32) for own in (inputs, targets))
    return inputs / inputs.std(0), targets[:, None]


def train(make: Make, seed: int) -> float:
    """The mean squared error over all patients after the training."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = make(model)
    inputs, targets = patients()
    for _ in range(STEPS):
        chosen = torch.randint(len(inputs), (BATCH,))
        optimizer.zero_grad()
        mse_loss(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        return mse_loss(model(inputs), targets).item()


def main() -> Comparison:
    """Train with TEKFAC and with Adam, and print what came out."""
    return compare(train, f"the mean squared error after {STEPS} steps")


if __name__ == "__main__":
    main()
