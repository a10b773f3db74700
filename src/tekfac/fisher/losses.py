"""The loss of a batch, whatever batch and model are like: where the backward pass of a survey starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from tekfac.capture.autograd import made_by
from tekfac.capture.capture import Capture
from tekfac.capture.likelihood_of_loss import AUTO, LikelihoodsOfLosses, of_one_prediction
from tekfac.fisher.options import Options
from tekfac.fisher.targets import of_each_prediction
from tekfac.likelihoods import LIKELIHOODS, OutputShapeError

logger = logging.getLogger("tekfac")

WITHOUT_A_LOSS = LIKELIHOODS["categorical"]
"""What is taken where no likelihood was set and there is no loss to find it from."""

MANY_COLUMNS = 1000
"""Backward passes per batch from which on the exact Fisher is worth a warning."""


class PredictionLoss(NamedTuple):
    """The loss of one prediction, which is -log p and nothing else.

    Attributes:
        output: the prediction.
        value: a scalar.
        counted: the terms that count, [N, P].
    """

    output: Tensor
    value: Tensor
    counted: Tensor


class BatchLoss(NamedTuple):
    """The loss of a batch.

    Attributes:
        value: a scalar.
        parts: that it is the sum of, by the names of predictions, where it is that of their likelihoods; none
            of any other loss.
        of_data: whether it is the loss of the data's targets; without targets it is that of some others.
    """

    value: Tensor
    parts: Mapping[str, PredictionLoss]
    of_data: bool = True

    @property
    def trained(self) -> dict[str, PredictionLoss]:
        """The parts that depend on parameters."""
        return {name: own for name, own in self.parts.items() if own.output.requires_grad}

    @property
    def has_hooks_at_outputs(self) -> bool:
        """Whether a backward pass that ends at the predictions comes by the hooks there.

        Not so where nothing is known of them, or where their precision was changed last: the hook is before.
        """
        outputs = [own.output for own in self.trained.values()]
        return bool(outputs) and all(made_by(output)[0] is output.grad_fn for output in outputs)


class BatchLosses:
    """Gives the loss of batches: the user's, the model's own, or that of the likelihoods."""

    def __init__(self, model: nn.Module, options: Options, likelihoods: LikelihoodsOfLosses) -> None:
        self._model = model
        self._options = options
        self._likelihoods = likelihoods
        self._reported = False

    def may_tell(self, batch: Any) -> bool:
        """Whether a likelihood may have to be found from the loss of a batch: the user's, or the model's."""
        setting = self._options.likelihood
        is_open = isinstance(setting, Mapping) or (isinstance(setting, str) and setting == AUTO)
        return is_open and (self._options.loss is not None or isinstance(batch, Mapping))

    def of(self, batch: Any, capture: Capture) -> BatchLoss:
        """Send a batch through the model, which `capture` watches."""
        options = self._options
        if options.loss is not None:
            return BatchLoss(options.loss(self._model, batch), {})
        targets = None
        if isinstance(batch, Mapping):
            returned = self._model(**batch)
            loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
            if isinstance(loss, Tensor):
                return BatchLoss(loss, {})
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
        return self._by_likelihoods(capture.predictions, targets)

    def _by_likelihoods(self, predictions: Mapping[str, Tensor], targets: Any) -> BatchLoss:
        """The sum over predictions of the mean of -log p."""
        if not predictions:
            raise ValueError("The model was called, but its outputs were not seen. Is it wrapped or compiled?")
        self._likelihoods.settle(WITHOUT_A_LOSS)
        of_each = of_each_prediction(predictions, targets, self._options.likelihood)
        parts: dict[str, PredictionLoss] = {}
        for name, own in of_each.items():
            try:
                parts[name] = self._of_prediction(name, predictions[name], own)
            except OutputShapeError as error:
                if len(of_each) == 1:
                    raise
                raise of_one_prediction(name, error) from error
        self._report_columns([own.output for own in parts.values()])
        first, *others = (own.value for own in parts.values())
        return BatchLoss(sum(others, start=first), parts, targets is not None)

    def _of_prediction(self, name: str, output: Tensor, targets: Tensor | None) -> PredictionLoss:
        """-log p of a prediction's targets, or of some that it does not predict for certain."""
        options, likelihood = self._options, self._likelihoods.set_for(name)
        assert likelihood is not None, "it was settled"
        likelihood.check(output)
        axis = options.batch_dim
        if not -output.ndim <= axis < output.ndim:
            shape = list(output.shape)
            raise OutputShapeError(
                f"Invalid batch_dim: {axis!r}. Expected an axis of the outputs, of shape {shape}."
            )
        axis %= output.ndim
        if targets is not None:
            targets = targets.movedim(axis, 0) if targets.ndim > axis else targets
        total, counted = likelihood.losses(output.movedim(axis, 0), targets)
        by = 1 if options.loss_reduction == "sum" else max(1, options.num_terms(counted))
        return PredictionLoss(output, total / by, counted)

    def _report_columns(self, outputs: Sequence[Tensor]) -> None:
        """Say once where the exact Fisher takes very many backward passes."""
        axis = self._options.batch_dim
        columns = sum(output.numel() // max(1, output.shape[axis]) for output in outputs)
        if self._options.fisher == "exact" and columns > MANY_COLUMNS and not self._reported:
            self._reported = True
            logger.warning(
                "fisher='exact' takes a backward pass for every class and position: %d for each batch. "
                "fisher='sampled' takes one.",
                columns,
            )
