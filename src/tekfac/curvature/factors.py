"""Kronecker factors of a layer's Fisher block: plain and trace-restricted.

    plain              F ~ A (x) U            A = E[a a^T],  U = E[u u^T]                (paper, Eq. kfac2)
    trace-restricted   F ~ sigma Phi (x) Psi  the normalised partial traces of F         (paper, Eq. tkfac2)

Both are built from two second moments, one of the inputs and one of the output gradients. In the
trace-restricted ones every row is weighted by the squared norm of its partner. What "row" means when a
layer uses its weights at several positions is the *sharing*:

    exact    partial traces of the exact block, E[G_n^T G_n] and E[G_n G_n^T]: the trace of F is kept
    expand   positions are treated as if they were independent samples
    reduce   inputs are averaged and output gradients summed over positions first

docs/mathematics.md, sections 2 and 3, has the formulas and what each of them keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tekfac.curvature import symmetric
from tekfac.layers.batch import RowSource
from tekfac.layers.contractions import grams_are_cheaper, samples_per_chunk, sizes_of
from tekfac.layers.rows import Rows


class KroneckerFactors(NamedTuple):
    """F is approximated by scale * input (x) output.

    The moments that are averaged over steps are of this form, and so are the factors that are read from them:
    the same, for plain factors; with both sides divided by their trace, for trace-restricted ones.

    Attributes:
        input: A or Phi, [G, d_in, d_in], or in the cheaper form of a large side (see symmetric.py).
        output: U or Psi, [G, d_out, d_out], likewise.
        scale: [G]; the common trace sigma for trace-restricted factors, 1 for plain ones.
    """

    input: Tensor
    output: Tensor
    scale: Tensor


class MomentSums(NamedTuple):
    """Sums over samples, and what the input sum is to be divided by.

    The output sum is always divided by the number of loss terms. `input_count` is None where the input
    sum is, too; both sums then have the same trace.
    """

    input: Tensor
    output: Tensor
    input_count: Tensor | None

    def plus(self, other: MomentSums) -> MomentSums:
        """The sums over both sets of samples; this one's tensors are used up."""
        count = None
        if self.input_count is not None and other.input_count is not None:
            count = self.input_count + other.input_count
        return MomentSums(self.input.add_(other.input), self.output.add_(other.output), count)

    def times(self, weight: float, num_terms: int) -> MomentSums:
        """Weighed means of what is made of gradients; a mean input is not."""
        inputs = self.input * weight / num_terms if self.input_count is None else self.input.clone()
        return MomentSums(inputs, self.output * weight / num_terms, self.input_count)


MeasureChunk = Callable[[Rows], MomentSums]


@dataclass(frozen=True)
class FactorRule:
    """One of the two choices of factors.

    Attributes:
        name: for messages.
        sharings: how a chunk of rows is measured, by the name of the sharing.
        trace_restricted: whether both moments have the trace of F, which becomes the scale.
    """

    name: str
    sharings: Mapping[str, MeasureChunk]
    trace_restricted: bool

    def measure(self, batches: Sequence[RowSource], sharing: str, memory_budget: int) -> KroneckerFactors:
        """The moments of one or more batches of the same layer, as of one large batch."""
        num_terms = sum(batch.num_terms for batch in batches)
        return self.moments(self.sums(batches, sharing, memory_budget), num_terms)

    def sums(self, batches: Sequence[RowSource], sharing: str, memory_budget: int) -> MomentSums:
        """What `measure` divides: sums that can be added to those of other batches."""
        total: MomentSums | None = None
        for batch in batches:
            for rows in batch.chunks(samples_per_chunk(batch, memory_budget)):
                sums = self._measured(rows, sharing)
                total = sums if total is None else total.plus(sums)
        assert total is not None, "sums() needs at least one batch"
        return total

    def _measured(self, rows: Rows, sharing: str) -> MomentSums:
        """The sums of a chunk.

        Rows of a tied table cannot be averaged with one another: unless the exact factors are asked for, each
        is weighted by its partner, whatever the factors.
        """
        if rows.moments is not None:
            inputs, outputs = rows.moments
            return MomentSums(inputs * rows.scale, outputs * rows.scale, None)
        measure = restricted_expand if rows.tied and sharing != "exact" else self.sharings[sharing]
        sums = measure(rows)
        if rows.scale != 1:
            sums = sums._replace(input=sums.input * rows.scale, output=sums.output * rows.scale)
        return sums if rows.tokens is None else sums._replace(input=rows.tokens.spread(sums.input, dim=1))

    def moments(self, sums: MomentSums, num_terms: float) -> KroneckerFactors:
        """The moments that sums over samples with so many loss terms stand for."""
        if sums.input_count is None:
            input_moment = sums.input / num_terms
            if not self.trace_restricted:
                input_moment = symmetric.unit_trace(input_moment)
        else:
            input_moment = sums.input / sums.input_count.reshape(-1, *[1] * (sums.input.ndim - 1))
        traces = symmetric.trace(input_moment)
        scale = traces if self.trace_restricted else torch.ones_like(traces)
        return KroneckerFactors(input_moment, sums.output / num_terms, scale)

    def read(self, moments: KroneckerFactors) -> KroneckerFactors:
        """The factors that the (averaged) moments stand for; factors stand for themselves."""
        if not self.trace_restricted:
            return moments
        return KroneckerFactors(
            symmetric.unit_trace(moments.input), symmetric.unit_trace(moments.output), moments.scale
        )


# -- plain ---------------------------------------------------------------------------------------------


def plain_expand(rows: Rows) -> MomentSums:
    """A: mean of a a^T over samples and positions; U: sum of u u^T over positions, mean over samples."""
    a, counted = rows.a, rows.counted
    if counted is None:
        weighted = a
        count = a.new_tensor(a.shape[1] * a.shape[2])
    else:
        weighted = a * counted[..., None].to(a.dtype)
        count = counted.sum(dim=(1, 2)).to(a.dtype)
    return MomentSums(_input_moment(rows, weighted, a), _output_moment(rows, rows.u, rows.u), count)


def plain_reduce(rows: Rows) -> MomentSums:
    """A: mean over samples of the outer product of the mean input; U: of the summed output gradient."""
    a, u = _reduced(rows)
    if rows.counted is None:
        count = a.new_tensor(a.shape[1])
    else:
        present = rows.counted.any(dim=2).to(a.dtype)
        a, count = a * present[..., None, None], present.sum(dim=1)
    return MomentSums(_input_moment(rows, a, a), _output_moment(rows, u, u), count)


# -- trace-restricted ----------------------------------------------------------------------------------


def restricted_exact(rows: Rows) -> MomentSums:
    """Partial traces of the exact block: sums of G^T G and G G^T, by the cheaper of two contractions.

    With a single position the block is that of `restricted_expand`.
    """
    if rows.formed:
        return exact_by_gradients(rows)
    if rows.a.shape[2] == 1:
        return restricted_expand(rows)
    return exact_by_grams(rows) if grams_are_cheaper(sizes_of(rows)) else exact_by_gradients(rows)


def exact_by_grams(rows: Rows) -> MomentSums:
    """sum a^T (u u^T) a and sum u^T (a a^T) u, from the T x T Gram matrices of each sample."""
    a, u = rows.a, rows.u
    gram_of_inputs = torch.einsum("gnti,gnsi->gnts", a, a)
    gram_of_gradients = torch.einsum("kgnto,kgnso->gnts", u, u)
    weighted_a = torch.einsum("gnts,gnsi->gnti", gram_of_gradients, a)
    weighted_u = torch.einsum("gnts,kgnso->kgnto", gram_of_inputs, u)
    return MomentSums(_input_moment(rows, a, weighted_a), _output_moment(rows, u, weighted_u), None)


def exact_by_gradients(rows: Rows) -> MomentSums:
    """sum G^T G and sum G G^T, from the per-sample gradients themselves."""
    gradients = rows.gradients  # [K, G, N, d_out, d_in]
    turned = gradients.mT
    return MomentSums(_input_moment(rows, gradients, gradients), _output_moment(rows, turned, turned), None)


def restricted_expand(rows: Rows) -> MomentSums:
    """Positions as samples: sum |u_t|^2 a_t a_t^T and sum |a_t|^2 u_t u_t^T."""
    return _weighted_by_partner(rows, rows.a, rows.u)


def restricted_reduce(rows: Rows) -> MomentSums:
    """One row per sample: sum |u|^2 a a^T and sum |a|^2 u u^T of the mean input, summed gradient."""
    return _weighted_by_partner(rows, *_reduced(rows))


def _weighted_by_partner(rows: Rows, a: Tensor, u: Tensor) -> MomentSums:
    norms_of_u = u.square().sum(dim=(0, -1))  # [G, N, T]
    norms_of_a = a.square().sum(dim=-1)  # [G, N, T]
    return MomentSums(
        _input_moment(rows, a * norms_of_u[..., None], a),
        _output_moment(rows, u * norms_of_a[None, ..., None], u),
        None,
    )


def _input_moment(rows: Rows, x: Tensor, y: Tensor) -> Tensor:
    """Sum of x y^T over [..., G, N, T, d_in], in the form of the input side."""
    return symmetric.sum_of_products(x, y, rows.forms.block_in or x.shape[-1], rows.forms.kernel)


def _output_moment(rows: Rows, x: Tensor, y: Tensor) -> Tensor:
    """Sum of x y^T over [..., G, N, T, d_out], in the form of the output side."""
    return symmetric.sum_of_products(x, y, rows.forms.block_out or x.shape[-1])


def _reduced(rows: Rows) -> tuple[Tensor, Tensor]:
    """Mean input [G, N, 1, d_in] over the counted positions, summed output gradient [K, G, N, 1, d_out]."""
    if rows.counted is None:
        mean_input = rows.a.mean(dim=2, keepdim=True)
    else:
        weight = rows.counted.to(rows.a.dtype).expand(rows.a.shape[:-1])
        weight = weight / weight.sum(dim=2, keepdim=True).clamp_min(1)
        mean_input = torch.einsum("gnti,gnt->gni", rows.a, weight)[:, :, None]
    return mean_input, rows.u.sum(dim=3, keepdim=True)


# -- the two rules -------------------------------------------------------------------------------------

PLAIN = FactorRule(
    name="plain",
    sharings={"expand": plain_expand, "reduce": plain_reduce},
    trace_restricted=False,
)

TRACE_RESTRICTED = FactorRule(
    name="trace-restricted",
    sharings={
        "exact": restricted_exact,
        "expand": restricted_expand,
        "reduce": restricted_reduce,
    },
    trace_restricted=True,
)
