"""Which targets belong to which of a model's predictions, where a batch has no loss of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from tekfac.capture.likelihood_of_loss import AUTO
from tekfac.capture.measurement import LikelihoodSetting
from tekfac.capture.outputs import named_tensors

WAYS_OUT = (
    "Otherwise leave out what is no prediction, outputs=lambda returned: ..., or give the loss: "
    "loss=lambda model, batch: ..."
)


def of_each_prediction(
    predictions: Mapping[str, Tensor], targets: Any, likelihood: LikelihoodSetting
) -> dict[str, Tensor | None]:
    """The targets of every prediction, by its name; None for each where there are none at all.

    A prediction that depends on no parameter, and has no targets, is none.

    Args:
        predictions: in what the model returned.
        targets: a tensor for a single prediction; for several a tuple, list or dict of them, like what the
            model returned; or None.
        likelihood: the setting.

    Raises:
        ValueError: if they do not belong together.
    """
    named = dict(named_tensors(targets))
    trained = [name for name, output in predictions.items() if output.requires_grad or name in named]
    trained = trained or list(predictions)
    if targets is None:
        _require_named(trained, likelihood)
        return dict.fromkeys(trained)
    if set(named) == set(trained):
        return {name: named[name] for name in trained}
    if len(trained) > 1:
        raise ValueError(_what_does_not_fit(targets, named, trained))
    if not isinstance(targets, Tensor):
        raise ValueError(f"Got targets of type {type(targets).__name__}. Expected a tensor.")
    return {trained[0]: targets}


def _require_named(predictions: list[str], likelihood: LikelihoodSetting) -> None:
    """Of several predictions without targets, nothing tells that a likelihood is right but its name."""
    given = {str(name): own for name, own in likelihood.items()} if isinstance(likelihood, Mapping) else {}
    unknown = [name for name in predictions if given.get(name, AUTO) == AUTO]
    if len(predictions) > 1 and unknown:
        setting = ", ".join(f"{name!r}: ..." for name in predictions)
        raise ValueError(
            f"The model gave several predictions, {_listed(predictions)}, and there are no targets. Say what "
            f"each of them means, likelihood={{{setting}}}; nothing is said of {_listed(unknown)}. {WAYS_OUT}"
        )


def _what_does_not_fit(targets: Any, named: Mapping[str, Tensor], predictions: list[str]) -> str:
    if isinstance(targets, Tensor):
        given = "a tensor of targets"
    elif named:
        given = f"targets named {_listed(named)},"
    else:
        given = f"targets of type {type(targets).__name__}, without any tensor,"
    missing = [name for name in predictions if name not in named]
    strange = [name for name in named if name not in predictions and name]
    problems = [f"there are none for {_listed(missing)}"] if missing else []
    problems += [f"there is no prediction {_listed(strange)}"] if strange else []
    return (
        f"Got {given} for several predictions, {_listed(predictions)}: {', and '.join(problems)}. Expected a "
        f"tensor for each, in a tuple, list or dict like what the model returned. {WAYS_OUT}"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
