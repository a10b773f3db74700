"""The trials of a sweep in a study of Optuna's, which several processes and machines may share.

A trial is begun by whoever takes it first, and shows signs of life while it runs. One whose process is gone is
given up, and its point tried again.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tekfac.common.extras import require
from tekfac.common.files import exclusive
from tekfac.lab.grids import SAMPLERS, Point, Range, Search, Sweep, values_in
from tekfac.lab.interruption import is_running
from tekfac.lab.run_folder import RunFolder

POINT, OWNER, ALIVE, DIVERGED = "point", "owner", "alive", "diverged"
"""What is noted with a trial."""

ALIVE_EVERY = 60.0
"""Seconds between signs of life of a running trial."""

STALE_AFTER = 600.0
"""Seconds without a sign of life after which a trial is taken for lost."""

OWNED_WITHIN = 10.0
"""Seconds that a process may take between beginning a trial and putting its name to it."""


@dataclass(frozen=True)
class Trial:
    """A point that has been tried.

    Attributes:
        point: its settings.
        accuracy: mean over the seeds of the final accuracy, 0 to 1.
        folders: of its runs.
        diverged: whether one of its runs did.
    """

    point: Point
    accuracy: float
    folders: tuple[Path, ...]
    diverged: bool = False


def point_of(trial: Any) -> dict[str, Any]:
    """The settings of a trial of the study."""
    point: dict[str, Any] = json.loads(trial.user_attrs[POINT])
    return point


class SharedStudy:
    """The study of a plan.

    Args:
        plan: what is tried.
        folder: of the sweep.
        storage: None for a SQLite file in the folder; a database's URL, or `journal:FILE`.

    Raises:
        ValueError: if the storage cannot be opened, or holds a study of that name with another plan.
    """

    def __init__(self, plan: Sweep, folder: Path, storage: str | None) -> None:
        self._optuna: Any = require("optuna", "A sweep")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._states = self._optuna.trial.TrialState
        self._plan, self._folder = plan, folder
        self._seen: dict[int, tuple[Any, float]] = {}
        with exclusive(folder / "setup.lock"):
            self._study = self._open(storage)

    def refill(self, *, points: bool) -> None:
        """Give up trials whose process is gone and, if `points`, enqueue all points that nobody has begun."""
        with exclusive(self._folder / "setup.lock"):
            for trial in self._trials("RUNNING"):
                if self._is_lost(trial):
                    self._study.tell(trial.number, state=self._states.FAIL, skip_if_finished=True)
                    if self._plan.search is not None and POINT in trial.user_attrs:
                        self._study.enqueue_trial(trial.params, user_attrs={POINT: trial.user_attrs[POINT]})
            if points:
                present = {t.user_attrs.get(POINT) for t in self._trials("COMPLETE", "RUNNING", "WAITING")}
                for point in self._plan.points:
                    if (told := json.dumps(dict(point))) not in present:
                        self._study.enqueue_trial(dict(point), user_attrs={POINT: told})

    def take(self) -> Any:
        """The next trial, now owned by this process; None if there is nothing left to begin."""
        while not self._is_exhausted():
            trial = self._study.ask()
            trial.set_user_attr(OWNER, f"{socket.gethostname()}:{os.getpid()}")
            self.show_life([trial])
            if self._plan.search is not None:
                trial.set_user_attr(POINT, json.dumps(_sampled(trial, self._plan.search)))
                return trial
            told = trial.user_attrs.get(POINT)  # none if another process took the last one in between
            if told is not None and not self._is_taken(told, trial.number):
                choices = values_in(self._plan.points)
                for key in json.loads(told):
                    trial.suggest_categorical(key, choices[key])
                return trial
            self.give_up(trial)
        return None

    def finish(self, trial: Any, accuracy: float, diverged: bool) -> None:
        """Note the outcome of a trial, unless another process has given it up meanwhile."""
        if diverged:
            self._note(trial, DIVERGED, True)
        self._study.tell(trial, accuracy, skip_if_finished=True)

    def give_up(self, trial: Any) -> None:
        """Note that a trial has no outcome."""
        self._study.tell(trial, state=self._states.FAIL, skip_if_finished=True)

    def show_life(self, trials: Iterable[Any]) -> None:
        """Let other processes know that these trials are being worked on."""
        for trial in trials:
            self._note(trial, ALIVE, time.time())

    @property
    def num_running(self) -> int:
        """Trials that are being worked on, by whomever."""
        return len(self._trials("RUNNING"))

    @property
    def num_finished(self) -> int:
        """Trials with an outcome."""
        return len(self._trials("COMPLETE"))

    def finished(self) -> list[Trial]:
        """Every point with an outcome once, the best first, those that diverged last, ties as in the plan."""
        trials = {}
        for trial in self._trials("COMPLETE"):
            point = point_of(trial)
            folders = tuple(RunFolder.of(self._folder, config).path for config in self._plan.configs(point))
            whole = {"optimizer": self._plan.base.optimizer, **point}
            diverged = bool(trial.user_attrs.get(DIVERGED))
            trials[trial.user_attrs[POINT]] = Trial(whole, float(trial.value), folders, diverged)
        order = {json.dumps(dict(point)): place for place, point in enumerate(self._plan.points)}
        ranked = sorted(
            trials, key=lambda told: (trials[told].diverged, -trials[told].accuracy, order.get(told, 0), told)
        )
        return [trials[told] for told in ranked]

    # -- inside ----------------------------------------------------------------------------------------

    def _open(self, storage: str | None) -> Any:
        """The study, begun or found."""
        optuna, plan = self._optuna, self._plan
        study = optuna.create_study(
            study_name=plan.name,
            storage=self._storage(storage),
            sampler=optuna.samplers.RandomSampler(seed=0),
            direction="maximize",
            load_if_exists=True,
        )
        told, known = _told(plan), json.loads(study.user_attrs.get("plan", "null"))
        if known is not None and known != told:
            changed = ", ".join(key for key in told if told[key] != known.get(key))
            raise ValueError(
                f"The study {plan.name!r} in {str(self._folder)!r} has another plan (other {changed}). Choose "
                "another folder (--out) or name."
            )
        study.set_user_attr("plan", json.dumps(told))
        if plan.search is not None:
            # one that goes on must not begin with the same numbers, nor two that share a study
            seed = len(study.trials) if storage is None else None
            study.sampler = getattr(optuna.samplers, SAMPLERS[plan.search.sampler])(seed=seed)
        return study

    def _storage(self, url: str | None) -> Any:
        place = url or str(self._folder / "sweep.db")
        try:
            if place.startswith("journal:"):
                backend = self._optuna.storages.journal.JournalFileBackend(place.removeprefix("journal:"))
                return self._optuna.storages.JournalStorage(backend)
            return self._optuna.storages.RDBStorage(url or f"sqlite:///{Path(place).resolve()}")
        except Exception as error:
            raise ValueError(f"Cannot open the study's storage {place!r}: {error}") from error

    def _note(self, trial: Any, name: str, value: Any) -> None:
        """Note something with a trial, unless another process has given it up meanwhile."""
        with suppress(self._optuna.exceptions.UpdateFinishedTrialError):
            trial.set_user_attr(name, value)

    def _trials(self, *states: str) -> list[Any]:
        wanted = tuple(self._states[name] for name in states)
        return list(self._study.get_trials(deepcopy=False, states=wanted))

    def _is_exhausted(self) -> bool:
        """Whether no trial is left to begin."""
        if self._plan.search is None:
            return not self._trials("WAITING")
        return len(self._trials("COMPLETE", "RUNNING")) >= self._plan.search.trials

    def _is_taken(self, point: str, number: int) -> bool:
        """Whether another trial has this point: done, or running and begun earlier."""
        same = [t for t in self._trials("COMPLETE", "RUNNING") if t.user_attrs.get(POINT) == point]
        return any(t.number < number or (t.number != number and t.state == self._states.COMPLETE) for t in same)

    def _is_lost(self, trial: Any) -> bool:
        """Whether nobody works on a running trial any more.

        On this machine its process tells. Elsewhere its signs of life do, as this process has seen them come:
        clocks of machines may differ.
        """
        owner, sign = trial.user_attrs.get(OWNER), trial.user_attrs.get(ALIVE)
        known = self._seen.get(trial.number)
        if known is None or known[0] != (owner, sign):
            known = self._seen[trial.number] = (owner, sign), time.monotonic()
        silence = time.monotonic() - known[1]
        if owner is None or sign is None:
            return silence > OWNED_WITHIN
        host, _, process = str(owner).rpartition(":")
        if host == socket.gethostname():
            is_own = int(process) == os.getpid()  # an earlier one's: this process is not at work on any now
            return is_own or not is_running(int(process)) or silence > STALE_AFTER
        looks_old = time.time() - float(sign) > STALE_AFTER
        return silence > (2 * ALIVE_EVERY if looks_old else STALE_AFTER)


def _told(plan: Sweep) -> dict[str, Any]:
    """The plan in plain values, but for where its runs are computed and how many trials a search has."""
    told: dict[str, Any] = {
        "base": plan.base.fingerprint(),
        "points": list(map(dict, plan.points)),
        "search": None,
    }
    if plan.search is not None:
        space = plan.search.space.items()
        plain = {key: vars(value) if isinstance(value, Range) else list(value) for key, value in space}
        told["search"] = {"space": plain, "sampler": plan.search.sampler}
    return {**told, "seeds": list(plan.seeds)}


def _sampled(trial: Any, search: Search) -> dict[str, Any]:
    point = {}
    for key, values in search.space.items():
        if not isinstance(values, Range):
            point[key] = trial.suggest_categorical(key, list(values))
        elif isinstance(values.low, int) and isinstance(values.high, int):
            point[key] = trial.suggest_int(key, values.low, values.high, log=values.log)
        else:
            point[key] = trial.suggest_float(key, values.low, values.high, log=values.log)
    return point
