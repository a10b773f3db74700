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
from itertools import product

import torch
from torch import Tensor


def transform(kernel: Sequence[int], like: Tensor) -> Tensor:
    """W, the orthogonal matrix from positions to frequencies, [P, P]: of every axis a DCT-II.

    In the precision and on the device of a tensor.
    """
    return torch.tensor(_waves(tuple(kernel)), dtype=like.dtype, device=like.device)


@cache
def _waves(kernel: tuple[int, ...]) -> list[list[float]]:
    """Its numbers: products over the axes, positions and frequencies of the last axis next to each other."""
    axes = [_cosines(size) for size in kernel]
    places = list(product(*map(range, kernel)))
    return [
        [math.prod(axis[f][p] for axis, f, p in zip(axes, wave, place, strict=True)) for place in places]
        for wave in places
    ]


def _cosines(size: int) -> list[list[float]]:
    """cos(pi (p + 1/2) f / size) for every frequency f and position p, rows of length 1."""
    return [
        [math.sqrt((1 if f == 0 else 2) / size) * math.cos(math.pi * (p + 0.5) * f / size) for p in range(size)]
        for f in range(size)
    ]


def split(rows: Tensor, waves: Tensor) -> Tensor:
    """Rows [G, R, C P] by frequencies, [G, P, R, C], laid out so.

    Args:
        rows: channels, then positions.
        waves: W, [P, P].
    """
    groups, count, dim = rows.shape
    channels = dim // len(waves)
    flat = rows.reshape(groups, count * channels, len(waves)).mT
    found = waves @ flat[0] if groups == 1 else torch.bmm(waves.expand(groups, -1, -1), flat)
    return found.view(groups, len(waves), count, channels)


def joined(by_frequency: Tensor, waves: Tensor) -> Tensor:
    """The inverse of `split`: [G, P, R, C], laid out so, as rows [G, R, C P]."""
    groups, positions, count, channels = by_frequency.shape
    flat = by_frequency.reshape(groups, positions, count * channels).mT
    found = flat[0] @ waves if groups == 1 else torch.bmm(flat, waves.expand(groups, -1, -1))
    return found.view(groups, count, channels * positions)
