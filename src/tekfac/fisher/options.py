"""How a model is sent over a data set: what `estimate`, `exact_blocks` and `compare` take alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor, nn

from tekfac.capture.measurement import FisherKind, LikelihoodSetting, Measurement, MeasurementKeywords
from tekfac.common.checks import require_choice, require_keywords
from tekfac.ranks.group import AUTO, GroupSetting

LossOfBatch = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> the training loss of the batch, a scalar."""


ALL_DATA, OWN_PART = "all", "part"

LoaderGives = Literal["all", "part"]


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
        progress: whether to show a progress bar (needs rich); of several processes the first one does.
        process_group: the processes that measure together, a ProcessGroup of torch.distributed; "auto": that of
            DistributedDataParallel, or else all processes; "alone": this one.
        loader_gives: to each of several processes: "all" data, of which it measures its share of the batches,
            or a "part" of its own.

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
    process_group: GroupSetting = AUTO
    loader_gives: LoaderGives = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is None:
            raise ValueError("Invalid seed: None. Expected a whole number: blocks are measured reproducibly.")
        if isinstance(self.layers, str):
            object.__setattr__(self, "layers", [self.layers])
        require_choice("loader_gives", self.loader_gives, (ALL_DATA, OWN_PART))


class Keywords(MeasurementKeywords, total=False):
    """The same names, for the type checker."""

    layers: Iterable[str] | None
    loss: LossOfBatch | None
    progress: bool
    process_group: GroupSetting
    loader_gives: LoaderGives


def resolve(function: str, keywords: Mapping[str, Any], own: Sequence[str]) -> Options:
    """The checked options of a function that has keywords of its own beside them.

    Raises:
        TypeError: for a keyword that does not exist.
        ValueError: for a value that does not fit.
    """
    require_keywords(f"fisher.{function}", keywords, [*own, *(field.name for field in fields(Options))])
    return Options(**keywords)
