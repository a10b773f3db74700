"""`tekfac train`: one run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tekfac.cli import arguments
from tekfac.common.console import output, progress
from tekfac.lab import recipes
from tekfac.lab.config import OF_OPTIMIZER, RunConfig
from tekfac.lab.pool import told
from tekfac.lab.run_folder import RunFolder, read_plain
from tekfac.lab.training import Progress, train

DEFAULT_OUT = "run"

DESCRIPTION = """\
Train a network, and leave everything about the run in a folder: config, logs, weights.

  tekfac train --data cifar10 --data-dir DIR --model vgg16 --optimizer tekfac --lr 1e-3
  tekfac train --config my.toml            settings from a file; arguments go before it
  tekfac train --config RUN/run.json       a run once more
  tekfac train --resume RUN                an interrupted run, bit by bit as if it had not been
"""


def add_to(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "train",
        help="train a network",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings: TOML, JSON, or a run's run.json")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with an interrupted run")
    parser.add_argument("--seed", type=int)
    arguments.add_task(parser)
    group = parser.add_argument_group("the optimizer")
    group.add_argument(
        "--optimizer", help="sgd, sgdm, adam, adamw, kfac, ekfac, tkfac, tekfac (default: tekfac)"
    )
    group.add_argument("--lr", type=float)
    group.add_argument("--momentum", type=float)
    group.add_argument("--weight-decay", type=float)
    for name in arguments.OPTIONS:
        group.add_argument(f"--{name.replace('_', '-')}", type=int if name.endswith("every") else float)
    group.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="any other setting of the optimizer"
    )
    arguments.add_manner(parser, DEFAULT_OUT)
    parser.set_defaults(run=run, out=None)


def run(options: argparse.Namespace) -> None:
    """Train, and say how it went."""
    arguments.require_interval(options)
    if options.resume:
        arguments.refuse(options, ["out"], "the run stays in its folder")
    folder = options.resume or options.out or Path(DEFAULT_OUT)
    config = _resumed(options) if options.resume else _config(options)
    with progress("told", quiet=options.quiet) as bars:
        task = bars.add_task(f"{config.optimizer} on {config.data}", total=None, told="")

        def watch(at: Progress) -> None:
            bars.update(task, completed=at.step, total=at.steps, told=told(at))

        result = train(
            config,
            folder,
            resume=options.resume is not None,
            command=options.command_line,
            checkpoint_seconds=options.checkpoint_every,
            tensorboard=options.tensorboard,
            watch=watch,
        )
    output().print(
        f"{config.optimizer} on {config.data}, {config.model}: {100 * result['test_accuracy']:.2f}% "
        f"after {result['epochs']} epochs (best {100 * result['best_test_accuracy']:.2f}%), "
        f"{result['seconds']:.0f} s of training, {result['status']}.\n"
        f"Everything about it is in {folder}; tekfac report {folder} draws its curves."
    )


def _config(options: argparse.Namespace) -> RunConfig:
    """The config of a new run: by file or by recipe, changed by the arguments."""
    if options.config is not None:
        arguments.refuse(options, ["recipe"], "the settings come from --config")
        base = RunConfig.from_plain(read_plain(options.config), str(options.config))
    else:
        task = arguments.task(options)
        base = recipes.config(task, arguments.point(options, task, (options.optimizer or "tekfac").lower()))
    return _changed(base, options)


def _resumed(options: argparse.Namespace) -> RunConfig:
    """The config of the run that goes on; arguments may repeat it, and say where it is computed."""
    arguments.refuse(options, ["recipe", "config"], "the settings come from the run")
    return _changed(RunFolder(options.resume).config(), options)


def _changed(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """The config with the settings that stand on the command line."""
    own = {key: value for key in OF_OPTIMIZER if (value := getattr(options, key)) is not None}
    if "optimizer" in own:
        own["optimizer"] = own["optimizer"].lower()
    named = {key: value for key in arguments.OPTIONS if (value := getattr(options, key)) is not None}
    further = {**config.options, **named, **dict(arguments.pair(text) for text in options.option)}
    plain = arguments.over(config, options).plain()
    return RunConfig.from_plain({**plain, **own, "options": further})
