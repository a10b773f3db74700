"""Where the time of a training step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

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
