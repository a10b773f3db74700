"""The likelihoods of a survey, which is no training loop: it measures what it knows, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tekfac.capture.likelihood_of_loss import LikelihoodsOfLosses, in_words
from tekfac.capture.loss_graph import LossSort
from tekfac.fisher.options import Options
from tekfac.likelihoods import Likelihood, Unknown


class UnclearLossError(ValueError):
    """The loss does not tell what is to be measured."""


class KnownLikelihoods(LikelihoodsOfLosses):
    """Of one loss: found in the first batch, and the same in all.

    Where an optimizer goes on with the empirical Fisher of the gradients that arrive, this says what to do.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options.likelihood)
        self._fisher = options.fisher

    def of(
        self, name: str, outputs: Tensor, gradient: Tensor, loss: Callable[[], LossSort | None]
    ) -> Likelihood:
        """The likelihood of a prediction.

        Raises:
            UnclearLossError: where the loss does not tell, tells another one than before, or belongs to none
                though labels are to be drawn from it.
        """
        before = self.found.get(name)
        likelihood = super().of(name, outputs, gradient, loss)
        of, setting = f" of the prediction {name!r}" if name else "", "likelihood=..."
        if name:
            setting = f"likelihood={{{name!r}: ...}}"
        if name not in self.found:
            if self._fisher == "empirical":
                return likelihood
            raise UnclearLossError(
                f"the loss{of} does not tell its likelihood: its gradients are too small, or too few of them "
                f"have labels. Say it, {setting}, or begin with a larger batch"
            )
        if before is not None and likelihood != before:
            raise UnclearLossError(
                f"the loss{of} is that of {in_words(likelihood)}; it was that of {in_words(before)} in a batch "
                f"before. Say which is meant: {setting}"
            )
        if isinstance(likelihood, Unknown) and self._fisher != "empirical":
            raise UnclearLossError(
                f"the loss{of} belongs to no likelihood that is known, so that fisher={self._fisher!r} has no "
                f"labels to go by. Say what the outputs mean, {setting} ('categorical', 'bernoulli', "
                "'gaussian', ...), or measure the data's own labels: fisher='empirical'"
            )
        return likelihood
