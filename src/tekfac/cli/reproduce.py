"""`tekfac reproduce`: the paper's tables and figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from tekfac.cli import run_arguments
from tekfac.common.checks import nearest, require_choice
from tekfac.common.console import remark
from tekfac.lab import recipes
from tekfac.lab.config import PLACE
from tekfac.lab.contest.ablation import VARIANTS, Ablation, ablate
from tekfac.lab.contest.contest import ENTRANTS, Contest, compete
from tekfac.lab.contest.tasks import TASKS
from tekfac.lab.contest.untuned import untuned
from tekfac.lab.contest.whole_data import train_on_all
from tekfac.lab.report import Asked, present, require_reports
from tekfac.lab.reproducing import EXPERIMENTS, SCALE_NOTES, SENSITIVE, Wish

ALL = "all"
ABLATION, CONTEST, UNTUNED, WHOLE_DATA = "ablation", "contest", "untuned", "whole-data"
OF_A_TASK = (ABLATION, CONTEST)
WITH_OWN_DATA = (UNTUNED, WHOLE_DATA)
OURS = (*OF_A_TASK, *WITH_OWN_DATA)
"""Experiments that are not the paper's."""

SAME_RUNS = "figure-curves"
"""Drawn by table-accuracy, too."""

OF_ONE_TASK = ("table-vartheta", "table-lr", "figure-sensitivity")

DESCRIPTION = """\
Run the paper's experiments and put its numbers beside ours.

  table-accuracy      all optimizers, CIFAR-10, CIFAR-100 and SVHN, VGG16 and ResNet20
  table-vartheta      TEKFAC on CIFAR-100 with ResNet20, by vartheta
  table-lr            the same by learning rate
  figure-curves       accuracy against epochs and time (the runs of table-accuracy)
  figure-sensitivity  accuracy over learning rate and vartheta
  all
  ablation            TEKFAC's default step with one piece changed at a time, on a task (--task; ours)
  contest             TEKFAC, AdamW, SOAP and others on a task, only the learning rate tuned (--task; ours)
  untuned             TEKFAC and AdamW as they come, on tasks that no default was chosen on (ours)
  whole-data          Levenberg-Marquardt against tuned Adam, all data at every step (ours)

The scale "paper" is the real thing, for a GPU and days; "small" is the same code on a reduced budget, which two
CPU cores finish within an hour. In the small scale every optimizer first gets the best of five
settings (--no-tune leaves that out). What was interrupted goes on when the same command is given again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    names = ", ".join((*EXPERIMENTS, *OURS))
    parser.add_argument("experiment", metavar="EXPERIMENT", help=f"{names} or {ALL}")
    group = parser.add_argument_group("the ablation and the contest")
    told = f"of {', '.join(TASKS)} (default: none, it must be named)"
    group.add_argument("--task", metavar="NAME", help=told)
    told = "what the ablation changes, of the names in docs/results/ablation (default: everything)"
    group.add_argument("--variants", metavar="NAME,...", help=told)
    told = f"who takes part in the contest, of {', '.join(ENTRANTS)} (default: all)"
    group.add_argument("--entrants", metavar="NAME,...", help=told)
    parser.add_argument("--scale", choices=recipes.SCALES, default="small", help="how much of it")
    told = "folder with the official folders of the data sets (default: see tekfac data)"
    parser.add_argument("--data-dir", metavar="DIR", help=told)
    parser.add_argument("--allow-partial", action="store_true", default=None, help="a part of the data will do")
    for name, known in (("data", Wish.data), ("models", Wish.models)):
        told = f"of the table of accuracies (default: {','.join(known)})"
        parser.add_argument(f"--{name}", metavar="NAME,...", help=told)
    told = "the best of five settings for every optimizer, not the paper's (default: in the small scale)"
    parser.add_argument("--tune", action=argparse.BooleanOptionalAction, help=told)
    run_arguments.add_optimizers(parser, "3")
    run_arguments.add_manner(parser, "reproduction")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run, then report."""
    if options.experiment in OURS:
        run_ours(options)
        return
    _refuse_what_is_for_others(options)
    require_reports()
    if options.experiment not in (*EXPERIMENTS, ALL):
        hint = nearest(options.experiment, (*EXPERIMENTS, *OURS, ALL))
        raise ValueError(f"Unknown experiment: {options.experiment!r}.{hint}")
    if options.experiment in OF_ONE_TASK:
        one = "{2} on {0} with {1}".format(*SENSITIVE)
        run_arguments.refuse(
            options, ["data", "models", "optimizers", "tune"], f"{options.experiment} is of {one}"
        )
    names = [options.experiment]
    if options.experiment == ALL:
        names = [name for name in EXPERIMENTS if name != SAME_RUNS]
    out: Path = options.out / options.scale
    wish = Wish(
        scale=options.scale,
        out=out,
        manner=run_arguments.manner(options),
        data=_listed(options.data, "data", Wish.data),
        models=_listed(options.models, "models", Wish.models),
        optimizers=tuple(run_arguments.optimizers(options)),
        seeds=tuple(run_arguments.seeds(options)),
        tune=options.scale == "small" if options.tune is None else options.tune,
        place=run_arguments.given(options, (*PLACE, "allow_partial")),
    )
    for name in names:
        outcome = EXPERIMENTS[name](wish)
        asked = Asked(
            title=f"The paper's {name}, scale {options.scale}",
            command=options.command_line,
            extra_tables=outcome.tables,
            paper=outcome.paper,
            notes=[SCALE_NOTES[wish.scale]],
        )
        present(outcome.folders, out / name, asked)


def run_ours(options: argparse.Namespace) -> None:
    """Run an experiment that is not the paper's, and show its table."""
    of_paper = ["data", "models", "optimizers", "tune", "device", "threads", "workers"]
    run_arguments.refuse(
        options, of_paper, f"{options.experiment} has tasks of its own, and one thread per run"
    )
    _refuse_what_is_for_others(options)
    if options.experiment in WITH_OWN_DATA:
        run_arguments.refuse(options, ["data_dir"], "its data come with Python and scikit-learn")
    if options.experiment in OF_A_TASK and options.task is None:
        raise ValueError(f"{options.experiment} needs --task NAME, one of {', '.join(TASKS)}.")
    seeds, processes = run_arguments.seeds(options), options.jobs or 1
    folder = None if options.data_dir is None else Path(options.data_dir)
    out: Path = options.out / options.experiment
    if options.experiment == ABLATION:
        variants = tuple(VARIANTS) if options.variants is None else tuple(options.variants.split(","))
        chosen = tuple(dict.fromkeys(("default", *variants)))
        text = ablate(
            Ablation(options.task, chosen, seeds, processes, folder), out, options.command_line, remark
        )
    elif options.experiment == CONTEST:
        entrants = tuple(ENTRANTS) if options.entrants is None else tuple(options.entrants.split(","))
        text = compete(
            Contest(options.task, entrants, seeds, processes, folder), out, options.command_line, remark
        )
    elif options.experiment == WHOLE_DATA:
        text = train_on_all(seeds, processes, out, options.command_line, remark)
    else:
        text = untuned(seeds, processes, out, options.command_line, remark)
    print(text)


def _refuse_what_is_for_others(options: argparse.Namespace) -> None:
    """Arguments of experiments that are not the paper's, and not this one."""
    for name, owners in (("task", OF_A_TASK), ("variants", (ABLATION,)), ("entrants", (CONTEST,))):
        if options.experiment not in owners:
            run_arguments.refuse(options, [name], f"it is for {' and '.join(owners)}")


def _listed(text: str | None, name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    if text is None:
        return known
    names = tuple(part.strip() for part in text.split(","))
    for part in names:
        require_choice(name, part, known)
    return names
