"""Sweeps: every point once, resumed, shared by several processes, and searched by samplers."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tekfac.lab import study, sweeping
from tekfac.lab.config import RunConfig
from tekfac.lab.grids import Range, Search, Sweep, product
from tekfac.lab.pool import THREADS_VARIABLES, Job, Manner
from tekfac.lab.run_folder import RunFolder
from tekfac.lab.study import STALE_AFTER, SharedStudy
from tekfac.lab.sweeping import best, read_base, read_trials, sweep

BASE = RunConfig(model="mlp", train_samples=200, held_back=100, epochs=1)
GRID = Sweep("rates", BASE, tuple(product({"optimizer": ["sgdm", "adam"], "lr": [0.001, 0.01, 0.1]})))

SEARCH = Sweep("search", BASE, search=Search({"lr": Range(1e-3, 0.1)}, trials=3))


class Recorder:
    """In place of the pool of processes: gives every run an accuracy, and notes what was asked for."""

    def __init__(self, manner: Manner) -> None:
        self.free = manner.processes
        self.jobs: list[Job] = []
        Recorder.latest = self

    latest: Recorder
    broken: str | None = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def overall(self, description: str, total: int) -> Any:
        return lambda done: None

    def submit(self, job: Job) -> Any:
        self.jobs.append(job)
        self.free -= 1
        return Outcome(job)

    def wait(self, futures: Any, seconds: float | None = None) -> set[Any]:
        done = {next(iter(futures))}
        self.free += 1
        return done


class Outcome:
    def __init__(self, job: Job) -> None:
        self.job = job

    def exception(self) -> BaseException | None:
        return ValueError("a run broke.") if self.job.configs[0].optimizer == Recorder.broken else None

    def result(self) -> list[dict[str, Any]]:
        return [result(accuracy(config)) for config in self.job.configs]


def result(accuracy: float, status: str = "finished") -> dict[str, Any]:
    return {"test_accuracy": accuracy, "status": status}


def accuracy(config: RunConfig) -> float:
    return 0.5 + config.lr + 0.01 * config.seed + (0.001 if config.optimizer == "adam" else 0.0)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr(sweeping, "Pool", Recorder)
    monkeypatch.setattr(Recorder, "broken", None)
    return Recorder


def tried(recorder: Recorder) -> list[tuple[str, float]]:
    return [(job.configs[0].optimizer, job.configs[0].lr) for job in recorder.jobs]


def test_every_point_is_tried_once_and_the_best_comes_first(tmp_path: Path, recorded: type[Recorder]) -> None:
    trials = sweep(GRID, tmp_path, Manner(processes=2))
    assert sorted(tried(recorded.latest)) == sorted((p["optimizer"], p["lr"]) for p in GRID.points)
    assert trials[0].point == {"optimizer": "adam", "lr": 0.1}
    assert [t.accuracy for t in trials] == sorted((t.accuracy for t in trials), reverse=True)
    assert {name: trial.point["lr"] for name, trial in best(trials).items()} == {"adam": 0.1, "sgdm": 0.1}


def test_equally_good_points_come_in_the_order_of_the_plan(
    tmp_path: Path, recorded: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outcome, "result", lambda self: [result(0.5)])
    assert [trial.point for trial in sweep(GRID, tmp_path, Manner(processes=3))] == list(GRID.points)


def test_what_is_done_is_not_done_again(tmp_path: Path, recorded: type[Recorder]) -> None:
    first = sweep(GRID, tmp_path, Manner())
    assert sweep(GRID, tmp_path, Manner()) == first
    assert recorded.latest.jobs == []


def test_the_mean_over_seeds_counts(tmp_path: Path, recorded: type[Recorder]) -> None:
    plan = replace(GRID, seeds=(0, 1, 2))
    trials = sweep(plan, tmp_path, Manner())
    assert trials[0].accuracy == pytest.approx(0.5 + 0.1 + 0.01 + 0.001)
    assert [config.seed for config in recorded.latest.jobs[0].configs] == [0, 1, 2]
    assert len(set(trials[0].folders)) == 3


def test_the_outcome_can_be_read_back(tmp_path: Path, recorded: type[Recorder]) -> None:
    trials = sweep(GRID, tmp_path, Manner())
    assert read_trials(tmp_path) == trials
    assert read_base(tmp_path) == replace(BASE, held_back=0)
    with pytest.raises(ValueError, match="holds no finished sweep"):
        read_trials(tmp_path / "elsewhere")


def test_runs_get_their_share_of_the_cores(
    tmp_path: Path, recorded: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tekfac.lab.pool.cores", lambda: 8)
    for variable in THREADS_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    sweep(GRID, tmp_path, Manner(processes=3))
    assert {job.configs[0].threads for job in recorded.latest.jobs} == {2}


def test_another_plan_is_refused_in_the_same_folder(tmp_path: Path, recorded: type[Recorder]) -> None:
    sweep(GRID, tmp_path, Manner())
    for other in (replace(GRID, base=replace(BASE, epochs=2)), replace(GRID, points=GRID.points[:2])):
        with pytest.raises(ValueError, match=r"another plan \(other (base|points)\)"):
            sweep(other, tmp_path, Manner())
    sweep(replace(GRID, base=replace(BASE, device="cpu", threads=1)), tmp_path, Manner())


def test_a_trial_that_fails_is_tried_again_and_the_others_are_kept(
    tmp_path: Path, recorded: type[Recorder]
) -> None:
    recorded.broken = "adam"
    with pytest.raises(ValueError, match="3 of the trials failed, the first with: a run broke"):
        sweep(GRID, tmp_path, Manner())
    recorded.broken = None
    assert len(sweep(GRID, tmp_path, Manner())) == 6
    assert set(tried(recorded.latest)) == {("adam", 0.001), ("adam", 0.01), ("adam", 0.1)}


def test_a_point_that_diverged_comes_last(
    tmp_path: Path, recorded: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def results(self: Outcome) -> list[dict[str, Any]]:
        [config] = self.job.configs
        return [result(accuracy(config), "diverged" if config.lr == 0.1 else "finished")]

    monkeypatch.setattr(Outcome, "result", results)
    trials = sweep(GRID, tmp_path, Manner())
    assert [trial.point["lr"] for trial in trials] == [0.01, 0.01, 0.001, 0.001, 0.1, 0.1]
    assert [trial.diverged for trial in read_trials(tmp_path)] == [False] * 4 + [True] * 2
    assert {name: trial.point["lr"] for name, trial in best(trials).items()} == {"adam": 0.01, "sgdm": 0.01}


def test_a_config_that_two_grids_name_is_tried_once(tmp_path: Path, recorded: type[Recorder]) -> None:
    points = [{"lr": 0.1}, {"lr": 0.1, "epochs": 1}, {"lr": 0.2}, {"optimizer": BASE.optimizer, "lr": 0.2}]
    assert len(sweep(Sweep("rates", BASE, tuple(points)), tmp_path, Manner())) == 2
    assert len(recorded.latest.jobs) == 2


HERE = socket.gethostname()
DEAD = 2**22 + 1


def leave_running(folder: Path, owner: str | None, alive: float, storage: str | None = None) -> None:
    """A trial as a process leaves it that was killed."""
    folder.mkdir(exist_ok=True)
    shared = SharedStudy(GRID, folder, storage)
    shared.refill(points=True)
    if owner is None:
        shared._study.ask()
    else:
        trial = shared.take()
        trial.set_user_attr("owner", owner)
        trial.set_user_attr("alive", alive)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited for others; none of them is waited for really."""
    waits: list[float] = []
    monkeypatch.setattr(sweeping, "WAIT_SECONDS", 15.0)
    monkeypatch.setattr(time, "monotonic", lambda: sum(waits))
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


@pytest.mark.parametrize("storage", [None, "journal"])
def test_the_trial_of_a_dead_process_is_tried_again(
    tmp_path: Path, recorded: type[Recorder], slept: list[float], storage: str | None
) -> None:
    place = f"journal:{tmp_path / 'journal.log'}" if storage else None
    leave_running(tmp_path / "out", f"{HERE}:{DEAD}", time.time(), place)
    assert len(sweep(GRID, tmp_path / "out", Manner(), place)) == 6
    assert len(tried(recorded.latest)) == 6
    assert not slept


@pytest.mark.parametrize(
    ("owner", "age", "waited"),
    [
        ("elsewhere:1", 3600, 2 * study.ALIVE_EVERY),  # its machine has long been silent, by its own clock
        ("elsewhere:1", 60, STALE_AFTER),
        (f"{HERE}:1", 60, STALE_AFTER),  # the number of its process is another one's now
        (None, 0, study.OWNED_WITHIN),  # killed before it could put its name to it
    ],
)
def test_the_trial_of_a_silent_process_is_tried_again(
    tmp_path: Path, recorded: type[Recorder], slept: list[float], owner: str | None, age: float, waited: float
) -> None:
    leave_running(tmp_path, owner, time.time() - age)
    assert len(sweep(GRID, tmp_path, Manner(quiet=True))) == 6
    assert len(tried(recorded.latest)) == 6
    assert waited < sum(slept) <= waited + 15


def test_the_trial_of_a_living_process_is_waited_for_however_its_clock_goes(
    tmp_path: Path,
    recorded: type[Recorder],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    leave_running(tmp_path, "elsewhere:1", time.time() - 7200)
    waits: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 60.0 * len(waits))

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        other = SharedStudy(GRID, tmp_path, None)._study
        [trial] = [trial for trial in other.trials if trial.state.name == "RUNNING"]
        if len(waits) < 30:
            alive = trial.user_attrs["alive"] + 60
            other._storage.set_trial_user_attr(trial._trial_id, "alive", alive)
        else:
            other.tell(trial.number, 0.99)

    monkeypatch.setattr(time, "sleep", sleep)
    trials = sweep(GRID, tmp_path, Manner())
    assert (len(trials), trials[0].accuracy, len(waits)) == (6, 0.99, 30)
    assert len(tried(recorded.latest)) == 5
    assert capsys.readouterr().err.count("Waiting for 1 trials that other processes are at work on") == 1


def test_a_trial_that_was_given_to_another_may_still_end(tmp_path: Path) -> None:
    shared = SharedStudy(GRID, tmp_path, None)
    shared.refill(points=True)
    trial = shared.take()
    shared._study.tell(trial.number, state=shared._states.FAIL)
    shared.show_life([trial])
    shared.finish(trial, 0.5, diverged=True)
    assert shared.num_finished == 0


def test_a_point_that_two_processes_enqueue_is_tried_once(tmp_path: Path, recorded: type[Recorder]) -> None:
    shared = SharedStudy(GRID, tmp_path, None)
    for _ in range(2):
        for point in GRID.points:
            shared._study.enqueue_trial(dict(point), user_attrs={"point": json.dumps(dict(point))})
    assert len(sweep(GRID, tmp_path, Manner())) == 6
    assert len(tried(recorded.latest)) == 6


def test_of_two_that_begin_the_same_point_at_once_one_goes_on(tmp_path: Path) -> None:
    shared = SharedStudy(GRID, tmp_path, None)
    told = json.dumps(dict(GRID.points[0]))
    for _ in range(2):
        shared._study.enqueue_trial(dict(GRID.points[0]), user_attrs={"point": told})
    first, second = shared._study.ask(), shared._study.ask()
    assert not shared._is_taken(told, first.number)
    assert shared._is_taken(told, second.number)


def test_the_unfinished_point_of_a_search_is_tried_again(tmp_path: Path, recorded: type[Recorder]) -> None:
    trial = SharedStudy(SEARCH, tmp_path, None).take()
    trial.set_user_attr("owner", f"{HERE}:{DEAD}")
    trials = sweep(SEARCH, tmp_path, Manner())
    assert len(trials) == 3
    assert json.loads(trial.user_attrs["point"])["lr"] in [trial.point["lr"] for trial in trials]
    assert len({trial.point["lr"] for trial in trials}) == 3


def test_a_search_with_fewer_trials_than_were_begun_ends(tmp_path: Path, recorded: type[Recorder]) -> None:
    sweep(replace(SEARCH, search=Search({"lr": Range(1e-3, 0.1)}, trials=2)), tmp_path, Manner())
    trial = SharedStudy(SEARCH, tmp_path, None).take()
    trial.set_user_attr("owner", f"{HERE}:{DEAD}")
    assert (
        len(sweep(replace(SEARCH, search=Search({"lr": Range(1e-3, 0.1)}, trials=1)), tmp_path, Manner())) == 2
    )


@pytest.mark.slow
def test_a_point_that_is_drawn_twice_is_computed_once(tmp_path: Path) -> None:
    base = replace(BASE, optimizer="sgdm", model_options={"width": 8}, threads=1)
    plan = Sweep("search", base, search=Search({"lr": (0.1,)}, trials=3, sampler="random"))
    [trial] = sweep(plan, tmp_path, Manner(processes=2, quiet=True))
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert trial.accuracy > 0


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"learning_rate": Range(0.1, 1.0)}, "The search has an unknown key 'learning_rate'"),
        ({"lr": Range(-1.0, 0.1, log=False)}, "Invalid lr: -1.0"),
        ({"optimizer": ("sgdm", "tekfak")}, "Did you mean 'tekfac'"),
    ],
)
def test_a_search_is_checked_before_anything_is_run(
    tmp_path: Path, recorded: type[Recorder], space: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(Sweep("search", BASE, search=Search(space, trials=2)), tmp_path, Manner())
    assert not (tmp_path / "sweep.db").exists()


def test_a_search_in_which_all_fails_ends(tmp_path: Path, recorded: type[Recorder]) -> None:
    recorded.broken = BASE.optimizer
    with pytest.raises(ValueError, match="1 of the trials failed"):
        sweep(SEARCH, tmp_path, Manner())


def test_a_point_without_an_optimizer_has_that_of_the_base(tmp_path: Path, recorded: type[Recorder]) -> None:
    trials = sweep(Sweep("rates", BASE, ({"lr": 0.1},)), tmp_path, Manner())
    assert list(best(trials)) == [BASE.optimizer]


def test_a_setting_that_cannot_be_is_told_before_anything_is_run(
    tmp_path: Path, recorded: type[Recorder]
) -> None:
    points = (*GRID.points, {"optimizer": "tekfac", "options.dampin": 0.1})
    with pytest.raises(ValueError, match="dampin"):
        sweep(replace(GRID, points=points), tmp_path, Manner())
    assert not (tmp_path / "sweep.db").exists()


def test_two_that_share_a_study_take_different_trials(tmp_path: Path) -> None:
    one, two = (SharedStudy(GRID, tmp_path, None) for _ in range(2))
    one.refill(points=True)
    taken = [shared.take().user_attrs["point"] for shared in [one, two] * 3]
    assert sorted(taken) == sorted(json.dumps(point) for point in GRID.points)
    assert one.take() is None


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc"])
@pytest.mark.filterwarnings("ignore:.*experimental.*")
def test_a_search_draws_from_its_space(tmp_path: Path, recorded: type[Recorder], sampler: str) -> None:
    space = {"lr": Range(1e-3, 0.1), "optimizer": ("sgdm", "adam"), "batch_size": Range(16, 64)}
    plan = Sweep("search", BASE, search=Search(space, trials=7, sampler=sampler))
    trials = sweep(plan, tmp_path, Manner())
    assert len(trials) == 7
    for trial in trials:
        assert 1e-3 <= trial.point["lr"] <= 0.1
        assert trial.point["optimizer"] in ("sgdm", "adam")
        assert isinstance(trial.point["batch_size"], int)
    more = replace(plan, search=Search(space, trials=9, sampler=sampler))
    assert len(sweep(more, tmp_path, Manner())) == 9
    assert len(recorded.latest.jobs) == 2


def test_the_folder_of_a_run_is_named_after_what_is_computed(tmp_path: Path) -> None:
    one = RunFolder.of(tmp_path, BASE).path
    assert one == RunFolder.of(tmp_path, replace(BASE, threads=2, data_dir="x")).path
    assert one != RunFolder.of(tmp_path, replace(BASE, seed=1)).path
    assert one.parent == tmp_path / "runs"


def test_a_storage_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere://"):
        sweep(GRID, tmp_path, Manner(), "nowhere://")
