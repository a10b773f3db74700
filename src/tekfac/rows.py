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
class Rows:
    """A few samples of one layer.

    Attributes:
        a: inputs, [G, N, T, d_in].
        u: output gradients, [K, G, N, T, d_out].
        counted: [N, T] of 0 and 1, or None where every position counts. A position does not count if
            its target is ignored and no gradient reaches it (padding).
    """

    a: Tensor
    u: Tensor
    counted: Tensor | None = None

    def per_sample_gradients(self) -> Tensor:
        """G_n for every column and sample, [K, G, N, d_out, d_in]."""
        return torch.einsum("kgnto,gnti->kgnoi", self.u, self.a)


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
