"""Parameters that `fully_shard` has cut into parts, one for every process: the own part, or the whole if asked.

A tensor of which every process has a part is a DTensor. All of them here are cut along their first axis, as by
`torch.chunk`, over one dimension of a mesh of processes; along its other one, if there is any (HSDP), they are
alike. The rest of the library meets plain tensors: whole ones, or own parts of what goes entry by entry.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tekfac.ranks.group import Ranks, in_buckets

FSDP = "torch.distributed.fsdp"
"""The module with fully_shard; only where it is imported can there be parameters in shards."""


WHOLE = (Tensor, nn.Parameter)
"""Types of tensors that are not in parts: a look at the type costs least, and steps ask of every parameter."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether every process has a part of a tensor."""
    return type(tensor) not in WHOLE and hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, to read and to change; all of it where it is whole everywhere."""
    if not is_sharded(tensor):
        return tensor
    cut: Any = tensor
    with torch.no_grad():  # or it would be another tensor, with a graph
        return cut.to_local()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Cut:
    """How a tensor is cut.

    Attributes:
        group: the processes that have it together, by `torch.distributed`.
        index: of this one among them.
        count: how many they are.
        rows: of the first axis, in every part but the last ones, which may have fewer.
    """

    group: Any
    index: int
    count: int
    rows: int

    @classmethod
    def of(cls, tensor: Any) -> _Cut:
        mesh = tensor.device_mesh
        (place,) = (place for place, how in enumerate(tensor.placements) if how.is_shard())
        count = mesh.size(place)
        return cls(mesh.get_group(place), mesh.get_local_rank(place), count, -(-tensor.shape[0] // count))


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this process has of one which is cut like `like`."""
    if not is_sharded(like):
        return whole
    cut = _Cut.of(like)
    return whole[cut.index * cut.rows : (cut.index + 1) * cut.rows]


def wholes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, whole; all processes have to ask for the same, a few messages bring all of them."""
    found = list(tensors)
    for cuts in _by_group(tensors).values():
        places = list(cuts)
        padded = [_padded(own_part(tensors[place]), cuts[place].rows) for place in places]
        for bucket in in_buckets(padded):
            flat = torch.cat([padded[place].reshape(-1) for place in bucket])
            cut = cuts[places[bucket[0]]]
            everywhere = flat.new_empty(cut.count, len(flat))
            dist.all_gather(list(everywhere), flat, group=cut.group)
            parts = torch.split(everywhere, [padded[place].numel() for place in bucket], dim=1)
            for place, part in zip(bucket, parts, strict=True):
                shape = tensors[places[place]].shape
                found[places[place]] = part.reshape(-1, *shape[1:])[: shape[0]]
    return found


def summed_over_parts(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Scalars that were computed of the own parts of tensors, added up over the parts."""
    found = list(values)
    for cuts in _by_group(tensors).values():
        total = torch.stack([values[place] for place in cuts])
        dist.all_reduce(total, group=next(iter(cuts.values())).group)
        for place, value in zip(cuts, total.unbind(), strict=True):
            found[place] = value
    return found


def _by_group(tensors: Sequence[Tensor]) -> dict[Any, dict[int, _Cut]]:
    """How those in parts are cut, by their places, for every group of processes."""
    groups: dict[Any, dict[int, _Cut]] = {}
    for place, tensor in enumerate(tensors):
        if is_sharded(tensor):
            cut = _Cut.of(tensor)
            groups.setdefault(cut.group, {})[place] = cut
    return groups


def _padded(part: Tensor, rows: int) -> Tensor:
    missing = rows - len(part)
    return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part


def cut_like(value: Tensor, like: Tensor) -> Tensor:
    """A tensor with the parts of `like`: cut where it is whole, put together where `like` is."""
    if is_sharded(value) == is_sharded(like):
        return value
    if is_sharded(value):
        return wholes([value])[0]
    cut = torch.zeros_like(like, dtype=value.dtype)
    own_part(cut).copy_(part_of(value, like))
    return cut


def of_all_parts(facts: Mapping[str, Any], tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Facts of own parts, and of the others that make a whole with them: the same then in all replicas."""
    cut = next((_Cut.of(tensor) for tensor in tensors if is_sharded(tensor)), None)
    if cut is None:
        return dict(facts)
    everywhere: list[Any] = [None] * cut.count
    dist.all_gather_object(everywhere, dict(facts), group=cut.group)
    return {
        f"part {part} of {name}": value for part, own in enumerate(everywhere) for name, value in own.items()
    }


@contextlib.contextmanager
def whole_modules(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules have their parameters whole for a while, to be looked at; all processes have to ask."""
    owners = [
        (owner, name, parameter)
        for module in modules
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if is_sharded(parameter)
    ]
    found = wholes([parameter for _, _, parameter in owners])
    try:
        for (owner, name, parameter), whole in zip(owners, found, strict=True):
            setattr(owner, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        yield
    finally:
        for owner, name, parameter in owners:
            setattr(owner, name, parameter)


def stands_for(present: Any, parameter: nn.Parameter) -> bool:
    """Whether what a module has now is a parameter, or what fully_shard puts in its place while it is used."""
    if present is parameter:
        return True
    is_whole = isinstance(present, nn.Parameter) and not is_sharded(present)
    return is_sharded(parameter) and is_whole and present.shape == parameter.shape


def require_whole(owner: str, model: nn.Module) -> None:
    """Raise ValueError for parameters of which every process has a part."""
    fsdp = sys.modules.get(FSDP)
    kinds = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    parts = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
    if parts or any(isinstance(module, kinds) for module in model.modules()):
        raise ValueError(
            f"{owner} got a model whose parameters are in parts, by fully_shard. Expected one that is whole in "
            "every process: without fully_shard, with get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)) loaded into it."
        )


def require_supported(owner: str, model: nn.Module, ranks: Ranks) -> None:
    """Raise ValueError for parameters in parts that are not those of fully_shard, or of other processes."""
    fsdp = sys.modules.get(FSDP)
    if fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        raise ValueError(
            f"{owner} got a model with FullyShardedDataParallel, which makes its layers' parameters flat. Use "
            "torch.distributed.fsdp.fully_shard(model) instead."
        )
    parameters = dict(model.named_parameters())
    cut_by_fsdp = {
        parameter
        for module in model.modules()
        if fsdp is not None and isinstance(module, fsdp.FSDPModule)
        for parameter in module.parameters()
    }
    in_parts = {name: parameter for name, parameter in parameters.items() if is_sharded(parameter)}
    for name, parameter in in_parts.items():
        _require_cut_once(owner, name, parameter, ranks, by_fsdp=parameter in cut_by_fsdp)
    for name, parameter in parameters.items():
        if name not in in_parts and parameter.requires_grad and (in_parts or parameter in cut_by_fsdp):
            raise ValueError(
                f"Parameter {name!r} is whole in every process, in a model with fully_shard: it is in none of "
                "the modules that this was called of, or they have run meanwhile. Call fully_shard(model) of "
                f"the model itself, too, and make {owner} right after; or call model.reshard() before."
            )


def _require_cut_once(owner: str, name: str, parameter: Any, ranks: Ranks, *, by_fsdp: bool) -> None:
    placements, mesh = parameter.placements, parameter.device_mesh
    shards = [own for own in placements if not own.is_replicate()]
    if not by_fsdp or len(shards) != 1 or not shards[0].is_shard(0):
        raise ValueError(
            f"Parameter {name!r} is cut into parts as {tuple(placements)}. {owner} expects the parts that "
            "fully_shard makes along the first axis, over a mesh of one dimension (FSDP) or two (HSDP): no "
            "tensor parallelism, and no shard_placement_fn."
        )
    if mesh.size() != ranks.count:
        raise ValueError(
            f"Parameter {name!r} is cut over a mesh of {mesh.size()} processes, but {ranks.count} train "
            "together. Pass the group of all that have a part of the batch: process_group=... ."
        )
    if parameter.device.type != mesh.device_type:
        raise ValueError(
            f"Parameter {name!r} is on {parameter.device.type}, its mesh on {mesh.device_type}. {owner} needs "
            "weights and gradients where the model runs: no CPUOffloadPolicy."
        )
