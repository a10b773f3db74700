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
    everything = dict(_tensors(returned, ONLY))
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


def the_output(found: Mapping[str, Tensor]) -> Tensor:
    """The one that a measurement of a single tensor of predictions reads.

    Raises:
        OutputShapeError: if there are several, none of which comes first.
    """
    first = min(found, key=lambda name: name != LOGITS)
    if len(found) == 1 or first == LOGITS or first.replace(".", "").isdigit():
        return found[first]
    raise OutputShapeError(
        f"Cannot find the predictions in what the model returned: it has {', '.join(map(repr, found))}. Say "
        "which of them they are: outputs=lambda returned: ..."
    )


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
        return
    for key, part in _parts(value):
        yield from _tensors(part, f"{name}.{key}" if name else key)


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
