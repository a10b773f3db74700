"""Batches of data, whatever they are made of: tensors in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same batch with a function of each of its tensors."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [map_tensors(part, function) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(part)


def checksum(batch: Any) -> tuple[float, float]:
    """A sum that changes with the data but not with their order, and the size that its rounding goes by."""
    total = size = 0.0
    for index, tensor in enumerate(tensors_of(batch), start=1):
        values = tensor.detach().double()
        total += index * float(values.sum())
        size += index * float(values.abs().sum())
    return total, size


def fingerprint(batch: Any) -> float:
    """A number that tells batches apart, and orders of the same samples, too."""
    total = 0.0
    for index, tensor in enumerate(tensors_of(batch), start=1):
        values = tensor.detach().double().reshape(len(tensor) if tensor.ndim else 1, -1).sum(1)
        weights = values.new_tensor(range(1, len(values) + 1))
        total += index * float((weights * values).sum())
    return total
