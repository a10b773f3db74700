"""Arithmetic in the precision that was asked for, whatever the code around it has switched on."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """No mixed precision inside; for devices that know none there is nothing to switch off."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
