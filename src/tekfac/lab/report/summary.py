"""The numbers of a report: means over seeds, when a target was reached, and curves with their bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from tekfac.lab.counting import PARTS
from tekfac.lab.report.runs import Group, Run, Task, tasks_of
from tekfac.lab.run_log import Epoch

CHOSEN = (
    "chosen so that at least three quarters of the settings reach it with every seed: the lowest of the seeds' "
    "best accuracies of each setting, without its lowest quarter and without settings that diverged, rounded "
    "down to a whole percent"
)
GIVEN = "given by the user"

LOWEST = 0.05
"""Of a band, as a share of the mean: it is to end above zero where an axis is logarithmic."""

Value = Callable[[Epoch], float]


@dataclass(frozen=True)
class Spread:
    """A mean over seeds; the sample standard deviation is None for a single one."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class Reached:
    """The median over the seeds that reached the target, None if there are none, and how many they are."""

    median: float | None
    count: int
    runs: int

    @property
    def by_all(self) -> bool:
        """Whether every seed reached it."""
        return self.count == self.runs


@dataclass(frozen=True)
class GroupSummary:
    """The numbers of a group. A run counts with its last epoch, whether it finished or not.

    Attributes:
        group: the runs.
        final_accuracy: test accuracy after the last epoch, between 0 and 1; None without any epoch, as below.
        best_accuracy: of any epoch.
        train_loss: of the last epoch; nan if it was not finite in one of the runs.
        epochs_to_target: first epoch with that test accuracy.
        seconds_to_target: of training, to the end of that epoch.
        seconds: of training in all.
        step_ms: milliseconds per step.
        parts_ms: those of every part of a step.
    """

    group: Group
    final_accuracy: Spread | None
    best_accuracy: Spread | None
    train_loss: Spread | None
    epochs_to_target: Reached
    seconds_to_target: Reached
    seconds: Spread | None
    step_ms: Spread | None
    parts_ms: Mapping[str, float]


@dataclass(frozen=True)
class TaskSummary:
    """A task in numbers.

    Attributes:
        task: its groups and what they have in common.
        target: test accuracy, between 0 and 1.
        target_rule: where it comes from.
        rows: one per group.
    """

    task: Task
    target: float
    target_rule: str
    rows: tuple[GroupSummary, ...]

    @property
    def ranked(self) -> list[GroupSummary]:
        """The groups that finished an epoch, by mean final test accuracy, the best first."""
        ends = [(row.final_accuracy.mean, row) for row in self.rows if row.final_accuracy is not None]
        known = [(mean, row) for mean, row in ends if not math.isnan(mean)]
        return [row for _, row in sorted(known, key=lambda pair: -pair[0])]

    @property
    def best_of_optimizers(self) -> list[GroupSummary]:
        """One group of every optimizer, that with the best mean final test accuracy, in the order of all."""
        first: dict[str, GroupSummary] = {}
        for row in self.ranked:
            first.setdefault(row.group.optimizer, row)
        return [row for row in self.rows if first.get(row.group.optimizer) is row]


def summarise(runs: Iterable[Run], target: float | None = None) -> list[TaskSummary]:
    """The numbers of all tasks of the runs.

    Args:
        runs: of any tasks.
        target: test accuracy in percent; by default one is chosen for each task, see CHOSEN.

    Raises:
        ValueError: for a target that is no percentage, or if no run has finished an epoch.
    """
    runs = list(runs)
    if target is not None and not 0 < target <= 100:
        raise ValueError(
            f"The target is {target:g}, expected a test accuracy in percent: above 0 and up to 100."
        )
    if not any(run.epochs for run in runs):
        raise ValueError("No run has finished an epoch, so there is nothing to report. Let one train longer.")
    return [_summary(task, target) for task in tasks_of(runs)]


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and sample standard deviation; None of no values."""
    if not values:
        return None
    mean = fmean(values)
    if len(values) == 1:
        return Spread(mean, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return Spread(mean, deviation, len(values))


def _summary(task: Task, percent: float | None) -> TaskSummary:
    target = _chosen(task) if percent is None else percent / 100
    rows = tuple(_numbers(group, target) for group in task.groups)
    return TaskSummary(task, target, CHOSEN if percent is None else GIVEN, rows)


def _chosen(task: Task) -> float:
    """The automatic target; the rule is in CHOSEN."""
    started = [group for group in task.groups if any(run.epochs for run in group.runs)]
    steady = [group for group in started if all(run.status != "diverged" for run in group.runs)]
    lowest = (min(_best(run) for run in group.runs if run.epochs) for group in steady or started)
    worst = sorted(value for value in lowest if not math.isnan(value))
    return math.floor(100 * worst[len(worst) // 4] + 1e-6) / 100 if worst else 0.0


def _numbers(group: Group, target: float) -> GroupSummary:
    runs = [run for run in group.runs if run.epochs]
    last = [run.epochs[-1] for run in runs]
    enough = [[epoch for epoch in run.epochs if epoch.test_accuracy >= target] for run in runs]
    reached = [epochs[0] for epochs in enough if epochs]
    return GroupSummary(
        group=group,
        final_accuracy=spread([epoch.test_accuracy for epoch in last]),
        best_accuracy=spread([_best(run) for run in runs]),
        train_loss=spread([epoch.train_loss for epoch in last]),
        epochs_to_target=_reached(reached, lambda epoch: epoch.epoch, len(group.runs)),
        seconds_to_target=_reached(reached, lambda epoch: epoch.seconds, len(group.runs)),
        seconds=spread([epoch.seconds for epoch in last]),
        step_ms=spread([1000 * epoch.seconds / max(epoch.step, 1) for epoch in last]),
        parts_ms=_parts_ms(last),
    )


def _best(run: Run) -> float:
    return max(
        (epoch.test_accuracy for epoch in run.epochs if not math.isnan(epoch.test_accuracy)), default=math.nan
    )


def _reached(found: Sequence[Epoch], value: Value, runs: int) -> Reached:
    return Reached(median(map(value, found)) if found else None, len(found), runs)


def _parts_ms(last: Sequence[Epoch]) -> dict[str, float]:
    """Mean milliseconds per step of every part."""
    if not last:
        return {}
    return {part: fmean(1000 * epoch.parts[part] / max(epoch.step, 1) for epoch in last) for part in PARTS}


class Line(NamedTuple):
    """Points of a mean, and of the band around it."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def over_epochs(runs: Sequence[Run], value: Value) -> Line:
    """At every epoch over the runs that got there."""
    found = _by_epoch(runs, value)
    return _line(sorted(found), found)


def over_time(runs: Sequence[Run], value: Value) -> Line:
    """As over epochs, every epoch at its mean time: where all runs finish, the line ends with their means."""
    times = epoch_times(runs)
    line = _line(sorted(times), _by_epoch(runs, value))
    return line._replace(x=[times[epoch] for epoch in line.x])


def epoch_times(runs: Sequence[Run]) -> dict[float, float]:
    """Mean seconds of training up to every epoch, of the runs that got farthest; so they never go back."""
    farthest = max((run.epochs[-1].epoch for run in runs if run.epochs), default=0)
    whole = [run for run in runs if run.epochs and run.epochs[-1].epoch == farthest]
    found = _by_epoch(whole, lambda epoch: epoch.seconds)
    return {epoch: fmean(seconds) for epoch, seconds in found.items()}


def _by_epoch(runs: Sequence[Run], value: Value) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for run in runs:
        for epoch in run.epochs:
            found.setdefault(float(epoch.epoch), []).append(value(epoch))
    return found


def _line(places: Sequence[float], values: Mapping[float, list[float]]) -> Line:
    """Mean and band at every place; numbers that are not finite are left out."""
    line = Line([], [], [], [])
    for x in places:
        found = spread([number for number in values[x] if math.isfinite(number)])
        if found is None:
            continue
        deviation = found.deviation or 0.0
        line.x.append(x)
        line.mean.append(found.mean)
        line.low.append(max(found.mean - deviation, LOWEST * found.mean))
        line.high.append(found.mean + deviation)
    return line
