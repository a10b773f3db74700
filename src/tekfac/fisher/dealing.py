"""Which process measures which batch of the data, and what they tell each other meanwhile.

They go over the data in rounds, in which each measures one batch at most. After a round they hear of each
other: so an error is known to all within a batch, none gets far ahead, and loaders that do not give what was
said are noticed at once. No sums are sent before all data were seen, or are to be written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from tekfac.common.data_hash import DataHash
from tekfac.fisher.options import ALL_DATA, LoaderGives, Options
from tekfac.layers.layer import Layer
from tekfac.ranks.group import Ranks
from tekfac.ranks.replicas import values_of

logger = logging.getLogger("tekfac")


class Heard(NamedTuple):
    """What a process tells the others, or what all of them together have told.

    Attributes:
        read: which data it has read in this pass.
        ended: whether these are all.
        is_due: whether it is time to write what was summed up; the first process decides.
    """

    read: DataHash
    ended: bool = False
    is_due: bool = False


class Dealing:
    """The batches of a loader, dealt out to the processes one by one."""

    def __init__(self, ranks: Ranks, loader_gives: LoaderGives) -> None:
        self._ranks = ranks
        self._has_all = loader_gives == ALL_DATA

    def place_of(self, index: int) -> int:
        """Where in the data of all processes a batch of this one's loader is."""
        return index if self._has_all else index * self._ranks.count + self._ranks.index

    def is_own(self, index: int) -> bool:
        """Whether this process measures a batch of its loader."""
        return self.place_of(index) % self._ranks.count == self._ranks.index

    def ends_round(self, index: int) -> bool:
        """Whether the processes hear of each other after a batch of their loaders."""
        return not self._has_all or (index + 1) % self._ranks.count == 0

    def hear(self, own: Heard) -> Heard:
        """Tell the others, and hear of them.

        Raises:
            ValueError: in all processes, if their loaders do not give what was said.
        """
        heard: list[Heard] = self._ranks.gather(own)
        ended = all(one.ended for one in heard)
        told = {(one.read, one.ended) for one in heard}
        if self._has_all and len(told) > 1:
            raise ValueError(
                f"The loaders of the {len(heard)} processes give other data, or another order. Each has to be "
                "given all of the data, in the same order (no sampler that draws by itself), of which it "
                "measures its share. If each has a part of its own already: loader_gives='part'. If each is to "
                "have blocks of its own: process_group='alone'."
            )
        if not self._has_all and ended and len(told) == 1 < len(heard) and own.read != DataHash():
            raise ValueError(
                f"With loader_gives='part' all {len(heard)} loaders gave the same data, which would count that "
                "often. Leave it out: then every process measures a share of them."
            )
        return Heard(own.read, ended, heard[0].is_due)


def facts_of(model: nn.Module, layers: Mapping[str, Layer], options: Options) -> dict[str, Any]:
    """What processes that measure together must have in common, by name."""
    plain = (int, float, str, bool, type(None), torch.dtype)
    chosen = {f"{name}=": own for name, own in vars(options).items() if isinstance(own, plain)}
    chosen.pop("progress=")  # which the first may show alone
    shapes = {f"layer {name!r}": own.shape.parameters for name, own in layers.items()}
    state = {name: own for name, own in model.state_dict().items() if isinstance(own, Tensor)}
    kinds = {f"the form of {name!r}": (list(own.shape), str(own.dtype)) for name, own in state.items()}
    numbers = ((f"the values of {n!r}", own) for n, own in state.items() if own.is_floating_point())
    return {**chosen, **shapes, **kinds, **values_of(numbers)}


def require_sampler(loader: Any, ranks: Ranks, loader_gives: LoaderGives) -> None:
    """Refuse a DistributedSampler where all data are expected; warn of one that repeats samples."""
    nested: Any = getattr(loader, "batch_sampler", None)
    sampler = next(
        (
            own.sampler
            for own in (loader, nested)
            if isinstance(getattr(own, "sampler", None), DistributedSampler)
        ),
        None,
    )
    if sampler is None or ranks.count == 1:
        return
    if loader_gives == ALL_DATA:
        raise ValueError(
            "Got a loader with a DistributedSampler, which gives every process a part of the data. Say so, "
            "loader_gives='part', or give a loader without it: every process then measures a share of its "
            "batches, and no sample is repeated."
        )
    repeated = sampler.total_size - len(sampler.dataset)
    if repeated > 0:
        logger.warning(
            "The DistributedSampler repeats %d of %d samples, so that all processes have as many; they count "
            "twice. A loader without it, for all processes, does not.",
            repeated,
            len(sampler.dataset),
        )
