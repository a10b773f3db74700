"""Whether training diverges, as its losses and skipped steps tell, and the snapshots that it goes back to.

A snapshot is what a checkpoint at the end of a step would hold. It is a candidate until the loss at these very
parameters, that of the next step, is known to be good; until then the one before is kept, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tekfac.damping import DampingRule, Spectrum
from tekfac.guard import Guard
from tekfac.ranks.shards import own_part

FIRST = 10
"""Losses that have to be known before one of them can be a spike."""

SHARE = 0.05
"""Of a new loss in the running mean."""

LEAST_RISE = 0.5
"""Of the running mean, by which a loss has to be above it to be a spike."""

OF_SCHEDULES = ("lr", "momentum", "weight_decay")
"""Settings of a param group that stay what they are now: schedules set them, by clocks of their own."""


@dataclass(frozen=True)
class Snapshot:
    """All that a later step depends on.

    Attributes:
        num_steps: steps taken before it.
        model: parameters and buffers, by name.
        optimizer: its state.
    """

    num_steps: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Mapping[str, Any], num_steps: int) -> Snapshot:
        """Copies of all of it."""
        return cls(num_steps, {name: own.detach().clone() for name, own in _tensors(model)}, _copied(optimizer))

    def restore(self, model: nn.Module) -> None:
        """Put parameters and buffers back, in place; those that were not there stay."""
        with torch.no_grad():
            for name, own in _tensors(model):
                if name in self.model:
                    own_part(own).copy_(own_part(self.model[name]))


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(own) for key, own in value.items()}
    return [_copied(own) for own in value] if isinstance(value, list | tuple) else value


def as_number(loss: Any) -> float:
    """A loss that was told, or that a closure gave; waits for the device that it is on.

    Raises:
        ValueError: for what is no single number.
    """
    try:
        return float(torch.as_tensor(loss).detach())
    except (RuntimeError, TypeError, ValueError) as error:
        shown = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(
            f"Invalid loss: {shown}. Expected a single number, from the closure of step(closure) or by "
            "report_loss(loss), for the guard to look at; no step was taken."
        ) from error


@dataclass
class Losses:
    """What is known of the losses so far, and what was done about them.

    Attributes:
        seen: how many were good.
        mean: their running mean.
        distance: the running mean of their distances from it.
        actions: how often the guard has acted.
        step: what steps are multiplied by.
        damping: what is added to S is multiplied by.
    """

    seen: int = 0
    mean: float = 0.0
    distance: float = 0.0
    actions: int = 0
    step: float = 1.0
    damping: float = 1.0

    def is_good(self, loss: float, spike: float) -> bool:
        """Whether a loss is finite and not far above the others."""
        if not math.isfinite(loss):
            return False
        rise = loss - self.mean
        return self.seen < FIRST or rise <= max(spike * self.distance, LEAST_RISE * abs(self.mean))

    def add(self, loss: float) -> None:
        """Take in a good one."""
        self.seen += 1
        share = max(1 / self.seen, SHARE)
        if self.seen > 1:
            self.distance += max(1 / (self.seen - 1), SHARE) * (abs(loss - self.mean) - self.distance)
        self.mean += share * (loss - self.mean)


class Watch:
    """What a guard knows of a run.

    Attributes:
        settings: of the guard.
        losses: so far.
        bad_in_a_row: steps whose losses were bad, since a good one.
        good: the last snapshot that is known to be good.
        reported: the loss of the next step, if it was told.
    """

    def __init__(self, settings: Guard) -> None:
        self.settings = settings
        self.losses = Losses()
        self.reported: Any = None
        self.bad_in_a_row = 0
        self.good: Snapshot | None = None
        self._candidate: Snapshot | None = None

    def forget(self) -> None:
        """Let go of snapshots that the model has outgrown."""
        self.good = self._candidate = None

    def take_loss(self) -> Any:
        """What was reported, once."""
        reported, self.reported = self.reported, None
        return reported

    def judge(self, losses: Sequence[float | None]) -> bool:
        """Whether to go back, by the losses that the processes have seen at the present parameters.

        Args:
            losses: of a step; None where a process was told none.
        """
        known = [loss for loss in losses if loss is not None]
        if not known:
            return False
        loss = sum(known) / len(known)
        if self.losses.is_good(loss, self.settings.spike):
            self.losses.add(loss)
            self.bad_in_a_row = 0
            return False
        self.bad_in_a_row += 1
        self._candidate = None
        return self.bad_in_a_row >= self.settings.patience

    def after_step(self, skipped: int) -> None:
        """A step was taken, or skipped so many times in a row: it is known whether its parameters were good."""
        if skipped:
            self._candidate = None
        elif self._candidate is not None and not self.bad_in_a_row:
            self.good, self._candidate = self._candidate, None

    def wants_snapshot(self, num_steps: int) -> bool:
        """Whether it is time for one."""
        newest = self._candidate or self.good
        return newest is None or (not self.bad_in_a_row and num_steps - newest.num_steps >= self.settings.every)

    def keep(self, snapshot: Snapshot) -> None:
        """Take a snapshot, which is good once the next step is."""
        if self.good is None:
            self.good = snapshot
        else:
            self._candidate = snapshot

    def act(self) -> None:
        """Count an action, and what it changes."""
        losses, settings = self.losses, self.settings
        losses.actions += 1
        losses.step *= settings.step
        losses.damping *= settings.damping
        self.bad_in_a_row, self._candidate = 0, None

    def state(self) -> dict[str, Any]:
        """What is saved: no snapshots."""
        return asdict(self.losses)

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what was saved; snapshots of before are let go of."""
        self.losses = Losses(**(state or {}))
        self.bad_in_a_row = 0
        self.forget()


@dataclass(frozen=True)
class Raised:
    """A damping rule that adds a multiple of what another one adds.

    Attributes:
        rule: the other one.
        factor: how many times.
    """

    rule: DampingRule
    factor: float

    def denominators(self, layer: Spectrum, network: Sequence[Spectrum]) -> Tensor:
        """S + factor (D - S)."""
        rescaling = layer.rescaling
        return rescaling + self.factor * (self.rule.denominators(layer, network) - rescaling)


def raised(rule: DampingRule, factor: float) -> DampingRule:
    """A rule, or the multiple of it."""
    return rule if factor == 1 else Raised(rule, factor)
