"""Many runs at a time, in real processes: all are run, and what stops one stops or spares the others."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tekfac.lab import inputs
from tekfac.lab.config import RunConfig
from tekfac.lab.data import DataSet, images
from tekfac.lab.interruption import Interrupted
from tekfac.lab.pool import THREADS_VARIABLES, Job, Manner, cores, run_all, run_configs, share
from tekfac.lab.run_folder import RunFolder

BASE = RunConfig(model="mlp", optimizer="sgdm", lr=0.1, train_samples=256, epochs=1, threads=1)
LONG = replace(BASE, epochs=2000)


def test_all_are_run_and_one_that_fails_spares_the_others(tmp_path: Path) -> None:
    bad = replace(BASE, model_options={"depth": 3})
    configs = [BASE, bad, replace(BASE, seed=1)]
    jobs = [Job(f"job {i}", (config,), (tmp_path / str(i),)) for i, config in enumerate(configs)]
    with pytest.raises(ValueError, match=r"1 of 3 jobs failed; job 1: .*depth"):
        run_all(jobs, Manner(processes=2, quiet=True))
    assert [RunFolder(tmp_path / str(i)).result() is not None for i in range(3)] == [True, False, True]


def test_the_data_of_many_runs_are_read_and_hashed_once_and_by_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits, asked = inputs.read(BASE), []

    def read(config: RunConfig) -> DataSet:
        asked.append(config.data_dir)
        return digits

    monkeypatch.setattr(inputs, "read", read)
    nowhere = replace(BASE, data="folder", data_dir=str(tmp_path / "nowhere"))
    jobs = [Job(f"job {i}", (replace(nowhere, seed=i),), (tmp_path / str(i),)) for i in range(3)]
    run_all(jobs, Manner(processes=2, quiet=True))
    assert asked == [nowhere.data_dir]
    assert {RunFolder(tmp_path / str(i)).identity()["data"] for i in range(3)} == {digits.digest}


def test_shared_data_are_the_same_and_bring_their_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    data, shared = inputs.read(BASE), inputs.SharedData()
    digest = data.digest
    path = shared.path(BASE)
    assert path is not None
    assert shared.path(replace(BASE, seed=5)) == path
    assert shared.path(replace(BASE, train_samples=10)) != path
    monkeypatch.setattr(images, "hash_of", None)
    found = inputs.mapped(path)
    assert found.digest == digest
    assert torch.equal(found.train.pixels, data.train.pixels)
    assert torch.equal(found.test.labels, data.test.labels)
    shared.close()
    assert not path.exists()


@pytest.mark.slow
def test_data_that_cannot_be_had_fail_their_own_job_alone(tmp_path: Path) -> None:
    bad = replace(BASE, data="folder", data_dir=str(tmp_path / "nowhere"))
    jobs = [Job("bad", (bad,), (tmp_path / "0",)), Job("good", (BASE,), (tmp_path / "1",))]
    with pytest.raises(ValueError, match=r"1 of 2 jobs failed; bad: .*nowhere' does not exist"):
        run_all(jobs, Manner(processes=1, quiet=True))
    assert RunFolder(tmp_path / "1").result() is not None


def when_training(folders: list[Path], act: object) -> threading.Thread:
    """Act, in the background, as soon as all runs have finished an epoch."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not all((f / "epochs.csv").exists() for f in folders):
            time.sleep(0.05)
        act()  # type: ignore[operator]

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_every_run_save_itself_and_begins_no_other(
    tmp_path: Path, number: signal.Signals
) -> None:
    jobs = [Job(f"job {i}", (replace(LONG, seed=i),), (tmp_path / str(i),)) for i in range(4)]
    thread = when_training([tmp_path / "0", tmp_path / "1"], lambda: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted, match="stopped; the same command goes on"):
        run_all(jobs, Manner(processes=2, quiet=True))
    thread.join()
    assert [(tmp_path / str(i) / "checkpoint.pt").exists() for i in range(4)] == [True, True, False, False]
    assert not list(tmp_path.glob("*/*.unfinished"))


@pytest.mark.slow
def test_a_process_that_is_killed_is_told_of(tmp_path: Path) -> None:
    import multiprocessing

    def kill_one() -> None:
        process = multiprocessing.active_children()[0]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)

    jobs = [Job("long", (LONG,), (tmp_path / "0",))]
    thread = when_training([tmp_path / "0"], kill_one)
    with pytest.raises(ValueError, match="was killed, perhaps for lack of memory"):
        run_all(jobs, Manner(processes=1, quiet=True))
    thread.join()


def test_cores_are_divided_among_the_processes_unless_somebody_says_how_many_threads_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in THREADS_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    free = replace(BASE, threads=None)
    assert share(free, 1).threads == cores()
    assert share(free, 1000).threads == 1
    assert share(replace(BASE, threads=7), 2).threads == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert share(free, 1).threads == cores()


@pytest.mark.slow
@pytest.mark.parametrize("variable", THREADS_VARIABLES)
def test_a_number_of_threads_in_the_environment_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in THREADS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr("tekfac.lab.pool.cores", lambda: 2)
    (folder,) = run_configs([replace(BASE, threads=None)], tmp_path, Manner(processes=1, quiet=True), "one")
    assert RunFolder(folder).config().threads == 1


@pytest.mark.slow
def test_equal_configs_share_a_folder_and_are_run_once(tmp_path: Path) -> None:
    manner = Manner(processes=1, quiet=True)
    first = run_configs([BASE], tmp_path, manner, "once")
    written = (first[0] / "model.pt").stat().st_mtime_ns
    assert run_configs([replace(BASE, name="again")], tmp_path, manner, "twice") == first
    assert (first[0] / "model.pt").stat().st_mtime_ns == written
