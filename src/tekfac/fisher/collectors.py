"""What is summed up over a data set for one layer. Sums of batches are added in float64.

Of several predictions each has sums of its own: what they are divided by is known when all data were seen. The
sums of several processes, with a part of the data each, can be added, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tekfac.capture.tally import Shares
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.curvature.factors import FactorRule, KroneckerFactors, MomentSums
from tekfac.curvature.layer_curvature import require_finite
from tekfac.curvature.rescaling import sum_of_squares
from tekfac.layers.batch import CapturedBatch
from tekfac.layers.rows import samples_within
from tekfac.ranks.group import Ranks, added_by_name


class Collector(ABC):
    """Something that is summed up over a data set, for one layer."""

    @abstractmethod
    def add(self, source: str, batches: Sequence[CapturedBatch]) -> None:
        """Take in what the layer saw in one batch of the data, from one prediction."""

    @abstractmethod
    def sums(self) -> dict[str, Tensor]:
        """What was summed up so far, by names: what several processes have may be added."""

    @abstractmethod
    def put(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from such sums, or from none; their tensors are used up."""

    def constants(self) -> dict[str, Tensor]:
        """What the sums are taken with, by names, where that is tensors."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What there is to go on from after an interruption; nothing, where nothing was summed up."""
        sums = self.sums()
        return {**sums, **self.constants()} if sums else {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state, whose tensors stay as they are."""
        constants = self.constants()
        for name, constant in constants.items():
            constant.copy_(state[name])
        self.put({name: tensor.clone() for name, tensor in state.items() if name not in constants})


Collectors = Mapping[str, Sequence[Collector]]
"""By layer name."""


class FactorSums(Collector):
    """The sums that Kronecker factors are made of."""

    def __init__(self, rule: FactorRule, sharing: str, memory_budget: int) -> None:
        self._rule = rule
        self._sharing = sharing
        self._memory_budget = memory_budget
        self._totals: dict[str, MomentSums] = {}

    def add(self, source: str, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data."""
        sums = self._rule.sums(batches, self._sharing, self._memory_budget)
        require_finite(sums.input, sums.output)
        doubled = MomentSums(*(None if part is None else part.double() for part in sums))  # type: ignore[arg-type]
        total = self._totals.get(source)
        self._totals[source] = doubled if total is None else total.plus(doubled)

    def moments(self, shares: Shares) -> KroneckerFactors:
        """The moments of the whole data set."""
        first, *others = (own.times(*shares[source]) for source, own in sorted(self._totals.items()))
        for other in others:
            first = first.plus(other)
        return self._rule.moments(first, 1)

    def sums(self) -> dict[str, Tensor]:
        """The sums so far."""
        return {
            f"{part} {source}": tensor
            for source, own in self._totals.items()
            for part, tensor in own._asdict().items()
            if tensor is not None
        }

    def put(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        by_source: dict[str, dict[str, Tensor]] = {}
        for name, tensor in sums.items():
            part, _, source = name.partition(" ")
            by_source.setdefault(source, {})[part] = tensor
        self._totals = {
            source: MomentSums(own["input"], own["output"], own.get("input_count"))
            for source, own in by_source.items()
        }


class SquareSums(Collector):
    """The sum of squared gradients in a basis, which Theta is the mean of.

    Attributes:
        basis: the basis it is taken in.
    """

    def __init__(self, basis: Eigenbasis, memory_budget: int) -> None:
        self.basis = basis
        self._memory_budget = memory_budget
        self._totals: dict[str, Tensor] = {}

    def add(self, source: str, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data."""
        total = sum_of_squares(batches, self.basis, self._memory_budget).double()
        require_finite(total)
        self._totals[source] = self._totals[source].add_(total) if source in self._totals else total

    def theta(self, shares: Shares) -> Tensor:
        """Theta of the whole data set, [G, d_out, d_in]."""
        return _mean(self._totals, shares)

    def sums(self) -> dict[str, Tensor]:
        """The sums so far."""
        return {f"total {source}": own for source, own in self._totals.items()}

    def put(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from there, in the same basis."""
        self._totals = {name.removeprefix("total "): own for name, own in sums.items()}

    def constants(self) -> dict[str, Tensor]:
        """The basis."""
        return {f"{part} ": own for part, own in self.basis._asdict().items()}


class DenseSum(Collector):
    """The exact block as a matrix."""

    def __init__(self, memory_budget: int) -> None:
        self._memory_budget = memory_budget
        self._totals: dict[str, Tensor] = {}

    def add(self, source: str, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data."""
        for rows in gradient_rows(batches, self._memory_budget):
            if source not in self._totals:
                size = rows.shape[-1]
                zeros = torch.zeros(len(rows), size, size, dtype=torch.float64, device=rows.device)
                self._totals[source] = zeros
            self._totals[source] += rows.mT @ rows

    def sums(self) -> dict[str, Tensor]:
        """The matrices so far, by prediction."""
        return dict(self._totals)

    def put(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        self._totals = dict(sums)

    def matrices(self, shares: Shares) -> Tensor:
        """F, [G, d_out * d_in, d_out * d_in]; the sums are used up."""
        assert self._totals, "nothing was added"
        totals, self._totals = sorted(self._totals.items()), {}
        first, *others = (own.mul_(shares[name].weight).div_(shares[name].terms) for name, own in totals)
        for other in others:
            first += other
        return first


class RowCount(Collector):
    """How many rows J has, of every prediction that leads to the layer, in every process."""

    def __init__(self, index: int, processes: int) -> None:
        self._index = index
        self._processes = processes
        self._counts: dict[str, Tensor] = {}

    def add(self, source: str, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data: samples times columns."""
        counts = self._counts.setdefault(source, torch.zeros(self._processes, dtype=torch.int64))
        counts[self._index] += sum(batch.shape.samples * batch.shape.columns for batch in batches)

    def sums(self) -> dict[str, Tensor]:
        """The counts, by prediction, [processes]."""
        return dict(self._counts)

    def put(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        self._counts = dict(sums)

    @property
    def count(self) -> int:
        """Of all of them."""
        return sum(int(own.sum()) for own in self._counts.values())

    @property
    def sources(self) -> list[str]:
        """The predictions, by name, in the order in which J has their rows."""
        return sorted(self._counts)

    def places(self) -> dict[str, tuple[slice, int]]:
        """Of every prediction, which rows of J are its own, and the first of them that is of this process."""
        found, start = {}, 0
        for source in self.sources:
            counts = self._counts[source].tolist()
            found[source] = slice(start, start + sum(counts)), start + sum(counts[: self._index])
            start += sum(counts)
        return found


class RowList(Collector):
    """All gradients of all samples and columns: the rows J with F = J^T J / M.

    Rows of other processes are zero until they are added.
    """

    def __init__(self, count: RowCount, memory_budget: int) -> None:
        self._num_rows = count.count
        self._parts = {source: part for source, (part, _) in count.places().items()}
        self._next = {source: first for source, (_, first) in count.places().items()}
        self._memory_budget = memory_budget
        self._rows: Tensor | None = None

    def add(self, source: str, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data."""
        for rows in gradient_rows(batches, self._memory_budget):
            if self._rows is None:
                self._rows = rows.new_zeros(rows.shape[0], self._num_rows, rows.shape[2])
            first = self._next[source]
            self._next[source] += rows.shape[1]
            self._rows[:, first : self._next[source]] = rows

    def sums(self) -> dict[str, Tensor]:
        """J, where this process has any of it."""
        return {} if self._rows is None else {"rows": self._rows}

    def put(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        self._rows = sums.get("rows")

    def rows(self, shares: Shares) -> tuple[Tensor, int]:
        """J, [G, R, d_out * d_in], with every prediction's rows weighed by its share; M. J is used up."""
        assert self._rows is not None, "nothing was added"
        num_terms = sum(share.terms for share in shares.values())
        for source, part in self._parts.items():
            weight, terms = shares[source]
            self._rows[:, part] *= math.sqrt(weight * num_terms / terms)
        return self._rows, num_terms


class ProbeProducts(Collector):
    """F v for some fixed vectors v, without F.

    Attributes:
        probes: the vectors, [G, P, d_out * d_in].
    """

    def __init__(self, probes: Tensor, memory_budget: int) -> None:
        self.probes = probes
        self._memory_budget = memory_budget
        self._totals: dict[str, Tensor] = {}

    def add(self, source: str, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data."""
        zeros = torch.zeros_like(self.probes, dtype=torch.float64)
        total = self._totals.setdefault(source, zeros)
        for rows in gradient_rows(batches, self._memory_budget):
            along = rows @ self.probes.mT  # [G, R, P]
            total += along.mT @ rows

    def sums(self) -> dict[str, Tensor]:
        """The products so far, by prediction."""
        return dict(self._totals)

    def put(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        self._totals = dict(sums)

    def products(self, shares: Shares) -> Tensor:
        """F v for every probe, [G, P, d_out * d_in]."""
        return _mean(self._totals, shares)


def add_up(collectors: Collectors, ranks: Ranks, device: torch.device, *, keep: bool) -> None:
    """Put what the processes have summed up into the collectors of those that keep it; others begin anew."""
    named = {
        (name, place, part): tensor
        for name, own in collectors.items()
        for place, collector in enumerate(own)
        for part, tensor in collector.sums().items()
    }
    found: dict[tuple[str, int], dict[str, Tensor]] = {}
    for (name, place, part), tensor in added_by_name(named, ranks, device).items():
        found.setdefault((name, place), {})[part] = tensor
    for name, own in collectors.items():
        for place, collector in enumerate(own):
            collector.put(found.get((name, place), {}) if keep else {})


def share_constants(collectors: Collectors, ranks: Ranks) -> None:
    """Let all processes go on with the constants that the first one has."""
    constants = [own for each in collectors.values() for one in each for own in one.constants().values()]
    if constants:
        ranks.share(constants, owner=0)


def _mean(totals: Mapping[str, Tensor], shares: Shares) -> Tensor:
    """Sums over samples as means over terms, those of all predictions added up, in the order of their names."""
    assert totals, "nothing was added"
    means = (own * shares[name].weight / shares[name].terms for name, own in sorted(totals.items()))
    first, *others = means
    return sum(others, start=first)


def gradient_rows(batches: Sequence[CapturedBatch], memory_budget: int) -> Iterator[Tensor]:
    """Gradients of every sample and column as rows [G, R, d_out * d_in], a few samples at a time."""
    for batch in batches:
        columns, groups, _, positions, d_in, d_out = batch.shape
        numbers = groups * (positions * (d_in + columns * d_out) + 2 * columns * d_in * d_out)
        for rows in batch.chunks(samples_within(memory_budget, numbers)):
            gradients = rows.per_sample_gradients()  # [K, G, N, d_out, d_in]
            require_finite(gradients)
            yield gradients.transpose(0, 1).reshape(groups, -1, d_out * d_in)
