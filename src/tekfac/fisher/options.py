"""How a model is sent over a data set: what `estimate`, `exact_blocks` and `compare` take alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, TypedDict

from torch import Tensor, nn

from tekfac.capture.hooks import FISHER_KINDS, LOSS_REDUCTIONS, FisherKind, LossReduction
from tekfac.capture.outputs import OutputSelector
from tekfac.common.checks import require_axis, require_choice, require_keywords
from tekfac.likelihoods import Likelihood, SampledLoss, as_likelihood

LossOfBatch = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> the training loss of the batch, a scalar."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the functions of `tekfac.fisher` take alike; the names are those of the optimizers.

    Attributes:
        fisher: "exact" (all labels, each with its probability), "sampled" (one drawn label per term) or
            "empirical" (the data's own labels).
        likelihood: what the outputs mean: "categorical", "bernoulli", "gaussian", a
            tekfac.likelihoods.Likelihood or a callable.
        layers: names of the layers to look at; None: all that have a block.
        loss: (model, batch) -> loss, for batches that are not (inputs, targets), inputs alone, or a dict of
            the model's keywords, and for losses that do not follow from the likelihood.
        loss_reduction: how the loss adds up its terms: "mean", "batchmean" or "sum".
        batch_dim: the axis of the model's outputs that holds the samples.
        outputs: a function from what the model returns to its predictions, where that is not plain.
        memory_budget: bytes of working memory for the rows of one layer.
        seed: of drawn labels and probes.
        progress: whether to show a progress bar (needs tqdm).
    """

    fisher: FisherKind = "exact"
    likelihood: str | Likelihood | SampledLoss = "categorical"
    layers: Iterable[str] | None = None
    loss: LossOfBatch | None = None
    loss_reduction: LossReduction = "mean"
    batch_dim: int = 0
    outputs: OutputSelector | None = None
    memory_budget: int = 256 * 2**20
    seed: int = 0
    progress: bool = False

    def __post_init__(self) -> None:
        require_choice("fisher", self.fisher, FISHER_KINDS)
        require_choice("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        as_likelihood(self.likelihood)
        if isinstance(self.layers, str):
            object.__setattr__(self, "layers", [self.layers])
        require_axis("batch_dim", self.batch_dim)
        for name in ("memory_budget", "seed"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
                raise ValueError(f"Invalid {name}: {value!r}. Expected a whole number that is not negative.")


class Keywords(TypedDict, total=False):
    """The same names, for the type checker."""

    fisher: FisherKind
    likelihood: str | Likelihood | SampledLoss
    layers: Iterable[str] | None
    loss: LossOfBatch | None
    loss_reduction: LossReduction
    batch_dim: int
    outputs: OutputSelector | None
    memory_budget: int
    seed: int
    progress: bool


def resolve(function: str, keywords: Mapping[str, Any], own: Sequence[str]) -> Options:
    """The checked options of a function that has keywords of its own beside them.

    Raises:
        TypeError: for a keyword that does not exist.
        ValueError: for a value that does not fit.
    """
    require_keywords(f"fisher.{function}", keywords, [*own, *(field.name for field in fields(Options))])
    return Options(**keywords)
