"""The sentences of a report: what was compared, what was best, and what a reader has to know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tekfac.lab.report.cells import count, duration, in_percent, median_of_all, reached
from tekfac.lab.report.grouping import differing, plain
from tekfac.lab.report.names import display
from tekfac.lab.report.summary import GroupSummary, TaskSummary

Measure = Callable[[GroupSummary], float | None]


def lead(summaries: Sequence[TaskSummary]) -> str:
    """What was compared and what was best, in two sentences or three."""
    optimizers = {row.group.optimizer for summary in summaries for row in summary.rows}
    seeds = [len(row.group.runs) for summary in summaries for row in summary.rows]
    most = _word(min(seeds)) if min(seeds) == max(seeds) else f"{_word(min(seeds))} to {_word(max(seeds))}"
    what = f"{_word(len(optimizers))} optimizers" if len(optimizers) > 1 else display(min(optimizers))
    settings = (
        f" in {_word(len(seeds))} settings" if len(summaries) == 1 and len(seeds) > len(optimizers) else ""
    )
    where = summaries[0].task.title if len(summaries) == 1 else f"{_word(len(summaries))} tasks"
    was = "were compared" if len(seeds) > 1 else "was trained"
    opening = f"{what}{settings} {was} on {where}, {most} {'run' if most == 'one' else 'runs'} each."
    found = [_best(summary, named=len(summaries) > 1) for summary in summaries]
    return " ".join([opening[0].upper() + opening[1:], *(found if len(found) < 3 else [_wins(summaries)])])


def highlights(summary: TaskSummary) -> list[tuple[str, str, str]]:
    """The best of a task, each as (what, which, how much); what every seed reached is counted alone."""
    percent = f"{100 * summary.target:g}%"
    best = summary.ranked[:1]
    found = [("Best final test accuracy", row.group.label, in_percent(row.final_accuracy)) for row in best]
    epochs = _fastest(summary.rows, lambda row: median_of_all(row.epochs_to_target))
    if epochs:
        found.append((f"Fewest epochs to {percent}", epochs[0], count(epochs[1])))
    seconds = _fastest(summary.rows, lambda row: median_of_all(row.seconds_to_target))
    if seconds:
        found.append((f"Least time to {percent}", seconds[0], f"{duration(seconds[1])} s"))
    return found


def setup(summary: TaskSummary) -> str:
    """What all runs of a task have in common, as the configuration names it."""
    own = summary.task.settings
    said = [name for name in own if name not in ("data", "model") and own[name] not in (None, "", False)]
    return " · ".join(f"{name} {plain(own[name])}" for name in said)


def comparison_notes(summary: TaskSummary) -> tuple[str, ...]:
    """Under the table of accuracies."""
    notes = [
        "Mean ± sample standard deviation over runs with different seeds. Bold: the best mean, or the lowest "
        "median where every run got there. A run that diverged or is unfinished counts with its last epoch.",
        f"The target of {100 * summary.target:g}% is {summary.target_rule}. It is reached at the first epoch "
        "with that test accuracy: median over the runs that did, and how many these are if not all.",
    ]
    return (*notes, _settings(summary.rows), *_no_epoch(summary.rows), *_repeated(summary.rows))


def time_notes(summary: TaskSummary) -> tuple[str, ...]:
    """Under the table of times."""
    notes = ["Training alone: evaluation is not counted. Shares are of the time per step."]
    places = {
        (str(run.provenance.get("machine")), str(run.config.get("device")), str(run.config.get("threads")))
        for row in summary.rows
        for run in row.group.runs
    }
    if len(places) > 1:
        notes.append(
            "Careful: these runs differ in machine, device or threads, so that their times do not compare. "
            "Accuracies and epochs do."
        )
    return tuple(notes)


def alternative(summary: TaskSummary) -> str:
    """For those who cannot see the curves: the groups with their final accuracies."""
    return "; ".join(f"{row.group.label}: {in_percent(row.final_accuracy)}" for row in summary.rows)


def _wins(summaries: Sequence[TaskSummary]) -> str:
    """On how many tasks each optimizer is best."""
    wins = Counter(summary.ranked[0].group.optimizer for summary in summaries if summary.ranked)
    said = [f"{display(optimizer)} on {number}" for optimizer, number in wins.most_common()]
    return f"Best mean final test accuracy: {', '.join(said)}."


def _word(number: int) -> str:
    """A number in a sentence."""
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[number] if number < len(words) else str(number)


def _best(summary: TaskSummary, named: bool) -> str:
    """The winner of a task, the one after it, and how soon it reached the target."""
    if not summary.ranked:
        return f"On {summary.task.title} no run has finished an epoch."
    winner, *others = summary.ranked
    text = f"{winner.group.label} has the best mean final test accuracy, {in_percent(winner.final_accuracy)}"
    if not others:
        text = f"{winner.group.label} ends with a test accuracy of {in_percent(winner.final_accuracy)}"
    if others:
        text += f", before {others[0].group.label} with {in_percent(others[0].final_accuracy)}"
    if not named and winner.epochs_to_target.median is not None:
        epochs = reached(winner.epochs_to_target, count)
        text += f"; it reached {100 * summary.target:g}% at epoch {epochs}"
    return f"On {summary.task.title}, {text}." if named else f"{text}."


def _fastest(rows: Iterable[GroupSummary], get: Measure) -> tuple[str, float] | None:
    known = [(row.group.label, value) for row in rows if (value := get(row)) is not None]
    return min(known, key=lambda pair: pair[1], default=None)


def _settings(rows: Sequence[GroupSummary]) -> str:
    """What all groups of an optimizer have in common."""
    said = []
    for optimizer in dict.fromkeys(row.group.optimizer for row in rows):
        own = [row.group.settings for row in rows if row.group.optimizer == optimizer]
        common = {k: v for k, v in own[0].items() if k != "optimizer" and k not in differing(own) and v}
        said.append(f"{display(optimizer)}: {', '.join(f'{k} {plain(v)}' for k, v in common.items())}")
    return f"Settings. {'; '.join(said)}."


def _no_epoch(rows: Iterable[GroupSummary]) -> list[str]:
    without = {row.group.label: sum(not run.epochs for run in row.group.runs) for row in rows}
    said = [f"{number} of {label}" for label, number in without.items() if number]
    return [f"Without any finished epoch, and so in no mean: {', '.join(said)}."] if said else []


def _repeated(rows: Iterable[GroupSummary]) -> list[str]:
    said = []
    for row in rows:
        twice = [str(seed) for seed, times in Counter(row.group.seeds).items() if times > 1]
        if twice:
            said.append(f"{row.group.label} (seed {', '.join(twice)})")
    return [f"Careful: the same seed is counted more than once in {'; '.join(said)}."] if said else []
