"""Batches of data, whatever they are made of: tensors in tuples, lists and dicts; and hashes of them."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    @classmethod
    def of_parts(cls, parts: Sequence[DataHash]) -> DataHash:
        """Of what was seen in several parts, each in its order."""
        content = sum(part.content for part in parts) % WORD
        return cls(content, _hash(*(str(part.sequence).encode() for part in parts)))

    def then(self, batch: Any) -> DataHash:
        """After one more batch."""
        samples = _hashes_of_samples(batch)
        content = (self.content + sum(samples)) % WORD
        return DataHash(content, _hash(f"{self.sequence} {samples} {_outline(batch)}".encode()))


def hash_of(tensor: Tensor) -> int:
    """Of all its bytes and its shape."""
    return _hash(str(tuple(tensor.shape)).encode(), _bytes(tensor))


def _hashes_of_samples(batch: Any) -> list[int]:
    """One number per sample; tensors that do not have one row per sample count for all of them."""
    samples = length(batch)
    parts: list[list[bytes]] = [[] for _ in range(samples)]
    for tensor in tensors_of(batch):
        data = _bytes(tensor)
        has_rows = tensor.ndim > 0 and len(tensor) == samples
        size = len(data) // samples if has_rows and samples else 0
        for index, own in enumerate(parts):
            own.append(data[index * size : (index + 1) * size] if has_rows else data)
    return [_hash(*own) for own in parts]


def _hash(*parts: bytes) -> int:
    """64 bits of what was put together from these parts, and not from others."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "big")


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


def _bytes(tensor: Tensor) -> bytes:
    """The numbers of a tensor as they lie in memory, in order; NumPy may not be there."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    elif tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""
