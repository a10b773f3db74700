"""The curvature of one layer: what is known of its Fisher block, and how it is refreshed."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tekfac.common.memory import OUT_OF_MEMORY, is_out_of_memory
from tekfac.common.phases import Phase
from tekfac.curvature.averages import Average
from tekfac.curvature.eigenbasis import Eigenbasis, Turn, decompose, standard_basis
from tekfac.curvature.factors import FactorRule, KroneckerFactors, MomentSums
from tekfac.curvature.rescaling import RescalingRule, product_of_eigenvalues, sum_of_squares
from tekfac.curvature.symmetric import DecompositionError
from tekfac.layers.batch import FormedBatch, KeptRows, RowSource
from tekfac.layers.layer import Layer

logger = logging.getLogger("tekfac")

STUBBORN = "no decomposition of its factors succeeded, not in float64 either"
"""Why a basis was not renewed."""

OLDEST = 10
"""Steps that an interval counts at most, where decays are per step: of few measurements more of them count."""


class NonFiniteStatisticsError(ArithmeticError):
    """A batch gave statistics that are not finite numbers."""


@dataclass(frozen=True)
class Recipe:
    """How a layer's curvature is estimated: a method and its settings.

    Attributes:
        factors: which factors give the eigenbasis.
        rescaling: which diagonal is used in it.
        sharing: how positions that share weights are treated.
        factor_decay: weight of the past in the moments, per step or update.
        rescaling_decay: weight of the past in Theta, per step or update.
        decays_per_step: whether these are per step, of which an interval counts at most OLDEST.
        basis_tolerance: how nearly diagonal a factor must be in the basis so far for it to be kept.
        track_basis: whether a basis that is nearly right is improved by an iteration.
        averaging: "moments" keeps raw moments and normalises when read; "factors" averages the
            normalised factors, as the paper prints it.
        memory_budget: bytes of working memory for one layer's rows.
    """

    factors: FactorRule
    rescaling: RescalingRule
    sharing: str
    factor_decay: float
    rescaling_decay: float
    averaging: str
    memory_budget: int
    decays_per_step: bool = False
    basis_tolerance: float = 0.0
    track_basis: bool = False

    @property
    def decomposes_anew(self) -> bool:
        """Whether no basis is kept or improved, which a look at the whole side would decide."""
        return not self.basis_tolerance and not self.track_basis

    def past_factors(self, age: int) -> float:
        """The weight of moments that are so many steps old."""
        return self.factor_decay ** self._counted(age)

    def past_rescaling(self, age: int) -> float:
        """The weight of a Theta that is so many steps old."""
        return self.rescaling_decay ** self._counted(age)

    def _counted(self, age: int) -> int:
        return min(age, OLDEST) if self.decays_per_step else 1

    @property
    def needs_only_gradients(self) -> bool:
        """Whether all that is measured of a sample is made of its gradient: partial traces of F, and Theta."""
        return self.factors.trace_restricted and self.sharing == "exact"

    @property
    def needs_only_moments(self) -> bool:
        """Whether of these gradients only the partial traces are needed."""
        return self.needs_only_gradients and not self.rescaling.measured

    def squares(self, layer: Layer, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of G^T G and G G^T of gradients [K, G, n, d_out, d_in], in the forms of a layer's sides."""
        sums = self.factors.sums([FormedBatch(layer, gradients, 1.0)], self.sharing, self.memory_budget)
        return sums.input, sums.output


@dataclass(frozen=True)
class Due:
    """What a step refreshes.

    Attributes:
        factors: whether the factors.
        basis: whether the eigenbasis.
        rescaling: whether Theta.
        age_of_factors: steps since they were refreshed before.
        age_of_rescaling: steps since it was.
    """

    factors: bool
    basis: bool
    rescaling: bool
    age_of_factors: int = 1
    age_of_rescaling: int = 1

    @property
    def anything(self) -> bool:
        """Whether the step needs captured batches."""
        return self.factors or self.rescaling


NOTHING = Due(factors=False, basis=False, rescaling=False)


class Brought(NamedTuple):
    """What a refresh has brought.

    Attributes:
        factors: whether moments of at least one sample.
        basis: whether an eigenbasis of the present factors, new or found good.
        rescaling: whether second moments in that basis, of at least one sample.
        failure: what kept the basis from being renewed, in words.
    """

    factors: bool = False
    basis: bool = False
    rescaling: bool = False
    failure: str = ""


NOTHING_KNOWN = Brought()


@dataclass(frozen=True)
class LayerCurvature:
    """An approximate Fisher block, Q diag(S) Q^T; a value that is never changed.

    Q = Q_in (x) Q_out on column-major vectors, as the paper writes it; Q_out (x) Q_in on row-major ones, as
    blocks have them.

    Attributes:
        moments: running average of the moments.
        basis: the eigenbasis in use.
        theta: running average of the second moments in that basis; None for products of eigenvalues.
        failed_refreshes: how often a refresh failed and an older basis was kept.
        brought: by the refresh that made it; nothing is known of one that was loaded.
    """

    moments: Average[KroneckerFactors]
    basis: Eigenbasis
    theta: Average[tuple[Tensor]] | None
    failed_refreshes: int = 0
    brought: Brought = NOTHING_KNOWN

    @property
    def rescaling(self) -> Tensor:
        """S, [G, d_out, d_in]."""
        return product_of_eigenvalues(self.basis) if self.theta is None else self.theta.values[0]


class Addends(NamedTuple):
    """What a refresh has measured, to be added to what other processes have.

    Attributes:
        sums: over samples; (): nothing was seen here.
        terms: of the loss that these stand for.
    """

    sums: tuple[Tensor, ...]
    terms: float


class Decomposition(NamedTuple):
    """Factors that a refresh needs decomposed.

    Attributes:
        factors: the factors.
        before: the basis so far.
    """

    factors: KroneckerFactors
    before: Eigenbasis | None


Refreshing = Generator[Addends | Decomposition, Any, LayerCurvature | None]
"""Gives what it needs of others, one after the other, and gets it: Addends, or an Eigenbasis or None."""


def refreshed(
    old: LayerCurvature | None, batches: Sequence[RowSource], due: Due, recipe: Recipe
) -> LayerCurvature | None:
    """The curvature after one more batch: factors, basis, re-scaling, in the order of Algorithm 1.

    A layer seen for the first time gets all three, whatever is due; None if it was never seen. Where there is
    not enough memory all stays as it was, and the refresh counts as failed.

    Raises:
        NonFiniteStatisticsError: if the batch leads to numbers that are not finite.
    """
    steps = refreshing(old, batches, due, recipe)
    answer: Any = None
    try:
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            answer = asked if isinstance(asked, Addends) else decomposed(asked, recipe)
    except OUT_OF_MEMORY as error:
        if not is_out_of_memory(error):
            raise
    return _without_memory(old)


def _without_memory(old: LayerCurvature | None) -> LayerCurvature | None:
    """What a refresh leaves for which there was not enough memory: all as it was, and counted."""
    if old is None:
        logger.warning(
            "There was not enough memory to measure the curvature of a layer for the first time. It is tried "
            "again; a smaller max_dim, memory_budget or statistics_samples takes less."
        )
        return None
    failed = Brought(failure="there was not enough memory")
    return replace(old, failed_refreshes=old.failed_refreshes + 1, brought=failed)


def refreshing(
    old: LayerCurvature | None, batches: Sequence[RowSource], due: Due, recipe: Recipe
) -> Refreshing:
    """A refresh, step by step: what takes others, or could be done by them, is asked for.

    Raises:
        NonFiniteStatisticsError: if the batches lead to numbers that are not finite.
    """
    if old is None:
        due = Due(factors=True, basis=True, rescaling=True)
    rows = [KeptRows(batch) for batch in batches]
    moments, brought = None if old is None else old.moments, NOTHING_KNOWN
    if due.factors:
        found = yield _moment_sums(rows, recipe)
        if found.terms:
            moments, brought = _averaged(old, found, due, recipe), brought._replace(factors=True)
    if moments is None:
        return None
    basis, theta = (None, None) if old is None else (old.basis, old.theta)
    failures = 0 if old is None else old.failed_refreshes
    if due.basis or basis is None:
        factors = recipe.factors.read(moments.values)
        new_basis = yield Decomposition(factors, basis)
        brought = brought._replace(basis=new_basis is not None)
        if new_basis is None:
            failures += 1
            brought = brought._replace(failure=STUBBORN)
            new_basis = basis or standard_basis(factors)
        if theta is not None and basis is not None and new_basis is not basis:
            theta = replace(theta, values=(Turn.of(basis, new_basis).diagonal(theta.values[0]),))
        basis = new_basis
    if recipe.rescaling.measured and (due.rescaling or theta is None):
        found = yield _sums_of_squares(rows, basis, recipe)
        if found.terms:
            measured = (found.sums[0] / found.terms,)
            require_finite(*measured)
            past = recipe.past_rescaling(due.age_of_rescaling)
            theta = Average.of(measured) if theta is None else theta.updated(measured, past)
            brought = brought._replace(rescaling=True)
    return LayerCurvature(moments, basis, theta, failures, brought)


def decomposed(asked: Decomposition, recipe: Recipe) -> Eigenbasis | None:
    """The eigenbasis of factors; None if every attempt has failed."""
    with Phase("eigh"):
        try:
            return decompose(asked.factors, asked.before, recipe.basis_tolerance, track=recipe.track_basis)
        except DecompositionError:
            return None


def _moment_sums(batches: Sequence[RowSource], recipe: Recipe) -> Addends:
    """The sums that the moments are made of; the input's count, where it has one, is the third of them."""
    if not batches:
        return Addends((), 0.0)
    with Phase("factors"):
        sums = recipe.factors.sums(batches, recipe.sharing, recipe.memory_budget)
    own = sums if sums.input_count is not None else sums[:2]
    return Addends(tuple(own), sum(batch.num_terms for batch in batches))  # type: ignore[arg-type]


def _sums_of_squares(batches: Sequence[RowSource], basis: Eigenbasis, recipe: Recipe) -> Addends:
    """The sum that Theta is made of."""
    if not batches:
        return Addends((), 0.0)
    with Phase("theta"):
        squares = sum_of_squares(batches, basis, recipe.memory_budget)
    return Addends((squares,), sum(batch.num_terms for batch in batches))


def _averaged(
    old: LayerCurvature | None, found: Addends, due: Due, recipe: Recipe
) -> Average[KroneckerFactors]:
    """The average of the moments with those of one more batch."""
    sums = MomentSums(found.sums[0], found.sums[1], found.sums[2] if len(found.sums) > 2 else None)
    measured = recipe.factors.moments(sums, found.terms)
    require_finite(*measured)
    if recipe.averaging == "factors":  # as the paper averages them (Eqs. etkfac7, etkfac8)
        measured = recipe.factors.read(measured)
    if old is None:
        return Average.of(measured)
    return old.moments.updated(measured, recipe.past_factors(due.age_of_factors))


def require_finite(*tensors: Tensor) -> None:
    """Raise NonFiniteStatisticsError for numbers that are not finite, or whose sum leaves the range."""
    if not bool(torch.stack([tensor.sum() for tensor in tensors]).isfinite().all()):
        raise NonFiniteStatisticsError("the curvature statistics are not finite")
