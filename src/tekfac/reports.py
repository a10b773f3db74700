"""What the optimizer tells its user through the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from tekfac.inventory import ON_REQUEST, Inventory

logger = logging.getLogger("tekfac")

KEYS_OF_OTHERS = {"params", "name", "param_names", "initial_lr"}
"""What torch and its schedulers put into param groups."""


def inventory(optimizer: str, found: Inventory, names: Mapping[Tensor, str]) -> None:
    """What is preconditioned, what is not, and, for layers that could have been, why not."""
    for name, reason in found.reasons.items():
        if reason != ON_REQUEST:
            logger.warning("%s trains %r by momentum SGD on its raw gradient: %s.", optimizer, name, reason)
    in_layers = {p for layer in found.layers.values() for p in layer.parameters}
    others = [name for p, name in names.items() if p not in in_layers]
    share = sum(p.numel() for p in in_layers) / max(1, sum(p.numel() for p in names))
    logger.info(
        "%s preconditions %d layer(s) with %.0f%% of the parameters. %s",
        optimizer,
        len(found.layers),
        100 * share,
        f"By momentum SGD on the raw gradient: {', '.join(others)}." if others else "Nothing is left out.",
    )


def unknown_keys(optimizer: str, group: Iterable[str], known: Iterable[str]) -> None:
    """Entries of a param group that nobody will read."""
    unknown = sorted(set(group) - KEYS_OF_OTHERS - set(known))
    if unknown:
        logger.warning(
            "A param group of %s has %s, which has no meaning there. A group may have its own %s.",
            optimizer,
            ", ".join(map(repr, unknown)),
            ", ".join(known),
        )


def late_parameters(optimizer: str, count: int) -> None:
    """Parameters that came to the optimizer after it was made."""
    if count:
        logger.warning(
            "%d parameter(s) that %s was given are not the model's. They are trained by momentum SGD on their "
            "raw gradient.",
            count,
            optimizer,
        )


def unseen_layers(optimizer: str, layers: Sequence[str]) -> None:
    """Layers that are trained without curvature."""
    logger.warning(
        "%s has no statistics of %s and trains that by momentum SGD on the raw gradient until it has. "
        "Statistics are taken when the model itself is called (model(x)), in training mode, with gradients "
        "enabled, and loss.backward() passes through its outputs.",
        optimizer,
        ", ".join(f"layer {name!r}" for name in layers),
    )


def skipped_step(optimizer: str, step: int, skipped: int, problem: str, diverged: bool) -> None:
    """A step that was not taken."""
    if diverged:
        problem += "; the parameters are no longer finite: training has diverged, lower lr"
    logger.warning(
        "%s skipped a step after step %d (%d skipped so far): %s.", optimizer, step, skipped, problem
    )
