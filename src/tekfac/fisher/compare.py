"""How good each approximation is on a network: errors against the exact blocks, formed or not.

With S the diagonal of an approximation in its basis and Theta that of F in the same basis,

    <F, F_hat> = sum(S * Theta),    |F - F_hat|^2 = |F|^2 - 2 sum(S * Theta) + |S|^2

so that all that is left to find of the exact block is one number for all methods, |F|^2. It comes, in this
order, from the matrix, from the Gram matrix of all gradients, or, where neither fits the memory, from random
probes v: |(F - F_hat) v|^2 has the mean |F - F_hat|^2. docs/mathematics.md, section 9.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from tekfac import methods
from tekfac.blocks import Block, DenseBlock, GramBlock, KroneckerBlock
from tekfac.fisher.approximation import Approximation
from tekfac.fisher.collectors import DenseSum, FactorSums, ProbeProducts, RowCount, RowList, SquareSums
from tekfac.fisher.comparison import Comparison, Interval, LayerTruth, Row
from tekfac.fisher.metadata import metadata_of
from tekfac.fisher.options import Keywords, resolve
from tekfac.fisher.survey import Collector, Survey
from tekfac.layers import Layer

DEFAULT_PROBES = 64
FEWEST_PROBES = 8
DEFAULT_EXACT_MEMORY = 2**30
ROWS_AT_A_TIME = 256
ALL_METHODS = tuple(method.name.lower() for method in methods.ALL)


def compare(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    approximations: str | Sequence[str] = ALL_METHODS,
    damping: float | None = None,
    exact_memory: int = DEFAULT_EXACT_MEMORY,
    probes: int = DEFAULT_PROBES,
    confidence: float = 0.95,
    spectra: bool = False,
    **keywords: Unpack[Keywords],
) -> Comparison:
    """A table of layers and methods: trace ratio, Frobenius error, angle between preconditioned gradients.

    At least two passes over the data: one for the factors and the gradient, one for the diagonals and the
    exact blocks; one more for every `exact_memory` bytes that the exact blocks need.

    Args:
        model: the network; it is evaluated in eval mode.
        loader: as for `fisher.estimate`.
        approximations: methods, by name; "kfac:reduce" asks for another sharing than the method's own.
        damping: lambda of the preconditioned gradients (F + lambda I)^-1 g that are compared; None: the mean
            eigenvalue of each exact block, tr F / d (the paper's Eq. dam2 without its floor).
        exact_memory: bytes that exact blocks, or their gradients' rows, may take at a time. A layer that
            needs more by itself is measured by probes.
        probes: how many, for such layers; they take 24 bytes per probe and parameter.
        confidence: level of the intervals that probes give.
        spectra: whether to keep the eigenvalues of the exact blocks and the methods' diagonals.
        **keywords: see `tekfac.fisher.Options`.
    """
    own = ("approximations", "damping", "exact_memory", "probes", "confidence", "spectra")
    options = resolve("compare", keywords, own)
    names = [approximations] if isinstance(approximations, str) else approximations
    chosen = [Approximation.named(name) for name in names]
    _check(chosen, damping, exact_memory, probes, confidence)
    survey = Survey(model, loader, options)
    first_of = {approximation.factor_choice: approximation for approximation in chosen}
    sums = {
        name: {
            key: FactorSums(a.method.factors, a.sharing, options.memory_budget) for key, a in first_of.items()
        }
        for name in survey.layers
    }
    counts = {name: RowCount() for name in survey.layers}
    seen = survey.run("factors", {n: [counts[n], *sums[n].values()] for n in sums}, gradient=True)
    terms = survey.count.terms
    squares = {
        name: {
            key: SquareSums(
                a.basis(name, sums[name][key].moments(terms), survey.layers[name].dtype), options.memory_budget
            )
            for key, a in first_of.items()
        }
        for name in seen
    }
    budgets = _Budgets(exact_memory, probes, options.memory_budget, options.seed)
    plans = {name: _Plan.of(survey.layers[name], counts[name].count, budgets) for name in seen}
    rows: dict[str, list[Row]] = {}
    truths: dict[str, LayerTruth] = {}
    for number, names in enumerate(_packed(plans, exact_memory)):
        collectors: dict[str, list[Collector]] = {name: [plans[name].collector] for name in names}
        if number == 0:
            for name in seen:
                collectors[name] = [*collectors.get(name, ()), *squares[name].values()]
        survey.run("exact blocks" if number == 0 else f"exact blocks, part {number + 1}", collectors)
        for name in names:
            candidates = [
                _Candidate.of(a, survey.layers[name], squares[name][a.factor_choice], terms) for a in chosen
            ]
            truth = plans.pop(name).truth(candidates, terms, confidence, spectra)
            rows[name] = _rows(truth, candidates, survey.gradients[name].flatten(0, 1), damping, spectra)
            truths[name] = truth.without_block()
    metadata = {
        **metadata_of(model, options),
        "samples": survey.count.samples,
        "terms": terms,
        "confidence": confidence,
        "probes": probes,
    }
    in_order = tuple(row for name in seen for row in rows[name])
    return Comparison(tuple(chosen), in_order, {name: truths[name] for name in seen}, metadata)


@dataclass(frozen=True)
class _Candidate:
    """An approximation of one layer's block, and Theta of the exact block in its basis, [G, d_out, d_in]."""

    label: str
    block: KroneckerBlock
    theta: Tensor

    @classmethod
    def of(cls, approximation: Approximation, layer: Layer, squares: SquareSums, terms: int) -> _Candidate:
        theta = squares.theta(terms)
        diagonal = theta.to(layer.dtype) if approximation.corrected else None
        return cls(approximation.label, KroneckerBlock(layer.shape, squares.basis, diagonal), theta)

    @property
    def inner(self) -> float:
        """<F, F_hat> = sum(S * Theta)."""
        return float((self.block.rescaling.double() * self.theta).sum())

    @property
    def known(self) -> float:
        """|F_hat|^2 - 2 <F, F_hat>: what the squared error has beside |F|^2."""
        return float(self.block.rescaling.double().square().sum()) - 2 * self.inner


@dataclass(frozen=True)
class _Budgets:
    exact_memory: int
    probes: int
    memory_budget: int
    seed: int


Way = Literal["matrix", "Gram matrix", "probes"]


@dataclass
class _Plan:
    """How the exact block of one layer is looked at."""

    layer: Layer
    way: Way
    bytes: int
    collector: DenseSum | RowList | ProbeProducts

    @classmethod
    def of(cls, layer: Layer, num_rows: int, budgets: _Budgets) -> _Plan:
        """The way that takes least memory of those that are exact; probes, where neither fits."""
        groups, size = layer.shape.groups, layer.shape.d_out * layer.shape.d_in
        dense = 4 * 8 * groups * size**2  # F, and what a solve with it takes
        gram = (
            layer.dtype.itemsize * groups * (3 * num_rows * size + 6 * num_rows**2)
        )  # J, its Gram matrix, both bases
        memory_budget = budgets.memory_budget
        if min(dense, gram) > budgets.exact_memory:
            generator = torch.Generator().manual_seed(budgets.seed)
            signs = torch.randint(2, (groups, budgets.probes, size), generator=generator, dtype=torch.int8)
            vectors = signs.to(device=layer.weight.device, dtype=layer.dtype).mul_(2).sub_(1)
            return cls(layer, "probes", 3 * 8 * signs.numel(), ProbeProducts(vectors, memory_budget))
        if dense <= gram:
            return cls(layer, "matrix", dense, DenseSum(memory_budget))
        return cls(layer, "Gram matrix", gram, RowList(memory_budget))

    def truth(
        self, candidates: Sequence[_Candidate], terms: int, confidence: float, spectra: bool
    ) -> LayerTruth:
        """What was found out of the exact block."""
        shape, collector = self.layer.shape, self.collector
        if isinstance(collector, ProbeProducts):
            trace = float(candidates[0].theta.sum())  # of F, whatever the basis
            squared = _squared_norm_by_probes(collector, candidates, terms, confidence)
            return LayerTruth(shape, self.way, trace, squared, None, None)
        block: Block
        if isinstance(collector, DenseSum):
            block = DenseBlock(shape, collector.matrices(terms))
        else:
            block = GramBlock(shape, collector.rows(), terms)
        norm = block.frobenius_norm() ** 2
        values = block.eigenvalues() if spectra else None
        return LayerTruth(shape, self.way, block.trace(), Interval(norm, norm, norm), values, block)


def _packed(plans: Mapping[str, _Plan], exact_memory: int) -> list[list[str]]:
    """The layers of each pass: in order, as many as fit the memory."""
    passes: list[list[str]] = [[]]
    used = 0
    for name, plan in plans.items():
        if passes[-1] and used + plan.bytes > exact_memory:
            passes.append([])
            used = 0
        passes[-1].append(name)
        used += plan.bytes
    return passes


def _squared_norm_by_probes(
    collector: ProbeProducts, candidates: Sequence[_Candidate], terms: int, confidence: float
) -> Interval:
    """|F|^2 with its confidence interval.

    Every approximation gives an estimate, |(F - F_hat) v|^2 + 2 <F, F_hat> - |F_hat|^2, of which the last two
    are known exactly; the one that varies least from probe to probe is taken.
    """
    products = collector.products(terms)
    shape = candidates[0].block.matrix_shape
    best: tuple[float, float] | None = None
    for candidate in candidates:
        squares = torch.stack(
            [
                (product - candidate.block.matvec(probe.reshape(shape)).reshape(product.shape)).square().sum()
                for probe, product in zip(collector.probes.unbind(1), products.unbind(1), strict=True)
            ]
        )
        values = squares - candidate.known
        mean, error = float(values.mean()), float(values.std()) / math.sqrt(len(values))
        if best is None or error < best[1]:
            best = mean, error
    assert best is not None
    mean, error = best
    width = student_quantile(0.5 + confidence / 2, collector.probes.shape[1] - 1) * error
    return Interval(mean, mean - width, mean + width)


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution, by the first terms of its expansion around the normal one."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def _rows(
    truth: LayerTruth,
    candidates: Sequence[_Candidate],
    gradient: Tensor,
    damping: float | None,
    spectra: bool,
) -> list[Row]:
    """The rows of one layer."""
    lam = truth.trace / truth.shape.size if damping is None else damping
    exact_direction = None
    if truth.block is not None and lam > 0:
        exact_direction = truth.block.solve(gradient, lam).double()
    rows = []
    for candidate, squared_error in zip(candidates, _squared_errors(truth, candidates), strict=True):
        block = candidate.block
        cosine = None
        if exact_direction is not None:
            direction = block.solve(gradient, lam).double()
            lengths = float(exact_direction.norm() * direction.norm())
            cosine = float((exact_direction * direction).sum()) / lengths if lengths else None
        rows.append(
            Row(
                layer=truth.shape.name,
                approximation=candidate.label,
                parameters=truth.shape.size,
                trace_ratio=block.trace() / truth.trace if truth.trace else math.nan,
                squared_error=squared_error,
                squared_norm=truth.squared_norm,
                excess=float((block.rescaling.double() - candidate.theta).square().sum()),
                cosine=cosine,
                damping=lam,
                way=truth.way,
                diagonal=block.eigenvalues().flip(0) if spectra else None,
            )
        )
    return rows


def _squared_errors(truth: LayerTruth, candidates: Sequence[_Candidate]) -> list[Interval]:
    """|F - F_hat|^2 of every approximation; straight from the matrices where F is one, some rows at a time."""
    if not isinstance(truth.block, DenseBlock):
        return [Interval(*(max(0.0, v + c.known) for v in truth.squared_norm)) for c in candidates]
    size, shape = truth.shape.size, truth.block.matrix_shape
    totals = [0.0] * len(candidates)
    for start in range(0, size, ROWS_AT_A_TIME):
        count = min(ROWS_AT_A_TIME, size - start)
        units = torch.zeros(count, size, dtype=torch.float64, device=truth.block.device)
        units.diagonal(offset=start).fill_(1)
        units = units.reshape(count, *shape)
        exact = truth.block.matvec(units)
        for index, candidate in enumerate(candidates):
            totals[index] += float((exact - candidate.block.matvec(units)).square().sum())
    return [Interval(total, total, total) for total in totals]


def _check(
    chosen: Sequence[Approximation], damping: float | None, exact_memory: int, probes: int, confidence: float
) -> None:
    labels = [approximation.label for approximation in chosen]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"Invalid approximations: {labels}. Expected at least one method, each once.")
    if damping is not None and not 0 < damping < math.inf:
        raise ValueError(f"Invalid damping: {damping!r}. Expected a positive number, or None for tr F / d.")
    if exact_memory < 0:
        raise ValueError(f"Invalid exact_memory: {exact_memory!r}. Expected a number of bytes.")
    if probes < FEWEST_PROBES:
        raise ValueError(f"Invalid probes: {probes!r}. Expected at least {FEWEST_PROBES}, for an interval.")
    if not 0 < confidence < 1:
        raise ValueError(f"Invalid confidence: {confidence!r}. Expected a level between 0 and 1, as 0.95.")
