"""`torchrun -m tekfac train`: processes give what one of them gives alone, and one may die."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tekfac.cli.main import main

TASK = [
    *("--model", "mlp", "--model-option", "width=8", "--train-samples", "325", "--test-samples", "90"),
    *("--batch-size", "32", "--epochs", "2", "--seed", "0", "--lr", "0.05"),
]
OF_MODEL_IN_FILE = [word for word in TASK if word not in ("--model", "mlp", "--model-option", "width=8")]
CLOCKS = {"factors_every": 2, "basis_every": 2, "interval_growth": None}
NATURAL = {**CLOCKS, "rescaling": "measured", "power": 1, "damping": 0.1, "fisher": "exact"}
"""No root of moving second moments, which along directions that no input has is made of rounding; and nothing
that is measured depends on how many images a process has."""

KILLED = """
import os, signal
from pathlib import Path
from tekfac.curvature import network
from tekfac.lab.models import mlp

refreshed_by_all, calls = network.refreshed_by_all, []


def killed(*arguments):
    calls.append(1)
    mark = Path(os.environ["MARK"])
    if len(calls) == 6 and os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return refreshed_by_all(*arguments)


network.refreshed_by_all = killed


def make(channels, classes, size):
    return mlp(channels, classes, size, width=8)
"""


def options(settings: dict[str, object]) -> list[str]:
    return [word for name, value in settings.items() for word in ("--option", f"{name}={value}")]


def run(
    *arguments: str, folder: Path, processes: int = 1, restarts: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command, by one process or under torchrun."""
    command = [sys.executable, "-m"]
    if processes > 1:
        count = [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
        command += ["torch.distributed.run", "--standalone", *count, "-m"]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **environment}
    if sys.platform == "linux":
        own["GLOO_SOCKET_IFNAME"] = "lo"
    return subprocess.run(
        [*command, "tekfac", *arguments], cwd=folder, env=own, capture_output=True, text=True, timeout=300
    )


def train(*arguments: str, folder: Path, out: str, task: Sequence[str] = TASK, **more: Any) -> Path:
    done = run("train", *task, *arguments, "--out", out, folder=folder, **more)
    assert done.returncode == 0, done.stderr
    return folder / out


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "model.pt", weights_only=True)  # type: ignore[no-any-return]


def epochs(run: Path) -> list[dict[str, str]]:
    with (run / "epochs.csv").open() as file:
        return list(csv.DictReader(file))


def assert_same_run(one: Path, other: Path) -> None:
    """But for rounding, which differs where sums are put together from parts."""
    first, second = weights(one), weights(other)
    for name, own in first.items():
        torch.testing.assert_close(second[name], own, rtol=1e-3, atol=1e-5)
    for expected, found in zip(epochs(one), epochs(other), strict=True):
        for name in ("train_loss", "test_loss", "train_accuracy", "test_accuracy"):
            assert float(found[name]) == pytest.approx(float(expected[name]), rel=1e-4)


def test_two_processes_give_the_run_of_one(tmp_path: Path) -> None:
    """With batches that they can halve, and one at the end of every epoch that they cannot."""
    settings = options(NATURAL)
    one = train(*settings, folder=tmp_path, out="one")
    two = train(*settings, folder=tmp_path, out="two", processes=2)
    assert_same_run(one, two)
    assert json.loads((two / "run.json").read_text())["provenance"]["processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "processes"), [("adam", 2), ("tkfac", 3), ("sgdm", 4)])
def test_so_do_more_and_other_optimizers(optimizer: str, processes: int, tmp_path: Path) -> None:
    """The last batch has two images: fewer than some have processes."""
    settings = ["--optimizer", optimizer, "--train-samples", "322"]
    if optimizer == "tkfac":
        settings += options(NATURAL)
    one = train(*settings, folder=tmp_path, out="one")
    others = train(*settings, folder=tmp_path, out="others", processes=processes)
    assert_same_run(one, others)


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_refresh_costs_nothing_but_time(tmp_path: Path) -> None:
    """torchrun starts all of them again; the run ends, to the last bit, as one that nobody has disturbed."""
    (tmp_path / "killed.py").write_text(KILLED)
    never = tmp_path / "never"
    never.touch()
    own = ["--model", "killed:make", "--checkpoint-every", "0", *options(CLOCKS)]
    together = {"folder": tmp_path, "processes": 2, "task": OF_MODEL_IN_FILE}
    whole = train(*own, out="whole", MARK=str(never), **together)
    mark = tmp_path / "mark"
    cut = train(*own, out="cut", MARK=str(mark), restarts=1, **together)
    assert mark.exists()
    for name, expected in weights(whole).items():
        assert torch.equal(weights(cut)[name], expected)
    timeless = ("epoch", "step", "train_loss", "test_loss", "train_accuracy", "test_accuracy")
    for expected, found in zip(epochs(whole), epochs(cut), strict=True):
        assert [found[name] for name in timeless] == [expected[name] for name in timeless]


@pytest.mark.slow
def test_without_restarts_the_others_end_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    own = ["--model", "killed:make", "--checkpoint-every", "0", *options(CLOCKS)]
    mark, first = tmp_path / "mark", ["train", *OF_MODEL_IN_FILE, *own, "--out", "cut"]
    died = run(*first, folder=tmp_path, processes=2, MARK=str(mark))
    assert died.returncode != 0
    assert "cannot be reached by another process" in died.stderr
    words = ["train", "--resume", "cut", "--model", "killed:make"]
    alone = run(*words, folder=tmp_path, MARK=str(mark))
    assert alone.returncode == 1
    assert "a run of 2 processes" in alone.stderr
    resumed = run(*words, folder=tmp_path, processes=2, MARK=str(mark))
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.slow
def test_fisher_says_the_same_by_two_processes(tmp_path: Path) -> None:
    arguments = ["fisher", "--samples", "300", "--no-figures", "--quiet"]
    for out, processes in (("one", 1), ("two", 2)):
        done = run(*arguments, "--out", out, folder=tmp_path, processes=processes)
        assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / out / "comparison.json").read_text()) for out in ("one", "two"))
    for point, expected in one["points"].items():
        for row, found in zip(expected["rows"], two["points"][point]["rows"], strict=True):
            assert found["layer"] == row["layer"]
            assert found["error"] == pytest.approx(row["error"], rel=1e-8)


@pytest.mark.parametrize("command", ["compare", "bench", "sweep"])
def test_what_is_for_one_process_says_so(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([command]) == 1
    assert f"tekfac {command} was started 2 times" in capsys.readouterr().err


def test_an_environment_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main(["train"]) == 1
    assert "WORLD_SIZE is 'two'" in capsys.readouterr().err
