"""The likelihood of each of a model's predictions: as it was set, or found from the loss and kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tekfac.capture.loss_graph import LossSort
from tekfac.capture.recognition import NONE_KNOWN, Finding, recognised
from tekfac.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    OutputShapeError,
    Unknown,
    as_likelihood,
)
from tekfac.ranks.group import ALONE, Ranks

logger = logging.getLogger("tekfac")

AUTO = "auto"

UNKNOWN = Unknown()
"""Stands for a loss that belongs to no likelihood that is known, and for one that nothing is known of yet."""

KINDS: dict[str, type[Likelihood]] = {
    kind.__name__.lower(): kind for kind in (Categorical, Bernoulli, Gaussian, Unknown)
}
"""What can be found, by the names that a saved state has."""

RARELY = 1024
"""Steps between two looks at the loss, in the end; it is looked at in the first, second, fourth, ..., too."""

IN_VAIN = 16
"""Steps after which it is said that no likelihood was found; until then every one is looked at for it."""


@dataclass(frozen=True)
class _Known:
    """Of one prediction.

    Attributes:
        likelihood: that was found in earlier steps; None: nothing is known yet.
        seen: steps in which gradients have arrived.
        here: whether some have in the present step.
        now: the likelihood that was found in it, so far.
    """

    likelihood: Likelihood | None = None
    seen: int = 0
    here: bool = False
    now: Likelihood | None = None

    def arrived(self) -> _Known:
        """After a gradient."""
        return self if self.here else replace(self, seen=self.seen + 1, here=True)

    def is_to_be_checked(self) -> bool:
        """Whether the gradients of the present step are to be looked at."""
        is_open = self.likelihood is None and self.seen < IN_VAIN
        return is_open or self.seen & (self.seen - 1) == 0 or self.seen % RARELY == 0

    def with_loss_of(self, found: Likelihood) -> _Known:
        """After a look. A model that was called twice may have two losses, which are of no one likelihood."""
        return replace(self, now=found if self.now in (None, found) else UNKNOWN)

    @property
    def latest(self) -> Likelihood | None:
        """What was just found, or else is known."""
        return self.now or self.likelihood

    def after_step(self) -> _Known:
        """What there is to go on from."""
        return _Known(self.latest, self.seen)


class LikelihoodsOfLosses:
    """Tells the likelihood of a prediction when the gradient of its loss arrives.

    Attributes:
        speaker: put before messages; empty where it is clear whose they are.
    """

    def __init__(self, setting: Any, ranks: Ranks = ALONE) -> None:
        """Know nothing of any loss yet.

        Args:
            setting: "auto", what `as_likelihood` takes, or a mapping of names of predictions to such.
            ranks: the processes that have a part of every batch each, and agree.
        """
        self.speaker = ""
        self._ranks = ranks
        self._for_all: Likelihood | None = None
        self._named: dict[str, Likelihood | None] = {}
        if isinstance(setting, Mapping):
            self._named = {str(name): _as_set(value) for name, value in setting.items()}
        else:
            self._for_all = _as_set(setting)
        self._known: dict[str, _Known] = {}
        self._before: dict[str, _Known] = {}

    def set_for(self, name: str) -> Likelihood | None:
        """The likelihood that was set for a prediction; None: it is to be found."""
        return self._named.get(name, self._for_all)

    def settle(self, likelihood: Likelihood) -> None:
        """Take a likelihood for all predictions from now on for which none was set, instead of finding it."""
        self._for_all = self._for_all or likelihood
        self._named = {name: own or likelihood for name, own in self._named.items()}

    def check(self, predictions: Mapping[str, Tensor]) -> None:
        """What can be known in the forward pass.

        Raises:
            OutputShapeError: where the only prediction does not have the shape that its likelihood reads.
            ValueError: for a likelihood that was set for a prediction which is not there.
        """
        strange = [name for name in self._named if name not in predictions]
        if strange:
            raise ValueError(
                f"likelihood= names {', '.join(map(repr, strange))}, but the predictions in what the model "
                f"returned are {', '.join(map(repr, predictions)) or 'none'}. Expected their names: keys, "
                "fields or places, as '0' or 'heads.box'; a single tensor has the name ''."
            )
        if len(predictions) == 1:
            ((name, prediction),) = predictions.items()
            likelihood = self.set_for(name)
            if likelihood is not None:
                likelihood.check(prediction)

    def of(
        self,
        name: str,
        outputs: Tensor,
        gradient: Tensor,
        loss: Callable[[], LossSort | None],
    ) -> Likelihood:
        """The likelihood of a prediction; UNKNOWN where there is none, or none was found yet.

        Args:
            name: of the prediction.
            outputs: samples first.
            gradient: of the loss, of the same shape.
            loss: tells what it is of the outputs, as far as the graph shows.

        Raises:
            OutputShapeError: where they do not have the shape that a likelihood which was set reads.
        """
        known = self._known.get(name, _Known()).arrived()
        explicit = self.set_for(name)
        if explicit is not None and outputs.ndim:
            _require_shape(name, explicit, outputs)
        if known.is_to_be_checked() and type(explicit) in (type(None), *KINDS.values()):
            finding = recognised(outputs, gradient, loss()) if outputs.ndim else Finding(UNKNOWN)
            finding = agreed(self._ranks.gather(finding))
            if finding.is_certain:
                known = known.with_loss_of(finding.likelihood or UNKNOWN)
        self._known[name] = known
        return explicit or known.latest or UNKNOWN

    @property
    def found(self) -> dict[str, Likelihood]:
        """What is known so far, by the names of predictions: what was set, or else was found."""
        both = {name: self.set_for(name) or known.latest for name, known in self._known.items()}
        return {name: likelihood for name, likelihood in both.items() if likelihood is not None}

    def keep(self) -> None:
        """What was seen so far stays seen; what it tells is said."""
        for name, known in self._known.items():
            if known.now is not None:
                _tell(self.speaker, name, known.now, known.likelihood, self.set_for(name))
            elif known.here and known.seen == IN_VAIN and known.likelihood is self.set_for(name) is None:
                logger.info("%s%s", self.speaker, _in_vain(name))
        self._known = {name: known.after_step() for name, known in self._known.items()}
        self._before = dict(self._known)

    def roll_back(self) -> None:
        """As if nothing had been seen since the last `keep`."""
        self._known = dict(self._before)

    def state(self) -> str:
        """What was found up to the last `keep`, to go on from."""
        plain = {name: [known.seen, _to_plain(known.likelihood)] for name, known in self._before.items()}
        return json.dumps(plain)

    def load(self, state: str) -> None:
        """Go on from a saved state."""
        self._known = {
            name: _Known(_from_plain(plain), seen) for name, (seen, plain) in json.loads(state).items()
        }
        self.keep()


def agreed(findings: Sequence[Finding]) -> Finding:
    """What several parts of a batch say together: what one of them knows, unless another one contradicts."""
    certain = [finding for finding in findings if finding.is_certain]
    if not certain:
        return findings[0]
    return certain[0] if all(finding == certain[0] for finding in certain) else NONE_KNOWN


def require_likelihood(setting: Any) -> None:
    """Raise ValueError for what `LikelihoodsOfLosses` does not take."""
    if isinstance(setting, Mapping) and not setting:
        raise ValueError("Invalid likelihood: {}. Expected names of predictions, each with its likelihood.")
    for value in setting.values() if isinstance(setting, Mapping) else [setting]:
        _as_set(value)


def of_one_prediction(name: str, error: OutputShapeError) -> OutputShapeError:
    """An error that says which of several predictions it is of."""
    setting = f"likelihood={{{name!r}: ...}}"
    return OutputShapeError(
        f"Of the prediction {name!r}: {error} Each may have a likelihood of its own: {setting}."
    )


def _require_shape(name: str, likelihood: Likelihood, outputs: Tensor) -> None:
    try:
        likelihood.check(outputs)
    except OutputShapeError as error:
        raise of_one_prediction(name, error) from error


def _as_set(value: Any) -> Likelihood | None:
    return None if isinstance(value, str) and value == AUTO else as_likelihood(value)


def _tell(
    speaker: str, name: str, found: Likelihood, before: Likelihood | None, explicit: Likelihood | None
) -> None:
    """Say what was found, once; and what speaks against what was set."""
    of = f" of the prediction {name!r}" if name else ""
    if found == before:
        return
    if explicit is not None:
        if found is not UNKNOWN and type(found) is not type(explicit):
            logger.warning(
                "%sThe loss%s is that of %s, but likelihood=%r was set. Leave it out to have it found.",
                speaker,
                of,
                in_words(found),
                type(explicit).__name__.lower(),
            )
        return
    level = logging.INFO if before is None else logging.WARNING
    now = "" if before is None else f" no longer that of {in_words(before)}, but"
    logger.log(level, "%sThe loss%s is%s that of %s.", speaker, of, now, in_words(found))


def _in_vain(name: str) -> str:
    of = f" of the prediction {name!r}" if name else ""
    return (
        f"In {IN_VAIN} steps the loss{of} has not told its likelihood: its gradients are too small, or too few "
        "of them have labels. Until it does the empirical Fisher is measured. It can be said: likelihood=..."
    )


def in_words(likelihood: Likelihood) -> str:
    """For the log."""
    if isinstance(likelihood, Unknown):
        return "no likelihood that is known: its gradients have an empirical Fisher, and no other"
    along = getattr(likelihood, "class_dim", None)
    return f"a {type(likelihood).__name__.lower()} likelihood" + (
        "" if along is None else f", with classes along axis {along}"
    )


def _to_plain(likelihood: Likelihood | None) -> list[Any] | None:
    if likelihood is None:
        return None
    (name,) = (name for name, kind in KINDS.items() if type(likelihood) is kind)
    return [name, vars(likelihood)]


def _from_plain(plain: Iterable[Any] | None) -> Likelihood | None:
    if plain is None:
        return None
    name, values = plain
    return KINDS[name](**values)
