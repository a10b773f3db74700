"""What is counted while a run trains: where the time of a step goes, and loss and accuracy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tekfac.lab.data.batches import Batch
from tekfac.lab.devices import synchronise
from tekfac.optim.natural_gradient import NaturalGradient

PARTS = ("data", "forward", "backward", "curvature", "update")


class Clock:
    """Adds up the seconds of each part of a step.

    What a natural-gradient optimizer spends on curvature inside another part, in a measured backward pass or in
    a step that refreshes, is counted as curvature.

    Attributes:
        seconds: by part.
    """

    def __init__(self, device: torch.device, optimizer: Optimizer) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._device = device
        self._optimizer = optimizer

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what is done inside as this part."""
        start, curvature = time.perf_counter(), self._curvature()
        yield
        synchronise(self._device)
        spent = self._curvature() - curvature
        self.seconds["curvature"] += spent
        self.seconds[name] += time.perf_counter() - start - spent

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(self.seconds.values())

    def _curvature(self) -> float:
        optimizer = self._optimizer
        return optimizer.curvature_seconds if isinstance(optimizer, NaturalGradient) else 0.0


class Sums:
    """Loss and right answers of an epoch, added up on the device: reading them waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros(
            (), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device
        )
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        self._count = 0

    def add(self, loss: Tensor, outputs: Tensor, labels: Tensor) -> None:
        """Of a batch: its mean loss [], outputs [N, C] and labels [N]."""
        self._loss += loss.to(self._loss.dtype) * len(labels)
        self._right += (outputs.argmax(1) == labels).sum()
        self._count += len(labels)

    def means(self) -> tuple[float, float]:
        """Mean loss and share of right answers."""
        return float(self._loss) / self._count, int(self._right) / self._count

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"loss": self._loss, "right": self._right, "count": self._count}

    def add_state(self, state: Mapping[str, Any]) -> None:
        """Of a checkpoint, or of another process."""
        self._loss += state["loss"].to(self._loss.device)
        self._right += state["right"].to(self._right.device)
        self._count += state["count"]


def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Sums:
    """Loss and right answers in eval mode."""
    model.eval()
    sums = Sums(device)
    with torch.no_grad():
        for inputs, labels in batches:
            outputs = model(inputs)
            sums.add(F.cross_entropy(outputs, labels), outputs, labels)
    return sums
