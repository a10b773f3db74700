"""Batches of data, whatever they are made of: tensors in tuples, lists and dicts; and hashes of them.

The hashes are sums of products modulo 2^64, in torch alone: good for telling apart data that were changed or
reordered by accident, not by an adversary.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WORD = 2**64
CHUNK = 2**22
"""Numbers that are hashed at a time."""


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
    """The number of samples, as the first tensor with any has it."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.ndim and len(tensor)), 0)


def is_empty(batch: Any) -> bool:
    """Whether it has tensors with an axis of samples, and none of them has any."""
    lengths = [len(tensor) for tensor in tensors_of(batch) if tensor.ndim]
    return bool(lengths) and not any(lengths)


@dataclass(frozen=True)
class DataHash:
    """What data were seen.

    Attributes:
        content: of the tensors' samples, whatever their order.
        sequence: of everything, in its order and in its batches.
    """

    content: int = 0
    sequence: int = 0

    def then(self, batch: Any) -> DataHash:
        """After one more batch."""
        samples = _stirred(_hashes_of_samples(batch))
        content = (self.content + int(samples.sum())) % WORD
        in_order = int((samples * _weights(len(samples))).sum())
        digest = hashlib.sha256(f"{self.sequence} {in_order} {_outline(batch)}".encode()).digest()
        return DataHash(content, int.from_bytes(digest[:8], "big"))


def hash_of(tensor: Tensor) -> int:
    """Of all its bytes and its shape."""
    shape = int.from_bytes(hashlib.sha256(str(tuple(tensor.shape)).encode()).digest()[:8], "big")
    return (int(_combined(_words(_plain(tensor).reshape(1, -1)))[0]) + shape) % WORD


def _hashes_of_samples(batch: Any) -> Tensor:
    """One number per sample; tensors that do not have one row per sample count for all of them."""
    samples = length(batch)
    hashes = torch.zeros(samples, dtype=torch.int64)
    for index, tensor in enumerate(tensors_of(batch), start=1):
        plain = _plain(tensor)
        whole = not (plain.ndim and len(plain) == samples)
        rows = plain.reshape(1, -1) if whole else plain.reshape(samples, -1)
        hashes += (2 * index + 1) * _combined(_words(rows))
    return hashes


def _outline(batch: Any) -> str:
    """What a batch is made of beside the numbers in its tensors."""
    if isinstance(batch, Tensor):
        return f"{batch.dtype}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key!r}: {_outline(part)}" for key, part in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "[" + ", ".join(_outline(part) for part in batch) + "]"
    if hasattr(batch, "tobytes"):  # an array
        return hashlib.sha256(batch.tobytes()).hexdigest()
    return re.sub(r" at 0x[0-9a-f]+", "", repr(batch))


def _plain(tensor: Tensor) -> Tensor:
    """The tensor in a form whose bytes can be read."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.int_repr()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().cpu()


def _words(rows: Tensor) -> Tensor:
    """The bytes of each row as 64-bit numbers, [N, w]."""
    if not rows.numel():
        return torch.zeros(len(rows), 1, dtype=torch.int64)
    data = rows.contiguous().view(torch.uint8)
    missing = -data.shape[1] % 8
    return torch.nn.functional.pad(data, (0, missing)).contiguous().view(torch.int64)


def _combined(words: Tensor) -> Tensor:
    """A sum of each row's words, stirred, with fixed odd weights, modulo 2^64, [N]."""
    weights = _weights(words.shape[1])
    total = torch.zeros(len(words), dtype=torch.int64)
    step = max(1, CHUNK // max(1, len(words)))
    for start in range(0, words.shape[1], step):
        part = slice(start, start + step)
        total += (_stirred(words[:, part]) * weights[part]).sum(1)
    return total


def _weights(count: int) -> Tensor:
    """Fixed odd numbers."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1


def _stirred(words: Tensor) -> Tensor:
    """64-bit numbers with their bits mixed, so that no bit of a sum of them depends on single bits alone."""
    words = words * -0x61C8864680B583EB
    words = words ^ ((words >> 32) & 0xFFFFFFFF)
    words = words * -0x3B314601E57A13AD
    return words ^ ((words >> 29) & 0x7FFFFFFFF)
