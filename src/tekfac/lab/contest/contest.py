"""The contest: on each task only the learning rate of every optimizer is tuned, on data that were kept back.

    tune      every entrant, on a grid of learning rates, until its best one lies inside
    run       each with its best one, several seeds, scored on the test data
    borrow    TEKFAC with the rate that is best for AdamW, as somebody has it who changes one line

Finished runs are kept in a ledger, one line each, so that an interrupted contest goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tekfac.common.checks import nearest
from tekfac.common.files import make_folder
from tekfac.lab.bench.contestants import Contestant, hidden_matrices
from tekfac.lab.contest import rates, standing
from tekfac.lab.contest.ledger import Ledger, origin_of, written
from tekfac.lab.contest.running import Entry, Job
from tekfac.lab.contest.tasks import TASKS
from tekfac.lab.optimizers import NATURAL

TUNING_SEED = 1000
"""Of the runs by which learning rates are chosen."""

TUNING_STEPS = {"gpt": 300, "resnet": 237, "cnn": 213, "classifier": 300, "autoencoder": 300}
"""Of the runs by which learning rates are chosen: a third or a half of a whole one, with its own schedule."""


@dataclass(frozen=True)
class Entrant:
    """An optimizer whose learning rate is tuned.

    Attributes:
        optimizer: a name of the benchmark's contestants.
        middle: of the learning rates that are tried first, as a place on the grid of `rates`.
        options: its other settings.
    """

    optimizer: str
    middle: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def at(self, place: int) -> Entry:
        """With a learning rate."""
        return Entry(self.optimizer, rates.rate(place), self.options)


OURS, OTHER_BASIS = (NATURAL[name].method.name for name in ("tekfac", "ekfac"))
USUAL = "AdamW"
BORROWED = f"{OURS} at AdamW's rate"

ENTRANTS: Mapping[str, Entrant] = {
    OURS: Entrant("tekfac", -5),
    OTHER_BASIS: Entrant("ekfac", -5),
    "SOAP": Entrant("soap", -4, {"betas": (0.95, 0.95)}),
    "Muon": Entrant("muon", -4, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.01}),
    "schedule-free AdamW": Entrant("schedule-free", -4),
    USUAL: Entrant("adamw", -5),
    "SGDM": Entrant("sgd", -2),
}
"""All that take part, by their names in the tables."""


@dataclass(frozen=True)
class Contest:
    """What is to be run.

    Attributes:
        task: its name.
        entrants: names in ENTRANTS.
        seeds: of the runs with the best learning rates.
        processes: that run at the same time.
        folder: with the image data.
    """

    task: str
    entrants: Sequence[str]
    seeds: Sequence[int]
    processes: int
    folder: Path | None

    def __post_init__(self) -> None:
        for name, known in ((self.task, TASKS), *((entrant, ENTRANTS) for entrant in self.entrants)):
            if name not in known:
                raise ValueError(f"Unknown: {name!r}.{nearest(name, known)}")

    @property
    def tuning_steps(self) -> int:
        """Of a run by which a learning rate is chosen."""
        return TUNING_STEPS.get(self.task, TASKS[self.task].steps)


def compete(wish: Contest, out: Path, command: str, say: Callable[[str], None]) -> str:
    """Tune, run, and write NAME.md and NAME.json; give the former."""
    make_folder(out)
    origin = origin_of(command, wish.seeds, wish.processes)
    ledger = Ledger.at(out / f"{wish.task}.jsonl", origin)
    entrants = present(wish, say)
    tuned = _tuned(wish, entrants, ledger, say)
    chosen = {name: ENTRANTS[name].at(rates.best(scores)) for name, scores in tuned.items()}
    if OURS in chosen and USUAL in chosen:
        chosen[BORROWED] = ENTRANTS[OURS].at(rates.best(tuned[USUAL]))
    steps = TASKS[wish.task].steps
    jobs = [
        Job(wish.task, entry, seed, steps, folder=wish.folder)
        for seed in wish.seeds
        for entry in chosen.values()
    ]
    outcomes = ledger.outcomes(jobs, wish.processes, say)
    final = {name: outcomes[place :: len(chosen)] for place, name in enumerate(chosen)}
    result = standing.Standing(TASKS[wish.task], wish.tuning_steps, tuned, chosen, final)
    return written(out / wish.task, standing.page(result), origin, result.plain())


def present(wish: Contest, say: Callable[[str], None]) -> list[str]:
    """The entrants that are installed and have something to do in this task's network; of others a word."""
    model = TASKS[wish.task].prepare(TUNING_SEED, wish.folder).model
    found = []
    for name in wish.entrants:
        entrant = ENTRANTS[name]
        if entrant.optimizer == "muon" and not hidden_matrices(model):
            say(f"{name} is left out: {wish.task} has no linear layer inside.")
            continue
        try:
            Contestant(entrant.optimizer, options={"lr": 1e-3, **entrant.options}).make(model)
        except ImportError as error:
            say(f"{name} is left out. {error}")
        else:
            found.append(name)
    return found


def _tuned(
    wish: Contest, entrants: Sequence[str], ledger: Ledger, say: Callable[[str], None]
) -> dict[str, dict[int, float]]:
    """The scores on the data to tune on, by learning rate's place, of each entrant."""
    scores: dict[str, dict[int, float]] = {name: {} for name in entrants}
    wanted = [(name, place) for name in entrants for place in rates.first_places(ENTRANTS[name].middle)]
    while wanted:
        jobs = [
            Job(wish.task, ENTRANTS[name].at(place), TUNING_SEED, wish.tuning_steps, "tuning", wish.folder)
            for name, place in wanted
        ]
        found = ledger.outcomes(jobs, wish.processes, say)
        for (name, place), outcome in zip(wanted, found, strict=True):
            scores[name][place] = outcome.final
        further = {name: rates.next_place(own) for name, own in scores.items()}
        wanted = [(name, place) for name, place in further.items() if place is not None]
    return scores
