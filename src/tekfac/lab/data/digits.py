"""Scikit-learn's handwritten digits: small, real, and there without a download."""

from __future__ import annotations

import torch
from torch import Tensor

from tekfac.common.extras import require
from tekfac.lab.data.catalogue import DIGITS
from tekfac.lab.data.images import DataSet, Images


def read_digits(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """All 1,797 images, [N, 1, 8, 8] in 0..1, and labels [N], in an order fixed once and for all."""
    raw = require("sklearn.datasets", "The digits example").load_digits()
    images = torch.tensor(raw.images, dtype=dtype)[:, None] / 16
    labels = torch.tensor(raw.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def digits() -> DataSet:
    """The images as a data set; the first 360 are to test on."""
    (images, labels), tested = read_digits(), DIGITS.counts[1]
    pixels = images.mul(255).round().to(torch.uint8)
    return DataSet(
        DIGITS.name,
        train=Images(pixels[tested:], labels[tested:]),
        test=Images(pixels[:tested], labels[:tested]),
        classes=DIGITS.classes,
        mean=DIGITS.mean,
        std=DIGITS.std,
    )
