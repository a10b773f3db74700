"""The canonical layout of captured data.

Every layer, whatever its type, becomes `s[n, t] = W a[n, t]` for samples n and positions t. With G
blocks per layer (convolution groups; one otherwise) and K vectors back-propagated per sample:

    a: [G, N, T, d_in]       layer inputs; the last coordinate is 1 where the layer has a bias
    u: [K, G, N, T, d_out]   gradients of each sample's loss with respect to the layer's outputs

A sample's gradient is G_n = sum_t u[n, t] a[n, t]^T and the layer's Fisher block is the sum of
vec(G_n) vec(G_n)^T over samples and columns, divided by the number of loss terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tekfac.layers.side_forms import WHOLE, SideForms


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
        forms: in which the sides of the block are kept.
        tokens: which columns the inputs belong to, where a has only those that occur.
        tied: whether the rows come from a table of embeddings that is also an output projection: then rows of
            the two uses cannot be averaged with one another.
        formed: whether a holds the gradients themselves, G_n of d_out rows each, and u is the identity.
        scale: what squares of formed gradients are to be multiplied by; others are as they should be.
        moments: the sums of G^T G and G G^T over the samples, in the forms of the sides, where these are all
            that is left of formed gradients: a and u are empty then.
    """

    a: Tensor
    u: Tensor
    counted: Tensor | None = None
    forms: SideForms = WHOLE
    tokens: Tokens | None = None
    tied: bool = False
    formed: bool = False
    scale: float = 1.0
    moments: tuple[Tensor, Tensor] | None = None

    @cached_property
    def gradients(self) -> Tensor:
        """G_n for every column and sample, not scaled, [K, G, N, d_out, d_in]; tokens leave out what is 0.

        Formed once, for the moments and for Theta alike.
        """
        if self.formed:
            return self.a[None]
        if len(self.u) == 1:
            return (self.u[0].mT @ self.a)[None]
        return torch.einsum("kgnto,gnti->kgnoi", self.u, self.a)

    def per_sample_gradients(self) -> Tensor:
        """G_n for every column and sample, [K, G, N, d_out, d_in]."""
        gradients = self.gradients if self.scale == 1 else self.gradients * self.scale**0.5
        return gradients if self.tokens is None else self.tokens.spread(gradients, dim=-1)


def samples_within(memory_budget: int, numbers_per_sample: int) -> int:
    """How many samples fit into the budget (in bytes, of 8-byte numbers); never fewer than one."""
    return max(1, memory_budget // max(1, 8 * numbers_per_sample))
