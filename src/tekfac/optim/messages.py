"""What the optimizer tells its user through the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from tekfac.curvature.layer_curvature import LayerCurvature
from tekfac.layers.inventory import AS_MEANT, Inventory

logger = logging.getLogger("tekfac")

KEYS_OF_OTHERS = {"params", "name", "param_names", "initial_lr"}
"""What torch and its schedulers put into param groups."""


USUAL_SHARE = 0.9
"""Of the trainable parameters that have a block; if fewer have one, that is worth a warning."""


def inventory(optimizer: str, found: Inventory, names: Mapping[Tensor, str], told: set[str]) -> None:
    """What is preconditioned, what is not, and, for layers that could have been, why not; each once.

    Args:
        optimizer: its name.
        found: in the model.
        names: of the model's parameters.
        told: what was said before, which is added to.
    """
    for name, reason in found.reasons.items():
        if reason not in AS_MEANT:
            _once(
                told,
                logging.WARNING,
                f"{optimizer} trains {name!r} by first order: {reason}.",
            )
    in_layers = {p for layer in found.layers.values() for p in layer.parameters}
    others = [name for p, name in names.items() if p not in in_layers]
    trained = [p for p in names if p.requires_grad]
    trained_layers = sum(layer.weight.requires_grad for layer in found.layers.values())
    share = sum(p.numel() for p in trained if p in in_layers) / max(1, sum(p.numel() for p in trained))
    requested = bool(others) and all(found.reasons.get(name) in AS_MEANT for name in others)
    rest = f"By first order: {', '.join(others)}." if others else "Nothing is left out."
    _once(
        told,
        logging.INFO if share >= USUAL_SHARE or requested else logging.WARNING,
        f"{optimizer} preconditions {trained_layers} layer(s) with {100 * share:.0f}% of the trainable "
        f"parameters. {rest}",
    )


def strange_parameters(optimizer: str, names: Sequence[str], told: set[str]) -> None:
    """Parameters that the model has got and the optimizer was not given."""
    if names:
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        _once(
            told,
            logging.WARNING,
            f"The model has got parameters that {optimizer} does not train: {listed}. Give them to it: "
            "optimizer.add_param_group({'params': ...}).",
        )


def _once(told: set[str], level: int, message: str) -> None:
    if message not in told:
        told.add(message)
        logger.log(level, "%s", message)


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
    """Parameters in a group that are not the model's."""
    if count:
        logger.warning(
            "%d parameter(s) that %s was given are not the model's. They are trained by first order.",
            count,
            optimizer,
        )


def unseen_layers(optimizer: str, layers: Sequence[str], why: str) -> None:
    """Layers that are trained without curvature, and why."""
    listed = ", ".join(f"layer {name!r}" for name in layers[:3])
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    logger.warning(
        "%s has no statistics of %s%s and trains by first order there, until it has: %s",
        optimizer,
        listed,
        more,
        why,
    )


def failed_refreshes(
    optimizer: str, before: Mapping[str, LayerCurvature], after: Mapping[str, LayerCurvature]
) -> None:
    """Layers whose refreshes have failed for good: at the first, 10th, 100th, ... time of each."""
    for name, block in after.items():
        count = block.failed_refreshes
        if count > (before[name].failed_refreshes if name in before else 0) and is_power_of_ten(count):
            logger.warning(
                "%s could not refresh the curvature of layer %r (time %d): %s. It goes on with the basis that "
                "it has. Should that go on, look at its inputs, lower max_dim where memory is short, or leave "
                "it to first order (first_order=[%r]).",
                optimizer,
                name,
                count,
                block.brought.failure,
                name,
            )


def is_power_of_ten(count: int) -> bool:
    """Whether it is 1, 10, 100, ..."""
    return count > 0 and str(count).rstrip("0") == "1"


def went_back(
    optimizer: str, why: str, step: int, snapshot: int, length: float, damping: float, actions: int
) -> None:
    """A guard has acted."""
    changes = [f"steps are {length:g} times as long now"] if length != 1 else []
    changes += [f"damping is {damping:g} times as large"] if damping != 1 else []
    logger.warning(
        "The guard of %s went back from step %d to the snapshot of step %d (time %d): %s. %s.",
        optimizer,
        step,
        snapshot,
        actions,
        why,
        (" and ".join(changes) or "nothing else is changed").capitalize(),
    )


def given_up(optimizer: str, why: str, step: int, snapshot: int, actions: int) -> str:
    """What is told where a guard has acted as often as it may."""
    return (
        f"Training diverges: the guard of {optimizer} has acted {actions} times and would have to once more "
        f"after step {step}: {why}. The parameters are those of the snapshot of step {snapshot}. Look at the "
        "data and the loss, lower lr, raise damping, or let it act more often: guard=Guard(at_most=...)."
    )


SKIPS_TOLD = 5
"""Skipped steps in a row that are logged one by one; then only the 10th, 100th, ..."""


def skipped_step(optimizer: str, step: int, skipped: int, in_a_row: int, problem: str, diverged: bool) -> None:
    """A step that was not taken."""
    if diverged:
        problem += "; the parameters are no longer finite: training has diverged, lower lr"
    if in_a_row == SKIPS_TOLD:
        problem += (
            f". {in_a_row} steps in a row were skipped: training has probably diverged. Go back to a "
            "checkpoint and lower lr or raise damping. More skips are told now and then"
        )
    if in_a_row <= SKIPS_TOLD or is_power_of_ten(in_a_row):
        logger.warning(
            "%s skipped a step after step %d (%d skipped so far): %s.", optimizer, step, skipped, problem
        )
