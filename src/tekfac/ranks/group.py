"""The processes that train together, as few calls: gather, add, share. A lone process is one of them.

Only this package calls `torch.distributed`. What is summed here is linear in the data, so that ranks with a
part of the batch each have, together, what one process with the whole batch has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BUCKET = 25 * 2**20
"""Bytes that are sent at a time, roughly: enough that a call's latency does not count."""


class Ranks(Protocol):
    """The processes that train together."""

    @property
    def index(self) -> int:
        """Of this one."""
        ...

    @property
    def count(self) -> int:
        """How many they are."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """What every process has given, in their order: small things that can be pickled."""
        ...

    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over processes of tensors that are alike in all of them."""
        ...

    def share(self, tensors: Sequence[Tensor], owner: int) -> None:
        """Fill tensors with those of one process."""
        ...


@dataclass(frozen=True)
class Alone:
    """One process, which has all there is."""

    index: int = 0
    count: int = 1

    def gather(self, value: Any) -> list[Any]:
        """The value."""
        return [value]

    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors."""
        return list(tensors)

    def share(self, tensors: Sequence[Tensor], owner: int) -> None:
        """Nothing is to be done."""


ALONE = Alone()


class Together:
    """The processes of a group of `torch.distributed`.

    With a group of their own, messages are not mixed up with those of gradients, which are under way meanwhile.
    """

    def __init__(self, group: Any, *, apart: bool = True) -> None:
        """Make a group of the same processes, or take this one.

        Args:
            group: all of its processes have to call this, in the same order.
            apart: whether it is to be another one; it stays for good.
        """
        self._group = dist.new_group(dist.get_process_group_ranks(group)) if apart else group
        self.index = dist.get_rank(self._group)
        self.count = dist.get_world_size(self._group)

    def gather(self, value: Any) -> list[Any]:
        """What every process has given, in their order."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._group)
        return found

    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over processes, a few buckets at a time."""
        found: list[Tensor] = list(tensors)
        waiting = []
        for places in in_buckets(tensors):
            flat = _flat([tensors[place] for place in places])
            waiting.append((places, flat, dist.all_reduce(flat, group=self._group, async_op=True)))
        for places, flat, work in waiting:
            work.wait()
            parts = torch.split(flat, [tensors[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                found[place] = part.view(tensors[place].shape)
        return found

    def share(self, tensors: Sequence[Tensor], owner: int) -> None:
        """Fill tensors with those of one process, one message for each precision."""
        source = dist.get_global_rank(self._group, owner)
        for places in in_buckets(tensors, most=None):
            own = [tensors[place] for place in places]
            flat = _flat(own)
            dist.broadcast(flat, source, group=self._group)
            if owner != self.index:
                for tensor, part in zip(own, torch.split(flat, [t.numel() for t in own]), strict=True):
                    tensor.copy_(part.view(tensor.shape))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def in_buckets(tensors: Sequence[Tensor], most: int | None = BUCKET) -> Iterator[list[int]]:
    """Places of tensors of one precision and device, so many bytes at a time."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(place)
    for places in alike.values():
        bucket: list[int] = []
        size = 0
        for place in places:
            bucket.append(place)
            size += tensors[place].nbytes
            if most is not None and size >= most:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


GroupSetting = Any
"""A ProcessGroup of torch.distributed, "auto" or "alone"."""

AUTO, APART = "auto", "alone"


def ranks_of(model: nn.Module, setting: GroupSetting, *, apart: bool = True) -> Ranks:
    """The processes that train a model together.

    Args:
        model: DistributedDataParallel's wrapper knows its group.
        setting: a process group; "auto": that of the wrapper, or else all processes; "alone": this one.
        apart: whether their messages come among others, so that they need a group of their own.

    Raises:
        ValueError: for something else.
    """
    is_group = dist.is_available() and isinstance(setting, dist.ProcessGroup)
    if not is_group and not (isinstance(setting, str) and setting in (AUTO, APART)):
        raise ValueError(
            f"Invalid process_group: {setting!r}. Expected a ProcessGroup of torch.distributed, 'auto' for "
            "that of DistributedDataParallel or else all processes, or 'alone' for a model of this process."
        )
    if not dist.is_available() or not dist.is_initialized() or (not is_group and setting == APART):
        return ALONE
    group = setting
    if not is_group:
        group = model.process_group if isinstance(model, DistributedDataParallel) else dist.group.WORLD
    return Together(group, apart=apart) if dist.get_world_size(group) > 1 else ALONE


Name = TypeVar("Name")


def added_by_name(named: Mapping[Name, Tensor], ranks: Ranks, device: torch.device) -> dict[Name, Tensor]:
    """The sums over processes of tensors by their names; of some a process may have none.

    Args:
        named: of this process; those of one name have one shape and precision.
        ranks: the processes; all have to call this.
        device: that they are brought to.
    """
    if ranks.count == 1:
        return dict(named)
    outlines = ranks.gather({name: (tensor.shape, tensor.dtype) for name, tensor in named.items()})
    forms = {name: form for one in outlines for name, form in one.items()}
    own = [
        named[name].to(device) if name in named else torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in forms.items()
    ]
    return dict(zip(forms, ranks.add(own), strict=True))


def require_still_alone(owner: str, ranks: Ranks, setting: GroupSetting) -> None:
    """Raise RuntimeError where other processes have come up since `ranks_of` found none.

    Each would measure its own part of the batch, and they would walk apart.
    """
    alone = ranks.count == 1 and isinstance(setting, str) and setting == AUTO
    if alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"{owner} was made before torch.distributed knew of {dist.get_world_size()} processes, and knows "
            f"of none but this one. Make {owner} after init_process_group, or what calls it (Hugging Face's "
            "TrainingArguments, accelerate's Accelerator), or with process_group='alone' if this process "
            "trains a model of its own."
        )
