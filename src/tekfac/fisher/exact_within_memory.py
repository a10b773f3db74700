"""What is found out of a layer's exact block, in the cheapest way that the memory allows.

As a matrix, by the Gram matrix of its rows, or by random probes: `jobs_of` decides, a `Job` is what one pass
over the data does of it. docs/mathematics.md, section 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from tekfac.capture.tally import Shares
from tekfac.curvature.blocks.block import Block
from tekfac.curvature.blocks.dense import DenseBlock
from tekfac.curvature.blocks.gram import GramBlock
from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.fisher.approximation import Approximation
from tekfac.fisher.collectors import Collector, DenseSum, ProbeProducts, RowCount, RowList, SquareSums
from tekfac.fisher.comparison_table import Interval, LayerTruth
from tekfac.fisher.options import Options
from tekfac.layers.layer import Layer


@dataclass(frozen=True)
class Candidate:
    """An approximation of one layer's block.

    Attributes:
        label: of the approximation.
        block: the approximation.
        theta: diagonal of the exact block in its basis, [G, d_out, d_in].
    """

    label: str
    block: KroneckerBlock
    theta: Tensor

    @classmethod
    def of(cls, approximation: Approximation, layer: Layer, squares: SquareSums, shares: Shares) -> Candidate:
        """From the sums that were taken in its basis."""
        theta = squares.theta(shares)
        diagonal = theta.to(layer.dtype) if approximation.corrected else None
        return cls(approximation.label, KroneckerBlock(layer.shape, squares.basis, diagonal), theta)

    @property
    def known(self) -> float:
        """|F_hat|^2 - 2 <F, F_hat> = |S|^2 - 2 sum(S * Theta): what the squared error has beside |F|^2."""
        rescaling = self.block.rescaling.double()
        return float(rescaling.square().sum()) - 2 * float((rescaling * self.theta).sum())


@dataclass
class Job:
    """What is collected of one layer in one pass; by probes a layer may take several.

    Attributes:
        layer: whose exact block is looked at.
        way: as a matrix, by the Gram matrix of its rows, or by probes.
        bytes: what it takes.
        make: makes what collects it, which takes the memory.
        estimates: by probes, what each of them says of |F|^2, for every approximation; all jobs of a layer add
            to the same ones.
        is_last: of the layer.
    """

    layer: Layer
    way: Literal["matrix", "Gram matrix", "probes"]
    bytes: int
    make: Callable[[], DenseSum | RowList | ProbeProducts]
    estimates: dict[str, list[Tensor]] = field(default_factory=dict)
    is_last: bool = True

    def begin(self) -> Collector:
        """Take the memory."""
        self._collector = self.make()
        return self._collector

    def finish(
        self, candidates: Sequence[Candidate], shares: Shares, confidence: float, spectra: bool
    ) -> LayerTruth | None:
        """What was found out of the exact block, once all jobs of the layer are done; frees the memory."""
        shape, collector = self.layer.shape, self._collector
        del self._collector
        if isinstance(collector, ProbeProducts):
            for c in candidates:
                self.estimates.setdefault(c.label, []).append(_squared_norms_by_probes(collector, c, shares))
            if not self.is_last:
                return None
            trace = float(candidates[0].theta.sum())  # of F, whatever the basis
            least = max(float(c.theta.square().sum()) for c in candidates)  # |F|^2 is at least |Theta|^2
            squared_norm = _interval(map(torch.cat, self.estimates.values()), confidence, least)
            return LayerTruth(shape, self.way, trace, squared_norm, None, None)
        block: Block
        if isinstance(collector, DenseSum):
            block = DenseBlock(shape, collector.matrices(shares))
        else:
            block = GramBlock(shape, *collector.rows(shares))
        norm = block.frobenius_norm() ** 2
        eigenvalues = block.eigenvalues() if spectra else None
        return LayerTruth(shape, self.way, block.trace(), Interval(norm, norm, norm), eigenvalues, block)


def jobs_of(layer: Layer, rows: RowCount, exact_memory: int, probes: int, options: Options) -> list[Job]:
    """The way that takes least memory of those that are exact; probes, where neither fits.

    Args:
        layer: whose block.
        rows: of J; sums over them are kept of every prediction by itself.
        exact_memory: bytes for exact blocks at a time.
        probes: how many, where they do not fit.
        options: with the memory for the rows of one layer, and the seed of the probes.
    """
    budget = options.memory_budget
    groups, size = layer.shape.groups, layer.shape.d_out * layer.shape.d_in
    num_rows, more = rows.count, len(rows.sources) - 1
    dense = (4 + more) * 8 * groups * size**2  # F, and what a solve with it takes
    # J, its Gram matrix, and the eigenvectors of both in float64.
    gram = groups * ((2 * layer.dtype.itemsize + 16) * num_rows * size + 6 * 8 * num_rows**2)
    if min(dense, gram) <= exact_memory:
        if dense <= gram:
            return [Job(layer, "matrix", dense, lambda: DenseSum(budget))]
        return [Job(layer, "Gram matrix", gram, lambda: RowList(rows, budget))]
    one_probe = (3 + more) * 8 * groups * size
    at_a_time = max(1, max(exact_memory, budget) // one_probe)
    jobs: list[Job] = []
    estimates: dict[str, list[Tensor]] = {}
    for start in range(0, probes, at_a_time):
        stop = min(start + at_a_time, probes)
        make = partial(_probing, layer, range(start, stop), options)
        taken = (stop - start) * one_probe
        jobs.append(Job(layer, "probes", taken, make, estimates, is_last=stop == probes))
    return jobs


def _probing(layer: Layer, numbers: range, options: Options) -> ProbeProducts:
    """By vectors of independent signs, [G, P, d_out * d_in]; each number has its own."""
    groups, size = layer.shape.groups, layer.shape.d_out * layer.shape.d_in
    signs = []
    for number in numbers:
        generator = torch.Generator().manual_seed(((options.seed << 20) + number) % 2**63)
        signs.append(torch.randint(2, (groups, size), generator=generator, dtype=torch.int8))
    vectors = torch.stack(signs, dim=1).to(device=layer.weight.device, dtype=layer.dtype)
    return ProbeProducts(vectors.mul_(2).sub_(1), options.memory_budget)


def packed(jobs: Iterable[Job], exact_memory: int) -> list[list[Job]]:
    """The jobs of each pass: in order, as many as fit the memory."""
    passes: list[list[Job]] = [[]]
    used = 0
    for job in jobs:
        if passes[-1] and used + job.bytes > exact_memory:
            passes.append([])
            used = 0
        passes[-1].append(job)
        used += job.bytes
    return passes


def _squared_norms_by_probes(collector: ProbeProducts, candidate: Candidate, shares: Shares) -> Tensor:
    """What every probe v says of |F|^2, |(F - F_hat) v|^2 + 2 <F, F_hat> - |F_hat|^2, [P]."""
    shape, values = candidate.block.matrix_shape, []
    for probe, product in zip(collector.probes.unbind(1), collector.products(shares).unbind(1), strict=True):
        difference = product - candidate.block.matvec(probe.reshape(shape)).reshape(product.shape)
        values.append(difference.square().sum() - candidate.known)
    return torch.stack(values)


def _interval(estimates: Iterable[Tensor], confidence: float, least: float) -> Interval:
    """|F|^2 with its confidence interval, by the approximation whose estimates vary least."""
    values = min(estimates, key=lambda own: float(own.std()))
    error = float(values.std()) / math.sqrt(len(values))
    width = student_quantile(0.5 + confidence / 2, len(values) - 1) * error
    mean = float(values.mean())
    return Interval(*(max(least, value) for value in (mean, mean - width, mean + width)))


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution, by the first terms of its expansion around the normal one."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
