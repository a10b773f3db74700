"""The canonical layout of captured data.

Every layer, whatever its type, becomes `s[n, t] = W a[n, t]` for samples n and positions t. With G
blocks per layer (convolution groups; one otherwise) and K vectors back-propagated per sample:

    a: [G, N, T, d_in]       layer inputs; the last coordinate is 1 where the layer has a bias
    u: [K, G, N, T, d_out]   gradients of each sample's loss with respect to the layer's outputs

A sample's gradient is G_n = sum_t u[n, t] a[n, t]^T and the layer's Fisher block is the sum of
vec(G_n) vec(G_n)^T over samples and columns, divided by the number of loss terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Which columns of the gradient matrix the one-hot inputs of a few samples belong to.

    Inputs that say "row i of a table" have a 1 among very many zeros. Of a few samples only the columns that
    occur are formed, and put in their places afterwards.

    Attributes:
        columns: [d], different numbers.
        size: of all columns.
    """

    columns: Tensor
    size: int

    def spread(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensor with all columns along an axis, zeros where none of them occurred."""
        shape = list(tensor.shape)
        shape[dim] = self.size
        return tensor.new_zeros(shape).index_copy_(dim, self.columns, tensor)


@dataclass(frozen=True)
class Rows:
    """A few samples of one layer.

    Attributes:
        a: inputs, [G, N, T, d_in].
        u: output gradients, [K, G, N, T, d_out].
        counted: [1 or G, N, T] of booleans, or None where every position counts. A position does not count
            if its target is ignored, or it is padding, and no gradient reaches it.
        block_in: the size of the blocks that the input side is kept in (see side_forms.py); None: whole.
        block_out: of the output side.
        tokens: which columns the inputs belong to, where a has only those that occur.
        unlike: whether the rows come from uses of the parameters that are no like (a table of embeddings that
            is also an output projection).
    """

    a: Tensor
    u: Tensor
    counted: Tensor | None = None
    block_in: int | None = None
    block_out: int | None = None
    tokens: Tokens | None = None
    unlike: bool = False

    def gradients(self) -> Tensor:
        """G_n for every column and sample, [K, G, N, d_out, d_in], where tokens leave out what is 0."""
        return torch.einsum("kgnto,gnti->kgnoi", self.u, self.a)

    def per_sample_gradients(self) -> Tensor:
        """G_n for every column and sample, [K, G, N, d_out, d_in]."""
        gradients = self.gradients()
        return gradients if self.tokens is None else self.tokens.spread(gradients, dim=-1)


class BatchShape(NamedTuple):
    """The six sizes of a batch in the canonical layout."""

    columns: int  # K
    groups: int  # G
    samples: int  # N
    positions: int  # T
    d_in: int
    d_out: int


@dataclass(frozen=True)
class LayerBatch:
    """What one forward and backward pass left for one layer, still to be unfolded into rows.

    Attributes:
        shape: K, G, N, T, d_in and d_out of the whole batch.
        num_terms: the number of loss terms M that the Fisher is divided by.
        slice_rows: gives the rows of samples start..stop-1.
    """

    shape: BatchShape
    num_terms: int
    slice_rows: Callable[[int, int], Rows]

    def chunks(self, samples_per_chunk: int) -> Iterator[Rows]:
        """The rows of all samples, at most `samples_per_chunk` at a time."""
        for start in range(0, self.shape.samples, samples_per_chunk):
            yield self.slice_rows(start, min(start + samples_per_chunk, self.shape.samples))


def samples_within(memory_budget: int, numbers_per_sample: int) -> int:
    """How many samples fit into the budget (in bytes, of 8-byte numbers); never fewer than one."""
    return max(1, memory_budget // max(1, 8 * numbers_per_sample))
