"""Arithmetic in the precision that was asked for, whatever the code around it has switched on."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """No mixed precision inside.

    Where none is on there is nothing to switch off, and nothing is touched: an interrupt between the last line
    of a `with` and its end would leave autocast's count of nested uses one too high, and with it the copies of
    weights that it keeps until the outermost use ends.
    """
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
