"""Arithmetic entry by entry on large tensors, a piece at a time: what is in between stays in the cache."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

IN_CACHE = 2**16
"""Numbers of a piece, for every thread: some tensors of that size fit in a core's second cache.

Larger pieces go to memory and back between two operations; smaller ones cost calls."""


def in_pieces(*values: Tensor | float) -> Iterable[tuple[Any, ...]]:
    """Values that are combined entry by entry, piece by piece: views of the tensors.

    On other devices than the CPU, and where they are small, there is one piece.

    Args:
        values: tensors [G, d_out, d_in], the first of full size, the others perhaps [G, 1, 1]; numbers.
    """
    first = values[0]
    if not isinstance(first, Tensor) or first.numel() <= 2 * IN_CACHE or first.device.type != "cpu":
        return (values,)
    most = IN_CACHE * torch.get_num_threads()
    axis = 0 if first.shape[0] > 1 else 1  # groups, or rows of the only one
    length = first.shape[axis]
    size = max(1, most * length // first.numel())
    found = zip(*(_cut(value, size, axis, length) for value in values), strict=False)
    return found if axis or size > 1 else chain.from_iterable(in_pieces(*group) for group in found)


def _cut(value: Tensor | float, size: int, axis: int, length: int) -> Iterable[Tensor | float]:
    """Pieces of what has the full length along the axis, or the same again and again."""
    if isinstance(value, Tensor) and value.shape[axis] == length:
        return torch.split(value, size, dim=axis)
    return repeat(value)
