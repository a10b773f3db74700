"""What optimizers are called in a report, and in which order they stand."""

from __future__ import annotations

from tekfac import methods

FIRST_ORDER = {"sgd": "SGD", "sgdm": "SGDM", "adam": "Adam", "adamw": "AdamW"}
METHODS = {method.name.lower(): method for method in methods.ALL}
ORDER = (*FIRST_ORDER, *METHODS)


def display(optimizer: str) -> str:
    """The name as papers write it; one that is not known stays as it is."""
    method = METHODS.get(optimizer)
    return method.name if method else FIRST_ORDER.get(optimizer, optimizer)


def position(optimizer: str) -> tuple[int, str]:
    """To sort by: first-order methods, then the table of methods, then others by name."""
    return (ORDER.index(optimizer) if optimizer in ORDER else len(ORDER), optimizer)
