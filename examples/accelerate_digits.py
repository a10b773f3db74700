"""Hugging Face's accelerate: prepare the model, the optimizer and the data, and keep the loop.

A small convolutional network learns scikit-learn's digits. Gradients are accumulated over two batches by
`accelerator.accumulate`, and clipped. A run that is resumed from `accelerator.save_state` ends with the same
weights, bit for bit.

Run: python examples/accelerate_digits.py (ten seconds), or with two processes, each with its part of every
batch, torchrun --nproc-per-node 2 examples/accelerate_digits.py FOLDER, one for checkpoints that both see
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tekfac import TEKFAC

EPOCHS, MICRO_BATCH, MAX_NORM = 4, 64, 5.0

# Both are tuned by the loss that is printed: SGD over lr = 0.003, 0.01, 0.03, 0.1, 0.3 and 1; TEKFAC over
# lr = 0.001, 0.003, 0.01, 0.03 and 0.1.
OPTIMIZERS = {
    "TEKFAC": lambda model: TEKFAC(model, lr=0.03, seed=0),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
}


class Run:
    """An untrained network, its optimizer, schedule and data, all prepared by an accelerator."""

    def __init__(self, optimizer: str, **more: Any) -> None:
        arguments = {"cpu": True, "gradient_accumulation_steps": 2, **more}
        # The seedable sampler makes the order of an epoch a function of its number.
        seedable = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
        self.accelerator = Accelerator(dataloader_config=seedable, **arguments)  # first: it knows of the others
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(256, 10)),
        )
        made = OPTIMIZERS[optimizer](model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, EPOCHS)
        loader = DataLoader(digits(), MICRO_BATCH, shuffle=True, drop_last=True)
        prepared = self.accelerator.prepare(model, made, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared

    def train(self, epochs: range) -> None:
        """Train for these epochs."""
        self.model.train()
        for epoch in epochs:
            self.loader.set_epoch(epoch)
            for images, labels in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = cross_entropy(self.model(images), labels)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            self.schedule.step()

    @torch.no_grad()
    def loss(self) -> float:
        """Cross-entropy of all images, in eval mode."""
        images, labels = digits().tensors
        return float(cross_entropy(self.model.eval()(images), labels))


def digits() -> TensorDataset:
    """All 1797 images [N, 1, 8, 8] with their labels."""
    raw = load_digits()
    return TensorDataset(torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16, torch.tensor(raw.target))


def main(folder: str | None = None) -> tuple[Run, Run, Run]:
    """Train with both, resume TEKFAC, and say what came out. Gives the three runs."""
    sgd, tekfac, resumed = Run("SGD"), Run("TEKFAC"), Run("TEKFAC")
    sgd.train(range(EPOCHS))
    with contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory() as name:
        checkpoint = str(Path(name) / "checkpoint")
        tekfac.train(range(EPOCHS // 2))
        tekfac.accelerator.save_state(checkpoint)
        tekfac.train(range(EPOCHS // 2, EPOCHS))
        resumed.accelerator.load_state(checkpoint)
        resumed.train(range(EPOCHS // 2, EPOCHS))
    pairs = zip(tekfac.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    say = tekfac.accelerator.print  # the first process alone
    say(f"Loss after {EPOCHS} epochs: TEKFAC {tekfac.loss():.4f}, SGD {sgd.loss():.4f}")
    say(f"Resumed from the checkpoint of epoch {EPOCHS // 2}: {'the same' if same else 'other'} weights")
    return tekfac, sgd, resumed


if __name__ == "__main__":
    main(*sys.argv[1:])
