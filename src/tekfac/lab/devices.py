"""The device that is computed on: choosing it, waiting for it, the state of its random numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def choose(name: str) -> torch.device:
    """The device of that name; for "auto" the first there is of cuda, mps and cpu.

    Raises:
        ValueError: for a device that torch does not know or that is not there.
    """
    if name == "auto":
        return torch.device([*_accelerators(), "cpu"][0])
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"Cannot use device {name!r}: torch does not know it, or finds none here. Use "
            f"{', '.join(['auto', *_accelerators()])} or cpu."
        ) from error
    return device


def _accelerators() -> list[str]:
    """What is there and preferred to the CPU, the first first."""
    kinds = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [kind for kind, is_there in kinds.items() if is_there]


def synchronise(device: torch.device) -> None:
    """Wait until everything that was asked of the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's generators that computations on the device may use, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put the generators back; a run that goes on on another kind of device begins with that one's own."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    elif device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"])
