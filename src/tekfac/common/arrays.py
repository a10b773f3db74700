"""NumPy arrays beside tensors: an array in gives an array out.

NumPy itself is never imported here: whoever holds an array has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

Array = TypeVar("Array", Tensor, "NDArray[Any]")
"""A tensor or an array; where it is returned, it is what was given."""


def is_array(value: object) -> bool:
    """Whether it is a NumPy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def to_tensor(value: Array) -> Tensor:
    """A tensor as it is, an array as a tensor of its own.

    Raises:
        TypeError: for what is neither.
    """
    if isinstance(value, Tensor):
        return value
    if not is_array(value):
        raise TypeError(f"Got a {type(value).__name__}. Expected a tensor or a NumPy array.")
    # Torch takes neither negative strides nor foreign byte orders, and warns where it may not write.
    return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))


def as_given(result: Tensor, given: Array) -> Array:
    """A result as an array, if what was given is one."""
    return result if isinstance(given, Tensor) else result.detach().cpu().numpy()


def formed_array(form: Callable[[], Tensor], dtype: DTypeLike | None, copy: bool | None) -> NDArray[Any]:
    """What `__array__` returns of an object that has to be formed as a matrix first.

    Raises:
        ValueError: for copy=False, which asks for memory that is there already.
    """
    if copy is False:
        raise ValueError("The matrix is formed when it is asked for: copy=False cannot be kept. Leave it out.")
    matrix = form().cpu().numpy()
    return matrix if dtype is None else matrix.astype(dtype, copy=False)
