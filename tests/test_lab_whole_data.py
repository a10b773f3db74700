"""`tekfac reproduce whole-data`: judged steps against tuned Adam, by the training loss on all data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tekfac.cli.main import main
from tekfac.lab.contest import rates, whole_data
from tekfac.lab.contest.running import Entry, Job, Outcome, run
from tekfac.lab.contest.standing import Standing
from tekfac.lab.contest.whole_data import OURS, page, train_on_all
from tekfac.lab.contest.whole_tasks import WHOLE


@pytest.mark.parametrize("task", WHOLE)
def test_a_few_judged_steps_are_further_than_adams(task: str) -> None:
    threads = torch.get_num_threads()
    ours = run(Job(task, OURS["TEKFAC"], 0, 8))
    adams = run(Job(task, Entry("adamw", 1e-2, {"weight_decay": 0.0}), 0, 8))
    torch.set_num_threads(threads)
    assert ours.scores[0][2] == pytest.approx(adams.scores[0][2])
    scores = [score for _, _, score in ours.scores]
    assert scores == sorted(scores, reverse=True)
    assert ours.final < 0.9 * adams.final


def test_every_step_sees_all_data() -> None:
    training = WHOLE["function"].prepare(0, None)
    assert all(a is b for a, b in zip(training.batch(0), training.batch(7), strict=True))
    assert len(training.batch(0)[0]) == 1000


def test_the_page_has_shares_of_adams_steps_and_seconds() -> None:
    runs = {
        "Adam": [Outcome([(0, 0.0, 8.0), (100, 1.0, 4.0)], 4.0)],
        "TEKFAC": [Outcome([(0, 0.0, 8.0), (10, 0.4, 4.0), (20, 0.8, 2.0)], 2.0)],
    }
    chosen = {"Adam": Entry("adamw", 1e-2), "TEKFAC": OURS["TEKFAC"]}
    standing = Standing(WHOLE["function"], 100, {}, chosen, runs, measured_by="Adam")
    text = page({"function": standing})
    assert "| Adam | `adamw, lr=0.01` | 100 | 4 | 1.00 | 1.00 | 10 |" in text
    assert "| 20 | 2 | 0.10 | 0.40 | 40 |" in text


@pytest.mark.slow
def test_it_writes_a_page_a_figure_and_all_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, steps in (("STEPS", 3), ("FEW_STEPS", 2)):
        monkeypatch.setattr(whole_data, name, steps)
    monkeypatch.setattr(rates, "TRIALS", 3)
    monkeypatch.setattr(rates, "MOST_TRIALS", 3)
    monkeypatch.setattr(whole_data, "WHOLE", {"function": WHOLE["function"]})
    text = train_on_all([0], 2, tmp_path, "the command", lambda _: None)
    assert (tmp_path / "whole-data.md").read_text() == text
    assert (tmp_path / "whole-data.png").stat().st_size
    tasks = json.loads((tmp_path / "whole-data.json").read_text())["tasks"]
    assert len(tasks["function"]["runs"]["KFAC"][0]["scores"]) == 3


def test_it_takes_no_task_and_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "whole-data", "--task", "gpt"]) == 1
    assert main(["reproduce", "whole-data", "--data-dir", "data"]) == 1
    assert "--data-dir has no place here" in capsys.readouterr().err
