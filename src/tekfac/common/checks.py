"""Checks that several parts share, with the messages users see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any


def require_choice(name: str, value: Any, choices: Sequence[str], where: str = "") -> None:
    """Raise ValueError for a value that is not one of the choices."""
    if value not in choices:
        hint = probably_meant(str(value), choices)
        raise ValueError(f"Unknown {name}: {value!r}.{hint} Expected one of {', '.join(choices)}{where}.")


def require_keywords(owner: str, keywords: Iterable[str], names: Sequence[str]) -> None:
    """Raise TypeError for a keyword that does not exist, with the name that was probably meant."""
    for keyword in keywords:
        if keyword not in names:
            hint = probably_meant(keyword, names) or f" It takes {', '.join(names)}."
            raise TypeError(f"{owner} got an unknown keyword {keyword!r}.{hint}")


def nearest(name: str, names: Iterable[str]) -> str:
    """A sentence, with a space before it, for a name that does not exist: the nearest one, or all there are."""
    names = list(names)
    return probably_meant(name, names) or f" Expected one of {', '.join(names)}."


def probably_meant(name: str, names: Sequence[str]) -> str:
    """The name that was probably meant, as a sentence with a space before it; empty if none is near."""
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def require_axis(name: str, value: Any, others: Sequence[str] = ()) -> None:
    """Raise ValueError for what is neither an axis of the model's outputs nor one of some words."""
    if isinstance(value, str) and value in others:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        words = "".join(f" or {other!r}" for other in others)
        raise ValueError(f"Invalid {name}: {value!r}. Expected an axis of the model's outputs{words}.")


def require_whole(name: str, value: Any, what: str) -> None:
    """Raise ValueError for what is no whole number of at least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"Invalid {name}: {value!r}. Expected a whole number {what}.")
