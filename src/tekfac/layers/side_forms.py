"""Which form each side of a layer's block is kept in: whole, in blocks, as a diagonal, or by frequencies.

A block has two sides: a symmetric matrix over the layer's inputs and one over its outputs. One of many
dimensions is kept as a block diagonal with blocks of b, or as a diagonal (b = 1); the inputs of a convolution
as a block diagonal over the frequencies of its kernel. curvature/symmetric.py computes with all of them alike.
See docs/mathematics.md, section 10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

LargeDims = Literal["auto", "frequencies", "blocks", "diagonal"]
LARGE_DIMS: tuple[LargeDims, ...] = ("auto", "frequencies", "blocks", "diagonal")

DEFAULT_MAX_DIM = 5000
"""Of a Fisher that is looked at: 4096 inputs, or 512 channels under a 3 x 3 kernel, and a bias, are whole."""


class SideForms(NamedTuple):
    """In which form both sides of a layer's block are kept.

    Attributes:
        block_in: the size of the blocks of the input side; None: whole.
        block_out: of the output side.
        kernel: sizes of a convolution's kernel, where the input side is kept by its frequencies; else ().
    """

    block_in: int | None = None
    block_out: int | None = None
    kernel: tuple[int, ...] = ()

    def turning(self, d_in: int, d_out: int) -> tuple[int, int]:
        """Multiplications for every number that is turned along the inputs, and along the outputs.

        To find frequencies takes as many as the kernel has entries.
        """
        frequencies = math.prod(self.kernel) if self.kernel else 0
        return (self.block_in or d_in) + frequencies, self.block_out or d_out


WHOLE = SideForms()


class AutoSizes(NamedTuple):
    """What "auto" means.

    Attributes:
        whole: dimensions up to which a side is kept whole.
        blocks: the most of a block, where it is cut.
    """

    whole: int
    blocks: int


AUTO_OF_CONVOLUTIONS = AutoSizes(whole=800, blocks=400)
"""Where they are not kept by frequencies: outputs, kernels of one entry, images of few channels.

A convolution uses its weights at many positions, beside which the products with its sides are few."""

AUTO_OF_FREQUENCIES = AutoSizes(whole=64, blocks=400)
"""The inputs of a convolution: 7 channels under a 3 x 3 kernel are whole; and 400 channels of a frequency."""

LEAST_CHANNELS = 8
"""For which "auto" keeps inputs by frequencies: over fewer there is little that a block could tell."""

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
        large_dims: the form beyond; "frequencies": those of a convolution's kernel, each with blocks over the
            channels, and other sides as with "auto": in blocks up to MOST_IN_BLOCKS dimensions, else as the
            diagonal. With `max_dim`, too, "auto" is "frequencies".
    """

    max_dim: MaxDim = DEFAULT_MAX_DIM
    large_dims: LargeDims = "auto"

    def channels_in_a_block(self, channels: int, kernel: Sequence[int], *, bias: bool = False) -> int | None:
        """The size of blocks over the channels, where a convolution's inputs are kept by frequencies.

        All blocks have the same size: where no number of them near the wanted one divides the channels, as
        where the side is small, or another form is asked for, there are no frequencies, and the answer is None.

        Args:
            channels: of the inputs, of one group.
            kernel: its sizes.
            bias: whether there is one, which would be one more input of a whole side.
        """
        is_auto = self.max_dim == "auto"
        wanted = ("auto", "frequencies") if is_auto else ("frequencies",)
        sizes = AUTO_OF_FREQUENCIES if is_auto else AutoSizes(int(self.max_dim), int(self.max_dim))
        positions = math.prod(kernel)
        if self.large_dims not in wanted or positions == 1 or channels * positions + bias <= sizes.whole:
            return None
        if is_auto and channels < LEAST_CHANNELS:
            return None
        blocks = math.ceil(channels / sizes.blocks)
        while channels % blocks:
            blocks += 1
        return channels // blocks if blocks < 2 * math.ceil(channels / sizes.blocks) else None

    def block_size(self, dim: int, *, of_convolution: bool = False) -> int:
        """The size of the blocks: `dim` is whole, 1 is diagonal."""
        most = self.max_dim
        if most == "auto":
            sizes = AUTO_OF_CONVOLUTIONS if of_convolution else AUTO
            most = sizes.whole if dim <= sizes.whole else sizes.blocks
        blocks = math.ceil(dim / most)
        if self.large_dims == "diagonal" and blocks > 1:
            return 1
        if self.large_dims != "blocks" and blocks > 1 and dim > MOST_IN_BLOCKS:
            return 1
        return math.ceil(dim / blocks)


def in_words(dim: int, block_size: int, kernel: Sequence[int] = ()) -> str:
    """For tables: "64", "16384 in 4 blocks", "50257, diagonal", "576 by 3 x 3 frequencies"."""
    if kernel:
        axes = " x ".join(map(str, kernel))
        blocks = dim // math.prod(kernel) // block_size
        return f"{dim} by {axes} frequencies" + (f" in {blocks} blocks each" if blocks > 1 else "")
    if block_size == dim:
        return str(dim)
    return f"{dim}, diagonal" if block_size == 1 else f"{dim} in {math.ceil(dim / block_size)} blocks"
