"""`tekfac sweep`: the settings of optimizers, tried out."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from tekfac.cli import run_arguments
from tekfac.common.console import output
from tekfac.common.extras import require
from tekfac.lab import recipes
from tekfac.lab.grids import Sweep, described, values_in
from tekfac.lab.run_folder import read_plain
from tekfac.lab.study import Trial
from tekfac.lab.sweeping import best, sweep

SHOWN = ("optimizer", "lr", "options.kl_clip")
"""Settings that are shown with every trial."""

DESCRIPTION = """\
Try settings, several at a time. Runs are judged on images held back from the training set.

  tekfac sweep --grid small --optimizers sgdm,adam,tekfac --data cifar10 --model resnet20-he --epochs 5
  tekfac sweep --grid paper --optimizers tekfac --data cifar100 --model resnet20 --recipe paper
  tekfac sweep --config my.toml            any grids, or a search by one of Optuna's samplers

Killed or interrupted, the same command goes on, and no finished trial is lost. Several machines share a sweep
by giving the same --storage: the URL of a database, or journal:FILE on a disk they share. docs/lab.md has the
format of the file.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    told = "the paper's grid (learning rates times damping or vartheta), or five points for every optimizer"
    parser.add_argument("--grid", choices=recipes.SCALES, help=told)
    parser.add_argument("--config", type=Path, metavar="FILE", help="a sweep of your own: TOML or JSON")
    parser.add_argument("--storage", metavar="URL", help="of the study (default: a SQLite file in the folder)")
    run_arguments.add_task(parser, "2000 of the paper's data sets, 0.2 of others")
    run_arguments.add_optimizers(parser, "1")
    run_arguments.add_manner(parser, "sweep")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Try everything, then say what did best."""
    if (options.grid is None) == (options.config is None):
        raise ValueError("A sweep needs --grid paper, --grid small or --config FILE: one of them.")
    plan = _from_file(options) if options.config else _from_grid(options)
    run_arguments.require_named(
        (config for point in plan.examples() for config in plan.configs(point)), options
    )
    if not plan.base.held_back:
        output().print("Careful: the points are judged on the test set (held_back = 0), which they then fit.")
    trials = sweep(plan, options.out, run_arguments.manner(options), options.storage)
    _print(trials, options.out)


def _from_grid(options: argparse.Namespace) -> Sweep:
    base = run_arguments.task(options)
    if options.held_back is None:
        base = replace(base, held_back=recipes.held_back(base.data))
    grid = recipes.paper_grid if options.grid == "paper" else recipes.small_grid
    points = tuple(point for name in run_arguments.optimizers(options) for point in grid(name))
    return Sweep(f"{options.grid} grid", base, points, seeds=tuple(run_arguments.seeds(options, default=1)))


def _from_file(options: argparse.Namespace) -> Sweep:
    run_arguments.refuse(options, ["recipe", "optimizers", "seeds"], "the settings come from --config")
    plain = read_plain(options.config)
    plan = Sweep.from_plain(plain, str(options.config))
    base = run_arguments.over(plan.base, options)
    if options.held_back is None and "held_back" not in plain.get("base", {}):
        base = replace(base, held_back=recipes.held_back(base.data))
    return replace(plan, base=base)


def _print(trials: list[Trial], folder: Path) -> None:
    table = require("rich.table", "The lab").Table("accuracy %", "settings", title=f"{len(trials)} settings")
    winners, common = [trial.point for trial in best(trials).values()], _common(trials)
    for trial in trials:
        style = "bold" if trial.point in winners else ""
        told = described(trial.point, common) + (", diverged" if trial.diverged else "")
        table.add_row(f"{100 * trial.accuracy:.2f}", told, style=style)
    console = output()
    console.print(table)
    if common:
        console.print(f"The same everywhere: {described(common)}.")
    console.print(
        f"The best of each optimizer is bold. Everything is in {folder}; tekfac compare --tuned {folder} "
        "compares the best, with several seeds and on the test set."
    )


def _common(trials: list[Trial]) -> dict[str, Any]:
    """The settings, other than those that are always shown, that have one value wherever they occur."""
    found = values_in(trial.point for trial in trials)
    return {key: value for key, (value, *others) in found.items() if not others and key not in SHOWN}
