"""What is summed up over a data set for one layer. Sums of batches are added in float64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.curvature.factors import FactorRule, KroneckerFactors, MomentSums
from tekfac.curvature.layer_curvature import require_finite
from tekfac.curvature.rescaling import sum_of_squares
from tekfac.layers.batch import CapturedBatch
from tekfac.layers.rows import samples_within


class Collector(ABC):
    """Something that is summed up over a data set, for one layer."""

    @abstractmethod
    def add(self, batches: Sequence[CapturedBatch]) -> None:
        """Take in what the layer saw in one batch of the data."""

    def state(self) -> dict[str, Tensor]:
        """What was summed up so far; nothing, for what is not taken up again."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        raise NotImplementedError(f"{type(self).__name__} has no state.")


Collectors = Mapping[str, Sequence[Collector]]
"""By layer name."""


class FactorSums(Collector):
    """The sums that Kronecker factors are made of."""

    def __init__(self, rule: FactorRule, sharing: str, memory_budget: int) -> None:
        self._rule = rule
        self._sharing = sharing
        self._memory_budget = memory_budget
        self._total: MomentSums | None = None

    def add(self, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data."""
        sums = self._rule.sums(batches, self._sharing, self._memory_budget)
        require_finite(sums.input, sums.output)
        doubled = MomentSums(*(None if part is None else part.double() for part in sums))  # type: ignore[arg-type]
        self._total = doubled if self._total is None else self._total.plus(doubled)

    def moments(self, num_terms: int) -> KroneckerFactors:
        """The moments of the whole data set."""
        assert self._total is not None, "nothing was added"
        return self._rule.moments(self._total, num_terms)

    def state(self) -> dict[str, Tensor]:
        """The sums."""
        if self._total is None:
            return {}
        return {name: part for name, part in self._total._asdict().items() if part is not None}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        self._total = MomentSums(state["input"].clone(), state["output"].clone(), state.get("input_count"))


class SquareSums(Collector):
    """The sum of squared gradients in a basis, which Theta is the mean of.

    Attributes:
        basis: the basis it is taken in.
    """

    def __init__(self, basis: Eigenbasis, memory_budget: int) -> None:
        self.basis = basis
        self._memory_budget = memory_budget
        self._total: Tensor | None = None

    def add(self, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data."""
        total = sum_of_squares(batches, self.basis, self._memory_budget).double()
        require_finite(total)
        self._total = total if self._total is None else self._total.add_(total)

    def theta(self, num_terms: int) -> Tensor:
        """Theta of the whole data set, [G, d_out, d_in]."""
        assert self._total is not None, "nothing was added"
        return self._total / num_terms

    def state(self) -> dict[str, Tensor]:
        """The sum, and the basis it is taken in."""
        if self._total is None:
            return {}
        return {"total": self._total, **self.basis._asdict()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there, in the basis that was used there."""
        basis = dict(state)
        self._total = basis.pop("total").clone()
        self.basis = Eigenbasis(**basis)


class DenseSum(Collector):
    """The exact block as a matrix."""

    def __init__(self, memory_budget: int) -> None:
        self._memory_budget = memory_budget
        self._total: Tensor | None = None

    def add(self, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data."""
        for rows in gradient_rows(batches, self._memory_budget):
            if self._total is None:
                size = rows.shape[-1]
                self._total = torch.zeros(len(rows), size, size, dtype=torch.float64, device=rows.device)
            self._total += rows.mT @ rows

    def matrices(self, num_terms: int) -> Tensor:
        """F, [G, d_out * d_in, d_out * d_in]; the sum is used up."""
        assert self._total is not None, "nothing was added"
        total, self._total = self._total, None
        return total.div_(num_terms)


class RowList(Collector):
    """All gradients of all samples and columns: the rows J with F = J^T J / M."""

    def __init__(self, num_rows: int, memory_budget: int) -> None:
        self._num_rows = num_rows
        self._memory_budget = memory_budget
        self._filled = 0
        self._rows: Tensor | None = None

    def add(self, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data."""
        for rows in gradient_rows(batches, self._memory_budget):
            if self._rows is None:
                self._rows = rows.new_empty(rows.shape[0], self._num_rows, rows.shape[2])
            self._rows[:, self._filled : self._filled + rows.shape[1]] = rows
            self._filled += rows.shape[1]

    def rows(self) -> Tensor:
        """J, [G, R, d_out * d_in]."""
        assert self._rows is not None, "nothing was added"
        return self._rows


class ProbeProducts(Collector):
    """F v for some fixed vectors v, without F.

    Attributes:
        probes: the vectors, [G, P, d_out * d_in].
    """

    def __init__(self, probes: Tensor, memory_budget: int) -> None:
        self.probes = probes
        self._memory_budget = memory_budget
        self._total = torch.zeros_like(probes, dtype=torch.float64)

    def add(self, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data."""
        for rows in gradient_rows(batches, self._memory_budget):
            along = rows @ self.probes.mT  # [G, R, P]
            self._total += along.mT @ rows

    def products(self, num_terms: int) -> Tensor:
        """F v for every probe, [G, P, d_out * d_in]."""
        return self._total / num_terms


class RowCount(Collector):
    """How many rows J would have.

    Attributes:
        count: samples times columns.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self, batches: Sequence[CapturedBatch]) -> None:
        """Take in one batch of the data."""
        self.count += sum(batch.shape.samples * batch.shape.columns for batch in batches)


def gradient_rows(batches: Sequence[CapturedBatch], memory_budget: int) -> Iterator[Tensor]:
    """Gradients of every sample and column as rows [G, R, d_out * d_in], a few samples at a time."""
    for batch in batches:
        columns, groups, _, positions, d_in, d_out = batch.shape
        numbers = groups * (positions * (d_in + columns * d_out) + 2 * columns * d_in * d_out)
        for rows in batch.chunks(samples_within(memory_budget, numbers)):
            gradients = rows.per_sample_gradients()  # [K, G, N, d_out, d_in]
            require_finite(gradients)
            yield gradients.transpose(0, 1).reshape(groups, -1, d_out * d_in)
