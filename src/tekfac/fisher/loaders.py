"""What is taken as data: batches, as often as they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset


def require_loader(loader: Any, passes: int) -> None:
    """Refuse what gives no batches, or gives them once where they are needed more often.

    Raises:
        TypeError: for a tensor, a data set, a single batch, and what cannot be iterated over.
        ValueError: for an iterator, where there are several passes.
    """
    if isinstance(loader, Tensor | Dataset):
        raise TypeError(
            f"Got a {type(loader).__name__} as loader. Expected batches: a DataLoader, or a list of (inputs, "
            "targets)."
        )
    if isinstance(loader, Mapping):
        raise TypeError("Got a single batch, a dict, as loader. Expected batches: wrap it in a list: [batch].")
    if _is_a_pair(loader):
        raise TypeError(
            f"Got a {type(loader).__name__} of two as loader, which looks like one batch, inputs and targets. "
            "Expected batches: wrap it in a list: [(X, Y)]. Batches of inputs alone: [(X1,), (X2,)]."
        )
    if not isinstance(loader, Iterable):
        raise TypeError(f"Expected batches (a DataLoader, a list), got {type(loader).__name__}.")
    if isinstance(loader, Iterator) and passes > 1:
        raise ValueError(
            f"The data are read {passes} times or more, but the loader, a {type(loader).__name__}, can be read "
            "only once. Give a DataLoader or a list of batches."
        )


def _is_a_pair(loader: Any) -> bool:
    """Whether it is (inputs, targets), and not two batches.

    Batches of inputs alone are told from it by coming in a list, with one type and one number of axes.
    """
    if not isinstance(loader, tuple | list) or len(loader) != 2:
        return False
    first, second = loader
    if not isinstance(second, Tensor):  # targets of several predictions
        return isinstance(first, Tensor) and isinstance(second, Mapping | tuple | list)
    alike = isinstance(first, Tensor) and (first.dtype, first.ndim) == (second.dtype, second.ndim)
    return isinstance(loader, tuple) or not alike
