"""Whether several processes have the same: a difference is told to all, by name, before they drift apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tekfac.ranks.group import Ranks

SHOWN = 3
"""Differences that are named."""


class ReplicaError(RuntimeError):
    """Processes that train one model together have something different."""


ADVICE = "Make it the same everywhere, or pass process_group='alone' for processes that do not train together."


def require_same(ranks: Ranks, owner: str, facts: Mapping[str, Any], advice: str = ADVICE) -> None:
    """Raise ReplicaError in all processes where one of them has other facts; all have to call it.

    Args:
        ranks: the processes.
        owner: what the facts are of, for the message.
        facts: by name; things that can be compared and pickled.
        advice: what to do.
    """
    if ranks.count == 1:
        return
    everywhere = ranks.gather(dict(facts))
    first = everywhere[0]
    names = dict.fromkeys(name for one in everywhere for name in one)
    found = [
        f"{name} is {_short(first.get(name, 'not there'))} on rank 0 "
        f"and {_short(own.get(name, 'not there'))} on rank {rank}"
        for name in names
        for rank, own in enumerate(everywhere)
        if own.get(name, ...) != first.get(name, ...)
    ]
    if found:
        more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ReplicaError(
            f"{owner} needs the same in all {ranks.count} processes that train together, but "
            f"{'; '.join(found[:SHOWN])}{more}. {advice}"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def values_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[float, float]]:
    """Two numbers of each tensor that differ where an entry does: for comparing replicas."""
    found = {}
    for name, tensor in named:
        flat = tensor.detach().flatten().double()
        weights = torch.arange(1, len(flat) + 1, dtype=flat.dtype, device=flat.device).rsqrt()
        found[name] = float(flat.square().sum()), float(flat @ weights)
    return found
