"""`tekfac bench`: what a user types, what comes out, and what bad input is answered with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tekfac.cli.main import main
from tekfac.lab.bench import processes, running, worker
from tekfac.lab.bench.memory import GIVES_BACK

FEW = ["--contestants", "tekfac@2"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Jobs are done here and now, and noted; nothing is drawn."""
    done: list[Mapping[str, Any]] = []

    def here(job: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Any:
        done.append({**job, "environment": dict(environment or {})})
        return json.loads(json.dumps(worker.work(job)))

    monkeypatch.setattr(running, "alone", here)
    monkeypatch.setattr("tekfac.lab.bench.writing.drawings", lambda result: [])
    return done


def written(folder: str = "bench") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "bench.json").read_text())
    return found


def test_the_quick_command_measures_two_networks_in_processes_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--quick", "--networks", "mlp", "gpt", *FEW, "--no-memory", "--out", "out"]) == 0
    assert {path.name for path in Path("out").iterdir()} >= {"bench.json", "bench.md", "bench.png", "bench.svg"}
    result = written("out")
    for name in ("mlp", "gpt"):
        one = result["networks"][name]
        assert list(one["threads"]["1"]) == ["sgd", "tekfac@2"]
        assert {len(own["seconds"]) for own in one["threads"]["1"].values()} == {2 * 2}
        assert one["provenance"]["command"].startswith("tekfac bench --quick")
        assert one["provenance"]["threads"] == [1]
        assert set(one["summary"]["1"]) == {"sgd", "tekfac@2"}
        assert one["quick"] is True
    told = capsys.readouterr()
    assert "gpt, 1 thread: time beside SGD's" in told.out
    assert "Written to out: bench.json, bench.md" in told.out
    assert "mlp: 7 steps of 2 contestants in turn" in told.err


def test_further_networks_are_added_to_a_folder(jobs: list[Mapping[str, Any]]) -> None:
    quick = ["bench", "--quick", *FEW, "--no-memory", "--quiet", "--networks"]
    assert main([*quick, "mlp", "cnn"]) == 0
    before = written()["networks"]
    assert main([*quick, "mlp", "--threads", "1", "2", "--rounds", "1", "--warmup", "2"]) == 0
    after = written()["networks"]
    assert list(after) == ["mlp", "cnn"]
    assert after["cnn"] == before["cnn"]
    assert list(after["mlp"]["threads"]) == ["1", "2"]
    assert [job["threads"] for job in jobs] == [1, 1, 1, 2]
    assert (jobs[-1]["rounds"], jobs[-1]["warmup"]) == (1, 2)


def test_memory_is_measured_one_contestant_at_a_time_where_freed_memory_is_given_back(
    jobs: list[Mapping[str, Any]],
) -> None:
    assert main(["bench", "--quick", "--networks", "mlp", *FEW, "--memory-steps", "3", "--quiet"]) == 0
    memory = written()["networks"]["mlp"]["memory"]
    assert list(memory) == ["sgd", "tekfac@2"]
    assert {one["steps"] for one in memory.values()} == {3}
    of_memory = [job for job in jobs if job["kind"] == "memory"]
    assert [len(job["contestants"]) for job in of_memory] == [1, 1]
    assert all(job["environment"] == GIVES_BACK for job in of_memory)
    assert "mlp: memory" in Path("bench/bench.md").read_text()


def test_growth_alone_measures_no_network(
    jobs: list[Mapping[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--quick", "--growth", "--quiet"]) == 0
    assert [job["kind"] for job in jobs] == ["growth"]
    assert written()["networks"] == {}
    assert set(written()["growth"]) == {"provenance", "quick", "sweeps"}
    told = capsys.readouterr()
    assert "Growth of the cost of a step" in told.out
    assert told.err == ""


def test_a_missing_package_is_told_and_the_others_are_measured(
    jobs: list[Mapping[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    arguments = ["--quick", "--networks", "mlp", "--contestants", "soap@2,kfac@2", "--no-memory"]
    assert main(["bench", *arguments]) == 0
    assert "soap@2 is left out." in capsys.readouterr().err
    assert [plain["name"] for plain in jobs[0]["contestants"]] == ["sgd", "kfac"]


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["--networks", "resnet"], 2, "'resnet' is unknown. Did you mean 'resnet20'?"),
        (["--networks", "mlp", "mlp"], 1, "Invalid --networks: mlp mlp. Expected different ones."),
        (["--threads", "0"], 2, "'0' is not a positive whole number"),
        (["--threads", "2", "2"], 1, "Invalid --threads: 2 2. Expected different ones."),
        (["--rounds", "x"], 2, "'x' is not a positive whole number"),
        (["--warmup", "0"], 2, "'0' is not a positive whole number"),
        (["--contestants", "tekfax"], 1, "Unknown contestant: 'tekfax'. Did you mean 'tekfac'?"),
        (["--contestants", "kfac@2,fishr=exact"], 1, "Did you mean 'fisher'?"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(
    arguments: list[str],
    status: int,
    told: str,
    jobs: list[Mapping[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        found = main(["bench", *arguments])
    except SystemExit as ended:
        found = int(str(ended.code))
    assert found == status
    assert told in capsys.readouterr().err
    assert jobs == []


def test_a_folder_of_something_else_is_refused_before_anything_is_measured(
    jobs: list[Mapping[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bench").mkdir()
    Path("bench/bench.json").write_text("[]")
    assert main(["bench", "--quick", *FEW]) == 1
    assert "Choose another folder (--out)" in capsys.readouterr().err
    assert jobs == []


# -- processes -----------------------------------------------------------------------------------------------


def test_a_process_has_its_threads_and_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def run(command: list[str], *, env: dict[str, str], **other: Any) -> subprocess.CompletedProcess[str]:
        seen.update(env)
        Path(command[-1]).write_text("[1]")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(processes.subprocess, "run", run)
    assert processes.alone({"kind": "growth", "threads": 2}, {"A": "b"}) == [1]
    assert {seen[name] for name in processes.THREADS_OF} == {"2"}
    assert seen["A"] == "b"
    assert seen["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (1, "Traceback ...\nValueError: no\n\n", "The process of timing mlp failed: ValueError: no"),
        (1, "", "it said nothing"),
        (-9, "", "was killed by signal 9, perhaps for lack of memory. Try fewer --contestants"),
    ],
)
def test_a_process_that_fails_is_told(
    status: int, said: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], status, "", said)
    monkeypatch.setattr(processes.subprocess, "run", lambda *command, **other: done)
    with pytest.raises(ValueError, match=told):
        processes.alone({"kind": "timing", "network": "mlp", "threads": 1})
