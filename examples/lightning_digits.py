"""Lightning, with automatic and with manual optimisation.

A small convolutional network learns scikit-learn's digits. `configure_optimizers` makes TEKFAC from the network
that `training_step` calls. With automatic optimisation Lightning hands `step()` a closure with the forward and
backward pass; with manual optimisation these are in `training_step`. Either way a run that is resumed from
Lightning's own checkpoint ends with the same weights, bit for bit.

Run: python examples/lightning_digits.py (fifteen seconds)
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tekfac import TEKFAC

EPOCHS, BATCH = 4, 128

# Both are tuned by the loss that is printed: SGD over lr = 0.003, 0.01, 0.03, 0.1, 0.3 and 1; TEKFAC over
# lr = 0.001, 0.003, 0.01, 0.03 and 0.1.
OPTIMIZERS = {
    "TEKFAC": lambda model: TEKFAC(model, lr=0.03, seed=0),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


class Digits(lightning.LightningModule):
    """Automatic optimisation: `training_step` returns the loss, Lightning does the rest."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(256, 10)),
        )

    def configure_optimizers(self) -> Any:
        """Optimizer and schedule."""
        optimizer = OPTIMIZERS[self.optimizer](self.network)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        return cross_entropy(self.network(images), labels)


class ManualDigits(Digits):
    """Manual optimisation: `training_step` does everything itself."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """One step, taken here."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        """With manual optimisation the schedule is ours, too."""
        self.lr_schedulers().step()


def digits() -> TensorDataset:
    """All 1797 images [N, 1, 8, 8] with their labels."""
    raw = load_digits()
    return TensorDataset(torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16, torch.tensor(raw.target))


def fit(module: Digits, folder: Path, epochs: int = EPOCHS, resume: Path | None = None, **more: Any) -> Digits:
    """Train, and leave a checkpoint in the folder; `more` are arguments of the Trainer."""
    # Lightning tells this sampler the number of the epoch: a resumed run sees the batches it would have seen.
    sampler = DistributedSampler(digits(), num_replicas=1, rank=0, shuffle=True, seed=0)
    off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", **dict.fromkeys(off, False), **more)
    trainer.fit(module, DataLoader(digits(), BATCH, sampler=sampler), ckpt_path=resume)
    trainer.save_checkpoint(folder / f"epoch-{epochs}.ckpt")
    return module


@torch.no_grad()
def loss_of(module: Digits) -> float:
    """Cross-entropy of all images, in eval mode."""
    images, labels = digits().tensors
    return float(cross_entropy(module.network.eval()(images), labels))


def main(kind: type[Digits] = Digits) -> tuple[Digits, Digits, Digits]:
    """Train with both, resume TEKFAC, and say what came out. Gives the three modules."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sgd, tekfac = (fit(kind(optimizer), folder) for optimizer in ("SGD", "TEKFAC"))
        fit(kind("TEKFAC"), folder, EPOCHS // 2)
        resumed = fit(kind("TEKFAC"), folder, resume=folder / f"epoch-{EPOCHS // 2}.ckpt")
    same = all(torch.equal(value, resumed.state_dict()[key]) for key, value in tekfac.state_dict().items())
    print(f"{kind.__name__}, loss after {EPOCHS} epochs: TEKFAC {loss_of(tekfac):.4f}, SGD {loss_of(sgd):.4f}")
    print(f"Resumed from the checkpoint of epoch {EPOCHS // 2}: {'the same' if same else 'other'} weights")
    return tekfac, sgd, resumed


if __name__ == "__main__":
    main()
    main(ManualDigits)
