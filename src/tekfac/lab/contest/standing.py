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
"""Whose final score, the mean over seeds, is the target."""


@dataclass(frozen=True)
class Standing:
    """What came of a contest.

    Attributes:
        task: that was run.
        tuning_steps: of the runs by which learning rates were chosen.
        tuned: scores on the data to tune on, by the place of the learning rate.
        chosen: the optimizers with the learning rates that they ran with.
        final: a run of each for every seed.
    """

    task: Task
    tuning_steps: int
    tuned: Mapping[str, Mapping[int, float]]
    chosen: Mapping[str, Entry]
    final: Mapping[str, Sequence[Outcome]]

    @property
    def target(self) -> float | None:
        """The score that is to be reached."""
        if MEASURED_BY not in self.final:
            return None
        return mean(outcome.final for outcome in self.final[MEASURED_BY])

    def shares(self, name: str) -> tuple[float, float] | None:
        """Of AdamW's steps and seconds that an optimizer takes to AdamW's final score, means over seeds.

        AdamW's own are those to the end of its runs. None where there is no AdamW; inf where a run does not
        get there.
        """
        if self.target is None:
            return None
        found = []
        for own, usual in zip(self.final[name], self.final[MEASURED_BY], strict=True):
            steps = rates.crossing(((steps, score) for steps, _, score in own.scores), self.target)
            seconds = rates.crossing(((seconds, score) for _, seconds, score in own.scores), self.target)
            found.append((steps / usual.scores[-1][0], seconds / usual.scores[-1][1]))
        by_steps, by_seconds = zip(*found, strict=True)
        return mean(by_steps), mean(by_seconds)

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
            "whole runs after which a run has reached their mean final score; means over seeds.",
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
            f"within {_slack_in_words(task)} of the best.",
            "",
            *_table_of_rates(standing),
            "",
            "",
        ]
    )


def _row(standing: Standing, name: str) -> str:
    runs = standing.final[name]
    shares = standing.shares(name)
    own = name == MEASURED_BY
    reached = ["1", "1"] if own else ["–", "–"] if shares is None else [_share(share) for share in shares]
    cells = [
        name,
        f"`{standing.chosen[name].in_words}`",
        spread([run.final for run in runs]),
        spread([run.training_loss for run in runs]),
        *reached,
        f"{standing.step_ms(name):.3g}",
    ]
    return "| " + " | ".join(cells) + " |"


def _share(share: float) -> str:
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
        cells.append(f"{rates.width(own, slack(standing.task, own[best])):.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


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
