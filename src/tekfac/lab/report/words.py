"""Numbers and sentences of a report as text: what was compared, what was best, what a reader has to know."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from tekfac.lab.optimizers import display
from tekfac.lab.report.runs import differing, plain
from tekfac.lab.report.summary import GroupSummary, Reached, Spread, TaskSummary

Measure = Callable[[GroupSummary], float | None]
COMPARABLE = "among the settings all of whose runs finished"
ONLY_FOR_STEPS = ("decay_every", "decay_factor")
MOST_NAMES = 3
WITHIN = "within the deviation over seeds"
NOTHING = "—"

Form = Callable[[float, float], str]
"""A number as text, with the digits that another one of some size needs."""

# -- numbers ---------------------------------------------------------------------------------------------


def with_deviation(found: Spread | None, form: Form) -> str:
    """Mean ± deviation with as many digits, the mean alone of a single seed."""
    if found is None:
        return NOTHING
    if math.isnan(found.mean):
        return "not finite"
    mean = form(found.mean, found.mean)
    return mean if found.deviation is None else f"{mean} ± {form(found.deviation, found.mean)}"


def accuracy(found: Spread | None) -> str:
    """In percent."""
    return with_deviation(found, lambda value, _: f"{100 * value:.2f}")


def in_percent(found: Spread | None) -> str:
    """As part of a sentence, in one piece."""
    return accuracy(found).replace(" ", "\N{NO-BREAK SPACE}") + ("" if mean(found) is None else "%")


def loss(found: Spread | None) -> str:
    """As many digits as the mean needs."""
    return with_deviation(found, lambda value, size: f"{value:.1e}" if 0 < size < 1e-3 else f"{value:.4f}")


def reached(found: Reached, form: Callable[[float], str] = "{:g}".format) -> str:
    """The median, and how many seeds it is of if some did not get there; epochs may lie between two."""
    if found.median is None:
        return NOTHING
    return form(found.median) + ("" if found.by_all else f" ({found.count} of {found.runs})")


def seconds_or_ms(found: Spread | None) -> str:
    """Times with their deviation."""
    return with_deviation(found, duration)


def duration(value: float, size: float | None = None) -> str:
    """Seconds or milliseconds, three digits or more."""
    size = value if size is None else size
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:,.0f}"


def share(part: str, parts: Mapping[str, float]) -> str:
    """What a part takes of the time of all, in percent."""
    return f"{100 * parts[part] / (math.fsum(parts.values()) or 1.0):.0f}" if parts else NOTHING


def best_places(values: Sequence[float | None], choose: Callable[[Iterable[float]], float]) -> list[int]:
    """Where the largest or smallest number stands, in several places if these tie; nowhere if all do."""
    known = [value for value in values if value is not None]
    best = choose(known) if known else None
    places = [place for place, value in enumerate(values) if value is not None and value == best]
    return places if len(places) < len(values) else []


def mean(found: Spread | None) -> float | None:
    """To be compared; None where there is nothing finite."""
    return None if found is None or math.isnan(found.mean) else found.mean


def median_of_all(found: Reached) -> float | None:
    """To be compared; None where a seed did not get there."""
    return found.median if found.by_all else None


# -- sentences -------------------------------------------------------------------------------------------


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
    """The best of a task whose runs all finished, each as (what, which, how much); all that tie are named.

    What every seed reached is counted alone.
    """
    percent = f"{100 * summary.target:g}%"
    finished = [row for row in summary.rows if row.group.finished]
    found = []
    if any(row.group.finished for row in summary.ranked):
        best, others = _winners(summary)
        much = _shared(best)
        if len(best) == 1 and others and _close(best[0], others[0]):
            much += f"; {others[0].group.label} is {WITHIN}"
        found.append(("Best final test accuracy", _names(best), much))
    epochs = _fastest(finished, lambda row: median_of_all(row.epochs_to_target))
    if epochs:
        found.append((f"Fewest epochs to {percent}", epochs[0], f"{epochs[1]:g}"))
    seconds = _fastest(finished, lambda row: median_of_all(row.seconds_to_target))
    if seconds:
        found.append((f"Least time to {percent}", seconds[0], f"{duration(seconds[1])} s"))
    return found


def setup(summary: TaskSummary) -> str:
    """What all runs of a task have in common, as the configuration names it, as far as it does something."""
    own = summary.task.settings
    idle = ("data", "model", *(ONLY_FOR_STEPS if own.get("schedule") != "step" else ()))
    said = [name for name in own if name not in idle and own[name] not in (None, "", False)]
    return " · ".join(f"{name} {plain(own[name])}" for name in said)


def comparison_notes(summary: TaskSummary) -> tuple[str, ...]:
    """Under the table of accuracies."""
    notes = [
        "Mean ± sample standard deviation over runs with different seeds. Bold: the best mean, or the lowest "
        f"median where every run got there, {COMPARABLE}. A run that diverged or is unfinished counts with its "
        "last epoch.",
        f"The target of {100 * summary.target:g}% is {summary.target_rule}. It is reached at the first epoch "
        "with that test accuracy: median over the runs that did, and how many these are if not all.",
    ]
    return (*notes, _settings(summary.rows), *_no_epoch(summary.rows), *_repeated(summary.rows))


def time_notes(summary: TaskSummary) -> tuple[str, ...]:
    """Under the table of times."""
    notes = [
        "Training alone: evaluation is not counted. Shares are of the time per step. "
        f"Bold: the lowest mean {COMPARABLE}."
    ]
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
    """On how many tasks each optimizer is best, alone or with others, and on how many that is not certain."""
    found = [_winners(summary) for summary in summaries if any(row.group.finished for row in summary.ranked)]
    if not found:
        return "On none of them a setting has finished all of its runs."
    wins = Counter(name for best, _ in found for name in dict.fromkeys(row.group.optimizer for row in best))
    said = [f"{display(optimizer)} on {number}" for optimizer, number in wins.most_common()]
    close = sum(len(best) > 1 or any(_close(best[0], other) for other in others[:1]) for best, others in found)
    doubt = f"; on {close} of the tasks the difference to the next is none or {WITHIN}" if close else ""
    return f"Best mean final test accuracy: {', '.join(said)}{doubt}."


def _word(number: int) -> str:
    """A number in a sentence."""
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[number] if number < len(words) else str(number)


def _best(summary: TaskSummary, named: bool) -> str:
    """The winner of a task, the one after it, and how soon it reached the target; or all that are best."""
    if not summary.ranked:
        return f"On {summary.task.title} no run has finished an epoch."
    best, others = _winners(summary)
    winner, much = best[0], _shared(best)
    passed_over = winner.group.finished and not summary.ranked[0].group.finished
    what = "the best mean final test accuracy" + (f" {COMPARABLE}" if passed_over else "")
    if len(best) > 1:
        text = f"{_names(best)} share {what}, {much}"
    elif others or passed_over:
        text = f"{_names(best)} has {what}, {much}"
    else:
        text = f"{_names(best)} ends with a test accuracy of {much}"
    if len(best) == 1 and others:
        text += f", before {_names(others[:1])} with {in_percent(others[0].final_accuracy)}"
        text += f", a difference {WITHIN}" if _close(winner, others[0]) else ""
    if not named and len(best) == 1 and winner.epochs_to_target.median is not None:
        epochs = reached(winner.epochs_to_target)
        text += f"; it reached {100 * summary.target:g}% at epoch {epochs}"
    return f"On {summary.task.title}, {text}." if named else f"{text}."


def _winners(summary: TaskSummary) -> tuple[list[GroupSummary], list[GroupSummary]]:
    """The groups with the best mean final test accuracy, as far as digits are shown, and those after them.

    Groups all of whose runs finished are looked at alone, unless there are none.
    """
    ranked = [row for row in summary.ranked if row.group.finished] or summary.ranked
    best = [row for row in ranked if _without_deviation(row) == _without_deviation(ranked[0])]
    return best, ranked[len(best) :]


def _without_deviation(row: GroupSummary) -> str:
    found = row.final_accuracy
    return in_percent(None if found is None else replace(found, deviation=None))


def _shared(best: Sequence[GroupSummary]) -> str:
    """The final test accuracy of the best; of several what they have in common, the mean."""
    return in_percent(best[0].final_accuracy) if len(best) == 1 else _without_deviation(best[0])


def _close(first: GroupSummary, second: GroupSummary) -> bool:
    """Whether two mean final test accuracies differ by less than the larger deviation, where both have one."""
    one, other = first.final_accuracy, second.final_accuracy
    if one is None or other is None or one.deviation is None or other.deviation is None:
        return False
    return abs(one.mean - other.mean) < max(one.deviation, other.deviation)


def _names(rows: Sequence[GroupSummary]) -> str:
    """Their labels, with what became of runs that did not finish; or how many they are."""
    if len(rows) > MOST_NAMES:
        return f"{len(rows)} settings"
    groups = [row.group for row in rows]
    return ", ".join(group.label if group.finished else f"{group.label} ({group.status})" for group in groups)


def _fastest(rows: Iterable[GroupSummary], get: Measure) -> tuple[str, float] | None:
    """The groups with the smallest number, and the number."""
    known = [(row, value) for row in rows if (value := get(row)) is not None]
    least = min((value for _, value in known), default=None)
    return None if least is None else (_names([row for row, value in known if value == least]), least)


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
        twice = dict.fromkeys(plain(run.seed) for run in row.group.repeated)
        if twice:
            said.append(f"{len(row.group.repeated)} of {row.group.label} (seed {', '.join(twice)})")
    why = "Left out, since a run with the same settings and seed is counted"
    return [f"{why}: {'; '.join(said)}."] if said else []
