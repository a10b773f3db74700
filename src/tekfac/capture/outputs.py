"""The predictions in whatever a model returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.distributions import Distribution

from tekfac.likelihoods import OutputShapeError

OutputSelector = Callable[[Any], Any]
"""From what a model returns to its predictions: a tensor, or a tuple, list, dict or dataclass of several."""

ONLY = ""
"""The name of predictions that are all that a model returns."""

LOGITS = "logits"


def find_outputs(returned: Any) -> dict[str, Tensor]:
    """The tensors that may be predictions in whatever the model returned, by name.

    A tensor is itself, named "". Of tuples, lists, dicts and dataclasses, however nested, all tensors of
    numbers that have an axis are (or, where there is none, a lone number, which is a loss): named by their
    places, keys and fields, as "scores" or "1.0". So are those that a distribution, or an object of another
    kind, has as attributes. Where one is called "logits" only those are whose names end so.

    Raises:
        OutputShapeError: if there is none.
    """
    everything = {name: t for name, t in named_tensors(returned) if t.is_floating_point()}
    found = {name: tensor for name, tensor in everything.items() if tensor.ndim} or everything
    if LOGITS in found:
        return {name: tensor for name, tensor in found.items() if name.endswith(LOGITS)}
    if found:
        return found
    keys = f" with keys {list(returned)}" if isinstance(returned, Mapping) else ""
    if is_dataclass(returned):
        keys = f" with fields {[part.name for part in fields(returned)]}"
    raise OutputShapeError(
        f"Cannot find the predictions in what the model returned: a {type(returned).__name__}{keys}. "
        "Expected a tensor, something with `.logits` or a 'logits' entry, or a tuple, list, dict or dataclass "
        "of tensors. Otherwise say where they are: outputs=lambda returned: ..."
    )


def selected_outputs(returned: Any, select: OutputSelector | None) -> dict[str, Tensor]:
    """What the user's function takes of what the model returned; None: what `find_outputs` does.

    Raises:
        OutputShapeError: if there is no prediction.
    """
    if select is None:
        return find_outputs(returned)
    selected = select(returned)
    try:
        return find_outputs(selected)
    except OutputShapeError as error:
        raise OutputShapeError(
            f"The function outputs= gave a {type(selected).__name__}. Expected a tensor of predictions, "
            "one of those that the model returned, or a tuple, list, dict or dataclass of several."
        ) from error


def named_tensors(value: Any, name: str = ONLY) -> Iterator[tuple[str, Tensor]]:
    """All tensors in tuples, lists, dicts and dataclasses, however nested, with names as predictions have."""
    if isinstance(value, Tensor):
        yield name, value
        return
    for key, part in _parts(value):
        yield from named_tensors(part, f"{name}.{key}" if name else key)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", None) or map(str, range(len(value)))
        yield from zip(names, value, strict=True)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((part.name, getattr(value, part.name)) for part in fields(value))
    elif isinstance(logits := getattr(value, LOGITS, None), Tensor):
        yield LOGITS, logits
    else:
        own = getattr(value, "__dict__", {}).items()
        yield from ((name.lstrip("_"), part) for name, part in own if isinstance(part, Tensor | Distribution))
