"""The predictions in whatever a model returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from tekfac.likelihoods import OutputShapeError

OutputSelector = Callable[[Any], Tensor]
"""From what a model returns to the tensor of its predictions."""


def find_outputs(returned: Any) -> Tensor:
    """The tensor to read predictions from, in whatever the model returned.

    A tensor is itself; then `.logits`, the key "logits", and the first tensor of a tuple, list or
    one-entry dict.

    Raises:
        OutputShapeError: if none of these fits.
    """
    if isinstance(returned, Tensor):
        return returned
    logits = getattr(returned, "logits", None)
    if logits is None and isinstance(returned, Mapping):
        logits = returned.get("logits")
        if logits is None and len(returned) == 1:
            logits = next(iter(returned.values()))
    if logits is None and isinstance(returned, tuple | list):
        tensors = [part for part in returned if isinstance(part, Tensor)]
        logits = next((tensor for tensor in tensors if tensor.ndim), None)  # (loss, logits), too
    if isinstance(logits, Tensor):
        return logits
    keys = f" with keys {list(returned)}" if isinstance(returned, Mapping) else ""
    if is_dataclass(returned):
        keys = f" with fields {[part.name for part in fields(returned)]}"
    raise OutputShapeError(
        f"Cannot find the predictions in what the model returned: a {type(returned).__name__}{keys}. "
        "Expected a tensor, something with `.logits` or a 'logits' entry, or a tuple that starts with "
        "them. Otherwise say where they are: outputs=lambda returned: ..."
    )
