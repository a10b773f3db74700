"""How a model is sent over a data set: what `estimate`, `exact_blocks` and `compare` take alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, nn

from tekfac.capture.measurement import FisherKind, LikelihoodSetting, Measurement, MeasurementKeywords
from tekfac.common.checks import require_keywords

LossOfBatch = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> the training loss of the batch, a scalar."""


@dataclass(frozen=True, kw_only=True)
class Options(Measurement):
    """What the functions of `tekfac.fisher` take alike.

    Attributes:
        fisher: "exact" (all labels, each with its probability), "sampled" (one drawn label per term) or
            "empirical" (the data's own labels).
        seed: of drawn labels and probes.
        layers: names of the layers to look at; None: all that have a block.
        likelihood: what the predictions mean; "auto": what the gradient and the graph of the loss tell (of
            `loss`, or the model's own), and "categorical" where there is none.
        loss: (model, batch) -> loss, for batches that are not (inputs, targets), inputs alone, or a dict of
            the model's keywords, and for losses that do not follow from the likelihood.
        progress: whether to show a progress bar (needs rich).

    The others, `loss_reduction`, `batch_dim`, `outputs`, `padding_mask`, `max_dim`, `large_dims`,
    `curvature_dtype` and `memory_budget`, are those of the optimizers (docs/settings.md).
    """

    fisher: FisherKind = "exact"
    likelihood: LikelihoodSetting = "auto"
    batch_dim: int = 0
    seed: int = 0
    layers: Iterable[str] | None = None
    loss: LossOfBatch | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is None:
            raise ValueError("Invalid seed: None. Expected a whole number: blocks are measured reproducibly.")
        if isinstance(self.layers, str):
            object.__setattr__(self, "layers", [self.layers])


class Keywords(MeasurementKeywords, total=False):
    """The same names, for the type checker."""

    layers: Iterable[str] | None
    loss: LossOfBatch | None
    progress: bool


def resolve(function: str, keywords: Mapping[str, Any], own: Sequence[str]) -> Options:
    """The checked options of a function that has keywords of its own beside them.

    Raises:
        TypeError: for a keyword that does not exist.
        ValueError: for a value that does not fit.
    """
    require_keywords(f"fisher.{function}", keywords, [*own, *(field.name for field in fields(Options))])
    return Options(**keywords)
