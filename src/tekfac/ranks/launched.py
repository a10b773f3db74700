"""Joining the processes that a launcher, such as torchrun, has started to train together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tekfac.common.launcher import has_started_again, launched
from tekfac.ranks.group import ALONE, AUTO, Ranks, ranks_of


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """The processes that a launcher has started, which can send each other messages meanwhile; or this one.

    With accelerators each process takes the one of its number on its machine.
    """
    if dist.is_available() and dist.is_initialized():
        yield ranks_of(nn.Module(), AUTO)
        return
    if launched() == 1:
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        _join()
        yield ranks_of(nn.Module(), AUTO)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise ConnectionError(
            f"One of the {launched()} processes cannot be reached by another process: it has ended, and said "
            "why itself, or its machine is gone. Start all of them again."
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join() -> None:
    """Meet the others, by what the launcher says in the environment.

    After a restart torchrun's store still has the addresses of processes that are gone (pytorch issue 135712).
    There names begin with the number of the restart, which is the same for all processes of one machine.
    """
    told = os.environ
    is_shared = told.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not (has_started_again() and is_shared and told.get("LOCAL_WORLD_SIZE") == told["WORLD_SIZE"]):
        dist.init_process_group()
        return
    store: Any = dist.TCPStore(told["MASTER_ADDR"], int(told["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    fresh = dist.PrefixStore(f"restart {told['TORCHELASTIC_RESTART_COUNT']}", store)  # type: ignore[attr-defined]
    dist.init_process_group(store=fresh, rank=int(told["RANK"]), world_size=launched())


def in_parallel(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The model as its processes train it: gradients are the mean of theirs."""
    return model if ranks.count == 1 else DistributedDataParallel(model)
