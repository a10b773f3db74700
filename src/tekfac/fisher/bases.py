"""The eigenbases of a data set's factors, each decomposed by one process and sent to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from tekfac.common.balance import balanced
from tekfac.curvature import symmetric
from tekfac.curvature.eigenbasis import Eigenbasis, standard_basis
from tekfac.curvature.factors import KroneckerFactors
from tekfac.curvature.placement import SideSize
from tekfac.fisher.approximation import Approximation
from tekfac.ranks.group import Ranks

Key = TypeVar("Key")


@dataclass(frozen=True)
class Wanted:
    """A basis that is to be found.

    Attributes:
        approximation: whose.
        layer: its name.
        moments: over the data.
        dtype: of the basis.
    """

    approximation: Approximation
    layer: str
    moments: KroneckerFactors
    dtype: torch.dtype

    @property
    def cost(self) -> int:
        """Of its decomposition."""
        sides = self.moments.input, self.moments.output
        return sum(SideSize(*symmetric.in_blocks(side).shape).cost for side in sides)

    def found(self) -> Eigenbasis:
        """The basis."""
        return self.approximation.basis(self.layer, self.moments, self.dtype)

    def room(self) -> Eigenbasis:
        """Tensors that such a basis fits into."""
        like = standard_basis(self.moments)
        return Eigenbasis(*(part.new_empty(part.shape, dtype=self.dtype) for part in like))


def bases_of(wanted: Mapping[Key, Wanted], ranks: Ranks) -> dict[Key, Eigenbasis]:
    """Bases by their keys, the same in all processes to the last bit; all of them have to call this."""
    dealt = balanced({key: own.cost for key, own in wanted.items()}, ranks.count)
    found = {key: wanted[key].found() for key in dealt[ranks.index]}
    for owner, keys in enumerate(dealt):
        if owner != ranks.index:
            found |= {key: wanted[key].room() for key in keys}
        if keys and ranks.count > 1:
            ranks.share([part for key in keys for part in found[key]], owner)
    return {key: found[key] for key in wanted}
