"""Batches of data, whatever they are made of: tensors in tuples, lists and dicts; and hashes of them.

The hashes are sums of products modulo 2^64, in torch alone: good for telling apart data that were changed or
reordered by accident, not by an adversary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORD = 2**64


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


def length(batch: Any) -> int:
    """The number of samples, as the first tensor has it."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.ndim), 0)


@dataclass(frozen=True)
class DataHash:
    """What data were seen.

    Attributes:
        content: of the samples, whatever their order.
        sequence: of the samples in their order.
    """

    content: int = 0
    sequence: int = 0

    def then(self, batch: Any) -> DataHash:
        """After one more batch."""
        samples = [_mixed(value % WORD) for value in _hashes_of_samples(batch).tolist()]
        sequence = self.sequence
        for value in samples:
            sequence = _mixed((31 * sequence + value) % WORD)
        return DataHash((self.content + sum(samples)) % WORD, sequence)


def hash_of(tensor: Tensor) -> int:
    """Of all its bytes and its shape."""
    words = _words(tensor.reshape(1, -1))
    shape = sum((index + 1) * size for index, size in enumerate(tensor.shape))
    return _mixed((int(_combined(words)[0]) + shape) % WORD)


def _hashes_of_samples(batch: Any) -> Tensor:
    """One number per sample; tensors that do not have one row per sample count for all of them."""
    samples = length(batch)
    hashes = torch.zeros(samples, dtype=torch.int64)
    for index, tensor in enumerate(tensors_of(batch), start=1):
        if tensor.ndim and len(tensor) == samples and tensor.numel():
            hashes += (2 * index + 1) * _combined(_words(tensor.reshape(samples, -1)))
        elif tensor.numel():
            hashes += (2 * index + 1) * _combined(_words(tensor.reshape(1, -1)))
    return hashes


def _words(rows: Tensor) -> Tensor:
    """The bytes of each row as 64-bit numbers, [N, w]."""
    data = rows.detach().cpu().contiguous().view(torch.uint8)
    missing = -data.shape[1] % 8
    return torch.nn.functional.pad(data, (0, missing)).contiguous().view(torch.int64)


def _combined(words: Tensor) -> Tensor:
    """A sum of each row's words with fixed odd weights, modulo 2^64, [N]."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (words.shape[1],), generator=generator) * 2 + 1
    return (words * weights).sum(1)


def _mixed(value: int) -> int:
    """The bits of a 64-bit number, stirred."""
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD % WORD
    value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53 % WORD
    return value ^ (value >> 33)
