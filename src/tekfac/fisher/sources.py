"""Networks, data and trained parameters from what a user names on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tekfac.fisher.batch import map_tensors, tensors_of

NESTED = ("model", "state_dict", "model_state_dict", "net", "network")
"""Where checkpoints of training runs usually keep the model's parameters."""


def named_callable(name: str, what: str) -> Callable[[], Any]:
    """The function that `package.module:function` or `path/to/file.py:function` names.

    Raises:
        ValueError: if there is no such module or function.
    """
    place, _, attribute = name.rpartition(":")
    if not place:
        raise ValueError(
            f"Cannot read {what} {name!r}. Expected package.module:function or path/to/file.py:function, a "
            "function without arguments."
        )
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ValueError(f"Cannot import {place!r} for {what}: {error}.") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ValueError(
            f"{place!r} has no function {attribute!r} for {what}. It has {', '.join(names) or 'none'}."
        )
    return function  # type: ignore[no-any-return]


def load_state(model: nn.Module, path: str | Path) -> None:
    """Put the parameters of a checkpoint into a model: a state dict, alone or inside a dict.

    Raises:
        ValueError: if the file holds no state of this model; the message says what differs.
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no checkpoint {str(path)!r}.")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    state = saved
    if isinstance(saved, Mapping) and not all(isinstance(value, Tensor) for value in saved.values()):
        inside = [key for key in NESTED if isinstance(saved.get(key), Mapping)]
        if not inside:
            raise ValueError(
                f"{str(path)!r} holds no state dict: it has the entries {sorted(map(str, saved))}. Expected "
                f"the model's state_dict(), or a dict with it under {', '.join(NESTED)}."
            )
        state = saved[inside[0]]
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{str(path)!r} does not fit the network: {error}") from error


class Limited:
    """A loader cut off after some samples, its floating-point tensors cast."""

    def __init__(self, loader: Iterable[Any], samples: int | None, dtype: torch.dtype) -> None:
        self._loader = loader
        self._samples = samples
        self._dtype = dtype

    def __iter__(self) -> Iterator[Any]:
        left = self._samples
        for batch in self._loader:
            if left is not None and left <= 0:
                return
            size = _size(batch)
            if left is not None:
                batch = map_tensors(batch, lambda tensor, count=left: tensor[:count])  # type: ignore[misc]
                left -= size
            yield map_tensors(batch, self._cast)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def batches(images: Tensor, labels: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Images and labels in batches."""
    return list(zip(torch.split(images, size), torch.split(labels, size), strict=True))


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # so that the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def _size(batch: Any) -> int:
    return next((len(tensor) for tensor in tensors_of(batch)), 0)
