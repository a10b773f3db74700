"""The settings of an optimizer: from the keywords it was given to checked values.

Names, defaults and documentation of the keywords stand at `NaturalGradient.__init__`, where an editor shows
them; `tests/test_settings.py` holds that signature, this file and docs/settings.md together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tekfac.capture.measurement import FISHER_KINDS, FisherKind, LikelihoodSetting, Measurement
from tekfac.capture.selection import StatisticsSamples
from tekfac.common.checks import require_choice, require_keywords, require_whole
from tekfac.damping import (
    BETA_READINGS,
    DEFAULT_TRACE_FLOOR,
    BetaReading,
    DampingRule,
    TraceBased,
    as_rule,
)
from tekfac.guard import Guard, as_guard
from tekfac.layers.side_forms import MaxDim
from tekfac.methods import Method, default_settings, refused_settings
from tekfac.optim.param_groups import Selected
from tekfac.ranks.group import GroupSetting

Averaging = Literal["moments", "factors"]
AVERAGINGS: tuple[Averaging, ...] = ("moments", "factors")

Rescaling = Literal["measured", "moving"]
RESCALINGS: tuple[Rescaling, ...] = ("measured", "moving")

MomentumAt = Literal["before", "after"]
MOMENTUM_PLACES: tuple[MomentumAt, ...] = ("before", "after")

DecayPer = Literal["step", "update"]
DECAY_CLOCKS: tuple[DecayPer, ...] = ("step", "update")

FirstOrderStep = Literal["adamw", "sgd"]
FIRST_ORDER_STEPS: tuple[FirstOrderStep, ...] = ("adamw", "sgd")

AUTO = "auto"
"""Of damping, sharing and Fisher: what suits the other settings; of turns: where they are for nothing."""

ADAMWS_LENGTH = 2.0
"""By which the adaptive step is stretched, whatever its momentum, so that AdamW's learning rates fit it.

Damping shortens what is smaller than the mean: unstretched, its best learning rates were higher. See
docs/mathematics.md, section 7."""

DEFAULT_BASIS_TOLERANCE = 0.0
"""Bases are computed anew at every refresh: together with few samples a tolerance has cost accuracy."""

LEAST_GROWTH = 0.001
"""Of intervals: with less they would be a single step for ever, which an interval of 1 says better."""

OF_SOME_METHODS = ("rescaling_decay", "rescaling_every", "averaging", "trace_floor", "beta")
"""Settings that the other methods refuse; None stands for the default."""

OF_OWN_DAMPING = {"trace_floor", "beta"}
"""Settings of the paper's damping; to give one is to ask for it."""


@dataclass(frozen=True, kw_only=True)
class Settings(Measurement):
    """Settings of a whole optimizer; a param group has lr, momentum, weight_decay, damping, first_order."""

    fisher: FisherKind | Literal["auto"] = "auto"
    likelihood: LikelihoodSetting = "auto"
    batch_dim: int | Literal["auto"] = "auto"
    max_dim: MaxDim = "auto"
    power: float = 0.5
    rescaling: Rescaling = "moving"
    momentum_at: MomentumAt = "before"
    nesterov: bool = True
    step_scale: float | Literal["auto"] = "auto"
    damping: float | DampingRule | None = None
    trace_floor: float = DEFAULT_TRACE_FLOOR
    beta: BetaReading = "add"
    factor_decay: float = 0.95
    rescaling_decay: float = 0.95
    decay_per: DecayPer = "step"
    factors_every: int = 50
    basis_every: int = 50
    rescaling_every: int = 50
    interval_growth: float | None = 0.1
    first_interval: int | Literal["auto"] = "auto"
    sharing: str = "exact"
    averaging: Averaging = "moments"
    kl_clip: float | None = None
    first_order: Selected | Iterable[Selected] = ()
    precondition_norms: bool = False
    first_order_lr: float | None = None
    first_order_step: FirstOrderStep = "adamw"
    param_groups: Iterable[Mapping[str, Any]] = ()
    grad_scaler: torch.amp.GradScaler | None = None
    process_group: GroupSetting = AUTO
    replica_check_every: int | None = None
    statistics_samples: StatisticsSamples = "auto"
    turns: bool | Literal["auto"] = "auto"
    basis_tolerance: float = DEFAULT_BASIS_TOLERANCE
    track_basis: bool = False
    guard: bool | Guard = False

    fishers: ClassVar[tuple[str, ...]] = (*FISHER_KINDS, AUTO)
    batch_dims: ClassVar[tuple[str, ...]] = (AUTO,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_damping(self.damping)
        as_guard(self.guard)
        TraceBased(self.trace_floor)
        for name in ("factor_decay", "rescaling_decay"):
            _require_decay(name, getattr(self, name))
        for name in ("factors_every", "basis_every", "rescaling_every"):
            require_whole(name, getattr(self, name), "of steps, at least 1")
        growth = self.interval_growth
        if growth is not None and (not _is_number(growth) or not LEAST_GROWTH <= growth <= 1):
            raise ValueError(
                f"Invalid interval_growth: {growth!r}. Expected a number from {LEAST_GROWTH} to 1, the share "
                "of the steps so far that an interval has at most, or None for intervals that do not grow."
            )
        if self.first_interval != AUTO:
            require_whole("first_interval", self.first_interval, "of steps, at least 1, or 'auto'")
        require_choice("beta", self.beta, BETA_READINGS)
        require_choice("averaging", self.averaging, AVERAGINGS)
        require_choice("rescaling", self.rescaling, RESCALINGS)
        require_choice("momentum_at", self.momentum_at, MOMENTUM_PLACES)
        require_choice("decay_per", self.decay_per, DECAY_CLOCKS)
        require_choice("first_order_step", self.first_order_step, FIRST_ORDER_STEPS)
        if not _is_number(self.power) or not 0 < self.power <= 1:
            raise ValueError(
                f"Invalid power: {self.power!r}. Expected a number in (0, 1]: 1 for the natural gradient, 0.5 "
                "for its square root."
            )
        if self.step_scale != AUTO:
            _require_positive("step_scale", self.step_scale, "a positive number, or 'auto'")
        if self.kl_clip is not None:
            _require_positive("kl_clip", self.kl_clip, "a positive number, or None for no clipping")
            if self.momentum_at == "before":
                raise ValueError(
                    f"Invalid kl_clip: {self.kl_clip!r} with momentum_at='before'. Expected None there: it "
                    "bounds a step along the gradient of one batch, as .natural(model, kl_clip=...) takes it."
                )
        if self.first_order_lr is not None:
            _require_positive("first_order_lr", self.first_order_lr, "a positive number")
        if self.turns != AUTO and not isinstance(self.turns, bool):
            raise ValueError(f"Invalid turns: {self.turns!r}. Expected True, False or 'auto'.")
        for name in ("track_basis", "nesterov", "precondition_norms"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Invalid {name}: {getattr(self, name)!r}. Expected True or False.")
        tolerance = self.basis_tolerance
        if not _is_number(tolerance) or not 0 <= tolerance < 1:
            raise ValueError(
                f"Invalid basis_tolerance: {tolerance!r}. Expected a number in [0, 1): the share of a factor "
                "that may lie outside of the diagonal before its basis is renewed; 0 renews it every time."
            )
        samples = self.statistics_samples
        if samples is not None and samples != "auto":
            require_whole("statistics_samples", samples, "of samples, at least 1; None for all, or 'auto'")
        if self.replica_check_every is not None:
            require_whole("replica_check_every", self.replica_check_every, "of steps, at least 1, or None")
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            raise ValueError(
                f"Invalid grad_scaler: {self.grad_scaler!r}. Expected a torch.amp.GradScaler, or None."
            )

    @property
    def is_moving(self) -> bool:
        """Whether second moments are taken from the gradient of every step."""
        return self.rescaling == "moving"

    @property
    def stretch(self) -> float:
        """What preconditioned directions are multiplied by."""
        if self.step_scale != AUTO:
            return float(self.step_scale)
        is_adaptive = self.is_moving and self.power == 0.5 and self.momentum_at == "before"
        return ADAMWS_LENGTH if is_adaptive else 1.0


NAMES = tuple(field.name for field in fields(Settings))


def resolve(method: Method, keywords: Mapping[str, Any]) -> Settings:
    """The checked settings of an optimizer of the given method.

    Args:
        method: a row of the table in methods.py.
        keywords: as the optimizer got them. None stands for the default of a setting that only some methods
            have, and "auto" for what suits the others.

    Raises:
        TypeError: for a keyword that does not exist, or that the method refuses.
        ValueError: for a value that does not fit.
    """
    require_keywords(method.name, keywords, ["lr", "momentum", "weight_decay", *NAMES])
    is_moving = keywords.get("rescaling", Settings.rescaling) == "moving"
    for keyword, reason in refused_settings(method, is_moving=is_moving).items():
        if keywords.get(keyword) is not None:
            raise TypeError(f"{method.name} takes no {keyword!r}: {reason}. Leave it out.")
    given = {
        name: value
        for name, value in keywords.items()
        if name in NAMES
        and not (name in OF_SOME_METHODS and value is None)
        and not (name in ("damping", "sharing") and isinstance(value, str) and value == AUTO)
    }
    defaults = default_settings(method, is_moving=is_moving)
    if given.keys() & OF_OWN_DAMPING:
        defaults["damping"] = None
    settings = Settings(**{**defaults, **given})
    require_choice("sharing", settings.sharing, tuple(method.factors.sharings), f" for {method.name}")
    return settings


def check_group(group: Mapping[str, Any]) -> None:
    """Check the values that a param group may have of its own."""
    _require_positive("lr", group["lr"], "a positive number")
    momentum = group["momentum"]
    if not _is_number(momentum) or not 0 <= momentum < 1:
        raise ValueError(f"Invalid momentum: {momentum!r}. Expected a number in [0, 1).")
    decay = group["weight_decay"]
    if not _is_number(decay) or not 0 <= decay < math.inf:
        raise ValueError(f"Invalid weight_decay: {decay!r}. Expected a number that is not negative.")
    check_damping(group["damping"])
    if not isinstance(group["first_order"], bool):
        raise ValueError(f"Invalid first_order: {group['first_order']!r}. Expected True or False.")


def require_finite_rates(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError for a learning rate that is no number any more. Tensors are not read."""
    for place, group in enumerate(groups):
        if not isinstance(group["lr"], Tensor) and not math.isfinite(group["lr"]):
            raise ValueError(
                f"param_groups[{place}]['lr'] is {group['lr']!r}. Expected a finite number: look at what sets "
                "it, such as a schedule. No step was taken."
            )


def check_damping(damping: Any) -> None:
    """A positive number, a rule, or None."""
    as_rule(damping, TraceBased())


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | Tensor) and not isinstance(value, bool)


def _require_positive(name: str, value: Any, expected: str) -> None:
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"Invalid {name}: {value!r}. Expected {expected}.")


def _require_decay(name: str, value: Any) -> None:
    if not _is_number(value) or not 0 <= value < 1:
        raise ValueError(f"Invalid {name}: {value!r}. Expected a number in [0, 1): the weight of the past.")
