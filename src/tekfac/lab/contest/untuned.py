"""Optimizers as they come, no setting chosen: scores after the seconds that AdamW takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tekfac.common.files import make_folder
from tekfac.lab.contest.ledger import Ledger, origin_of, written
from tekfac.lab.contest.running import Entry, Job, Outcome
from tekfac.lab.contest.unseen import UNSEEN
from tekfac.lab.contest.words import gap, spread
from tekfac.lab.optimizers import NATURAL

OURS, USUAL = NATURAL["tekfac"].method.name, "AdamW"

AS_THEY_COME: Mapping[str, Entry] = {OURS: Entry("tekfac", None), USUAL: Entry("adamw", None)}
"""By their names in the table."""


def untuned(seeds: Sequence[int], processes: int, out: Path, command: str, say: Callable[[str], None]) -> str:
    """Run both on all tasks of `unseen`; write untuned.md and untuned.json, and give the former."""
    jobs = [
        Job(name, entry, seed, task.steps)
        for name, task in UNSEEN.items()
        for seed in seeds
        for entry in AS_THEY_COME.values()
    ]
    origin = origin_of(command, seeds, processes)
    make_folder(out)
    outcomes = iter(Ledger.at(out / "untuned.jsonl", origin).outcomes(jobs, processes, say))
    runs: dict[str, dict[str, list[Outcome]]] = {}
    for name in UNSEEN:
        runs[name] = {optimizer: [] for optimizer in AS_THEY_COME}
        for _ in seeds:
            for optimizer in AS_THEY_COME:
                runs[name][optimizer].append(next(outcomes))
    plain = {task: {k: [o.plain() for o in v] for k, v in own.items()} for task, own in runs.items()}
    return written(out / "untuned", page(runs), origin, {"runs": plain})


def page(runs: Mapping[str, Mapping[str, Sequence[Outcome]]]) -> str:
    """The results as Markdown, but for where they come from."""
    lines = [
        "# As they come: no setting chosen",
        "",
        "TEKFAC(model) and AdamW(model.parameters()), each with its own default learning rate, which stays, "
        "on tasks that no default was chosen on (digits and a tiny BERT are, too, in the tests that "
        "hold it to be no worse than Adam). Loss on test data, in nats, after as many steps, and after as "
        "many seconds, as AdamW takes; differences of the same seeds, with the standard error of their mean.",
        "",
        "| task | steps | AdamW | TEKFAC, equal steps | difference | TEKFAC, equal seconds | difference "
        "| ms per step, TEKFAC ÷ AdamW |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, own in runs.items():
        usual = [run.final for run in own[USUAL]]
        by_steps = [run.final for run in own[OURS]]
        by_seconds = [score_after(run, other.seconds) for run, other in zip(*own.values(), strict=True)]
        ratios = [run.seconds / other.seconds for run, other in zip(*own.values(), strict=True)]
        cells = [
            UNSEEN[name].about if name in UNSEEN else name,
            str(own[USUAL][0].scores[-1][0]),
            spread(usual),
            spread(by_steps),
            gap(by_steps, usual),
            spread(by_seconds),
            gap(by_seconds, usual),
            spread(ratios),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", ""])


def score_after(run: Outcome, seconds: float) -> float:
    """The score after so many seconds, on lines between looks; the last one if the run was over before."""
    for (_, start, before), (_, end, after) in pairwise(run.scores):
        if start <= seconds <= end:
            return before + (after - before) * (seconds - start) / (end - start)
    return run.final
