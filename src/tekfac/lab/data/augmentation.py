"""Random crops and flips of a whole batch at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def padding_of(size: int) -> int:
    """Pixels put around an image of this edge: four around the 32 of CIFAR, and that share of others."""
    return size // 8


def draw(count: int, padding: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where each image is cropped, int64 [B, 2] (down, right) in 0..2 padding, and which to flip, bool [B]."""
    offsets = torch.randint(2 * padding + 1, (count, 2), generator=generator)
    flips = torch.randint(2, (count,), generator=generator).bool()
    return offsets, flips


def crop_and_flip(pixels: Tensor, padding: int, offsets: Tensor, flips: Tensor) -> Tensor:
    """Surround raw images by zeros, cut them to their size again, and flip some left to right.

    Zeros are black here: they are put around pixels as they came, before these are normalised, as is usual.

    Args:
        pixels: uint8 [B, C, H, W].
        padding: how many zeros on each side.
        offsets: where to cut, from the top and from the left of the surrounded image, int64 [B, 2].
        flips: bool [B].

    Returns:
        uint8 [B, C, H, W].
    """
    count, channels, height, width = pixels.shape
    padded = F.pad(pixels, (padding,) * 4)
    columns = torch.arange(width, device=pixels.device)
    columns = torch.where(flips[:, None], columns.flip(0), columns) + offsets[:, 1:]
    rows = (torch.arange(height, device=pixels.device) + offsets[:, :1]) * padded.shape[3]
    places = (rows[:, :, None] + columns[:, None, :]).view(count, 1, height * width)
    chosen = padded.view(count, channels, -1).gather(2, places.expand(-1, channels, -1))
    return chosen.view(count, channels, height, width)
