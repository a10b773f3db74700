"""Named settings: functions that return a config, or points of a grid.

A config is put together from two independent halves: a task (data, network, epochs, schedule), and an optimizer
with its settings. Settings that the paper names are in paper.py; those it does not name are said to be ours.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from tekfac import methods
from tekfac.common.checks import require_choice
from tekfac.lab import paper
from tekfac.lab.config import RunConfig
from tekfac.lab.grids import Point, applied, product
from tekfac.lab.optimizers import NATURAL, require_optimizer

Scale = Literal["paper", "small"]
SCALES: tuple[Scale, ...] = ("paper", "small")

KL_CLIP = 1e-3
SMALL_EPOCHS = 10

# -- tasks ---------------------------------------------------------------------------------------------------


def digits() -> RunConfig:
    """The embedded default: scikit-learn's digits and a small CNN; some 350 steps."""
    return RunConfig(data="digits", model="cnn", epochs=15, batch_size=64, schedule="cosine")


def paper_task(data: str, model: str) -> RunConfig:
    """A task of the paper, as it was: batch 128, 100 epochs (SVHN: 40), rate x 0.1 every 40 (20) epochs."""
    require_choice("data of the paper", data, tuple(paper.EPOCHS))
    return RunConfig(
        data=data,
        model=model,
        epochs=paper.EPOCHS[data],
        batch_size=paper.BATCH_SIZE,
        schedule="step",
        decay_every=paper.DECAY_EVERY[data],
    )


def small_task(data: str, model: str) -> RunConfig:
    """The same in small: 2,560 images of 16 x 16 pixels, an eighth of the channels, ten epochs.

    The learning rate falls after the same shares of the run as in the paper. Batch norm forgets faster, since
    its averages have 200 steps instead of tens of thousands.
    """
    return RunConfig(
        data=data,
        model=model,
        model_options={"width": 8, "norm_momentum": 0.1},
        image_size=16,
        train_samples=2560,
        test_samples=2000,
        allow_partial=True,
        batch_size=paper.BATCH_SIZE,
        schedule="step",
        epochs=SMALL_EPOCHS,
        decay_every=_decay_every(data, SMALL_EPOCHS),
    )


def tuning_task(base: RunConfig) -> RunConfig:
    """A task as it is tuned: half the epochs, judged on images held back from the training set."""
    epochs = max(1, base.epochs // 2)
    return replace(
        base, held_back=held_back(base.data), epochs=epochs, decay_every=_decay_every(base.data, epochs)
    )


def _decay_every(data: str, epochs: int) -> int:
    """Epochs between decays, such that these come after the same shares of the run as in the paper."""
    return scaled(paper.DECAY_EVERY[data], epochs / paper.EPOCHS[data])


def scaled(epochs: int, ratio: float) -> int:
    """Epochs of a longer or shorter run: the nearest whole number, at least one; a half is rounded up."""
    return max(1, math.floor(epochs * ratio + 0.5))


def task(data: str, model: str, scale: Scale) -> RunConfig:
    """A task of the paper, in one of two scales."""
    return paper_task(data, model) if scale == "paper" else small_task(data, model)


def held_back(data: str) -> int | float:
    """How many training images are held back for tuning, or which share, unless the user says otherwise."""
    return 2000 if data in paper.EPOCHS else 0.2


# -- optimizers ----------------------------------------------------------------------------------------------


def naturally(optimizer: str, steps: int) -> Point:
    """The natural gradient proper, refreshed every so many steps; nothing for optimizers that are none."""
    if optimizer not in NATURAL:
        return {}
    settings = methods.natural_settings(methods.named(optimizer))
    settings.update({name: steps for name in settings if name.endswith("_every")})
    return _as_point(settings)


def clipped(optimizer: str, lr: float) -> Point:
    """A natural gradient with a larger rate, and a KL clip that makes up for it."""
    return {
        "optimizer": optimizer,
        **naturally(optimizer, 20),
        "lr": lr,
        "options.kl_clip": KL_CLIP,
    }


def _as_point(settings: Mapping[str, Any]) -> Point:
    """Settings of a method as a config has them; those that are None by default are left out."""
    outer = ("lr", "momentum", "weight_decay")
    defaults = inspect.signature(NATURAL["tekfac"]).parameters
    return {
        key if key in outer else f"options.{key}": value
        for key, value in settings.items()
        if value is not None or defaults[key].default is not None
    }


DIGITS_RATES = {"sgdm": 0.1, "adam": 0.003, "kfac": 0.003, "ekfac": 0.003, "tkfac": 0.001, "tekfac": 0.003}
"""By examples/digits_rates.toml: the middle of the rates within half a point of the best, the lower of two.

Half a point is four held-back images of all three seeds: no more than chance."""


def on_digits(optimizer: str) -> Point:
    """For the embedded default: a learning rate among the best on held-back images."""
    return {"optimizer": optimizer, "lr": DIGITS_RATES.get(optimizer, start(optimizer)["lr"])}


START = {"sgd": 0.1, "sgdm": 0.03, **dict.fromkeys(NATURAL, 3e-3)}


def start(optimizer: str) -> Point:
    """Where to start with an optimizer of which nothing is known (ours; sweep it before you judge it)."""
    require_optimizer(optimizer)
    return {"optimizer": optimizer, "lr": START.get(optimizer, 1e-3)}


def in_the_paper(optimizer: str) -> Point:
    """The paper's settings of a natural-gradient method; for others a usual rate, which is ours."""
    require_optimizer(optimizer)
    if optimizer not in NATURAL:
        return {"optimizer": optimizer, "lr": {"adam": 1e-3, "adamw": 1e-3}.get(optimizer, 0.1)}
    return {"optimizer": optimizer, **_as_point(methods.paper_settings(methods.named(optimizer)))}


# -- grids ---------------------------------------------------------------------------------------------------


def paper_grid(optimizer: str) -> list[Point]:
    """The paper's grid: learning rates, times dampings (plain factors) or vartheta (trace-restricted ones)."""
    grid: dict[str, Any] = {key: [value] for key, value in in_the_paper(optimizer).items()}
    grid["lr"] = list(paper.LEARNING_RATES)
    if optimizer in NATURAL:
        if methods.named(optimizer).factors.trace_restricted:
            grid["options.trace_floor"] = list(paper.TRACE_FLOORS)
        else:
            grid["options.damping"] = list(paper.DAMPINGS)
    return product(grid)


SMALL_RATES = {"sgdm": (0.003, 0.01, 0.03, 0.1, 0.3), "adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
CLIPPED_RATES = (0.01, 0.03, 0.1, 0.3)


def small_grid(optimizer: str) -> list[Point]:
    """Five points for every optimizer; for natural gradients the paper's rate, and larger ones with a clip."""
    if optimizer not in NATURAL:
        rates = SMALL_RATES["adam" if optimizer.startswith("adam") else "sgdm"]
        return [{"optimizer": optimizer, "lr": lr} for lr in rates]
    literal = {"optimizer": optimizer, **naturally(optimizer, 20)}
    return [literal, *(clipped(optimizer, lr) for lr in CLIPPED_RATES)]


def config(base: RunConfig, point: Point, **changes: Any) -> RunConfig:
    """A task with an optimizer's settings."""
    return RunConfig.from_plain({**applied(base.plain(), point), **changes})


def configs(base: RunConfig, points: Sequence[Point], seeds: Sequence[int]) -> list[RunConfig]:
    """Every point with every seed; the optimizers take turns, so that all have the same share of any noise."""
    return [config(base, point, seed=seed) for seed in seeds for point in points]
