"""What each piece of the default step is worth: TEKFAC with one of them changed at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tekfac.common.checks import nearest
from tekfac.common.files import make_folder
from tekfac.damping import Relative
from tekfac.lab.contest.ledger import Ledger, origin_of, written
from tekfac.lab.contest.running import Entry, Job, Outcome
from tekfac.lab.contest.tasks import TASKS
from tekfac.lab.contest.words import gap, spread

LR = 5e-3
"""Of all variants but those whose steps have another length."""

VARIANTS: Mapping[str, Entry] = {
    "default": Entry("tekfac", LR),
    "plain factors (EKFAC)": Entry("ekfac", LR),
    "product of eigenvalues (TKFAC)": Entry("tkfac", LR),
    "both (KFAC)": Entry("kfac", LR),
    "drawn labels": Entry("tekfac", LR, {"fisher": "sampled"}),
    "the data's labels": Entry("tekfac", LR, {"fisher": "empirical"}),
    "positions as samples": Entry("tekfac", LR, {"sharing": "expand"}),
    "without Nesterov": Entry("tekfac", LR, {"nesterov": False}),
    "momentum after": Entry("tekfac", LR * 0.2, {"momentum_at": "after"}),
    "damping ten times as large": Entry("tekfac", LR, {"damping": Relative(0.03)}),
    "damping ten times as small": Entry("tekfac", LR, {"damping": Relative(0.0003)}),
    "factors of a shorter past": Entry("tekfac", LR, {"factor_decay": 0.8}),
    "factors of a longer past": Entry("tekfac", LR, {"factor_decay": 0.99}),
    "squares of a longer past": Entry("tekfac", LR, {"rescaling_decay": 0.99}),
    "momentum of a longer past": Entry("tekfac", LR, {"momentum": 0.95}),
    "intervals of ten, in the end": Entry("tekfac", LR, {"factors_every": 10, "basis_every": 10}),
    "intervals of ten from the start": Entry(
        "tekfac", LR, {"factors_every": 10, "basis_every": 10, "interval_growth": None}
    ),
    "intervals of fifty from the start": Entry("tekfac", LR, {"interval_growth": None}),
    "tracked bases": Entry("tekfac", LR, {"track_basis": True}),
    "blocks of norms": Entry("tekfac", LR, {"precondition_norms": True}),
    "large sides whole": Entry("tekfac", LR, {"max_dim": 800, "large_dims": "blocks"}),
    "large sides in halves": Entry("tekfac", LR, {"max_dim": 150, "large_dims": "blocks"}),
    "convolutions whole": Entry("tekfac", LR, {"large_dims": "blocks"}),
    "EKFAC, convolutions whole": Entry("ekfac", LR, {"large_dims": "blocks"}),
    "exact statistics": Entry("tekfac", LR, {"statistics_samples": None, "turns": False}),
    "AdamW": Entry("adamw", 3e-3),
    "SOAP": Entry("soap", 1e-2, {"betas": (0.95, 0.95)}),
}
"""What is tried, by its name in the table."""

STEPS = {"gpt": 300, "classifier": 300}
"""Shorter runs than the contest's."""


@dataclass(frozen=True)
class Ablation:
    """What is to be tried.

    Attributes:
        task: on which.
        variants: names in VARIANTS; the first is what the others are compared to.
        seeds: of the runs.
        processes: that run at the same time.
        folder: with the image data.
    """

    task: str
    variants: Sequence[str]
    seeds: Sequence[int]
    processes: int
    folder: Path | None

    def __post_init__(self) -> None:
        for name, known in ((self.task, TASKS), *((variant, VARIANTS) for variant in self.variants)):
            if name not in known:
                raise ValueError(f"Unknown: {name!r}.{nearest(name, known)}")

    @property
    def steps(self) -> int:
        """Of a run."""
        return STEPS.get(self.task, TASKS[self.task].steps)


def ablate(wish: Ablation, out: Path, command: str, say: Callable[[str], None]) -> str:
    """Run all variants with all seeds; write NAME.md and NAME.json, and give the former.

    Runs of one seed come together, so that whatever disturbs the machine disturbs all variants.
    """
    jobs = [
        Job(wish.task, VARIANTS[variant], seed, wish.steps, folder=wish.folder)
        for seed in wish.seeds
        for variant in wish.variants
    ]
    origin = origin_of(command, wish.seeds, wish.processes)
    make_folder(out)
    outcomes = Ledger.at(out / f"{wish.task}.jsonl", origin).outcomes(jobs, wish.processes, say)
    of = {variant: outcomes[place :: len(wish.variants)] for place, variant in enumerate(wish.variants)}
    runs = {name: [outcome.plain() for outcome in own] for name, own in of.items()}
    return written(out / wish.task, page(wish, of), origin, {"runs": runs})


def page(wish: Ablation, outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """The results of one task as Markdown."""
    task = TASKS[wish.task]
    lines = [
        f"# {task.about[0].upper()}{task.about[1:]}: one piece changed at a time",
        "",
        f"{wish.steps} steps; less is better in all columns. Differences are from the first row, of the same "
        "seeds, with the standard error of their mean.",
        "",
        f"| | setting | {task.measure} | difference | training loss | difference |",
        "|---|---|---:|---:|---:|---:|",
    ]
    first = outcomes[wish.variants[0]]
    for variant, own in outcomes.items():
        cells = [variant, f"`{VARIANTS[variant].in_words}`"]
        for pick in (_final, _training_loss):
            cells += [spread(list(map(pick, own))), gap(list(map(pick, own)), list(map(pick, first)))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", ""])


def _final(outcome: Outcome) -> float:
    return outcome.final


def _training_loss(outcome: Outcome) -> float:
    return outcome.training_loss
