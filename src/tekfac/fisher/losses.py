"""The loss of a batch, whatever batch and model are like: where the backward pass of a survey starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from tekfac.capture.capture import Capture
from tekfac.fisher.options import Options
from tekfac.likelihoods import as_likelihood

logger = logging.getLogger("tekfac")

MANY_COLUMNS = 1000
"""Backward passes per batch from which on the exact Fisher is worth a warning."""


class BatchLoss(NamedTuple):
    """The loss of a batch.

    Attributes:
        value: a scalar.
        outputs: what it is a function of, where that is known.
        counted: the terms that count, [N, P], where that is known.
        of_data: whether it is the loss of the data's targets; without targets it is that of some others.
    """

    value: Tensor
    outputs: Tensor | None = None
    counted: Tensor | None = None
    of_data: bool = True


class BatchLosses:
    """Gives the loss of batches: the user's, the model's own, or that of the likelihood."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._model = model
        self._options = options
        self._likelihood = as_likelihood(options.likelihood)
        self._reported = False

    def of(self, batch: Any, capture: Capture) -> BatchLoss:
        """Send a batch through the model, which `capture` watches."""
        options = self._options
        if options.loss is not None:
            return BatchLoss(options.loss(self._model, batch))
        targets = None
        if isinstance(batch, Mapping):
            returned = self._model(**batch)
            loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
            if isinstance(loss, Tensor):
                return BatchLoss(loss)
        elif isinstance(batch, tuple | list):
            if len(batch) > 2:
                raise ValueError(
                    f"A batch of the data is a {type(batch).__name__} of {len(batch)}. Expected (inputs, "
                    "targets), inputs alone, or a dict of the model's keywords. Otherwise: "
                    "loss=lambda model, batch: ..."
                )
            inputs, targets = batch if len(batch) == 2 else (batch[0], None)
            self._model(*inputs) if isinstance(inputs, tuple | list) else self._model(inputs)
        else:
            self._model(batch)
        if targets is None and options.fisher == "empirical":
            raise ValueError("fisher='empirical' needs targets: batches of (inputs, targets), or loss=...")
        outputs = capture.outputs
        if outputs is None:
            raise ValueError("The model was called, but its outputs were not seen. Is it wrapped or compiled?")
        axis = options.batch_dim
        if not -outputs.ndim <= axis < outputs.ndim:
            shape = list(outputs.shape)
            raise ValueError(f"Invalid batch_dim: {axis!r}. Expected an axis of the outputs, of shape {shape}.")
        axis %= outputs.ndim
        self._report_columns(outputs.numel() // max(1, outputs.shape[axis]))
        if targets is not None:
            if not isinstance(targets, Tensor):
                raise ValueError(f"Got targets of type {type(targets).__name__}. Expected a tensor.")
            targets = targets.movedim(axis, 0) if targets.ndim > axis else targets
        terms = self._likelihood.losses(outputs.movedim(axis, 0), targets)
        if options.loss_reduction == "sum":
            return BatchLoss(terms.total, outputs, terms.counted, targets is not None)
        counted = terms.counted if options.loss_reduction == "mean" else terms.counted.any(1)
        mean = terms.total / counted.sum().clamp_min(1)
        return BatchLoss(mean, outputs, terms.counted, targets is not None)

    def _report_columns(self, columns: int) -> None:
        """Say once where the exact Fisher takes very many backward passes."""
        if self._options.fisher == "exact" and columns > MANY_COLUMNS and not self._reported:
            self._reported = True
            logger.warning(
                "fisher='exact' takes a backward pass for every class and position: %d for each batch. "
                "fisher='sampled' takes one.",
                columns,
            )
