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
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from tekfac import methods
from tekfac.curvature.blocks.dense import DenseBlock
from tekfac.fisher.approximation import Approximation
from tekfac.fisher.bases import Wanted, bases_of
from tekfac.fisher.collectors import Collector, FactorSums, RowCount, SquareSums
from tekfac.fisher.comparison_table import Comparison, Interval, LayerTruth, Row
from tekfac.fisher.exact_within_memory import Candidate, Job, jobs_of, packed
from tekfac.fisher.metadata import metadata_of
from tekfac.fisher.options import Keywords, Options, resolve
from tekfac.fisher.survey import Survey
from tekfac.ranks.failing_together import failing_together
from tekfac.ranks.group import Ranks, ranks_of

DEFAULT_PROBES = 64
FEWEST_PROBES = 8
DEFAULT_EXACT_MEMORY = 2**30
ROWS_AT_A_TIME = 256
ALL_METHODS = tuple(method.name.lower() for method in methods.ALL)

SquaresByBasis = dict[tuple[str, str], SquareSums]
"""Of one layer, by what the basis depends on: kind of factors and sharing."""


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
    exact blocks; more where the exact blocks do not fit into `exact_memory` together.

    Args:
        model: the network; it is evaluated in eval mode.
        loader: as for `fisher.estimate`.
        approximations: methods, by name; "kfac:reduce" asks for another sharing than the method's own.
        damping: lambda of the preconditioned gradients (F + lambda I)^-1 g that are compared; None: the mean
            eigenvalue of each exact block, tr F / d (the paper's Eq. dam2 without its floor).
        exact_memory: bytes that exact blocks, or their gradients' rows, may take at a time. A layer that
            needs more by itself is measured by probes.
        probes: how many, for such layers. They take 24 bytes per probe and parameter (8 more for every further
            prediction), as many at a time as fit into `exact_memory` or `memory_budget`, whichever is larger.
        confidence: level of the intervals that probes give.
        spectra: whether to keep the eigenvalues of the exact blocks and the methods' diagonals.
        **keywords: see `tekfac.fisher.Options`.
    """
    own = ("approximations", "damping", "exact_memory", "probes", "confidence", "spectra")
    options = resolve("compare", keywords, own)
    names = [approximations] if isinstance(approximations, str) else approximations
    chosen = [Approximation.named(name) for name in names]
    _check(chosen, damping, exact_memory, probes, confidence)
    asked = {
        "approximations": [a.label for a in chosen],
        "damping": damping,
        "exact_memory": exact_memory,
        "probes": probes,
        "confidence": confidence,
        "spectra": spectra,
    }
    with failing_together(ranks_of(model, options.process_group, apart=False)) as ranks:
        survey = Survey(model, loader, options, ranks, passes=2, asked=asked)
        squares, counts = _bases(survey, options, {a.factor_choice: a for a in chosen}, ranks)
        todo = [
            job
            for name, count in counts.items()
            for job in jobs_of(survey.layers[name], count, exact_memory, probes, options)
        ]
        rows: list[Row] = []
        truths: dict[str, LayerTruth] = {}
        for number, jobs in enumerate(packed(todo, exact_memory)):
            _run(survey, number, jobs, squares)
            shares = survey.count.shares
            for job in jobs:
                layer, own_squares = job.layer, squares[job.layer.name]
                candidates = [Candidate.of(a, layer, own_squares[a.factor_choice], shares) for a in chosen]
                truth = job.finish(candidates, shares, confidence, spectra)
                if truth is not None:
                    gradient = survey.gradients.get(layer.name)
                    rows += _rows(truth, candidates, gradient, damping, spectra)
                    truths[layer.name] = replace(truth, block=None)
                del truth, candidates  # before the next block is formed
        how = {
            **metadata_of(survey.model, options),
            **survey.count.plain(),
            "confidence": confidence,
            "probes": probes,
        }
        return Comparison(tuple(chosen), tuple(rows), truths, how)


def _bases(
    survey: Survey, options: Options, first_of: Mapping[tuple[str, str], Approximation], ranks: Ranks
) -> tuple[dict[str, SquaresByBasis], dict[str, RowCount]]:
    """The first pass: for each layer that was seen, empty sums in every basis, and how many rows J has."""
    sums = {
        name: {
            key: FactorSums(a.method.factors, a.sharing, options.memory_budget) for key, a in first_of.items()
        }
        for name in survey.layers
    }
    counts = {name: RowCount(ranks.index, ranks.count) for name in survey.layers}
    seen = survey.run("factors", {n: [counts[n], *sums[n].values()] for n in sums}, gradient=True)
    shares = survey.count.shares
    wanted = {
        (name, key): Wanted(a, name, sums[name][key].moments(shares), survey.layers[name].dtype)
        for name in seen
        for key, a in first_of.items()
    }
    squares: dict[str, SquaresByBasis] = {name: {} for name in seen}
    for (name, key), basis in bases_of(wanted, ranks).items():
        squares[name][key] = SquareSums(basis, options.memory_budget)
    return squares, {name: counts[name] for name in seen}


def _run(survey: Survey, number: int, jobs: Sequence[Job], squares: Mapping[str, SquaresByBasis]) -> None:
    """A pass for some exact blocks; the first of them is for the diagonals in every basis, too."""
    collectors: dict[str, list[Collector]] = {}
    if number == 0:
        collectors = {name: [*own.values()] for name, own in squares.items()}
    for job in jobs:
        collectors.setdefault(job.layer.name, []).append(job.begin())
    survey.run("exact blocks" if number == 0 else f"exact blocks, part {number + 1}", collectors)


def _rows(
    truth: LayerTruth,
    candidates: Sequence[Candidate],
    gradient: Tensor | None,
    damping: float | None,
    spectra: bool,
) -> list[Row]:
    """The rows of one layer."""
    lam = truth.trace / truth.shape.size if damping is None else damping
    exact_direction = None
    if truth.block is not None and gradient is not None and lam > 0:
        gradient = gradient.flatten(0, 1)
        exact_direction = truth.block.solve(gradient, lam).double()
    rows = []
    for candidate, squared_error in zip(candidates, _squared_errors(truth, candidates), strict=True):
        block = candidate.block
        cosine = None
        if exact_direction is not None and gradient is not None:
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


def _squared_errors(truth: LayerTruth, candidates: Sequence[Candidate]) -> list[Interval]:
    """|F - F_hat|^2 of every approximation; straight from the matrices where F is one, some rows at a time."""
    if not isinstance(truth.block, DenseBlock):
        return [Interval(*(value + c.known for value in truth.squared_norm)) for c in candidates]
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
