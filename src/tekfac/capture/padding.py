"""Which positions of a batch of sequences are real, as the model was told."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from tekfac.common.checks import nearest
from tekfac.layers.names import without_wrappers

PaddingMask = str | Callable[..., Tensor]
"""The name of an argument of the model's forward that is True (or 1) where a position is real; or a function of
the model's arguments that gives such a mask, [N, T]."""

KEEPING = ("attention_mask",)
"""Arguments that are known to be 1 where a position is real."""

DROPPING = ("src_key_padding_mask", "key_padding_mask")
"""Arguments that are known to be True (or -inf) where a position is padding."""


def real_positions(
    model: nn.Module, setting: PaddingMask | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Which positions are real, [N, T], where the arguments of the model tell.

    Raises:
        ValueError: if the named argument does not exist, or its mask is no matrix.
    """
    if callable(setting):
        return _checked(setting(*args, **kwargs), "the function padding_mask")
    arguments = _by_name(model, args, kwargs)
    if setting is not None:
        if setting not in arguments and setting not in _parameters(model):
            known = list(_parameters(model))
            raise ValueError(
                f"padding_mask={setting!r} is no argument of the forward method of {type(model).__name__}."
                f"{nearest(setting, known)}"
            )
        mask = arguments.get(setting)
        return None if mask is None else _checked(_as_real(setting, mask), f"the argument {setting!r}")
    for name in (*KEEPING, *DROPPING):
        mask = arguments.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            return _as_real(name, mask)
    return None


def _as_real(name: str, mask: Tensor) -> Tensor:
    return mask == 0 if name in DROPPING else mask != 0


def _checked(mask: Any, what: str) -> Tensor:
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise ValueError(
            f"{what[0].upper()}{what[1:]} gave a mask of {shape}. Expected a tensor [N, T], 1 where real."
        )
    return mask != 0


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        bound = inspect.signature(_forward(model)).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return dict(kwargs)
    inner = {
        key: value
        for name, parameter in _parameters(model).items()
        if parameter.kind is inspect.Parameter.VAR_KEYWORD
        for key, value in bound.get(name, {}).items()
    }
    return {**bound, **inner}


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_forward(model)).parameters


def _forward(model: nn.Module) -> Callable[..., Any]:
    """The forward method, also of a model that is compiled or wrapped."""
    return without_wrappers(model).forward
