"""Where the samples of one process are in the batch that all of them have together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tekfac.ranks.group import Ranks


class WholeBatch(NamedTuple):
    """The batch of all processes, of which this one has the samples from `start` on.

    Attributes:
        start: the number of its first sample.
        samples: how many it has.
        candidates: which samples of the whole batch take part in the loss, [N].
        terms: of the loss, in the whole batch.
        own_terms: of these, its own.
    """

    start: int
    samples: int
    candidates: Tensor
    terms: int
    own_terms: int

    @classmethod
    def of(cls, counted: Tensor, ranks: Ranks) -> WholeBatch:
        """From which terms of this process's samples count, [N, P]; all processes have to call it."""
        own, own_terms = counted.any(dim=1), int(counted.sum())
        if ranks.count == 1:
            return cls(0, len(own), own, own_terms, own_terms)
        parts = ranks.gather((own.tolist(), own_terms))
        start = sum(len(candidates) for candidates, _ in parts[: ranks.index])
        candidates = [one for part, _ in parts for one in part]
        whole = torch.tensor(candidates, dtype=torch.bool, device=own.device)
        return cls(start, len(own), whole, sum(terms for _, terms in parts), own_terms)

    def own(self, chosen: Tensor) -> Tensor:
        """Of numbers of samples in the whole batch those that are here, by their numbers here."""
        here = chosen - self.start
        return here[(here >= 0) & (here < self.samples)]

    @property
    def is_all(self) -> bool:
        """Whether this process has the whole batch."""
        return self.samples == len(self.candidates)
