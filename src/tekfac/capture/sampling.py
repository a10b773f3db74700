"""The generator that labels are drawn with: its own, saved with the optimizer, and able to take a draw back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of two places in the data: odd, so that 2^32 of them in a row are different ones."""


class Sampling:
    """A random generator on whatever device the outputs are; the global random state is never touched."""

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        """A generator that has drawn nothing yet; where no device is given, that of the first draw is it."""
        self._first = self._seed = seed
        self._generator = None if device is None else torch.Generator(device=device).manual_seed(seed)
        self._before: tuple[torch.Generator, Tensor] | tuple[None, None] | None = None

    def generator_on(self, device: torch.device) -> torch.Generator:
        """The generator to draw with next."""
        if self._before is None:
            self._before = self._now()
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device=device).manual_seed(self._seed)
        return self._generator

    def _now(self) -> tuple[torch.Generator, Tensor] | tuple[None, None]:
        """The generator, and its state; nothing where none was needed yet."""
        return (None, None) if self._generator is None else (self._generator, self._generator.get_state())

    def begin(self, place: int) -> None:
        """Draw from now on what belongs to a place in the data, whatever was drawn before.

        Whoever comes to the place draws the same there; at the first one, 0, as if nothing had been drawn yet.
        """
        self._seed = (self._first + place * STRIDE) % 2**63
        self._generator = self._before = None

    def keep(self) -> None:
        """What was drawn so far stays drawn."""
        self._before = None

    def roll_back(self) -> None:
        """As if nothing had been drawn since the last `keep`."""
        if self._before is not None:
            self._generator, state = self._before
            if self._generator is not None and state is not None:
                self._generator.set_state(state)
        self._before = None

    def state(self) -> dict[str, Any]:
        """The generator as plain values, as it was at the last `keep`: passes since then will be made again."""
        generator, state = self._now() if self._before is None else self._before
        if generator is None or state is None:
            return {"seed": self._seed, "device": None, "state": None}
        return {"seed": self._seed, "device": str(generator.device), "state": state.clone()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on drawing where the saved generator stopped."""
        generator = None
        if saved["state"] is not None:
            generator = torch.Generator(device=saved["device"])
            generator.set_state(saved["state"].cpu())
        self._first = self._seed = saved["seed"]
        self._generator, self._before = generator, None
