"""The settings of a measurement: what the optimizers, `tekfac.fisher` and capture take alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor

from tekfac.capture.likelihood_of_loss import require_likelihood
from tekfac.capture.outputs import OutputSelector
from tekfac.capture.padding import PaddingMask
from tekfac.common.checks import require_axis, require_choice, require_whole
from tekfac.layers.side_forms import DEFAULT_MAX_DIM, LARGE_DIMS, LargeDims, MaxDim, SideRule
from tekfac.likelihoods import Likelihood, SampledLoss

FisherKind = Literal["sampled", "empirical", "exact"]
FISHER_KINDS: tuple[FisherKind, ...] = ("sampled", "empirical", "exact")

OneLikelihood = str | Likelihood | SampledLoss
LikelihoodSetting = OneLikelihood | Mapping[str, OneLikelihood]

LossReduction = Literal["mean", "batchmean", "sum"]
LOSS_REDUCTIONS: tuple[LossReduction, ...] = ("mean", "batchmean", "sum")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How the Fisher of a model is measured.

    Attributes:
        fisher: "sampled" (one label per term, drawn from the model's own prediction), "empirical" (the data's
            own labels) or "exact" (all labels, each with its probability).
        likelihood: what the outputs mean: "auto" (what their loss shows), "categorical", "bernoulli",
            "gaussian", a tekfac.likelihoods.Likelihood, or a callable (outputs, generator) -> losses of drawn
            labels; or a mapping of names of predictions to such.
        loss_reduction: how the loss adds up its terms: "mean", "batchmean" or "sum".
        batch_dim: the axis of the model's outputs that holds the samples; "auto", where it is taken: the first
            one, or what layers show that know their samples.
        outputs: a function from what the model returns to its predictions, where that is not plain.
        padding_mask: the argument of the model, or a function of its arguments, that tells which positions are
            real; None: attention_mask and key padding masks are found.
        max_dim: inputs or outputs of a layer beyond which that side of its block takes a cheaper form; "auto":
            800 for convolutions, 200 for others, in blocks of at most 400 and 136.
        large_dims: which: "frequencies" (of convolutions), "blocks", "diagonal", or "auto" (see side_forms.py).
        curvature_dtype: torch.float32 or torch.float64; None: float32, or float64 for float64 parameters.
        memory_budget: bytes of working memory for the rows of one layer.
        seed: of the generator that draws labels; None: torch.initial_seed().
    """

    fisher: FisherKind | Literal["auto"] = "sampled"
    likelihood: LikelihoodSetting = "categorical"
    loss_reduction: LossReduction = "mean"
    batch_dim: int | Literal["auto"] = 0
    outputs: OutputSelector | None = None
    padding_mask: PaddingMask | None = None
    max_dim: MaxDim = DEFAULT_MAX_DIM
    large_dims: LargeDims = "auto"
    curvature_dtype: torch.dtype | None = None
    memory_budget: int = 256 * 2**20
    seed: int | None = None

    fishers: ClassVar[tuple[str, ...]] = FISHER_KINDS
    batch_dims: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        require_choice("fisher", self.fisher, self.fishers)
        require_likelihood(self.likelihood)
        require_choice("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        require_axis("batch_dim", self.batch_dim, self.batch_dims)
        if self.outputs is not None and not callable(self.outputs):
            raise ValueError(
                f"Invalid outputs: {self.outputs!r}. Expected a function from what the model returns to its "
                "predictions, or None."
            )
        _require_padding_mask(self.padding_mask)
        if self.max_dim != "auto":
            require_whole("max_dim", self.max_dim, "of dimensions, at least 1, or 'auto'")
        require_choice("large_dims", self.large_dims, LARGE_DIMS)
        if self.curvature_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(
                f"Invalid curvature_dtype: {self.curvature_dtype!r}. Expected torch.float32, torch.float64, or "
                "None for float32 (float64 where parameters are)."
            )
        require_whole("memory_budget", self.memory_budget, "of bytes, at least 1")
        seed = self.seed
        if seed is not None and (not isinstance(seed, Integral) or isinstance(seed, bool) or seed < 0):
            raise ValueError(f"Invalid seed: {seed!r}. Expected a whole number that is not negative.")

    def num_terms(self, counted: Tensor) -> int:
        """M, the number of summands that the Fisher is divided by, where these terms count, [N, P]."""
        return int((counted if self.loss_reduction == "mean" else counted.any(dim=1)).sum())

    @property
    def side_rule(self) -> SideRule:
        """Which form the sides of blocks get."""
        return SideRule(self.max_dim, self.large_dims)


class MeasurementKeywords(TypedDict, total=False):
    """The names of `Measurement`, for the type checker, where a function takes them as keywords."""

    fisher: FisherKind
    likelihood: LikelihoodSetting
    loss_reduction: LossReduction
    batch_dim: int
    outputs: OutputSelector | None
    padding_mask: PaddingMask | None
    max_dim: MaxDim
    large_dims: LargeDims
    curvature_dtype: torch.dtype | None
    memory_budget: int
    seed: int | None


def _require_padding_mask(value: Any) -> None:
    if value is not None and not isinstance(value, str) and not callable(value):
        raise ValueError(
            f"Invalid padding_mask: {value!r}. Expected the name of an argument of the model, a function of "
            "the model's arguments, or None."
        )
