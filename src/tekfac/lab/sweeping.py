"""Sweeps: the points of a plan are trials of a study, which remembers them; each is a job of the pool.

A killed sweep loses nothing: its finished trials are in the study, and the run of an unfinished one goes on
from its checkpoint, since the folder of a run is named after its config.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from tekfac.common.console import remark
from tekfac.common.files import make_folder, read_json, write_json
from tekfac.lab.config import RunConfig
from tekfac.lab.grids import Sweep, described
from tekfac.lab.pool import Job, Manner, Pool, raise_if_over, share
from tekfac.lab.run_folder import RUNS, RunFolder, read_plain
from tekfac.lab.study import ALIVE_EVERY, SharedStudy, Trial, point_of
from tekfac.lab.training import check_all

WAIT_SECONDS = 2.0
"""Between two looks at what other processes are at work on."""


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
    make_folder(folder)
    check_all(plan.configs(point)[0] for point in plan.examples())
    study = SharedStudy(plan, folder, storage)
    write_json(folder / "base.json", plan.base.plain())
    problems: list[BaseException] = []
    waited = False
    with Pool(manner) as pool:
        advance = pool.overall(plan.name, plan.search.trials if plan.search else len(plan.points))
        while True:
            study.refill(points=not problems)
            problems += _work(study, plan, folder, manner, pool, advance)
            if not study.num_running:
                break
            if not waited and not manner.quiet:
                remark(f"Waiting for {study.num_running} trials that other processes are at work on.")
            waited = True
            time.sleep(WAIT_SECONDS)
    trials = study.finished()
    write_json(
        folder / "trials.json",
        [
            {
                "point": dict(trial.point),
                "accuracy": trial.accuracy,
                "diverged": trial.diverged,
                "runs": [path.name for path in trial.folders],
            }
            for trial in trials
        ],
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
    try:
        return [
            Trial(
                entry["point"],
                entry["accuracy"],
                tuple(folder / RUNS / name for name in entry["runs"]),
                entry["diverged"],
            )
            for entry in read_json(path)
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} is damaged ({type(error).__name__}: {error}). The command of the sweep writes it "
            "anew."
        ) from error


def read_base(folder: Path) -> RunConfig:
    """The config that a sweep's points started from, on the test set instead of held-back images."""
    path = folder / "base.json"
    return replace(RunConfig.from_plain(read_plain(path), str(path)), held_back=0)


def _work(
    study: SharedStudy, plan: Sweep, folder: Path, manner: Manner, pool: Pool, advance: Callable[[int], None]
) -> list[BaseException]:
    """Keep the pool busy until no trial is left to begin; what went wrong."""
    running: dict[Future[list[dict[str, Any]]], Any] = {}
    last_sign = time.monotonic()
    problems: list[BaseException] = []
    while True:
        gives_up = bool(problems) and plan.search is not None  # which would draw new points for ever
        while not gives_up and pool.free and (trial := study.take()) is not None:
            point = point_of(trial)
            plan.require_own(point)
            configs = tuple(share(config, manner.processes) for config in plan.configs(point))
            folders = tuple(RunFolder.of(folder, config).path for config in configs)
            job = Job(described(point), configs, folders)
            running[pool.submit(job)] = trial
        advance(study.num_finished)
        if not running:
            return problems
        for future in pool.wait(running, seconds=1.0):
            trial, error = running.pop(future), future.exception()
            if error is None:
                results = future.result()
                accuracy = mean(result["test_accuracy"] for result in results)
                study.finish(trial, accuracy, any(result["status"] == "diverged" for result in results))
            else:
                raise_if_over(error)
                study.give_up(trial)
                problems.append(error)
        if time.monotonic() - last_sign > ALIVE_EVERY:
            last_sign = time.monotonic()
            study.show_life(running.values())
