"""Killed without warning and resumed: weights and tables are those of runs that were left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tekfac.lab.run_folder import RunFolder

pytestmark = pytest.mark.slow  # every test is several processes

TASK = [
    "--model",
    "mlp",
    "--model-option",
    "width=16",
    "--train-samples",
    "640",
    "--test-samples",
    "200",
    "--batch-size",
    "32",
]


def tekfac(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tekfac", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )


def hear_interrupts() -> None:
    """As in a terminal; what a shell starts in the background ignores them, and so does what that starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(*arguments: str, folder: Path) -> str:
    process = tekfac(*arguments, folder=folder)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)  # type: ignore[no-any-return]


def assert_equal_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def accuracies(folder: Path) -> list[float]:
    return [json.loads(line)["test_accuracy"] for line in (folder / "epochs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("number", "seconds"),
    [(signal.SIGKILL, "0"), (signal.SIGKILL, "0.3"), (signal.SIGTERM, "0"), (signal.SIGINT, "0")],
)
def test_training_goes_on_after_a_signal(tmp_path: Path, number: signal.Signals, seconds: str) -> None:
    train = ["train", *TASK, "--optimizer", "tekfac", "--epochs", "20", "--checkpoint-every", seconds]
    run(*train, "--out", "whole", folder=tmp_path)
    process = tekfac(*train, "--out", "cut", folder=tmp_path)
    log, saved = tmp_path / "cut" / "epochs.jsonl", tmp_path / "cut" / "checkpoint.pt"
    wait_for(lambda: saved.exists() and log.exists() and len(log.read_bytes().splitlines()) >= 3, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert "stopped and saved at step" in err
        assert "--resume cut" in err
        assert "Traceback" not in err
    assert saved.exists()
    assert not (tmp_path / "cut" / "result.json").exists()
    run("train", "--resume", "cut", folder=tmp_path)
    assert_equal_weights(tmp_path / "whole", tmp_path / "cut")
    assert accuracies(tmp_path / "whole") == accuracies(tmp_path / "cut")


SWEEP = """
name = "learning rates"
seeds = [0, 1]
[base]
model = "mlp"
model_options = { width = 16 }
train_samples = 640
held_back = 200
batch_size = 32
epochs = 12
[[grid]]
optimizer = "sgdm"
lr = [0.03, 0.3]
[[grid]]
optimizer = "ekfac"
lr = [0.003, 0.03]
"options.kl_clip" = 0.001
"options.momentum_at" = "after"
"""


def finished(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("runs/*/result.json"))


def test_a_sweep_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(SWEEP)
    sweep = ["sweep", "--config", "my.toml", "--jobs", "2", "--checkpoint-every", "0"]
    run(*sweep, "--out", "whole", folder=tmp_path)
    process = tekfac(*sweep, "--out", "cut", folder=tmp_path)
    wait_for(lambda: len(finished(tmp_path / "cut")) >= 3, process)
    process.kill()
    process.communicate()
    wait_for_silence(tmp_path / "cut")
    done = {path: (path / "result.json").stat().st_mtime_ns for path in finished(tmp_path / "cut")}
    assert 3 <= len(done) < 8
    table = run(*sweep, "--out", "cut", folder=tmp_path)
    assert {path: (path / "result.json").stat().st_mtime_ns for path in done} == done
    assert len(finished(tmp_path / "cut")) == 8
    for path in finished(tmp_path / "whole"):
        assert_equal_weights(path, tmp_path / "cut" / "runs" / path.name)
    trials = [json.loads((tmp_path / name / "trials.json").read_text()) for name in ("whole", "cut")]
    assert trials[0] == trials[1]
    assert len(trials[0]) == 4
    assert table.count("kl_clip") == 2


def wait_for_silence(folder: Path) -> None:
    """Processes whose parent was killed end by themselves, and let go of their locks."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            for path in folder.glob("runs/*"):
                with RunFolder(path).locked():
                    pass
        except ValueError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("orphaned processes go on training")
