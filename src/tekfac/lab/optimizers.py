"""The optimizers of the lab by name: torch's own, and every method of the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tekfac import methods, optimizers
from tekfac.common.checks import nearest
from tekfac.lab.config import RunConfig

NATURAL = {method.name.lower(): getattr(optimizers, method.name) for method in methods.ALL}
"""The natural-gradient methods, in the order of their table."""

FACTORIES: dict[str, type[Any]] = {
    "sgd": torch.optim.SGD,
    "sgdm": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    **NATURAL,
}

COMPARED = ("sgdm", "adam", *NATURAL)
"""What is compared unless the user says otherwise: the paper's baselines and the four methods."""

DEFAULT_MOMENTUM = {"sgd": 0.0, "sgdm": 0.9, **dict.fromkeys(NATURAL, None)}
"""Of those that have a momentum, None for their own; the others have betas, among their options."""

NAMES = {name: kind.__name__ for name, kind in FACTORIES.items()} | {"sgdm": "SGDM"}
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


def build(config: RunConfig, model: nn.Module) -> Optimizer:
    """The optimizer of a run for the model's parameters.

    Raises:
        ValueError: for an unknown name, or settings that do not fit it.
    """
    name, momentum = config.optimizer, config.momentum
    require_optimizer(name)
    keywords: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, **config.options}
    if name in DEFAULT_MOMENTUM:
        own = DEFAULT_MOMENTUM[name] if momentum is None else momentum
        keywords |= {} if own is None else {"momentum": own}
    elif momentum is not None:
        raise ValueError(f"{name} has no momentum; got {momentum}. Set betas among its options instead.")
    if name in NATURAL:
        keywords.setdefault("seed", config.seed)
    try:
        made: Optimizer = FACTORIES[name](model if name in NATURAL else model.parameters(), **keywords)
    except TypeError as error:
        raise ValueError(f"Cannot make {name} with {', '.join(sorted(keywords))}: {error}") from error
    return made
