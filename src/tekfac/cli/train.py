"""`tekfac train`: one run."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from tekfac.cli import run_arguments
from tekfac.cli.parsing import add_repeated, pair
from tekfac.common.console import output, progress, remark
from tekfac.common.launcher import has_started_again, launched_index
from tekfac.lab import recipes
from tekfac.lab.config import OF_OPTIMIZER, RunConfig
from tekfac.lab.pool import told
from tekfac.lab.run_folder import RunFolder, read_plain
from tekfac.lab.training import Progress, train
from tekfac.optim.settings import Settings

DEFAULT_OUT = "run"

DESCRIPTION = """\
Train a network, and leave everything about the run in a folder: config, logs, weights.

  tekfac train --data cifar10 --data-dir DIR --model vgg16 --optimizer tekfac --lr 1e-3
  tekfac train --config my.toml            settings from a file; arguments go before it
  tekfac train --config RUN/run.json       a run once more
  tekfac train --resume RUN                an interrupted run, bit by bit as if it had not been
  torchrun --nproc-per-node 2 -m tekfac train ...    by two processes, each with half of every batch; if one of
                                           them dies, torchrun's --max-restarts goes on from the last checkpoint
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings: TOML, JSON, or a run's run.json")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with an interrupted run")
    parser.add_argument("--seed", type=int, help=f"of everything random (default: {RunConfig.seed})")
    run_arguments.add_task(parser)
    group = parser.add_argument_group("the optimizer")
    told = "sgd, sgdm, adam, adamw, kfac, ekfac, tkfac, tekfac (default: tekfac)"
    group.add_argument("--optimizer", help=told)
    for name, meaning in (SHARED | OPTIONS).items():
        kind = int if name.endswith("every") else float
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=meaning)
    told = "any other setting of the optimizer (default: the recipe's, or its own)"
    add_repeated(group, "--option", "KEY=VALUE", told)
    run_arguments.add_manner(parser, DEFAULT_OUT, many=False)
    parser.set_defaults(run=run, out=None)


def _by_optimizer(setting: str) -> str:
    """The default of an optimizer's setting, for the help."""
    on_digits, elsewhere = (recipe("tekfac")[setting] for recipe in (recipes.on_digits, recipes.start))
    told = f"{on_digits:g}" if on_digits == elsewhere else f"{on_digits:g} on digits, else {elsewhere:g}"
    return f"(default: by optimizer and recipe; for tekfac {told})"


SHARED = {
    "lr": f"learning rate {_by_optimizer('lr')}",
    "momentum": "in [0, 1) (default: 0.9 for sgdm, 0 for sgd, their own for ours; adam and adamw have none)",
    "weight_decay": f"decoupled, but for sgd, sgdm, adam (default: {RunConfig.weight_decay:g})",
}
OPTIONS = {
    "damping": "added to the re-scaling (default: a share of its mean; the paper's rule with its recipe)",
    "trace_floor": "vartheta of the paper's damping, which this asks for (default: another damping)",
    "kl_clip": "bound on lr^2 g.Pg, for --option momentum_at=after (default: none)",
    "factors_every": f"steps between updates of the factors, in the end (default: {Settings.factors_every}; "
    "--option interval_growth=None: from the first step on)",
    "basis_every": f"steps between eigendecompositions, in the end (default: {Settings.basis_every})",
    "rescaling_every": "steps between updates of a measured Theta, in the end "
    f"(default: {Settings.rescaling_every})",
}
"""Settings of all optimizers, and of natural-gradient methods, that have arguments of their own; their help."""


def run(options: argparse.Namespace) -> None:
    """Train, and say how it went."""
    run_arguments.require_interval(options)
    if options.resume:
        run_arguments.refuse(options, ["out"], "the run stays in its folder")
    folder = options.resume or options.out or Path(DEFAULT_OUT)
    config = _resumed(options) if options.resume else _config(options)
    run_arguments.require_named([config], options)
    is_first = launched_index() == 0
    with progress("told", quiet=options.quiet or not is_first) as bars:
        task = bars.add_task(f"{config.optimizer} on {config.data}", total=None, told="")

        def watch(at: Progress) -> None:
            bars.update(task, completed=at.step, total=at.steps, told=told(at))

        result = train(
            config,
            folder,
            resume=options.resume is not None or has_started_again(),
            command=options.command_line,
            checkpoint_seconds=options.checkpoint_every,
            tensorboard=options.tensorboard,
            watch=watch,
            tell=partial(bars.console.print, markup=False),  # which may have brackets
        )
    if not is_first:
        return
    output().print(
        f"{config.optimizer} on {config.data}, {config.model}: {100 * result['test_accuracy']:.2f}% "
        f"after {result['epochs']} epochs (best {100 * result['best_test_accuracy']:.2f}%), "
        f"{result['seconds']:.0f} s of training, {result['status']}.\n"
        f"Everything about it is in {folder}; tekfac report {folder} draws its curves."
    )


def _config(options: argparse.Namespace) -> RunConfig:
    """The config of a new run: by file or by recipe, changed by the arguments."""
    if options.config is not None:
        run_arguments.refuse(options, ["recipe"], "the settings come from --config")
        base = RunConfig.from_plain(read_plain(options.config), str(options.config))
    else:
        task = run_arguments.task(options)
        base = recipes.config(task, run_arguments.point(options, task, (options.optimizer or "tekfac").lower()))
    return _changed(base, options)


def _resumed(options: argparse.Namespace) -> RunConfig:
    """The config of the run that goes on; arguments may repeat it, and say where it is computed."""
    run_arguments.refuse(options, ["recipe", "config"], "the settings come from the run")
    run = RunFolder(options.resume)
    config = _changed(run.config(), options)
    if run.has_progress and not run.checkpoints.there and run.result() is None:
        remark(
            f"The run in {run.path} has no checkpoint: it begins anew, and its logs are kept beside the new."
        )
    return config


def _changed(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """The config with the settings that stand on the command line."""
    own = run_arguments.given(options, OF_OPTIMIZER)
    if "optimizer" in own:
        own["optimizer"] = own["optimizer"].lower()
    named = run_arguments.given(options, OPTIONS)
    further = {**config.options, **named, **dict(map(pair, options.option))}
    plain = run_arguments.over(config, options).plain()
    return RunConfig.from_plain({**plain, **own, "options": further})
