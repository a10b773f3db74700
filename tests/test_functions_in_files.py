"""Promise: a function that a file names is called only if the command line names it, too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tekfac.cli.main import main
from tekfac.lab.checked_json import checked, unchecked
from tekfac.lab.grids import Sweep

MINE = """
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""

STRANGE = "subprocess:getoutput"
QUICK = ["--quiet", "--epochs", "1", "--train-samples", "20", "--test-samples", "10", "--threads", "1"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(MINE)
    return tmp_path


def command_of(mark: str) -> dict[str, Any]:
    """Model options with which the strange function would leave a file."""
    return {"cmd": f"touch {mark}"}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert "subprocess:getoutput" in told.replace("\n", "")
    assert not Path("mark").exists()


def edited(path: Path, **changes: Any) -> None:
    """A file of a run or a sweep, as somebody has changed it who knows of checksums."""
    plain = json.loads(path.read_text())
    plain.get("config", plain).update(changes)
    path.write_text(json.dumps(checked(unchecked(plain)) if "config" in plain else plain))


def test_a_config_is_refused_whatever_its_form(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(f'model = "{STRANGE}"\n[model_options]\ncmd = "touch mark"\n')
    refused(["train", "--config", "run.toml", *QUICK], capsys)
    Path("run.json").write_text(json.dumps({"model": STRANGE, "model_options": command_of("mark")}))
    refused(["train", "--config", "run.json", *QUICK], capsys)
    Path("sweep.toml").write_text(
        f'[base]\nmodel = "{STRANGE}"\nmodel_options = {{ cmd = "touch mark" }}\n[[grid]]\nlr = [0.1]\n'
    )
    refused(["sweep", "--config", "sweep.toml", "--quiet", "--out", "s"], capsys)
    Path("grid.toml").write_text(f'[[grid]]\nlr = [0.1]\nmodel = ["cnn", "{STRANGE}"]\n')
    refused(["sweep", "--config", "grid.toml", "--quiet", "--out", "s"], capsys)


def test_a_run_that_is_resumed_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--optimizer", "sgd", "--out", "run", *QUICK]) == 0
    edited(Path("run/run.json"), model=STRANGE, model_options=command_of("mark"))
    (Path("run") / "result.json").unlink()
    refused(["train", "--resume", "run", "--quiet"], capsys)


def test_a_sweep_that_is_compared_is(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweep.toml").write_text(
        "[base]\nepochs = 1\ntrain_samples = 20\nheld_back = 10\noptimizer = 'sgd'\n[[grid]]\nlr = [0.1]\n"
    )
    assert main(["sweep", "--config", "sweep.toml", "--quiet", "--out", "s", "--jobs", "1"]) == 0
    base = Path("s/base.json").read_text()
    edited(Path("s/base.json"), model=STRANGE, model_options=command_of("mark"))
    refused(["compare", "--tuned", "s", "--quiet", "--optimizers", "sgd"], capsys)
    Path("s/base.json").write_text(base)
    trials = Path("s/trials.json")
    plain = json.loads(trials.read_text())
    plain[0]["point"]["model"] = STRANGE
    trials.write_text(json.dumps(plain))
    refused(["compare", "--tuned", "s", "--quiet", "--optimizers", "sgd"], capsys)


def test_one_that_is_named_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text('model = "nets.py:net"\noptimizer = "sgd"\n')
    assert main(["train", "--config", "run.toml", "--out", "run", *QUICK]) == 1
    assert "--model nets.py:net" in capsys.readouterr().err.replace("\n", "")
    assert main(["train", "--config", "run.toml", "--out", "run", "--model", "nets.py:net", *QUICK]) == 0
    assert (Path("run") / "result.json").exists()


def test_an_image_folder_with_postscript_in_it_starts_no_other_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(command))
    monkeypatch.setattr("subprocess.Popen", lambda *args, **more: pytest.fail(str(args)))
    for name in ("a", "b"):
        (Path("images") / name).mkdir(parents=True)
        for number in range(6):
            text = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
            (Path("images") / name / f"{number}.png").write_text(text)
    assert main(["train", "--data", "folder", "--data-dir", "images", "--quiet"]) == 1
    told = capsys.readouterr().err.replace("\n", " ")
    assert "Cannot read" in told
    assert "0.png" in told


def test_a_study_that_was_edited_is() -> None:
    plan = Sweep.from_plain({"grid": {"model": ["cnn", "mlp"], "lr": [0.1, 0.3]}}, "a test")
    for point in plan.points:
        plan.require_own(dict(point))
    with pytest.raises(ValueError, match="settings that are none of the sweep"):
        plan.require_own({**plan.points[0], "model": STRANGE})
    searched = Sweep.from_plain({"search": {"trials": 2, "space": {"lr": {"low": 0.1, "high": 1.0}}}}, "a test")
    searched.require_own({"lr": 0.5})
    for point in ({"lr": 2.0}, {"lr": 0.5, "model": STRANGE}):
        with pytest.raises(ValueError, match="settings that are none of the sweep"):
            searched.require_own(point)
