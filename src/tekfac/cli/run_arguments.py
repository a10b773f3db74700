"""Arguments that describe training runs, which the lab's commands share, and what is made of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tekfac.cli.model_arguments import add_model
from tekfac.cli.parsing import add_out, count_or_share, pair
from tekfac.lab import recipes
from tekfac.lab.config import OF_OPTIMIZER, SCHEDULES, RunConfig
from tekfac.lab.devices import choose
from tekfac.lab.grids import NESTED, Point
from tekfac.lab.optimizers import COMPARED, require_optimizer
from tekfac.lab.pool import Manner, cores
from tekfac.lab.training import CHECKPOINT_SECONDS

RECIPES = ("start", *recipes.SCALES)
PAPER_MODEL = "resnet20"


def add_task(parser: argparse.ArgumentParser, held_back: str = str(RunConfig.held_back)) -> None:
    """Data, network, length of the run: everything of a config but the optimizer."""
    task = parser.add_argument_group("the task")
    task.add_argument("--data", help="cifar10, cifar100, svhn, digits or folder (default: digits)")
    task.add_argument("--data-dir", metavar="DIR", help="where the data lie (default: see tekfac data)")
    task.add_argument("--allow-partial", action="store_true", default=None, help="a part of the data will do")
    task.add_argument("--train-samples", type=int, help="train on so many images (default: all)")
    task.add_argument("--test-samples", type=int, help="test on so many of the test set (default: all)")
    told = f"test on so many training images, or such a share, instead of the test set (default: {held_back})"
    task.add_argument("--held-back", type=count_or_share, help=told)
    told = "random crops and flips (default: for CIFAR, not for the others)"
    task.add_argument("--augment", action=argparse.BooleanOptionalAction, help=told)
    told = "bring images to this size (default: their own)"
    task.add_argument("--image-size", type=int, metavar="PIXELS", help=told)
    add_model(task, default=f"{RunConfig.model}; {PAPER_MODEL} with the paper's recipes")
    task.add_argument("--epochs", type=int, help=f"passes over the training images {_of_recipe('epochs')}")
    task.add_argument("--batch-size", type=int, help=f"images per step {_of_recipe('batch_size')}")
    task.add_argument("--schedule", choices=SCHEDULES, help=f"of the learning rate {_of_recipe('schedule')}")
    told = f"of the schedule step {_of_recipe('decay_every')}"
    task.add_argument("--decay-every", type=int, metavar="EPOCHS", help=told)
    task.add_argument("--decay-factor", type=float, help=f"of the schedule step {_of_recipe('decay_factor')}")
    told = "where settings that are not given come from: a good start, the paper, or that in small"
    task.add_argument("--recipe", choices=RECIPES, help=f"{told} (default: start)")


def add_manner(parser: argparse.ArgumentParser, default_out: str, *, many: bool = True) -> None:
    """Where and how the runs are computed."""
    manner = parser.add_argument_group("where and how")
    add_out(manner, default_out)
    if many:
        told = "runs at a time (default: one per core on the CPU, one on other devices)"
        manner.add_argument("--jobs", type=int, help=told)
    manner.add_argument("--device", help="cuda, mps, cpu (default: the first of these that there is)")
    manner.add_argument(
        "--threads", type=int, help="of torch, for each run on the CPU (default: torch's choice)"
    )
    told = f"threads that prepare batches ahead (default: {RunConfig.workers})"
    manner.add_argument("--workers", type=int, help=told)
    told, seconds = "how much work may be lost (default: %(default)g)", CHECKPOINT_SECONDS
    manner.add_argument("--checkpoint-every", type=float, default=seconds, metavar="SECONDS", help=told)
    manner.add_argument("--tensorboard", action="store_true", help="also write TensorBoard's files")
    manner.add_argument("--quiet", action="store_true", help="no progress bars")


def add_optimizers(parser: argparse.ArgumentParser, default_seeds: str) -> None:
    """Several optimizers, and seeds; None where they are not given."""
    group = parser.add_argument_group("the optimizers")
    told = f"of sgd, sgdm, adam, adamw, kfac, ekfac, tkfac, tekfac (default: {','.join(COMPARED)})"
    group.add_argument("--optimizers", metavar="NAME,...", help=told)
    told = f"how many, or which: 0,1,2, or one as 5, (default: {default_seeds})"
    group.add_argument("--seeds", metavar="N", help=told)


def task(options: argparse.Namespace) -> RunConfig:
    """The config, still without an optimizer's settings, that the arguments describe."""
    given = of_task(options)
    return over(_base(options.recipe or "start", given.get("data", "digits"), given.get("model")), options)


def over(base: RunConfig, options: argparse.Namespace) -> RunConfig:
    """A config with what stands on the command line in place of its own.

    Where only the epochs change, the learning rate falls after the same shares of the run as before.
    """
    given = of_task(options)
    if "epochs" in given and "decay_every" not in given:
        given["decay_every"] = recipes.scaled(base.decay_every, given["epochs"] / base.epochs)
    model_options = {**base.model_options, **dict(map(pair, options.model_option))}
    return RunConfig.from_plain({**base.plain(), **given, "model_options": model_options})


def require_named(configs: Iterable[RunConfig], options: argparse.Namespace) -> None:
    """Raise ValueError where a file names a function that is to make the model, and the command line does not.

    A file may come from anywhere, and a function may do anything.
    """
    for config in configs:
        if ":" in config.model and config.model != options.model:
            raise ValueError(
                f"A file with settings names the function {config.model!r} to make the model, with "
                f"{dict(config.model_options)}. It would be run: if you know it and want that, name it, too: "
                f"--model {config.model}"
            )


def of_task(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the task that stand on the command line."""
    names = [field.name for field in fields(RunConfig) if field.name not in (*NESTED, *OF_OPTIMIZER)]
    return given(options, names)


def given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of some settings that stand on the command line."""
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def _base(recipe: str, data: str, model: str | None) -> RunConfig:
    if data == "digits":
        if recipe != "start":
            raise ValueError(
                f"The recipe {recipe!r} is for cifar10, cifar100 and svhn. Leave --recipe out for digits."
            )
        return recipes.digits()
    if recipe == "start":
        return RunConfig(data=data, epochs=20, schedule="cosine")
    return recipes.task(data, model or PAPER_MODEL, recipe)  # type: ignore[arg-type]


def _of_recipe(name: str) -> str:
    """The default of a setting of the task, for the help."""
    on_digits, elsewhere = (getattr(_base("start", data, None), name) for data in ("digits", "folder"))
    start = on_digits if on_digits == elsewhere else f"{on_digits} for digits, else {elsewhere}"
    return f"(default: {start}; or the recipe's)"


def point(options: argparse.Namespace, base: RunConfig, optimizer: str) -> Point:
    """The settings of an optimizer by the recipe."""
    require_optimizer(optimizer)
    if options.recipe == "paper":
        return recipes.in_the_paper(optimizer)
    return recipes.on_digits(optimizer) if base.data == "digits" else recipes.start(optimizer)


def optimizers(options: argparse.Namespace, default: Sequence[str] = COMPARED) -> list[str]:
    """The optimizers that are named, each checked."""
    if options.optimizers is None:
        return list(default)
    names = [name.strip().lower() for name in options.optimizers.split(",") if name.strip()]
    for name in names:
        require_optimizer(name)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"Invalid --optimizers: {options.optimizers!r}. Expected different names.")
    return names


def seeds(options: argparse.Namespace, default: int = 3) -> list[int]:
    """The seeds: so many, from 0 on, or those that are listed."""
    text = options.seeds or str(default)
    try:
        numbers = [int(part) for part in text.rstrip(",").split(",")]
    except ValueError as error:
        raise ValueError(f"Invalid --seeds: {text!r}. Expected a number, or seeds as in 0,1,2.") from error
    if "," not in text:
        numbers = list(range(numbers[0]))
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"Invalid --seeds: {text!r}. Expected at least one, and different ones.")
    return numbers


def refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ValueError for arguments that would not be heeded."""
    for name in names:
        if getattr(options, name) not in (None, []):
            raise ValueError(f"--{name.replace('_', '-')} has no place here: {why}.")


def require_interval(options: argparse.Namespace) -> None:
    """Raise ValueError for a time between checkpoints that cannot be."""
    if not 0 <= options.checkpoint_every < math.inf:
        raise ValueError(
            f"Invalid --checkpoint-every: {options.checkpoint_every:g}. Expected seconds; 0 for every step."
        )


def manner(options: argparse.Namespace) -> Manner:
    """How the runs are computed."""
    processes = options.jobs
    require_interval(options)
    if processes is None:
        processes = cores() if choose(options.device or "auto").type == "cpu" else 1
    if processes < 1:
        raise ValueError(f"Invalid --jobs: {processes}. Expected a whole number, at least 1.")
    return Manner(
        processes=processes,
        command=options.command_line,
        checkpoint_seconds=options.checkpoint_every,
        tensorboard=options.tensorboard,
        quiet=options.quiet,
    )


def by_optimizer(texts: Sequence[str], names: Sequence[str], argument: str) -> dict[str, list[str]]:
    """Values of an argument for each optimizer: `NAME:VALUE` is for one of them, `VALUE` for all."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for text in texts:
        name, colon, value = text.partition(":")
        if colon:
            require_optimizer(name)
            if name not in found:
                raise ValueError(f"{argument} {text}: {name} is not among --optimizers {','.join(names)}.")
            found[name].append(value)
        else:
            for values in found.values():
                values.append(text)
    return found


def changed(point: Point, lr: float | None, settings: Mapping[str, Any]) -> Point:
    """The point with another learning rate and other settings of the optimizer."""
    rate = {} if lr is None else {"lr": lr}
    named = {key if key in OF_OPTIMIZER else f"options.{key}": value for key, value in settings.items()}
    return {**point, **rate, **named}


def rate(text: str, argument: str) -> float:
    """A number that stands behind an argument."""
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"Invalid {argument}: {text!r}. Expected a number, such as 0.1.") from error
