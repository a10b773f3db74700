"""Data and trained parameters for `tekfac fisher`, as the user's files hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tekfac.common.checksums import DamagedError
from tekfac.common.data_hash import length, map_tensors
from tekfac.lab.sealed_files import require_sealed

NESTED = ("model", "state_dict", "model_state_dict", "net", "network")
"""Where checkpoints of training runs usually keep the model's parameters."""


def load_state(model: nn.Module, path: str | Path) -> None:
    """Put the parameters of a checkpoint into a model: a state dict, alone or inside a dict.

    Raises:
        ValueError: if the file holds no state of this model; the message says what differs.
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no checkpoint {str(path)!r}.")
    try:
        require_sealed(Path(path))
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except DamagedError:
        raise
    except Exception as error:
        raise ValueError(
            f"{str(path)!r} is no checkpoint of tensors that can be read safely ({type(error).__name__}). Save "
            "torch.save(model.state_dict(), ...), not the model itself."
        ) from error
    state = saved
    if isinstance(saved, Mapping) and not all(isinstance(value, Tensor) for value in saved.values()):
        inside = [key for key in NESTED if isinstance(saved.get(key), Mapping)]
        state = saved[inside[0]] if inside else None
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        entries = f"a dict of {sorted(map(str, saved))}" if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(
            f"{str(path)!r} holds no state dict: it is {entries}. Expected the model's state_dict(), or a dict "
            f"with it under {', '.join(NESTED)}."
        )
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{str(path)!r} does not fit the network: {error}") from error


class Limited:
    """A loader cut off after some samples, its floating-point tensors cast."""

    def __init__(self, loader: Iterable[Any], samples: int, dtype: torch.dtype) -> None:
        self._loader = loader
        self._samples = samples
        self._dtype = dtype

    def __iter__(self) -> Iterator[Any]:
        left = self._samples
        for batch in self._loader:
            size = length(batch)
            kept = map_tensors(batch, partial(_first, size=size, count=left)) if size > left else batch
            yield map_tensors(kept, self._cast)
            left -= size
            if left <= 0:
                return

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _first(tensor: Tensor, size: int, count: int) -> Tensor:
    """The first samples, of tensors that have one row per sample."""
    return tensor[:count] if tensor.ndim and len(tensor) == size else tensor


def distinct(paths: Sequence[str]) -> list[str]:
    """Short names of files: without folder and ending where these tell nothing.

    Raises:
        ValueError: for a file that is named twice.
    """
    if len(set(paths)) < len(paths):
        raise ValueError(f"--state names a file twice: {', '.join(paths)}.")
    stems = [Path(path).stem for path in paths]
    return stems if len(set(stems)) == len(stems) else list(paths)
