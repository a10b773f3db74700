"""Sweeps on Optuna: points are trials of a study, which remembers them; a trial is a job of the pool.

A study may be shared by several processes and machines (a database's URL, or a journal file): each takes
waiting trials one by one. A killed sweep loses nothing: its finished trials are in the study, and the run of an
unfinished one goes on from its checkpoint, since the folder of a run is named after its config.
"""

from __future__ import annotations

import json
import os
import socket
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from tekfac.extras import require
from tekfac.lab.config import RunConfig, read_plain
from tekfac.lab.files import exclusive, write_json
from tekfac.lab.grids import Point, Range, Search, Sweep, described
from tekfac.lab.pool import Job, Manner, Pool, raise_if_over, share
from tekfac.lab.training import check_all

POINT = "point"
OWNER = "owner"
ALIVE = "alive"

ALIVE_EVERY = 60.0
"""Seconds between signs of life of a running trial."""

STALE_AFTER = 600.0
"""Seconds without a sign of life after which a trial of another machine is taken for lost."""

WAIT_SECONDS = 2.0
"""Between two looks at what other processes are at work on."""


@dataclass(frozen=True)
class Trial:
    """A point that has been tried.

    Attributes:
        point: its settings.
        accuracy: mean over the seeds of the final accuracy, 0 to 1.
        folders: of its runs.
    """

    point: Point
    accuracy: float
    folders: tuple[Path, ...]


def sweep(plan: Sweep, folder: Path, manner: Manner, storage: str | None = None) -> list[Trial]:
    """Try what the plan says, several points at a time; what an earlier call has finished is not done again.

    Points that other processes are at work on are waited for.

    Args:
        plan: what to try.
        folder: where runs, the study and the outcome are kept.
        manner: how many at a time, and how.
        storage: None for a SQLite file in the folder; a database's URL or `journal:FILE` for many machines.

    Returns:
        The finished trials, best first.

    Raises:
        ValueError: if the folder's study is of another plan, or a trial failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_all(plan.configs(point)[0] for point in plan.points)
    with exclusive(folder / "setup.lock"):
        study = _study(plan, folder, storage)
        write_json(folder / "base.json", plan.base.plain())
    problems: list[BaseException] = []
    with Pool(manner) as pool:
        while True:
            with exclusive(folder / "setup.lock"):
                _give_up_stale_trials(study, plan)
                if not problems:
                    _enqueue_missing(study, plan)
            problems += _work(study, plan, folder, manner, pool)
            if not _others_at_work(study):
                break
            time.sleep(WAIT_SECONDS)
    trials = finished(study, plan, folder)
    write_json(
        folder / "trials.json",
        [{"point": dict(t.point), "accuracy": t.accuracy, "runs": [f.name for f in t.folders]} for t in trials],
    )
    if problems:
        raise ValueError(
            f"{len(problems)} of the trials failed, the first with: {problems[0]} The others are kept; the "
            "same command tries again."
        ) from problems[0]
    return trials


def best(trials: list[Trial], key: str = "optimizer") -> dict[Any, Trial]:
    """The best trial for each value of a setting, in order of appearance in the trials' study."""
    found: dict[Any, Trial] = {}
    for trial in trials:  # best first
        found.setdefault(trial.point.get(key), trial)
    return found


def read_trials(folder: Path) -> list[Trial]:
    """The finished trials of a sweep, best first, from what it left in its folder."""
    path = folder / "trials.json"
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} holds no finished sweep: there is no trials.json in it.")
    saved = json.loads(path.read_text(encoding="utf-8"))
    return [
        Trial(entry["point"], entry["accuracy"], tuple(folder / "runs" / name for name in entry["runs"]))
        for entry in saved
    ]


def read_base(folder: Path) -> RunConfig:
    """The config that a sweep's points started from, on the test set instead of held-back images."""
    path = folder / "base.json"
    return replace(RunConfig.from_plain(read_plain(path), str(path)), held_back=0)


# -- the study -----------------------------------------------------------------------------------------------


def _study(plan: Sweep, folder: Path, storage: str | None) -> Any:
    optuna = require("optuna", "A sweep")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = {
        "tpe": optuna.samplers.TPESampler,
        "random": optuna.samplers.RandomSampler,
        "qmc": optuna.samplers.QMCSampler,
        "cmaes": optuna.samplers.CmaEsSampler,
    }
    study = optuna.create_study(
        study_name=plan.name,
        storage=_storage(optuna, folder, storage),
        sampler=optuna.samplers.RandomSampler(seed=0),
        direction="maximize",
        load_if_exists=True,
    )
    told = _told(plan)
    known = study.user_attrs.get("plan")
    if known is not None and json.loads(known) != told:
        raise ValueError(
            f"The study {plan.name!r} in {str(folder)!r} has another plan. Choose another folder or name."
        )
    study.set_user_attr("plan", json.dumps(told))
    if (
        plan.search is not None
    ):  # one that goes on must not begin with the same numbers, nor two that share a study
        study.sampler = samplers[plan.search.sampler](seed=len(study.trials) if storage is None else None)
    return study


def _storage(optuna: Any, folder: Path, url: str | None) -> Any:
    if url is not None and url.startswith("journal:"):
        backend = optuna.storages.journal.JournalFileBackend(url.removeprefix("journal:"))
        return optuna.storages.JournalStorage(backend)
    try:
        return optuna.storages.RDBStorage(url or f"sqlite:///{(folder / 'sweep.db').resolve()}")
    except Exception as error:
        place = url or f"{folder / 'sweep.db'}"
        raise ValueError(f"Cannot open the study's storage {place!r}: {error}") from error


def _told(plan: Sweep) -> dict[str, Any]:
    """The plan in plain values, but for where its runs are computed and how many trials a search has."""
    search = (
        None if plan.search is None else {"space": _plain_space(plan.search), "sampler": plan.search.sampler}
    )
    return {
        "base": plan.base.fingerprint(),
        "points": [dict(point) for point in plan.points],
        "search": search,
        "seeds": list(plan.seeds),
    }


def _plain_space(search: Search) -> dict[str, Any]:
    return {
        key: vars(value) if isinstance(value, Range) else list(value) for key, value in search.space.items()
    }


def _give_up_stale_trials(study: Any, plan: Sweep) -> None:
    """Give up trials whose process is gone; their points are tried again."""
    states = require("optuna", "A sweep").trial.TrialState
    for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
        host, _, process = str(trial.user_attrs.get(OWNER, ":0")).rpartition(":")
        is_gone = host == socket.gethostname() and not _is_alive(int(process))
        alive = float(trial.user_attrs.get(ALIVE, trial.datetime_start.timestamp()))
        if is_gone or time.time() - alive > STALE_AFTER:
            study.tell(trial.number, state=states.FAIL)
            if plan.search is not None and POINT in trial.user_attrs:
                study.enqueue_trial(trial.params, user_attrs={POINT: trial.user_attrs[POINT]})


def _others_at_work(study: Any) -> bool:
    states = require("optuna", "A sweep").trial.TrialState
    return bool(study.get_trials(deepcopy=False, states=(states.RUNNING, states.WAITING)))


def _is_alive(process: int) -> bool:
    """Whether another process of this machine has that number; at the start of a sweep, none of its own has."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process > 0


def _enqueue_missing(study: Any, plan: Sweep) -> None:
    """Put every point in the queue that is neither done, nor being tried, nor waiting."""
    optuna = require("optuna", "A sweep")
    states = optuna.trial.TrialState
    present = [
        trial.user_attrs.get(POINT)
        for trial in study.get_trials(deepcopy=False, states=(states.COMPLETE, states.RUNNING, states.WAITING))
    ]
    for point in plan.points:
        told = json.dumps(dict(point))
        if told not in present:
            study.enqueue_trial(dict(point), user_attrs={POINT: told})


def finished(study: Any, plan: Sweep, folder: Path) -> list[Trial]:
    """The finished trials of a study, best first, equal ones in the order of the plan; every point once."""
    optuna = require("optuna", "A sweep")
    trials = {}
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)):
        point = json.loads(trial.user_attrs[POINT])
        folders = tuple(run_folder(folder, config) for config in plan.configs(point))
        whole = {"optimizer": plan.base.optimizer, **point}
        trials[trial.user_attrs[POINT]] = Trial(whole, float(trial.value), folders)
    order = {json.dumps(dict(point)): place for place, point in enumerate(plan.points)}
    ranked = sorted(trials, key=lambda told: (-trials[told].accuracy, order.get(told, 0), told))
    return [trials[told] for told in ranked]


# -- the work ------------------------------------------------------------------------------------------------


def run_folder(folder: Path, config: RunConfig) -> Path:
    """Where a run of a sweep or a comparison is kept: a folder named after what is computed."""
    return folder / "runs" / f"{config.optimizer}-{config.fingerprint()}-seed{config.seed}"


def _work(study: Any, plan: Sweep, folder: Path, manner: Manner, pool: Pool) -> list[BaseException]:
    """Keep the pool busy until no trial is left to begin; what went wrong."""
    states = require("optuna", "A sweep").trial.TrialState
    running: dict[Future[list[dict[str, Any]]], Any] = {}
    total = plan.search.trials if plan.search else len(plan.points)
    advance, last_sign = pool.overall(plan.name, total), time.monotonic()
    problems: list[BaseException] = []
    while True:
        gives_up = bool(problems) and plan.search is not None  # which would draw new points for ever
        while not gives_up and pool.free and (trial := _next_trial(study, plan)) is not None:
            point = json.loads(trial.user_attrs[POINT])
            configs = tuple(share(config, manner.processes) for config in plan.configs(point))
            job = Job(described(point), configs, tuple(run_folder(folder, config) for config in configs))
            running[pool.submit(job)] = trial
        advance(len(study.get_trials(deepcopy=False, states=(states.COMPLETE,))))
        if not running:
            return problems
        for future in pool.wait(running, seconds=1.0):
            trial, error = running.pop(future), future.exception()
            if error is None:
                study.tell(trial, mean(result["test_accuracy"] for result in future.result()))
            else:
                raise_if_over(error)
                study.tell(trial, state=states.FAIL)
                problems.append(error)
        if time.monotonic() - last_sign > ALIVE_EVERY:
            last_sign = time.monotonic()
            for trial in running.values():
                trial.set_user_attr(ALIVE, time.time())


def _next_trial(study: Any, plan: Sweep) -> Any:
    """The next trial, owned by this process; None if there is nothing left to begin."""
    states = require("optuna", "A sweep").trial.TrialState
    while not _is_exhausted(study, plan):
        trial = study.ask()
        trial.set_user_attr(OWNER, f"{socket.gethostname()}:{os.getpid()}")
        trial.set_user_attr(ALIVE, time.time())
        if plan.search is not None:
            point = _sampled(trial, plan.search)
            trial.set_user_attr(POINT, json.dumps(point))
            return trial
        told = trial.user_attrs.get(POINT)  # none if another process took the last one in between
        if told is not None and not _is_taken(study, told, trial.number):
            for key in json.loads(told):
                trial.suggest_categorical(key, plan.choices()[key])
            return trial
        study.tell(trial, state=states.FAIL)
    return None


def _is_exhausted(study: Any, plan: Sweep) -> bool:
    """Whether no trial is left to begin."""
    states = require("optuna", "A sweep").trial.TrialState
    if plan.search is None:
        return not study.get_trials(deepcopy=False, states=(states.WAITING,))
    begun = study.get_trials(deepcopy=False, states=(states.COMPLETE, states.RUNNING))
    return len(begun) >= plan.search.trials


def _is_taken(study: Any, point: str, number: int) -> bool:
    """Whether another trial has this point already, done or running: two processes may both enqueue it."""
    states = require("optuna", "A sweep").trial.TrialState
    begun = study.get_trials(deepcopy=False, states=(states.COMPLETE, states.RUNNING))
    return any(trial.user_attrs.get(POINT) == point and trial.number != number for trial in begun)


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
