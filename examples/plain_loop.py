"""A training loop of one's own: gradient accumulation, clipping, a schedule, and a checkpoint.

A small convolutional network with batch norms learns scikit-learn's digits. It is trained by TEKFAC and by SGD
for the same number of steps on the same batches. Then the run is repeated from the checkpoint that was written
half-way, by a new process's worth of objects: it must end with the same weights, bit for bit.

Run: python examples/plain_loop.py (five seconds)
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from tekfac import TEKFAC

STEPS, MICRO_BATCHES, MICRO_BATCH, MAX_NORM = 60, 2, 64, 5.0

# Both are tuned by the loss that is printed: SGD over lr = 0.003, 0.01, 0.03, 0.1, 0.3 and 1; TEKFAC over
# lr = 0.001, 0.003, 0.01, 0.03 and 0.1.
OPTIMIZERS = {
    "TEKFAC": lambda model: TEKFAC(model, lr=0.03),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


class Run(NamedTuple):
    """All that a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: CosineAnnealingLR

    def save(self, path: Path) -> None:
        """Write the three states to one file."""
        torch.save({name: part.state_dict() for name, part in self._asdict().items()}, path)

    def load(self, path: Path) -> None:
        """Read them back."""
        states = torch.load(path, weights_only=True)
        for name, part in self._asdict().items():
            part.load_state_dict(states[name])


def digits() -> tuple[Tensor, Tensor]:
    """All 1797 images [N, 1, 8, 8], and their labels."""
    raw = load_digits()
    return torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16, torch.tensor(raw.target)


def start(name: str) -> Run:
    """An untrained network with its optimizer. TEKFAC takes the model, SGD the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    optimizer = OPTIMIZERS[name](model)
    return Run(model, optimizer, CosineAnnealingLR(optimizer, STEPS))


def train(run: Run, steps: range) -> None:
    """Take these steps; which images a step sees depends on its number alone."""
    images, labels = digits()
    run.model.train()
    for step in steps:
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))
        run.optimizer.zero_grad()
        for part in chosen[: MICRO_BATCHES * MICRO_BATCH].split(MICRO_BATCH):
            loss = cross_entropy(run.model(images[part]), labels[part])
            (loss / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), MAX_NORM)
        run.optimizer.step()
        run.schedule.step()


@torch.no_grad()
def loss_of(run: Run) -> float:
    """Cross-entropy of all images, in eval mode."""
    images, labels = digits()
    return float(cross_entropy(run.model.eval()(images), labels))


def main() -> tuple[Run, Run, Run]:
    """Train with both, resume TEKFAC, and say what came out. Gives the three runs."""
    sgd, tekfac, resumed = start("SGD"), start("TEKFAC"), start("TEKFAC")
    train(sgd, range(STEPS))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        train(tekfac, range(STEPS // 2))
        tekfac.save(checkpoint)
        train(tekfac, range(STEPS // 2, STEPS))
        resumed.load(checkpoint)
        train(resumed, range(STEPS // 2, STEPS))
    pairs = zip(tekfac.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    print(f"Loss after {STEPS} steps: TEKFAC {loss_of(tekfac):.4f}, SGD {loss_of(sgd):.4f}")
    print(f"Resumed from the checkpoint of step {STEPS // 2}: {'the same' if same else 'other'} weights")
    return tekfac, sgd, resumed


if __name__ == "__main__":
    main()
