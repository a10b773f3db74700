"""A model under torch.compile. Nothing changes in the loop.

A fully connected network with layer norms learns scikit-learn's digits. On the steps that measure curvature it
runs as if it were not compiled; on all others the compiled graph runs, whole (`fullgraph=True`). Whether the
model is compiled before or after the optimizer is made does not matter, nor which of the two the optimizer is
given. Checkpoints are those of the model itself, so that they can be loaded with and without a compiler.

Run: python examples/compiled_digits.py (ten seconds, most of them for the compiler)
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tekfac import TEKFAC

STEPS, BATCH = 65, 128

# Both are tuned by the loss that is printed: SGD over lr = 0.003, 0.01, 0.03, 0.1, 0.3 and 1; TEKFAC over
# lr = 0.001, 0.003, 0.01, 0.03 and 0.1.
OPTIMIZERS = {
    "TEKFAC": lambda model: TEKFAC(model, lr=0.003),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
}


class Run(NamedTuple):
    """A model, the compiled form of it, which is called, and the optimizer."""

    model: nn.Module
    compiled: nn.Module
    optimizer: torch.optim.Optimizer


def digits() -> tuple[Tensor, Tensor]:
    """All 1797 images as vectors [N, 64], and their labels."""
    raw = load_digits()
    return torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)


def start(name: str, backend: str = "inductor") -> Run:
    """An untrained network, compiled, with its optimizer; the backend "eager" leaves it as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()),
        *(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()),
        nn.Linear(64, 10),
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    return Run(model, compiled, OPTIMIZERS[name](model))


def train(run: Run, steps: range) -> list[float]:
    """Take these steps; which images a step sees depends on its number alone. Gives their losses."""
    images, labels = digits()
    losses = []
    for step in steps:
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))[:BATCH]
        run.optimizer.zero_grad()
        loss = cross_entropy(run.compiled(images[chosen]), labels[chosen])
        loss.backward()
        run.optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def loss_of(run: Run) -> float:
    """Cross-entropy of all images."""
    images, labels = digits()
    return float(cross_entropy(run.model(images), labels))


def main(backend: str = "inductor") -> tuple[Run, Run, Run]:
    """Train with both, resume TEKFAC, and say what came out. Gives the three runs."""
    sgd = start("SGD", backend)
    train(sgd, range(STEPS))
    tekfac = start("TEKFAC", backend)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        train(tekfac, range(STEPS // 2))
        torch.save({"model": tekfac.model.state_dict(), "optimizer": tekfac.optimizer.state_dict()}, checkpoint)
        train(tekfac, range(STEPS // 2, STEPS))
        resumed = start("TEKFAC", backend)
        states = torch.load(checkpoint, weights_only=True)
        resumed.model.load_state_dict(states["model"])
        resumed.optimizer.load_state_dict(states["optimizer"])
        train(resumed, range(STEPS // 2, STEPS))
    pairs = zip(tekfac.model.parameters(), resumed.model.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    print(f"Loss after {STEPS} steps: TEKFAC {loss_of(tekfac):.4f}, SGD {loss_of(sgd):.4f}")
    print(f"Resumed from the checkpoint of step {STEPS // 2}: {'the same' if same else 'other'} weights")
    return tekfac, sgd, resumed


if __name__ == "__main__":
    main()
