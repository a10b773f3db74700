"""The optimizers of the lab by name: torch's own, and every method of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tekfac import methods, optimizers
from tekfac.common.checks import nearest
from tekfac.optim.natural_gradient import NaturalGradient

Factory = Callable[[nn.Module, dict[str, Any]], Optimizer]


def _natural(kind: type[NaturalGradient]) -> Factory:
    return lambda model, keywords: kind(model, **keywords)


def _first_order(kind: Callable[..., Optimizer]) -> Factory:
    return lambda model, keywords: kind(model.parameters(), **keywords)


NATURAL = {method.name.lower(): getattr(optimizers, method.name) for method in methods.ALL}
"""The natural-gradient methods, in the order of their table."""

FACTORIES: dict[str, Factory] = {
    "sgd": _first_order(torch.optim.SGD),
    "sgdm": _first_order(torch.optim.SGD),
    "adam": _first_order(torch.optim.Adam),
    "adamw": _first_order(torch.optim.AdamW),
    **{name: _natural(kind) for name, kind in NATURAL.items()},
}

COMPARED = ("sgdm", "adam", *NATURAL)
"""What is compared unless the user says otherwise: the paper's baselines and the four methods."""

DEFAULT_MOMENTUM = {"sgd": 0.0, "sgdm": 0.9, **dict.fromkeys(NATURAL, 0.9)}
"""Of those that have a momentum; the others have betas, among their options."""


NAMES = {
    "sgd": "SGD",
    "sgdm": "SGDM",
    "adam": "Adam",
    "adamw": "AdamW",
    **{method.name.lower(): method.name for method in methods.ALL},
}
"""As papers write them, in the order of a report: first-order methods, then the table of methods."""


def display(name: str) -> str:
    """The name as papers write it; one that is not known stays as it is."""
    return NAMES.get(name, name)


def position(name: str) -> tuple[int, str]:
    """To sort by: as in NAMES, then others by name."""
    return (list(NAMES).index(name) if name in NAMES else len(NAMES), name)


def require_optimizer(name: str) -> None:
    """Raise ValueError for a name that does not exist, with the one that was probably meant."""
    if name not in FACTORIES:
        raise ValueError(f"Unknown optimizer: {name!r}.{nearest(name, FACTORIES)}")


def build(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    momentum: float | None = None,
    weight_decay: float = 0.0,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Optimizer:
    """An optimizer of the model's parameters.

    Raises:
        ValueError: for an unknown name, or settings that do not fit it.
    """
    require_optimizer(name)
    keywords: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, **(options or {})}
    if name in DEFAULT_MOMENTUM:
        keywords["momentum"] = DEFAULT_MOMENTUM[name] if momentum is None else momentum
    elif momentum is not None:
        raise ValueError(f"{name} has no momentum; got {momentum}. Set betas among its options instead.")
    if name in NATURAL:
        keywords.setdefault("seed", seed)
    try:
        return FACTORIES[name](model, keywords)
    except TypeError as error:
        raise ValueError(f"Cannot make {name} with {', '.join(sorted(keywords))}: {error}") from error
