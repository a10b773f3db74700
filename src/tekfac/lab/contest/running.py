"""One run of an optimizer on a task, and many of them in processes of their own."""

from __future__ import annotations

import copy
import inspect
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tekfac.damping import LevenbergMarquardt
from tekfac.lab.bench.contestants import Contestant, Stepping, Together
from tekfac.lab.contest.tasks import TASKS, Batch, Kept, Training
from tekfac.lab.contest.unseen import UNSEEN
from tekfac.lab.contest.whole_tasks import WHOLE
from tekfac.lab.optimizers import NATURAL

LOOKS = 20
"""How often a run is scored, at equal distances."""

DIVERGED = math.inf
"""Stands for a score that is not a number."""

BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)

WITHOUT_SCHEDULE = ("schedule-free",)
"""Optimizers whose learning rate rises as the others' does, and then stays."""

PASSES_FOR_NORMS = 10
"""Of training batches, by whose mean norms learn the statistics of averaged weights."""


@dataclass(frozen=True)
class Entry:
    """An optimizer with its settings.

    Attributes:
        optimizer: a name of the benchmark's contestants.
        lr: the highest learning rate of the schedule; None: the optimizer's default.
        options: further keywords.
    """

    optimizer: str
    lr: float | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_words(self) -> str:
        """As one would write it down."""
        rate = [] if self.lr is None else [f"lr={self.lr:g}"]
        return ", ".join([self.optimizer, *rate, *(f"{key}={value}" for key, value in self.options.items())])

    @property
    def is_judged(self) -> bool:
        """Whether its steps look at the loss, and take a closure."""
        return isinstance(self.options.get("damping"), LevenbergMarquardt)

    def contestant(self, likelihood: str) -> Contestant:
        """The same for the benchmark; those that draw labels are told from what."""
        options = dict(self.options)
        options["lr"] = _default_rate(self.optimizer) if self.lr is None else self.lr
        if self.optimizer in NATURAL:
            options.setdefault("likelihood", likelihood)
        return Contestant(self.optimizer, options=options)


@dataclass(frozen=True)
class Job:
    """What is to be run.

    Attributes:
        task: its name.
        entry: the optimizer.
        seed: of weights, batches and drawn labels.
        steps: of the run, which the schedule fits.
        kept: what the run is scored on.
        folder: with the image data.
    """

    task: str
    entry: Entry
    seed: int
    steps: int
    kept: Kept = "test"
    folder: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        scores: (steps, seconds of training, score), from before the first step to the last.
        training_loss: the mean of the last tenth of the steps.
    """

    scores: Sequence[tuple[int, float, float]]
    training_loss: float

    @property
    def final(self) -> float:
        """The last score."""
        return self.scores[-1][2]

    @property
    def seconds(self) -> float:
        """Of training, in all."""
        return self.scores[-1][1]

    def plain(self) -> dict[str, Any]:
        """As plain values; None for numbers that there are none."""
        scores = [(steps, seconds, _or_none(score)) for steps, seconds, score in self.scores]
        return {"scores": scores, "training_loss": _or_none(self.training_loss)}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Outcome:
        """The outcome that `plain` was made of."""
        scores = [(steps, seconds, _or_diverged(score)) for steps, seconds, score in plain["scores"]]
        return cls(scores, _or_diverged(plain["training_loss"]))


def _default_rate(optimizer: str) -> float:
    """The learning rate of one that is not told any."""
    kind = {"adamw": torch.optim.AdamW, **NATURAL}[optimizer]
    return inspect.signature(kind).parameters["lr"].default  # type: ignore[no-any-return]


def run(job: Job) -> Outcome:
    """Train, with one thread, and look at the score now and then; its time does not count."""
    torch.set_num_threads(1)
    task = {**TASKS, **UNSEEN, **WHOLE}[job.task]
    training = task.prepare(job.seed, job.folder)
    share_of_lr = task.rising if job.entry.optimizer in WITHOUT_SCHEDULE else task.share_of_lr
    optimizer = job.entry.contestant(task.likelihood).make(training.model, job.seed)
    rates = [(group, group["lr"]) for part in _parts(optimizer) for group in part.param_groups]
    _warm_up()
    scores, losses, seconds = [(0, 0.0, training.score(job.kept))], [], 0.0
    for step in range(job.steps):
        inputs, targets = training.batch(step)
        for group, rate in rates:
            group["lr"] = rate * share_of_lr(step, job.steps)
        start = time.perf_counter()
        if job.entry.is_judged:
            loss = optimizer.step(partial(_pass, optimizer, training, (inputs, targets)))  # type: ignore[call-arg]
        else:
            loss = _pass(optimizer, training, (inputs, targets))
            optimizer.step()
        seconds += time.perf_counter() - start
        losses.append(loss.item())
        if (step + 1) * LOOKS // job.steps > step * LOOKS // job.steps:
            with _as_used(optimizer, training):
                score = training.score(job.kept)
            scores.append((step + 1, seconds, score if math.isfinite(score) else DIVERGED))
    last = losses[-max(1, job.steps // 10) :]
    return Outcome(scores, sum(last) / len(last))


def _pass(optimizer: Stepping, training: Training, batch: Batch) -> Tensor:
    """Forward and backward pass; gives the loss."""
    optimizer.zero_grad()
    loss = training.loss(training.model(batch[0]), batch[1])
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


@contextmanager
def _as_used(optimizer: Stepping, training: Training) -> Iterator[None]:
    """The weights that an optimizer would have used, where they are others than those it trains."""
    if not hasattr(optimizer, "eval"):
        yield
        return
    norms = [module for module in training.model.modules() if isinstance(module, BATCH_NORMS)]
    before = [(norm, norm.momentum, copy.deepcopy(norm.state_dict())) for norm in norms]
    optimizer.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean of all passes
    with torch.no_grad():
        for step in range(PASSES_FOR_NORMS if norms else 0):
            training.model(training.batch(step)[0])
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]
        for norm, momentum, state in before:
            norm.momentum = momentum
            norm.load_state_dict(state)


def _warm_up() -> None:
    """Let torch do what it does only once, so that the first run of a process pays no more than others."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.zeros(8, 8)).sum().backward()
        optimizer.step()


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _or_diverged(number: float | None) -> float:
    return DIVERGED if number is None else number


def _parts(optimizer: Stepping) -> Sequence[Optimizer]:
    """The optimizers of torch that it consists of."""
    if isinstance(optimizer, Together):
        return optimizer.parts
    assert isinstance(optimizer, Optimizer)
    return [optimizer]


def run_all(
    jobs: Iterable[Job],
    processes: int,
    say: Callable[[str], None],
    keep: Callable[[Job, Outcome], None] = lambda job, outcome: None,
) -> list[Outcome]:
    """The outcome of every job, in their order; several at a time. Each is kept as soon as it is there.

    Raises:
        Exception: what a job has raised, when all others are finished.
    """
    jobs = list(jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = {pool.submit(run, job): job for job in jobs}
        for future in as_completed(waiting):
            if future.exception() is None:
                job, outcome = waiting[future], future.result()
                say(f"{job.task}, {job.entry.in_words}, seed {job.seed}: {outcome.final:.4f}")
                keep(job, outcome)
        return [future.result() for future in waiting]
