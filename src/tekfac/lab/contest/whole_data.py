"""Training on the whole data at once: Levenberg-Marquardt as it comes, against Adam with a tuned learning rate.

Only the training loss counts: how soon is that reached which tuned Adam ends with?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tekfac.common.files import make_folder
from tekfac.damping import LevenbergMarquardt
from tekfac.fisher.figures import COLOURS, empty, save_figure
from tekfac.lab.contest import rates
from tekfac.lab.contest.ledger import Ledger, origin_of, written
from tekfac.lab.contest.running import Entry, Job
from tekfac.lab.contest.standing import Standing, share_in_words
from tekfac.lab.contest.whole_tasks import STEPS, WHOLE
from tekfac.lab.contest.words import spread
from tekfac.lab.optimizers import NATURAL
from tekfac.lab.report.drawing import legend, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USUAL = "Adam"
TUNING_SEED = 1000
MIDDLE = -5
"""Of Adam's learning rates that are tried first, as a place on the grid of `rates`."""

FEW_STEPS = 200
"""Of a run of ours."""


def _judged(method: str) -> Entry:
    return Entry(method, None, {"damping": LevenbergMarquardt()})


OURS: Mapping[str, Entry] = {kind.method.name: _judged(name) for name, kind in reversed(NATURAL.items())}
"""As they come."""

MEANT: Mapping[str, Mapping[str, str]] = {
    "digits-codes": {"loss_reduction": "batchmean"},
    "function": {},
}
"""What the losses of the tasks need."""


def train_on_all(
    seeds: Sequence[int], processes: int, out: Path, command: str, say: Callable[[str], None]
) -> str:
    """Run all tasks; write whole-data.md, .json and .png, and give the former."""
    origin = origin_of(command, seeds, processes)
    make_folder(out)
    ledger = Ledger.at(out / "whole-data.jsonl", origin)
    found = {name: _standing(name, seeds, ledger, processes, say) for name in WHOLE}
    save_figure(figure(found), out / "whole-data.png")
    plain = {name: standing.plain() for name, standing in found.items()}
    return written(out / "whole-data", page(found), origin, {"tasks": plain})


def _standing(
    task: str, seeds: Sequence[int], ledger: Ledger, processes: int, say: Callable[[str], None]
) -> Standing:
    scores: dict[int, float] = {}
    wanted = rates.first_places(MIDDLE)
    while wanted:
        jobs = [Job(task, _adam(place), TUNING_SEED, STEPS) for place in wanted]
        found = ledger.outcomes(jobs, processes, say)
        scores |= {place: outcome.final for place, outcome in zip(wanted, found, strict=True)}
        further = rates.next_place(scores)
        wanted = [] if further is None else [further]
    ours = {name: _with(entry, MEANT[task]) for name, entry in OURS.items()}
    chosen = {USUAL: _adam(rates.best(scores)), **ours}
    jobs = [
        Job(task, entry, seed, STEPS if name == USUAL else FEW_STEPS)
        for seed in seeds
        for name, entry in chosen.items()
    ]
    outcomes = ledger.outcomes(jobs, processes, say)
    final = {name: outcomes[place :: len(chosen)] for place, name in enumerate(chosen)}
    return Standing(WHOLE[task], STEPS, {USUAL: scores}, chosen, final, measured_by=USUAL)


def _adam(place: int) -> Entry:
    """AdamW without weight decay is Adam."""
    return Entry("adamw", rates.rate(place), {"weight_decay": 0.0})


def _with(entry: Entry, options: Mapping[str, str]) -> Entry:
    return Entry(entry.optimizer, entry.lr, {**entry.options, **options})


def page(found: Mapping[str, Standing]) -> str:
    """The results as Markdown, but for where they come from."""
    lines = [
        "# The whole data at once: Levenberg-Marquardt against tuned Adam",
        "",
        f"The training loss, on all data at every step. {USUAL} has the best learning rate of a grid that it "
        "lies inside of (chosen by the training loss of another seed), a linear start and a cosine, and "
        f"{STEPS:,} steps; ours, `.natural(model, damping=LevenbergMarquardt())`, have {FEW_STEPS}, and "
        f"nothing chosen. To {USUAL}'s: the share of the steps, and of the seconds, of {USUAL}'s whole runs "
        "after which the mean curve over seeds stays at or below their mean final loss. A step of ours has a "
        "forward and a backward pass, the quadratic model, and another forward pass.",
        "",
        "![Training loss over steps and over seconds](whole-data.png)",
    ]
    for standing in found.values():
        lines += [
            "",
            f"## {standing.task.about[0].upper()}{standing.task.about[1:]}",
            "",
            f"| | setting | steps | {standing.task.measure} | steps to {USUAL}'s | seconds to {USUAL}'s "
            "| ms per step |",
            "|---|---|---:|---:|---:|---:|---:|",
            *(_row(standing, name) for name in standing.final),
        ]
    return "\n".join([*lines, "", ""])


def _row(standing: Standing, name: str) -> str:
    runs, shares = standing.final[name], standing.shares(name)
    cells = [
        name,
        f"`{standing.chosen[name].in_words}`",
        str(runs[0].scores[-1][0]),
        spread([run.final for run in runs]),
        *(["–", "–"] if shares is None else [share_in_words(share) for share in shares]),
        f"{standing.step_ms(name):.3g}",
    ]
    return "| " + " | ".join(cells) + " |"


def figure(found: Mapping[str, Standing]) -> Figure:
    """A row for every task: the loss over steps, and over seconds."""
    with style():
        drawn = empty(0.5 + 2.6 * len(found))
        panels = drawn.subplots(len(found), 2, squeeze=False)
        handles: list[Any] = []
        labels: list[str] = []
        for (by_steps, by_seconds), standing in zip(panels, found.values(), strict=True):
            handles, labels = [], list(standing.final)
            for name in labels:
                looks, line = standing.curve(name), {"color": _colour(name), "linewidth": 1.3}
                handles += by_steps.plot([look[0] for look in looks], [look[2] for look in looks], **line)
                by_seconds.plot([look[1] for look in looks], [look[2] for look in looks], **line)
            by_steps.set(ylabel=standing.task.measure, xlabel="steps", title=standing.task.about)
            by_seconds.set(xlabel="seconds")
            for axes in (by_steps, by_seconds):
                axes.set(yscale="log")
                axes.grid(visible=True)
        legend(drawn, handles, labels)
    return drawn


def _colour(name: str) -> str:
    kinds = {kind.method.name: kind.method for kind in NATURAL.values()}
    if name not in kinds:
        return "#555555"
    return COLOURS[kinds[name].factors.trace_restricted, kinds[name].rescaling.measured]
