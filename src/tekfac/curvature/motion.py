"""What is gathered of gradients from step to step, in the eigenbasis: momentum, and moving second moments.

The projected gradient G~ = Q_out^T G Q_in of every step enters two running averages,

    first     M = E[G~]            momentum, before it is preconditioned
    second    V = E[G~^2]          the re-scaling S = V of EKFAC and TEKFAC
              t = E[mean G~^2]     the mean of S = sigma lambda_out lambda_in^T, of KFAC and TKFAC

which turn with the basis. A direction is Q_out [M' / (S + lambda)^power] Q_in^T, where M' is M after the same
gradient once more: Nesterov's momentum. Averages are right from their first value on, as those of averages.py.
See docs/mathematics.md, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tekfac.curvature.eigenbasis import Eigenbasis, Turn
from tekfac.curvature.pieces import in_pieces


@dataclass(frozen=True)
class StepForm:
    """How a projected gradient becomes a direction.

    Attributes:
        power: of the denominators: 1 is the natural gradient; with 1/2 the loss's scale does not matter.
        moving_decay: weight of the past in the moving second moments, per step; None: S is that of the
            curvature, and none are kept.
        entrywise: whether every entry of a moving S moves by itself, or only the scale of all of them.
        momentum_before: whether gradients are averaged before they are preconditioned.
        nesterov: whether that average looks a step ahead.
    """

    power: float = 1.0
    moving_decay: float | None = None
    entrywise: bool = True
    momentum_before: bool = False
    nesterov: bool = True

    @property
    def moves_entries(self) -> bool:
        """Whether every entry of S moves by itself."""
        return self.entrywise and self.moving_decay is not None

    def require_memory(self, momentum: float) -> None:
        """Raise ValueError where squares are forgotten so much sooner than gradients that steps would explode.

        After many gradients of zero, M has decayed by momentum^k and the root of V by decay^(k/2).
        """
        decay = self.moving_decay
        if decay is not None and self.momentum_before and momentum**2 > decay:
            raise ValueError(
                f"Invalid rescaling_decay: {decay!r} with momentum {momentum!r}. Expected at least momentum^2, "
                f"{momentum**2:.4g}: second moments must not be forgotten sooner than the mean gradient."
            )

    @property
    def gathers(self) -> bool:
        """Whether anything is kept from step to step."""
        return self.momentum_before or self.moving_decay is not None


class Moving(NamedTuple):
    """A running average that moves in place.

    Attributes:
        value: the mean.
        weight: sum of the weights of what it is the mean of, of which the last is 1.
    """

    value: Tensor
    weight: float


class LayerMotion(NamedTuple):
    """What was gathered of one layer's gradients, in its eigenbasis.

    Attributes:
        first: the mean gradient, [G, d_out, d_in].
        second: its mean square, of the same shape, or [G, 1, 1] where only the scale of S moves.
    """

    first: Moving | None
    second: Moving | None


NO_MOTION = LayerMotion(None, None)


def turned(motion: LayerMotion, old: Eigenbasis, new: Eigenbasis, form: StepForm) -> LayerMotion:
    """What was gathered, in another basis: mean gradients exactly, mean squares as a diagonal is seen there."""
    if old is new:
        return motion
    first, second, turn = motion.first, motion.second, Turn.of(old, new)
    if first is not None:
        first = first._replace(value=turn.vectors(first.value))
    if second is not None and form.entrywise:
        second = second._replace(value=turn.diagonal(second.value))
    return LayerMotion(first, second)


class Motion:
    """The same of several layers whose blocks have one size, one behind the other; changed in place."""

    def __init__(
        self, form: StepForm, groups: Sequence[int], like: Tensor, parts: Sequence[LayerMotion]
    ) -> None:
        """Go on with what was gathered so far.

        Args:
            form: of the step.
            groups: of each layer.
            like: a tensor [G, d_out, d_in] of the right precision, on the right device; G of all layers.
            parts: of each layer.
        """
        self._form = form
        self._first = self._second = None
        if form.momentum_before:
            self._first = Averages(torch.zeros_like(like), groups, [part.first for part in parts])
        if form.moving_decay is not None:
            zeros = torch.zeros_like(like) if form.entrywise else like.new_zeros(len(like), 1, 1)
            self._second = Averages(zeros, groups, [part.second for part in parts])

    @property
    def second(self) -> Averages | None:
        """Mean squares, as they are at any time; None if none are kept."""
        return self._second

    def parts(self) -> list[LayerMotion]:
        """What was gathered of each layer so far: views."""
        nothing = [None] * len((self._first or self._second).views)  # type: ignore[union-attr]
        first = nothing if self._first is None else self._first.averages()
        second = nothing if self._second is None else self._second.averages()
        return [LayerMotion(*pair) for pair in zip(first, second, strict=True)]

    def turn(self, old: Sequence[Eigenbasis], new: Sequence[Eigenbasis]) -> None:
        """Follow the layers' bases."""
        for layer, (part, before, after) in enumerate(zip(self.parts(), old, new, strict=True)):
            if before is not after:
                moved = turned(part, before, after, self._form)
                for averages, average in ((self._first, moved.first), (self._second, moved.second)):
                    if averages is not None and average is not None:
                        averages.views[layer].copy_(average.value)

    def advance(
        self, projected: Tensor, momenta: Sequence[float], present: Sequence[bool], finite: Tensor | None
    ) -> None:
        """Take in the gradients of one step, and put in their place what the denominators are to divide.

        Args:
            projected: G~, [G, d_out, d_in]; changed.
            momenta: weight of the past in the mean gradient, of each layer.
            present: whether each layer has a gradient; what was gathered of the others stays.
            finite: a boolean on the device; where it is False everything stays. None: True.
        """
        first, second = self._first, self._second
        share: float | Tensor = 0.0
        share_of_square: float | Tensor = 0.0
        past: float | Tensor = 0.0
        if second is not None:
            share_of_square = second.count([self._form.moving_decay or 0.0] * len(present), present)
            if not self._form.entrywise:
                mean = projected.square().mean(dim=(1, 2), keepdim=True)
                second.whole.lerp_(_finite(mean, second.whole, finite), share_of_square)
                second = None
        if first is not None:
            share = first.count(momenta, present)
            past = first.share_of_past() if self._form.nesterov else 1.0
        averages = [0.0 if own is None else own.whole for own in (first, second)]
        for new, mean, square, *shares in in_pieces(projected, *averages, share, share_of_square, past):
            if second is not None:
                square.lerp_(_finite(new.square(), square, finite), shares[1])
            if first is not None:
                mean.lerp_(_finite(new, mean, finite), shares[0])
                new.lerp_(mean, shares[2])

    def take_back(self, steps: int) -> None:
        """Count less: so many of the last steps were not finite, and have left everything as it was."""
        for averages in (self._first, self._second):
            if averages is not None:
                averages.take_back(steps)


def _finite(new: Tensor, old: Tensor, finite: Tensor | None) -> Tensor:
    """The new values, or the old ones where `finite`, a boolean on the device, is False."""
    return new if finite is None else torch.where(finite, new, old)


class Averages:
    """Running averages of several layers, in one tensor.

    Attributes:
        whole: [G, ...] of all layers.
        views: of each layer.
    """

    def __init__(self, whole: Tensor, groups: Sequence[int], before: Sequence[Moving | None]) -> None:
        self.whole = whole
        self.views = torch.split(whole, list(groups))
        self._groups = groups
        self._weights = [0.0 if average is None else average.weight for average in before]
        self._decays: Sequence[float] = [0.0] * len(groups)
        for own, average in zip(self.views, before, strict=True):
            if average is not None:
                own.copy_(average.value)

    def averages(self) -> list[Moving | None]:
        """Of each layer; None of those that have none yet."""
        pairs = zip(self.views, self._weights, strict=True)
        return [Moving(view, weight) if weight else None for view, weight in pairs]

    def count(self, decays: Sequence[float], present: Sequence[bool]) -> float | Tensor:
        """Count one more value of each layer that is present: its share in the new average, 0 of the others."""
        states = zip(self._weights, decays, present, strict=True)
        self._weights = [decay * weight + 1 if here else weight for weight, decay, here in states]
        self._decays = decays
        return self._coefficient(
            [1 / weight if here else 0.0 for weight, here in zip(self._weights, present, strict=True)]
        )

    def share_of_past(self) -> float | Tensor:
        """The weight of the averages, as they are now, in those after the same values once more."""
        states = zip(self._weights, self._decays, strict=True)
        return self._coefficient([1 - 1 / (decay * weight + 1) for weight, decay in states])

    def take_back(self, steps: int) -> None:
        """Weights as they were so many steps ago."""
        for _ in range(steps):
            states = zip(self._weights, self._decays, strict=True)
            self._weights = [max(0.0, (weight - 1) / decay) if decay else weight for weight, decay in states]

    def _coefficient(self, of_layers: Sequence[float]) -> float | Tensor:
        """One number if all layers have the same, else one for every group, [G, 1, 1]."""
        if of_layers.count(of_layers[0]) == len(of_layers):
            return of_layers[0]
        each = [value for value, groups in zip(of_layers, self._groups, strict=True) for _ in range(groups)]
        return self.whole.new_tensor(each)[:, None, None]
