"""Which form each side of a layer's block is kept in: whole, in blocks, or as a diagonal.

A block has two sides: a symmetric matrix over the layer's inputs and one over its outputs. One of many
dimensions is kept as a block diagonal with blocks of b, or as a diagonal (b = 1); curvature/symmetric.py
computes with all three alike. See docs/mathematics.md, section 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

LargeDims = Literal["auto", "blocks", "diagonal"]
LARGE_DIMS: tuple[LargeDims, ...] = ("auto", "blocks", "diagonal")

DEFAULT_MAX_DIM = 5000
"""Of a Fisher that is looked at: 4096 inputs, or 512 channels under a 3 x 3 kernel, and a bias, are whole."""


class AutoSizes(NamedTuple):
    """What "auto" means.

    Attributes:
        whole: dimensions up to which a side is kept whole.
        blocks: the most of a block, where it is cut.
    """

    whole: int
    blocks: int


AUTO_OF_CONVOLUTIONS = AutoSizes(whole=800, blocks=400)
"""64 channels under a 3 x 3 kernel and a bias are whole.

A convolution uses its weights at many positions, beside which the products with its sides are few."""

AUTO = AutoSizes(whole=200, blocks=136)
"""Of other layers: 192 inputs and a bias are whole, 512 and a bias are four blocks.

Of a linear layer, the products with its sides are the larger part of a step. docs/results/ablation has what
blocks cost in accuracy, docs/results/inner-products.md what sides take."""

MaxDim = int | Literal["auto"]

MOST_IN_BLOCKS = 20_000
"""Dimensions up to which "auto" prefers blocks to the diagonal."""


@dataclass(frozen=True)
class SideRule:
    """Which form a side of so many dimensions gets.

    Attributes:
        max_dim: dimensions up to which it is whole, and the largest size of blocks beyond; "auto": by the kind
            of the layer.
        large_dims: the form beyond; "auto": blocks up to MOST_IN_BLOCKS dimensions, else the diagonal.
    """

    max_dim: MaxDim = DEFAULT_MAX_DIM
    large_dims: LargeDims = "auto"

    def block_size(self, dim: int, *, of_convolution: bool = False) -> int:
        """The size of the blocks: `dim` is whole, 1 is diagonal."""
        most = self.max_dim
        if most == "auto":
            sizes = AUTO_OF_CONVOLUTIONS if of_convolution else AUTO
            most = sizes.whole if dim <= sizes.whole else sizes.blocks
        blocks = math.ceil(dim / most)
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
