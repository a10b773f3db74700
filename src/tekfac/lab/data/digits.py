"""Scikit-learn's handwritten digits: small, real, and there without a download."""

from __future__ import annotations

import torch

from tekfac.extras import require
from tekfac.lab.data.catalogue import DIGITS
from tekfac.lab.data.images import DataSet, Images

TEST = 360
BRIGHTEST = 16


def digits() -> DataSet:
    """All 1,797 images, [N, 1, 8, 8], in an order fixed once and for all; the first 360 are to test on."""
    raw = require("sklearn.datasets", "The data set 'digits'").load_digits()
    pixels = torch.tensor(raw.images)[:, None].mul(255 / BRIGHTEST).round().to(torch.uint8)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    every = Images(pixels, labels)
    return DataSet(
        DIGITS.name,
        train=every.chosen(order[TEST:]),
        test=every.chosen(order[:TEST]),
        classes=DIGITS.classes,
        mean=DIGITS.mean,
        std=DIGITS.std,
    )
