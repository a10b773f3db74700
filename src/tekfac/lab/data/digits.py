"""Scikit-learn's handwritten digits: small, real, and there without a download."""

from __future__ import annotations

import torch

from tekfac.fisher.digits import data
from tekfac.lab.data.catalogue import DIGITS
from tekfac.lab.data.images import DataSet, Images

TEST = 360


def digits() -> DataSet:
    """All 1,797 images, [N, 1, 8, 8], in an order fixed once and for all; the first 360 are to test on."""
    images, labels = data()
    pixels = images.mul(255).round().to(torch.uint8)
    return DataSet(
        DIGITS.name,
        train=Images(pixels[TEST:], labels[TEST:]),
        test=Images(pixels[:TEST], labels[:TEST]),
        classes=DIGITS.classes,
        mean=DIGITS.mean,
        std=DIGITS.std,
    )
