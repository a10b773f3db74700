"""Which form each side of a layer's block is kept in: whole, in blocks, or as a diagonal.

A block has two sides: a symmetric matrix over the layer's inputs and one over its outputs. One of many
dimensions is kept as a block diagonal with blocks of b, or as a diagonal (b = 1); curvature/symmetric.py
computes with all three alike. See docs/mathematics.md, section 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

LargeDims = Literal["auto", "blocks", "diagonal"]
LARGE_DIMS: tuple[LargeDims, ...] = ("auto", "blocks", "diagonal")

DEFAULT_MAX_DIM = 5000
"""Of a Fisher that is looked at: 4096 inputs, or 512 channels under a 3 x 3 kernel, and a bias, are whole."""

QUICK_MAX_DIM = 800
"""Of an optimizer: 768 inputs and a bias are whole. docs/results/inner-products.md has what sides take."""

MOST_IN_BLOCKS = 20_000
"""Dimensions up to which "auto" prefers blocks to the diagonal."""


@dataclass(frozen=True)
class SideRule:
    """Which form a side of so many dimensions gets.

    Attributes:
        max_dim: dimensions up to which it is whole, and the largest size of blocks beyond.
        large_dims: the form beyond; "auto": blocks up to MOST_IN_BLOCKS dimensions, else the diagonal.
    """

    max_dim: int = DEFAULT_MAX_DIM
    large_dims: LargeDims = "auto"

    def block_size(self, dim: int) -> int:
        """The size of the blocks: `dim` is whole, 1 is diagonal."""
        blocks = math.ceil(dim / self.max_dim)
        if self.large_dims == "diagonal" and blocks > 1:
            return 1
        if self.large_dims == "auto" and blocks > 1 and dim > MOST_IN_BLOCKS:
            return 1
        return math.ceil(dim / blocks)


def in_words(dim: int, block_size: int) -> str:
    """For tables: "64", "16384 in 4 blocks", "50257, diagonal"."""
    if block_size == dim:
        return str(dim)
    return f"{dim}, diagonal" if block_size == 1 else f"{dim} in {math.ceil(dim / block_size)} blocks"
