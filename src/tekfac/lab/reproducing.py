"""The paper's experiments: what each of them runs, and its outcome beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from tekfac.lab import paper, recipes
from tekfac.lab.config import RunConfig
from tekfac.lab.grids import Point, Sweep, described
from tekfac.lab.optimizers import COMPARED
from tekfac.lab.pool import Manner, run_configs
from tekfac.lab.recipes import Scale
from tekfac.lab.report.summary import spread
from tekfac.lab.report.table_formats import Table
from tekfac.lab.report.words import accuracy, best_places, mean
from tekfac.lab.run_folder import RunFolder
from tekfac.lab.sweeping import best, sweep

SCALE_NOTES: dict[Scale, str] = {
    "paper": "Ours at the paper's scale.",
    "small": "Ours in small, on a reduced budget: 2,560 training images of 16 x 16 pixels, 2,000 test images, "
    "an eighth of the channels, 10 epochs. Such numbers do not compare with the paper's.",
}

SENSITIVE = ("cifar100", "resnet20", "tekfac")
"""Data, network and optimizer of the paper's study of sensitivity."""


@dataclass(frozen=True)
class Wish:
    """What is to be reproduced, and how.

    Attributes:
        scale: as in the paper, or in small.
        out: folder for all runs.
        manner: how runs are computed.
        data: data sets of the table of accuracies.
        models: its networks.
        optimizers: its optimizers.
        seeds: how often every run is repeated.
        tune: whether every optimizer gets the best of its grid of five points, by runs of half as many epochs.
        place: settings of where runs are computed and data lie, by name.
    """

    scale: Scale
    out: Path
    manner: Manner
    data: tuple[str, ...] = tuple(paper.ACCURACY)
    models: tuple[str, ...] = ("vgg16", "resnet20")
    optimizers: tuple[str, ...] = COMPARED
    seeds: tuple[int, ...] = tuple(range(paper.SEEDS))
    tune: bool = True
    place: dict[str, Any] = field(default_factory=dict)

    def task(self, data: str, model: str) -> RunConfig:
        """A task in this wish's scale and place."""
        return replace(recipes.task(data, model, self.scale), **self.place)


@dataclass(frozen=True)
class Outcome:
    """Runs of an experiment, and what the report shows beside its usual tables.

    Attributes:
        folders: of the runs.
        tables: further tables.
        paper: the paper's accuracies, for the table of accuracies.
    """

    folders: list[Path]
    tables: list[Table] = field(default_factory=list)
    paper: dict[tuple[str, str, str], str] | None = None


def table_accuracy(wish: Wish) -> Outcome:
    """Final accuracies of all optimizers on all data sets with both networks; its runs draw the curves, too."""
    configs = []
    for data, model in product(wish.data, wish.models):
        points = _tuned(wish, data, model) if wish.tune else map(recipes.in_the_paper, wish.optimizers)
        configs += recipes.configs(wish.task(data, model), list(points), wish.seeds)
    folders = run_configs(configs, wish.out / "accuracy", wish.manner, "Accuracies")
    return Outcome(folders, paper=paper.accuracies())


def _tuned(wish: Wish, data: str, model: str) -> list[Point]:
    """For every optimizer the best of its five points, on images held back from the training set."""
    base = recipes.tuning_task(wish.task(data, model))
    points = tuple(point for optimizer in wish.optimizers for point in recipes.small_grid(optimizer))
    plan = Sweep(f"tuning {data} {model}", base, points)
    winners = best(sweep(plan, wish.out / "tuning" / f"{data}-{model}", wish.manner))
    return [winners[optimizer].point for optimizer in wish.optimizers]


def table_vartheta(wish: Wish) -> Outcome:
    """Accuracy by vartheta, at one learning rate."""
    points = {floor: _sensitive(wish.scale, trace_floor=floor) for floor in paper.VARTHETA}
    return _by_setting(wish, points, paper.VARTHETA, "ϑ")


def table_lr(wish: Wish) -> Outcome:
    """Accuracy by learning rate, at the paper's vartheta."""
    points = {lr: _sensitive(wish.scale, lr=lr) for lr in paper.LEARNING_RATE}
    return _by_setting(wish, points, paper.LEARNING_RATE, "learning rate")


def figure_sensitivity(wish: Wish) -> Outcome:
    """Accuracy over vartheta and learning rate, and the curves for every vartheta."""
    points = [_sensitive(wish.scale, lr, floor) for lr in paper.LEARNING_RATE for floor in paper.VARTHETA]
    task = wish.task(*SENSITIVE[:2])
    configs = recipes.configs(task, points, wish.seeds[:1] if wish.scale == "small" else wish.seeds)
    return Outcome(run_configs(configs, wish.out / "sensitivity", wish.manner, "Sensitivity"))


def _settings_note(scale: Scale) -> str:
    shown = {k: v for k, v in _sensitive(scale).items() if k not in ("optimizer", "weight_decay")}
    return (
        f"Settings of ours where they are not varied: {described(shown)}. The paper: lr 0.001, no clip, ϑ 0.01."
    )


SMALL_RATE = 0.1
"""Where the learning rate is not varied: a run of 200 steps needs a larger one than the paper's."""


def _sensitive(scale: Scale, lr: float | None = None, trace_floor: float = 1e-2) -> Point:
    """The paper's settings, or in small a larger rate with a clip, but for what is varied."""
    optimizer = SENSITIVE[2]
    point = recipes.in_the_paper(optimizer) if scale == "paper" else recipes.clipped(optimizer, SMALL_RATE)
    return {**point, "lr": point["lr"] if lr is None else lr, "options.trace_floor": trace_floor}


def _by_setting(wish: Wish, points: dict[float, Point], printed: dict[float, str], setting: str) -> Outcome:
    """A row of ours and a row of the paper's, a column for every value of the setting."""
    data, model, optimizer = SENSITIVE
    task = wish.task(data, model)
    configs = [recipes.config(task, point, seed=seed) for point in points.values() for seed in wish.seeds]
    folders = run_configs(configs, wish.out / "sensitivity", wish.manner, f"Accuracy by {setting}")
    ends = [RunFolder(folder).epochs()[-1].test_accuracy for folder in folders]
    found = [spread(ends[i : i + len(wish.seeds)]) for i in range(0, len(ends), len(wish.seeds))]
    table = Table(
        title=f"{optimizer} on {data} with {model}: final test accuracy in percent, by {setting}",
        header=(setting, *(f"{value:g}" for value in points)),
        rows=(("ours", *map(accuracy, found)), ("the paper", *(printed[value] for value in points))),
        bold=frozenset((0, 1 + place) for place in best_places(list(map(mean, found)), max)),
        notes=(f"Mean ± sample standard deviation over {len(wish.seeds)} seeds.", _settings_note(wish.scale)),
    )
    return Outcome(folders, [table])


EXPERIMENTS: dict[str, Callable[[Wish], Outcome]] = {
    "table-accuracy": table_accuracy,
    "table-vartheta": table_vartheta,
    "table-lr": table_lr,
    "figure-curves": table_accuracy,
    "figure-sensitivity": figure_sensitivity,
}
