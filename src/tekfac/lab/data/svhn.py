"""SVHN's files of cropped digits."""

from __future__ import annotations

from pathlib import Path

import torch

from tekfac.lab.data.images import Images
from tekfac.lab.data.mat import read_mat


def images_in_mat(path: Path) -> Images:
    """The images X, [32, 32, 3, N], and the digits y, [N, 1], of which 10 is the digit zero.

    Raises:
        ValueError: if the file is damaged; the message says how.
    """
    found = read_mat(path)
    missing = [name for name in ("X", "y") if name not in found]
    if missing:
        raise ValueError(f"{str(path)!r} has no {' and no '.join(missing)}. Expected SVHN's X and y.")
    pixels, digits = found["X"], found["y"].flatten()
    if pixels.ndim == 3:
        pixels = pixels[..., None]  # MATLAB drops a last axis of length one
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise ValueError(
            f"X in {str(path)!r} is {pixels.dtype} of shape {list(pixels.shape)}. "
            "Expected torch.uint8 of shape [32, 32, 3, N]."
        )
    count = pixels.shape[3]
    if len(digits) != count:
        raise ValueError(f"{str(path)!r} has {len(digits):,} labels for {count:,} images. Fetch it again.")
    if not count:
        raise ValueError(f"{str(path)!r} holds no images.")
    labels = digits.to(torch.int64)
    if not torch.equal(labels.double(), digits.double()) or labels.min() < 1 or labels.max() > 10:
        raise ValueError(
            f"The digits in {str(path)!r} are {digits.double().min():g} to {digits.double().max():g}. Expected "
            "whole numbers from 1 to 10, where 10 is the digit zero."
        )
    return Images(pixels.permute(3, 2, 0, 1).contiguous(), labels % 10)
