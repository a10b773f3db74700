"""`tekfac compare`: which optimizer is best for a network."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from tekfac.cli import run_arguments
from tekfac.cli.parsing import add_repeated, add_target, pair
from tekfac.lab import recipes
from tekfac.lab.config import RunConfig
from tekfac.lab.grids import Point
from tekfac.lab.optimizers import COMPARED, FACTORIES
from tekfac.lab.pool import run_configs
from tekfac.lab.report import Asked, present, require_reports
from tekfac.lab.run_folder import RunFolder
from tekfac.lab.study import Trial
from tekfac.lab.sweeping import best, read_base, read_trials

DESCRIPTION = """\
Train the same network with several optimizers and seeds; the outcome is a table, figures and a page.

  tekfac compare                           digits, a small CNN, six optimizers, three seeds
  tekfac compare --data cifar10 --model resnet20 --optimizers sgdm,adam,tekfac --epochs 10 --seeds 3
  tekfac compare --model nets.py:make --data folder --data-dir DIR --lr sgdm:0.1 --lr tekfac:0.03
  tekfac compare --tuned SWEEP             each optimizer as it did best in a sweep (see tekfac sweep)

What was interrupted goes on when the same command is given again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    run_arguments.add_task(parser)
    run_arguments.add_optimizers(parser, "3")
    whose = "of one optimizer or all (default: the recipe's)"
    add_repeated(parser, "--lr", "[NAME:]VALUE", f"learning rate, {whose}")
    add_repeated(parser, "--option", "[NAME:]KEY=VALUE", f"any other setting, {whose}")
    told = "settings that did best in a finished sweep"
    parser.add_argument("--tuned", type=Path, metavar="SWEEP", help=told)
    add_target(parser)
    run_arguments.add_manner(parser, "comparison")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run everything, then report."""
    require_reports()
    tuned = {} if options.tuned is None else best(read_trials(options.tuned))
    names = run_arguments.optimizers(options, [name for name in FACTORIES if name in tuned] or COMPARED)
    base = _base(options)
    points = _points(options, base, names, tuned)
    seeds = run_arguments.seeds(options)
    configs = recipes.configs(base, points, seeds)
    run_arguments.require_named(configs, options)
    folders = run_configs(configs, options.out, run_arguments.manner(options), "All runs")
    asked = Asked(
        title=f"{len(names)} optimizers on {base.data} with {base.model}",
        target=options.target,
        command=options.command_line,
        notes=_origin(tuned, changed=bool(options.lr or options.option)),
    )
    present(folders, options.out, asked)


def _base(options: argparse.Namespace) -> RunConfig:
    if options.tuned is None:
        return run_arguments.task(options)
    run_arguments.refuse(options, ["recipe"], "the settings come from --tuned")
    return run_arguments.over(read_base(options.tuned), options)


def _origin(tuned: Mapping[str, Trial], *, changed: bool) -> list[str]:
    """Where tuned settings come from: the command that tried them, if its runs are still there."""
    begun = [RunFolder(trial.folders[0]) for trial in tuned.values()]
    commands = dict.fromkeys(run.provenance().get("command", "") for run in begun if run.has_progress)
    but = ", but for --lr and --option" if changed else ""
    return [f"Every optimizer has the settings that did best in `{command}`{but}." for command in commands]


def _points(
    options: argparse.Namespace, base: RunConfig, names: list[str], tuned: Mapping[str, Trial]
) -> list[Point]:
    rates = run_arguments.by_optimizer(options.lr, names, "--lr")
    settings = run_arguments.by_optimizer(options.option, names, "--option")
    points = []
    for name in names:
        if options.tuned is not None and name not in tuned:
            raise ValueError(
                f"The sweep {str(options.tuned)!r} has not tried {name}. It has {', '.join(tuned)}."
            )
        point = tuned[name].point if tuned else run_arguments.point(options, base, name)
        rate = run_arguments.rate(rates[name][-1], "--lr") if rates[name] else None
        points.append(run_arguments.changed(point, rate, dict(map(pair, settings[name]))))
    return points
