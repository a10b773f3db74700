"""The optimizers that are benchmarked, by name: SGD as the reference, ours, and rivals that are installed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from tekfac.common.checks import nearest, require_keywords, require_whole
from tekfac.common.extras import require
from tekfac.damping import LevenbergMarquardt
from tekfac.lab.bench.networks import TINY
from tekfac.lab.optimizers import NATURAL
from tekfac.optim.settings import Settings

RATES = {"sgd": 2e-2}
RATE = 1e-3
"""Of learning, unless an option says otherwise: such that all train, and curvature changes meanwhile."""

REFERENCE = "sgd"

RIVAL_EVERY = 10
"""Steps between two preconditioners of SOAP and Shampoo, unless they are given: SOAP's default."""


class Stepping(Protocol):
    """What is needed of an optimizer."""

    def step(self) -> Any:
        """Move the parameters."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...


@dataclass(frozen=True)
class Together:
    """Several optimizers that share a model's parameters, as one."""

    parts: Sequence[Optimizer]

    def step(self) -> None:
        """A step of each."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for part in self.parts:
            part.zero_grad()


@dataclass(frozen=True)
class Contestant:
    """An optimizer with its settings.

    Attributes:
        name: of ALL.
        every: steps between its measurements; None: its own default.
        options: further keywords.
    """

    name: str
    every: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in ALL:
            raise ValueError(f"Unknown contestant: {self.name!r}.{nearest(self.name, ALL)}")
        if self.every is None:
            return
        if self.name not in WITH_INTERVAL:
            raise ValueError(
                f"Invalid contestant: {self.label!r}. {self.name} does the same at every step; leave out "
                f"@{self.every}."
            )
        require_whole(f"interval of {self.name}", self.every, "of steps, at least 1, as in tekfac@10")

    @property
    def label(self) -> str:
        """As on the command line."""
        interval = "" if self.every is None else f"@{self.every}"
        return ",".join([f"{self.name}{interval}", *(f"{k}={v}" for k, v in self.options.items())])

    @property
    def is_ours(self) -> bool:
        """Whether it is one of the methods of this library."""
        return self.name in NATURAL

    @property
    def intervals(self) -> dict[str, int]:
        """The intervals that it is told, by keyword."""
        if self.is_ours:
            asked = {} if self.every is None else dict.fromkeys(self._clocks, self.every)
            return asked | {k: v for k, v in self.options.items() if k in self._clocks}
        return {INTERVAL_OF[self.name]: self.every or RIVAL_EVERY} if self.name in INTERVAL_OF else {}

    @property
    def cycle(self) -> int:
        """Steps after which it has done everything equally often."""
        return math.lcm(*self._all_intervals.values())

    def measures_at(self, step: int) -> bool:
        """Whether it measures at a step, counted from 0, if it measures all layers at once."""
        late = step + 1 if self.name in AFTER_INTERVAL else step
        return any(late % every == 0 for every in self._all_intervals.values())

    @property
    def _all_intervals(self) -> dict[str, int]:
        defaults = {clock: getattr(Settings, clock) for clock in self._clocks} if self.is_ours else {}
        return defaults | self.intervals

    @property
    def _clocks(self) -> tuple[str, ...]:
        """The keywords of the intervals of a method of ours."""
        measures_theta = self.options.get("rescaling", Settings.rescaling) == "measured"
        shared = ("factors_every", "basis_every")
        has_theta = measures_theta and NATURAL[self.name].method.rescaling.measured
        return (*shared, "rescaling_every") if has_theta else shared

    def make(self, model: nn.Module, seed: int = 0) -> Stepping:
        """The optimizer of a model.

        Raises:
            ImportError: where its package is not installed.
            TypeError: for options that it does not have.
            ValueError: for options that do not fit, or a model that has nothing for it.
        """
        keywords = {"lr": RATES.get(self.name, RATE), **self.intervals, **self.options}
        if self.is_ours:
            kind = NATURAL[self.name]
            is_judged = isinstance(keywords.get("damping"), LevenbergMarquardt)
            maker = kind.natural if is_judged else kind
            return maker(model, **{"seed": seed, **keywords})  # type: ignore[no-any-return]
        return MAKERS[self.name](model, keywords)

    def plain(self) -> dict[str, Any]:
        """As plain values, of which `Contestant(**plain)` is the same again."""
        return {"name": self.name, "every": self.every, "options": dict(self.options)}


# -- the others ----------------------------------------------------------------------------------------------


def _sgd(model: nn.Module, keywords: Mapping[str, Any]) -> Stepping:
    return torch.optim.SGD(model.parameters(), **{"momentum": 0.9, **keywords})


def _adamw(model: nn.Module, keywords: Mapping[str, Any]) -> Stepping:
    return torch.optim.AdamW(model.parameters(), **keywords)


def _soap(model: nn.Module, keywords: Mapping[str, Any]) -> Stepping:
    return _checked(require("pytorch_optimizer", "SOAP").SOAP, model, keywords)


def _shampoo(model: nn.Module, keywords: Mapping[str, Any]) -> Stepping:
    """From its first step on with a preconditioner; by default it waits for the 25th."""
    kind = require("pytorch_optimizer", "Shampoo").ScalableShampoo
    return _checked(kind, model, {"start_preconditioning_step": 1, **keywords})


def _checked(kind: Callable[..., Stepping], model: nn.Module, keywords: Mapping[str, Any]) -> Stepping:
    """An optimizer that would not complain of keywords that it does not have."""
    known = inspect.signature(kind).parameters.values()
    names = [one.name for one in known if one.kind is not one.VAR_KEYWORD and one.name != "params"]
    require_keywords(getattr(kind, "__name__", "It"), keywords, names)
    return kind(model.parameters(), **keywords)


def _schedule_free(model: nn.Module, keywords: Mapping[str, Any]) -> Stepping:
    """AdamW whose weights are averaged instead of its learning rate lowered; in its state of training."""
    kind = require("pytorch_optimizer", "Schedule-free AdamW").ScheduleFreeAdamW
    optimizer = _checked(kind, model, keywords)
    optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def _muon(model: nn.Module, keywords: Mapping[str, Any]) -> Stepping:
    """Muon for what it is made for, AdamW for the rest."""
    if not hasattr(torch.optim, "Muon"):
        raise ImportError(f"Muon needs a torch that has torch.optim.Muon; torch {torch.__version__} has none.")
    hidden = hidden_matrices(model)
    if not hidden:
        raise ValueError("Muon moves weights of linear layers inside of a network, and it has none.")
    chosen = set(hidden)
    rest = [parameter for parameter in model.parameters() if parameter not in chosen]
    muon: Optimizer = torch.optim.Muon(hidden, **keywords)
    return Together([muon, torch.optim.AdamW(rest, lr=keywords["lr"])])


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all linear layers but the last, whose outputs are the model's."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [module.get_parameter("weight") for module in linear[:-1]]


MAKERS: Mapping[str, Callable[[nn.Module, Mapping[str, Any]], Stepping]] = {
    REFERENCE: _sgd,
    "adamw": _adamw,
    "soap": _soap,
    "shampoo": _shampoo,
    "muon": _muon,
    "schedule-free": _schedule_free,
}
INTERVAL_OF = {"soap": "precondition_frequency", "shampoo": "preconditioning_compute_steps"}
"""The keyword of a rival's interval."""

AFTER_INTERVAL = ("shampoo",)
"""Those that count steps from 1."""

WITH_INTERVAL = (*NATURAL, *INTERVAL_OF)
ALL = (REFERENCE, "adamw", *NATURAL, "soap", "shampoo", "muon", "schedule-free")
"""The names of all."""


def present(contestants: Sequence[Contestant], say: Callable[[str], None]) -> list[Contestant]:
    """Those whose packages are installed, the reference first; of the others a word is said.

    Raises:
        TypeError: for options that a contestant does not have.
        ValueError: for options that do not fit, and for a contestant that is there twice.
    """
    labels = [contestant.label for contestant in contestants]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"Contestant {twice!r} is there twice. Name each once.")
    found = [] if any(label == REFERENCE for label in labels) else [Contestant(REFERENCE)]
    for contestant in contestants:
        try:
            contestant.make(TINY["gpt"].make())
        except ImportError as error:
            say(f"{contestant.label} is left out. {error}")
        except RuntimeError as error:
            raise ValueError(f"Cannot make {contestant.label}: {error}") from error
        else:
            found.append(contestant)
    return sorted(found, key=lambda contestant: contestant.label != REFERENCE)


def fitting(
    contestants: Sequence[Contestant], model: nn.Module, network: str, say: Callable[[str], None]
) -> list[Contestant]:
    """Those that have something to do in a network; of the others a word is said."""
    found = []
    for contestant in contestants:
        if contestant.name == "muon" and not hidden_matrices(model):
            say(f"{contestant.label} is left out of {network}, which has no linear layer inside.")
        else:
            found.append(contestant)
    return found
