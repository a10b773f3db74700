"""Steps that are not taken because something is not finite: noticed at once, or on the device and read later.

On the CPU, and on steps that measure, the host looks at the numbers anyway. On other devices a plain step must
not wait for them: there everything is put back as it was where a number is not finite, by the device itself (as
with the loss scaler's `found_inf`), and counted; the count is read on the next step that measures, or when
somebody asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tekfac.common.torch_internals import norms_of
from tekfac.ranks.group import Ranks
from tekfac.ranks.shards import own_part


class Skipping:
    """Looks whether directions are finite, and counts on the device what was not.

    Attributes:
        device: where parameters are.
        deferred: whether plain steps leave the answer on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.deferred = device.type != "cpu"
        self._missed: Tensor | None = None

    def note(self, finite: Tensor) -> None:
        """Count a step whose answer stays on the device."""
        missed = (~finite).to(torch.int32)
        self._missed = missed if self._missed is None else self._missed + missed

    def read(self) -> int:
        """How many steps were not taken since the last reading; waits for the device."""
        if self._missed is None:
            return 0
        missed, self._missed = int(self._missed), None
        return missed


def all_finite(tensors: Sequence[Tensor]) -> Tensor | None:
    """Whether all entries of all tensors are finite, as a scalar on their device; None where there is nothing.

    A sum is finite only if all its terms are. That it overflows although they are takes entries near the end
    of the range, along which nobody should move either.
    """
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    if not nonempty:
        return None
    sums = [tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in nonempty]
    return torch.isfinite(torch.stack(sums).sum())


ROOT = 1 / 8
"""Of the largest number: no step is longer. Products of eight weights that it leads to stay in the range."""


def longest_direction(groups: Iterable[Mapping[str, Any]], stretch: float) -> float:
    """So long a direction may be, as a share of the longest step.

    Learning rates that are tensors on a device are not read, and bound nothing.
    """
    rates = (group["lr"] for group in groups)
    known = [float(rate) for rate in rates if not isinstance(rate, Tensor) or rate.device.type == "cpu"]
    highest = max(known, default=0.0) * max(stretch, 1.0)
    return 1 / highest if highest else math.inf


def squares_are_finite(tensors: Sequence[Tensor], share: float = math.inf) -> Tensor | None:
    """Whether the sum of the squares of all entries is finite, as `all_finite`.

    Then so are all squares in any other orthonormal basis.

    Args:
        tensors: to look at.
        share: of the longest step (see ROOT) that all of them may be as long as; there is no longer one than
            whose square is finite.
    """
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    if not nonempty:
        return None
    wide = [tensor if tensor.dtype.itemsize >= 4 else tensor.float() for tensor in nonempty]
    norms = norms_of(wide)
    if any(tensor.dtype != wide[0].dtype for tensor in wide):
        norms = [norm.to(wide[0].dtype) for norm in norms]
    largest = torch.finfo(wide[0].dtype).max
    longest = min(share * largest**ROOT, largest**0.5)
    square: Tensor = torch.stack(list(norms)).square().sum()
    return square.le(min(longest**2, largest))


def in_words(directions: Mapping[Tensor, Tensor], names: Mapping[Tensor, str], owners: Ranks) -> str:
    """Which parameters would move along something that is not finite, in one of the processes with parts."""
    own = [
        names.get(parameter, "a parameter")
        for parameter, direction in directions.items()
        if not bool(torch.isfinite(own_part(direction)).all())
    ]
    bad = list(dict.fromkeys(name for found in owners.gather(own) for name in found))
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return f"the gradient of {', '.join(bad[:3])}{more} is not finite" if bad else "the gradient is too large"
