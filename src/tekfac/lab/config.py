"""The settings of one training run: a typed value, checked, to plain values and back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from tekfac.common.checks import nearest, require_choice

Schedule = Literal["step", "cosine", "constant"]
SCHEDULES: tuple[Schedule, ...] = ("step", "cosine", "constant")

PLACE = ("data_dir", "device", "threads", "workers")
"""Settings that say where and how a run is computed, not what."""

OF_DATA = ("data", "data_dir", "allow_partial", "train_samples", "test_samples", "held_back", "image_size")
"""Settings that say what is trained and tested on."""

OF_OPTIMIZER = ("optimizer", "lr", "momentum", "weight_decay")
"""Settings of the optimizer that all of them share; the others are its options."""


MOST_THREADS = 1024
"""More than any one machine has use for; some tens of thousands would end the process."""

LARGEST_IMAGE = 4096
"""Edge to which images may be brought, in pixels."""

LARGEST = sys.float_info.max

RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("epochs", "batch_size", "decay_every"), lambda n: n >= 1, "a whole number, at least 1"),
    (
        ("train_samples", "test_samples", "image_size", "threads"),
        lambda n: n is None or n >= 1,
        "a whole number, at least 1, or nothing",
    ),
    (
        ("threads", "workers"),
        lambda n: n is None or n <= MOST_THREADS,
        f"at most {MOST_THREADS}: no more than the machine has cores",
    ),
    (("image_size",), lambda n: n is None or n <= LARGEST_IMAGE, f"at most {LARGEST_IMAGE}"),
    (("held_back", "workers", "weight_decay"), lambda n: n >= 0, "a number that is not negative"),
    (("held_back",), lambda n: n < 1 or isinstance(n, int), "a whole number, or a share below 1"),
    (("weight_decay",), lambda n: n <= LARGEST, "a finite number"),
    (("seed",), lambda n: 0 <= n < 2**63, "a whole number from 0 to 2^63 - 1"),
    (("lr",), lambda n: 0 < n <= LARGEST, "a positive number"),
    (("momentum",), lambda n: n is None or 0 <= n < 1, "a number in [0, 1)"),
    (("decay_factor",), lambda n: 0 < n <= 1, "a number in (0, 1]"),
)
"""Names of settings, what has to hold for their values, and that in words."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a training run depends on.

    Attributes:
        name: a label of the user's own; empty for none.
        data: cifar10, cifar100, svhn, digits, or folder.
        data_dir: where the data lie; None for the default folder.
        allow_partial: whether a part of a data set will do.
        train_samples: train on so many images; None for all.
        test_samples: test on so many images of the test set; None for all.
        held_back: images of the training set that are tested on instead of the test set, for tuning: how many,
            or, below 1, which share of them.
        augment: random crops and flips; None for what is usual for the data.
        image_size: edge that images are brought to; None for their own.
        model: a name of tekfac.lab.models, or module:function.
        model_options: keywords of the model, such as its width.
        optimizer: a name of tekfac.lab.optimizers.
        lr: learning rate.
        momentum: of the optimizers that have one; None for 0.9.
        weight_decay: of the optimizer.
        options: its further keywords, such as damping, trace_floor, kl_clip, factors_every.
        epochs: passes over the training images.
        batch_size: images per step.
        schedule: "step": the learning rate is multiplied by `decay_factor` every `decay_every` epochs;
            "cosine": it falls to zero over the run, step by step; "constant".
        decay_every: epochs.
        decay_factor: at each decay.
        seed: of the initial weights, the order of the images, their augmentation and drawn labels.
        device: "auto", or a device of torch.
        threads: of torch on the CPU; None for torch's own choice.
        workers: threads that prepare batches ahead.
    """

    name: str = ""
    data: str = "digits"
    data_dir: str | None = None
    allow_partial: bool = False
    train_samples: int | None = None
    test_samples: int | None = None
    held_back: int | float = 0
    augment: bool | None = None
    image_size: int | None = None
    model: str = "cnn"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "tekfac"
    lr: float = 1e-3
    momentum: float | None = None
    weight_decay: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 15
    batch_size: int = 128
    schedule: Schedule = "step"
    decay_every: int = 40
    decay_factor: float = 0.1
    seed: int = 0
    device: str = "auto"
    threads: int | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(RunConfig)
        for name, value in vars(self).items():
            _require_type(name, value, hints[name])
        for names, holds, expected in RULES:
            for name in names:
                if not holds(getattr(self, name)):
                    raise ValueError(f"Invalid {name}: {getattr(self, name)!r}. Expected {expected}.")
        require_choice("schedule", self.schedule, SCHEDULES)
        for name in ("model_options", "options"):
            object.__setattr__(self, name, _as_in_a_file(name, getattr(self, name)))
        for name in OF_OPTIMIZER:
            if name in self.options:
                raise ValueError(
                    f"Invalid options: {name!r} is a setting of its own. Set it beside the options."
                )

    def plain(self) -> dict[str, Any]:
        """Plain values, as in a file."""
        return {**vars(self), "model_options": dict(self.model_options), "options": dict(self.options)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], origin: str = "") -> Self:
        """The config with these values, the rest at their defaults.

        Args:
            plain: the values.
            origin: the file that they come from, if they do.

        Raises:
            ValueError: for an unknown key, with the one that was probably meant, or an invalid value.
        """
        require_keys(plain, [entry.name for entry in dataclasses.fields(cls)], origin or "The config")
        try:
            return cls(**plain)
        except ValueError as error:
            raise ValueError(f"{origin}: {error}" if origin else str(error)) from error

    def fingerprint(self) -> str:
        """A short name for what is computed; neither the config's name nor where it runs is part of it."""
        return hashlib.sha256(json.dumps(self._computed(), sort_keys=True).encode()).hexdigest()[:10]

    def differences(self, other: Self) -> list[str]:
        """What another config computes differently, in words."""
        mine, others = self._computed(), other._computed()
        return [f"{key} {mine[key]!r} -> {others[key]!r}" for key in mine if mine[key] != others[key]]

    def _computed(self) -> dict[str, Any]:
        return {key: value for key, value in self.plain().items() if key not in (*PLACE, "name")}


def require_keys(plain: Mapping[str, Any], names: Sequence[str], origin: str) -> None:
    """Raise ValueError for a key that does not exist, with the one that was probably meant."""
    for key in plain:
        if key not in names:
            raise ValueError(f"{origin} has an unknown key {key!r}.{nearest(key, names)}")


def _as_in_a_file(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as they come back from a file: tuples as lists."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(values), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"Invalid {name}: {str(values)[:200]}. Expected numbers, texts, lists, true and false: what a "
            "file can hold."
        ) from error
    return plain


def _require_type(name: str, value: Any, hint: Any) -> None:
    """Whether the value is of the field's type; whole numbers will do for real ones."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(
        str if typing.get_origin(kind) is Literal else typing.get_origin(kind) or kind for kind in allowed
    )
    fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
    if not fits or (isinstance(value, bool) and bool not in kinds):
        names = {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            str: "a text",
            type(None): "nothing",
        }
        told = " or ".join(names.get(kind, "keys and values") for kind in kinds)
        raise ValueError(f"Invalid {name}: {value!r}. Expected {told}.")
