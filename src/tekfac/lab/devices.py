"""The device that is computed on, and waiting for it."""

from __future__ import annotations

import torch


def choose(name: str) -> torch.device:
    """The device of that name; for "auto" the first there is of cuda, mps and cpu.

    Raises:
        ValueError: for a device that torch does not know or that is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"Cannot use device {name!r}: {reason} Use auto, cpu, cuda or mps.") from error
    return device


def synchronise(device: torch.device) -> None:
    """Wait until everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
