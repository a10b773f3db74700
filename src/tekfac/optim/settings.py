"""Every keyword of the optimizers: its type, its default, its check."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypedDict

import torch
from torch import Tensor

from tekfac.capture.hooks import FISHER_KINDS, LOSS_REDUCTIONS, FisherKind, LossReduction
from tekfac.capture.outputs import OutputSelector
from tekfac.capture.padding import PaddingMask
from tekfac.common.checks import require_axis, require_choice, require_keywords
from tekfac.damping import BETA_READINGS, DEFAULT_TRACE_FLOOR, BetaReading, DampingRule, TraceBased, as_rule
from tekfac.layers.side_forms import DEFAULT_MAX_DIM, LARGE_DIMS, LargeDims
from tekfac.likelihoods import Likelihood, SampledLoss, as_likelihood
from tekfac.optim.param_groups import Selected

AVERAGINGS = ("moments", "factors")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a whole optimizer; those of its param groups are lr, momentum, weight_decay, damping."""

    damping: float | DampingRule | None = None
    trace_floor: float = DEFAULT_TRACE_FLOOR
    beta: BetaReading = "add"
    factor_decay: float = 0.95
    rescaling_decay: float = 0.95
    factors_every: int = 50
    basis_every: int = 50
    rescaling_every: int = 50
    fisher: FisherKind = "sampled"
    likelihood: str | Likelihood | SampledLoss = "categorical"
    sharing: str = "exact"
    averaging: str = "moments"
    kl_clip: float | None = None
    loss_reduction: LossReduction = "mean"
    batch_dim: int = 0
    outputs: OutputSelector | None = None
    padding_mask: PaddingMask | None = None
    first_order: Iterable[Selected] = ()
    first_order_lr: float | None = None
    param_groups: Iterable[Mapping[str, Any]] = ()
    max_dim: int = DEFAULT_MAX_DIM
    large_dims: LargeDims = "auto"
    curvature_dtype: torch.dtype | None = None
    grad_scaler: torch.amp.GradScaler | None = None
    memory_budget: int = 256 * 2**20
    seed: int | None = None

    def __post_init__(self) -> None:
        check_damping(self.damping)
        TraceBased(self.trace_floor)
        as_likelihood(self.likelihood)
        for name in ("factor_decay", "rescaling_decay"):
            _require_decay(name, getattr(self, name))
        for name in ("factors_every", "basis_every", "rescaling_every"):
            _require_whole(name, getattr(self, name), "of steps, at least 1")
        require_choice("beta", self.beta, BETA_READINGS)
        require_choice("fisher", self.fisher, FISHER_KINDS)
        require_choice("averaging", self.averaging, AVERAGINGS)
        require_choice("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        require_axis("batch_dim", self.batch_dim)
        if self.kl_clip is not None:
            _require_positive("kl_clip", self.kl_clip, "a positive number, or None for no clipping")
        if self.first_order_lr is not None:
            _require_positive("first_order_lr", self.first_order_lr, "a positive number")
        _require_whole("max_dim", self.max_dim, "of dimensions, at least 1")
        require_choice("large_dims", self.large_dims, LARGE_DIMS)
        if self.curvature_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(
                f"Invalid curvature_dtype: {self.curvature_dtype!r}. Expected torch.float32, torch.float64, or "
                "None for float32 (float64 where parameters are)."
            )
        if (
            self.padding_mask is not None
            and not isinstance(self.padding_mask, str)
            and not callable(self.padding_mask)
        ):
            raise ValueError(
                f"Invalid padding_mask: {self.padding_mask!r}. Expected the name of an argument of the model, "
                "a function of the model's arguments, or None."
            )
        if self.grad_scaler is not None and not hasattr(self.grad_scaler, "get_scale"):
            raise ValueError(
                f"Invalid grad_scaler: {self.grad_scaler!r}. Expected a torch.amp.GradScaler, or None."
            )
        _require_positive("memory_budget", self.memory_budget, "a positive number of bytes")


OF_OWN_DAMPING = {"trace_floor", "beta"}
"""Settings of the paper's damping; to give one is to ask for it."""

DESCRIPTIONS = {
    "model": "the network; tekfac.explain(model) tells which of its layers are preconditioned, and how.",
    "lr": "step length along the preconditioned gradient; not comparable with SGD's.",
    "momentum": "of the preconditioned gradient, in [0, 1).",
    "weight_decay": "decoupled: w <- (1 - lr * weight_decay) * w.",
    "damping": "a number: S + damping * I; a rule of tekfac.damping; None: the paper's rule for this method.",
    "trace_floor": "vartheta: the least trace that the paper's damping is computed from; asks for that one.",
    "beta": "how the paper's damping treats linear layers beside convolutions; asks for that one.",
    "factor_decay": "weight of the past in the factors' running averages, in [0, 1).",
    "rescaling_decay": "weight of the past in the running average of Theta, in [0, 1).",
    "factors_every": "steps between updates of the factors.",
    "basis_every": "steps between eigendecompositions.",
    "rescaling_every": "steps between updates of Theta.",
    "fisher": "'sampled' labels (from the model's own prediction), 'empirical' or 'exact'.",
    "likelihood": "'categorical', 'bernoulli', 'gaussian', a tekfac.likelihoods.Likelihood, or a callable "
    "(outputs, generator) -> losses of drawn labels.",
    "sharing": "of weights over positions: 'exact', 'expand' or 'reduce'.",
    "averaging": "of raw 'moments', or of the normalised 'factors'.",
    "kl_clip": "bound on lr^2 g.Pg, to which the preconditioned gradient is shortened; None: no bound.",
    "loss_reduction": "how the loss adds up its terms: 'mean', 'batchmean' or 'sum'.",
    "batch_dim": "the axis of the model's outputs that holds the samples.",
    "outputs": "a function from what the model returns to its predictions, where that is not plain.",
    "padding_mask": "the argument of the model, or a function of its arguments, that tells which positions are "
    "real; None: attention_mask and key padding masks are found.",
    "first_order": "names, modules, their types or parameters to leave to momentum SGD on the raw gradient.",
    "first_order_lr": "learning rate of what is not preconditioned; None: lr.",
    "param_groups": "groups with lr, momentum, weight_decay, damping or first_order of their own.",
    "max_dim": "inputs or outputs of a layer beyond which that side of its block takes a cheaper form.",
    "large_dims": "which: 'blocks', 'diagonal', or 'auto' for up to four blocks, then the diagonal.",
    "curvature_dtype": "torch.float32 or torch.float64; None: float32, or float64 for float64 parameters.",
    "grad_scaler": "the loss scaler; only fisher='empirical' needs to know it.",
    "memory_budget": "bytes of working memory for the rows of one layer.",
    "seed": "of the generator that draws labels; None: torch.initial_seed().",
}
"""One line on every argument; docs/settings.md says more."""


def documented(summary: str, names: Iterable[str]) -> str:
    """A docstring: the summary, and the description of every named argument."""
    lines = [f"    {name}: {DESCRIPTIONS[name]}" for name in names]
    return "\n".join([inspect.cleandoc(summary), "", "Args:", *lines])


class Keywords(TypedDict, total=False):
    """The same names, for the type checker."""

    damping: float | DampingRule | None
    trace_floor: float
    beta: BetaReading
    factor_decay: float
    rescaling_decay: float
    factors_every: int
    basis_every: int
    rescaling_every: int
    fisher: FisherKind
    likelihood: str | Likelihood | SampledLoss
    sharing: str
    averaging: str
    kl_clip: float | None
    loss_reduction: LossReduction
    batch_dim: int
    outputs: OutputSelector | None
    padding_mask: PaddingMask | None
    first_order: Iterable[Selected]
    first_order_lr: float | None
    param_groups: Iterable[Mapping[str, Any]]
    max_dim: int
    large_dims: LargeDims
    curvature_dtype: torch.dtype | None
    grad_scaler: torch.amp.GradScaler | None
    memory_budget: int
    seed: int | None


def resolve(
    owner: str,
    keywords: Mapping[str, Any],
    defaults: Mapping[str, Any],
    refused: Mapping[str, str],
    sharings: Iterable[str],
) -> Settings:
    """The checked settings of an optimizer called `owner`.

    Raises:
        TypeError: for a keyword that does not exist, or that the method refuses.
        ValueError: for a value that does not fit.
    """
    names = ["lr", "momentum", "weight_decay", *(field.name for field in fields(Settings))]
    for keyword in keywords:
        if keyword in refused:
            raise TypeError(f"{owner} takes no {keyword!r}: {refused[keyword]}. Leave it out.")
    require_keywords(owner, keywords, names)
    if keywords.keys() & OF_OWN_DAMPING:
        defaults = {**defaults, "damping": None}
    settings = Settings(**{**defaults, **keywords})
    require_choice("sharing", settings.sharing, tuple(sharings), f" for {owner}")
    return settings


def signature(defaults: Mapping[str, Any], refused: Mapping[str, str]) -> inspect.Signature:
    """What help() shows of an optimizer with these defaults that refuses these keywords."""
    positional = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in (
            ("model", inspect.Parameter.empty),
            ("lr", 1e-3),
            ("momentum", 0.9),
            ("weight_decay", 0.0),
        )
    ]
    keywords = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
        )
        for field in fields(Settings)
        if field.name not in refused
    ]
    return inspect.Signature([*positional, *keywords])


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


def _require_whole(name: str, value: Any, what: str) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"Invalid {name}: {value!r}. Expected a whole number {what}.")
