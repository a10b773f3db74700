"""A convolution's inputs by the frequencies of its kernel: the discrete cosine transform of its positions.

Neighbouring pixels are alike, and alike everywhere. So the inputs of a kernel are nearly uncorrelated from one
frequency to another, and a side that keeps only a block over the channels for each of them loses little, at a
fraction of the price (docs/mathematics.md, section 10). Coordinates are channels, then positions of the kernel
before the transform, and frequencies, then channels after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


@cache
def transform(kernel: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthogonal matrix from positions to frequencies, [P, P]: of every axis a DCT-II."""
    found = torch.ones(1, 1, dtype=torch.float64)
    for size in kernel:
        found = torch.kron(found, _cosines(size))
    return found.to(device, dtype)


def _cosines(size: int) -> Tensor:
    """cos(pi (p + 1/2) f / size) for every frequency f and position p, rows of length 1, [size, size]."""
    places = torch.arange(size, dtype=torch.float64)
    waves = torch.cos(math.pi / size * torch.outer(places, places + 0.5))
    lengths: Tensor = torch.linalg.vector_norm(waves, dim=1, keepdim=True)
    return waves / lengths


def split(rows: Tensor, kernel: Sequence[int]) -> Tensor:
    """Rows [G, R, C P] by frequencies, [G, P, R, C], laid out so."""
    groups, count, dim = rows.shape
    waves = transform(tuple(kernel), rows.dtype, rows.device)
    positions = len(waves)
    flat = rows.reshape(groups, -1, positions).mT
    found = waves @ flat[0] if groups == 1 else torch.bmm(waves.expand(groups, -1, -1), flat)
    return found.view(groups, positions, count, dim // positions)


def joined(by_frequency: Tensor, kernel: Sequence[int]) -> Tensor:
    """The inverse of `split`: [G, P, R, C], laid out so, as rows [G, R, C P]."""
    groups, positions, count, channels = by_frequency.shape
    waves = transform(tuple(kernel), by_frequency.dtype, by_frequency.device)
    flat = by_frequency.reshape(groups, positions, -1).mT
    found = flat[0] @ waves if groups == 1 else torch.bmm(flat, waves.expand(groups, -1, -1))
    return found.view(groups, count, channels * positions)
