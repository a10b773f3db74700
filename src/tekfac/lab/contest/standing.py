"""Who is ahead on a task: steps and seconds to the result of tuned AdamW, final scores, learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from tekfac.lab.contest import rates
from tekfac.lab.contest.running import Entry, Outcome
from tekfac.lab.contest.tasks import Task
from tekfac.lab.contest.words import spread

MEASURED_BY = "AdamW"
"""Whose final score is the target, unless another one is named."""


@dataclass(frozen=True)
class Standing:
    """What came of a contest.

    Attributes:
        task: that was run.
        tuning_steps: of the runs by which learning rates were chosen.
        tuned: scores on the data to tune on, by the place of the learning rate.
        chosen: the optimizers with the learning rates that they ran with.
        final: a run of each for every seed.
        measured_by: the optimizer whose final score, the mean over seeds, is the target.
    """

    task: Task
    tuning_steps: int
    tuned: Mapping[str, Mapping[int, float]]
    chosen: Mapping[str, Entry]
    final: Mapping[str, Sequence[Outcome]]
    measured_by: str = MEASURED_BY

    def curve(self, name: str) -> list[tuple[float, float, float]]:
        """Steps, seconds and scores of an optimizer, means over seeds."""
        runs = (run.scores for run in self.final[name])
        return [tuple(map(mean, zip(*looks, strict=True))) for looks in zip(*runs, strict=True)]

    @property
    def target(self) -> float | None:
        """The score that is to be reached: the last of that optimizer's curve; None if there is none."""
        if self.measured_by not in self.final:
            return None
        last = self.curve(self.measured_by)[-1][2]
        return last if math.isfinite(last) else None

    def shares(self, name: str) -> tuple[float, float] | None:
        """Of its steps and seconds after which an optimizer's curve stays at or below its final score.

        None where there is no such score; inf where a curve does not get there.
        """
        if self.target is None:
            return None
        own, (all_steps, all_seconds, _) = self.curve(name), self.curve(self.measured_by)[-1]
        steps = rates.settled(((steps, score) for steps, _, score in own), self.target)
        seconds = rates.settled(((seconds, score) for _, seconds, score in own), self.target)
        return steps / all_steps, seconds / all_seconds

    def step_ms(self, name: str) -> float:
        """The milliseconds of a step, the median over runs."""
        return median(1000 * run.scores[-1][1] / run.scores[-1][0] for run in self.final[name])

    def plain(self) -> dict[str, Any]:
        """All numbers, as plain values."""
        return {
            "tuning_steps": self.tuning_steps,
            "tuned": {
                name: {f"{rates.rate(place):g}": _or_none(score) for place, score in sorted(own.items())}
                for name, own in self.tuned.items()
            },
            "chosen": {name: entry.in_words for name, entry in self.chosen.items()},
            "runs": {name: [outcome.plain() for outcome in own] for name, own in self.final.items()},
        }


def page(standing: Standing) -> str:
    """The results of a task as Markdown, but for where they come from."""
    task = standing.task
    return "\n".join(
        [
            f"# {task.about[0].upper()}{task.about[1:]}: only the learning rate tuned",
            "",
            f"{task.steps} steps. To AdamW's: the share of the steps, and of the seconds, of tuned AdamW's "
            "whole runs after which the mean curve over seeds stays at or below their mean final score. "
            "Weight decay is 0.01 for AdamW, SOAP and Muon, their defaults or usual, and 0 for the others.",
            "",
            f"| | setting | {task.measure} | training loss | steps to AdamW's | seconds to AdamW's "
            "| ms per step |",
            "|---|---|---:|---:|---:|---:|---:|",
            *(_row(standing, name) for name in standing.final),
            "",
            "## Learning rates",
            "",
            f"{task.measure[0].upper()}{task.measure[1:]} on data that were kept back for tuning, after "
            f"{standing.tuning_steps} steps. Width: powers of ten of learning rates "
            f"within {_slack_in_words(task)} of the best; ≥ where they reach an end of what was "
            "tried. One seed each.",
            "",
            *_table_of_rates(standing),
            "",
            "",
        ]
    )


def _row(standing: Standing, name: str) -> str:
    runs = standing.final[name]
    shares = standing.shares(name)
    reached = ["–", "–"] if shares is None else [share_in_words(share) for share in shares]
    cells = [
        name,
        f"`{standing.chosen[name].in_words}`",
        spread([run.final for run in runs]),
        spread([run.training_loss for run in runs]),
        *reached,
        f"{standing.step_ms(name):.3g}",
    ]
    return "| " + " | ".join(cells) + " |"


def share_in_words(share: float) -> str:
    """For a table."""
    return f"{share:.2f}" if math.isfinite(share) else "not reached"


def _table_of_rates(standing: Standing) -> list[str]:
    places = sorted({place for own in standing.tuned.values() for place in own})
    lines = [
        "| | " + " | ".join(f"{rates.rate(place):g}" for place in places) + " | width |",
        "|---|" + "---:|" * (len(places) + 1),
    ]
    for name, own in standing.tuned.items():
        best = rates.best(own)
        cells = [_score(own.get(place), is_best=place == best) for place in places]
        cells.append(_width(own, slack(standing.task, own[best])))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _width(scores: Mapping[int, float], slack: float) -> str:
    if not math.isfinite(min(scores.values())):
        return "–"
    width, is_open = rates.width(scores, slack)
    return f"{'≥ ' if is_open else ''}{width:.2f}"


def _score(score: float | None, *, is_best: bool) -> str:
    if score is None:
        return ""
    if not math.isfinite(score):
        return "diverged"
    return f"**{score:.4g}**" if is_best else f"{score:.4g}"


def slack(task: Task, best: float) -> float:
    """How far from the best score is as good: 0.02 nats, a point of errors, or a hundredth."""
    return {"loss, nats": 0.02, "errors, %": 1.0}.get(task.measure, 0.01 * best)


def _slack_in_words(task: Task) -> str:
    return {"loss, nats": "0.02 nats", "errors, %": "one point"}.get(task.measure, "1%")


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None
