"""Promise: optimizers compete on equal terms, and a page of an ablation has the numbers of its runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac.cli.main import main
from tekfac.lab.bench.contestants import Contestant
from tekfac.lab.contest import ablation, running, tasks
from tekfac.lab.contest.ablation import VARIANTS, Ablation, page
from tekfac.lab.contest.running import Entry, Job, Outcome, run
from tekfac.lab.contest.tasks import TASKS, Kept, Task, Training
from tekfac.lab.contest.text import standard_library, windows
from tekfac.lab.contest.unseen import UNSEEN
from tekfac.lab.contest.untuned import page as untuned_page
from tekfac.lab.contest.untuned import score_after
from tekfac.lab.contest.words import gap, spread
from training import mlp, vectors

SEEN: list[Tensor] = []
STARTS: list[list[Tensor]] = []


def tiny(seed: int, folder: Path | None) -> Training:
    model, data = mlp(seed=seed, dtype=torch.float32), vectors(5, seed=seed, dtype=torch.float32)
    STARTS.append([parameter.detach().clone() for parameter in model.parameters()])

    def batch(step: int) -> tuple[Tensor, Tensor]:
        SEEN.append(data[step % 5][0])
        return data[step % 5]

    def score(kept: Kept) -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(data[0][0]), data[0][1])) + (kept == "tuning")

    return Training(model, batch, F.cross_entropy, score)


def broken() -> Training:
    return tiny(0, None)._replace(score=lambda kept: math.nan)


@pytest.fixture(autouse=True)
def tiny_task(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    SEEN.clear()
    STARTS.clear()
    threads = torch.get_num_threads()
    known = {
        **TASKS,
        "tiny": Task("tiny", "a tiny network", 8, "loss", tiny),
        "broken": Task("broken", "one that diverges", 8, "loss", lambda *_: broken()),
    }
    for module in (running, ablation, tasks):
        monkeypatch.setattr(module, "TASKS", known)
    yield
    torch.set_num_threads(threads)


def test_all_optimizers_start_at_the_same_weights_and_see_the_same_batches() -> None:
    for name in ("adamw", "tekfac"):
        run(Job("tiny", Entry(name, 1e-2), 3, 8))
    assert all(torch.equal(a, b) for a, b in zip(*STARTS, strict=True))
    assert len(SEEN) == 16
    assert all(torch.equal(a, b) for a, b in zip(SEEN[:8], SEEN[8:], strict=True))


def test_a_run_is_scored_at_equal_distances_and_at_its_end() -> None:
    outcome = run(Job("tiny", Entry("tekfac", 1e-2), 3, 40))
    assert [steps for steps, _, _ in outcome.scores] == list(range(0, 41, 2))
    assert outcome.final == outcome.scores[-1][2]
    assert all(a[1] < b[1] for a, b in zip(outcome.scores, outcome.scores[1:], strict=False))
    tuned = run(Job("tiny", Entry("tekfac", 1e-2), 3, 40, kept="tuning"))
    assert tuned.final == pytest.approx(outcome.final + 1)


def test_a_run_that_diverges_has_no_number() -> None:
    outcome = run(Job("broken", Entry("sgd", 1e-3), 0, 4))
    assert outcome.final == math.inf


def test_the_learning_rate_rises_and_falls_as_the_task_says() -> None:
    task = TASKS["gpt"]
    shares = [task.share_of_lr(step, 100) for step in range(101)]
    assert shares[0] == pytest.approx(0.2 * (0.1 + 0.9))
    assert max(shares) == pytest.approx(shares[4], rel=0.01)
    assert shares[100] == pytest.approx(0.1)
    assert TASKS["resnet"].share_of_lr(474, 474) == pytest.approx(0.0)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "SOAP"])
def test_every_variant_has_settings_that_its_optimizer_takes(variant: str) -> None:
    entry = VARIANTS[variant]
    Contestant(entry.optimizer, options={"lr": entry.lr, **entry.options}).make(nn.Linear(3, 2))


def test_differences_are_those_of_equal_seeds() -> None:
    assert spread([1.0, 2.0, 3.0]) == "2 ± 1"
    assert spread([1.5]) == "1.5"
    assert gap([1.0, 2.0, 4.0], [0.5, 1.0, 2.5]) == "+1 ± 0.29"
    assert gap([1.0, 2.0], [1.0, 2.0]) == "–"
    outcomes = {
        "default": [Outcome([(1, 0.1, 2.0)], 1.0), Outcome([(1, 0.1, 3.0)], 1.5)],
        "AdamW": [Outcome([(1, 0.1, 2.5)], 1.0), Outcome([(1, 0.1, 3.5)], 1.5)],
    }
    text = page(Ablation("tiny", list(outcomes), [0, 1], 1, None), outcomes)
    assert "| AdamW | `adamw, lr=0.003` | 3 ± 0.71 | +0.5 ± 0 | 1.25 ± 0.35 | – |" in text


@pytest.mark.parametrize("name", ["table", "digits", pytest.param("bert", marks=pytest.mark.slow)])
def test_tasks_that_no_default_was_chosen_on_are_learnt_by_both_as_they_come(name: str) -> None:
    if name == "bert":
        pytest.importorskip("transformers")
    for optimizer in ("tekfac", "adamw"):
        outcome = run(Job(name, Entry(optimizer, None), 0, 40))
        assert outcome.final < 0.95 * outcome.scores[0][2]
    assert UNSEEN[name].share_of_lr(0, 40) == UNSEEN[name].share_of_lr(39, 40) == 1


def test_scores_are_compared_after_equal_seconds() -> None:
    slow = Outcome([(0, 0.0, 5.0), (10, 2.0, 3.0), (20, 4.0, 1.0)], 1.0)
    quick = Outcome([(0, 0.0, 5.0), (10, 1.5, 4.0), (20, 3.0, 2.5)], 1.0)
    assert score_after(slow, 3.0) == pytest.approx(2.0)
    assert score_after(slow, 5.0) == 1.0
    assert score_after(slow, 0.0) == 5.0
    text = untuned_page({"table": {"TEKFAC": [slow], "AdamW": [quick]}})
    assert "| 20 | 2.5 | 1 | -1.5 | 2 | -0.5 | 1.333 |" in text


def test_averaged_weights_are_what_is_scored_with_statistics_of_their_own() -> None:
    """Schedule-free AdamW trains other weights than it would use; scoring leaves no trace in the norms."""

    class Averaging:
        used = 0

        def eval(self) -> None:
            Averaging.used += 1
            with torch.no_grad():
                model[0].weight.mul_(2)

        def train(self) -> None:
            with torch.no_grad():
                model[0].weight.div_(2)

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    data = vectors(20)
    training = Training(
        model, lambda step: (data[step][0][:, :3], data[step][1]), F.cross_entropy, lambda _: 0.0
    )
    model(training.batch(11)[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with running._as_used(Averaging(), training):  # type: ignore[arg-type]
        outputs = torch.cat([model[0](training.batch(step)[0]) for step in range(running.PASSES_FOR_NORMS)])
        assert torch.allclose(model[1].running_mean, outputs.mean(0))
    assert Averaging.used == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[1].momentum == 0.1


@pytest.mark.slow
def test_runs_are_kept_as_they_come_also_beside_one_that_fails() -> None:
    jobs = [Job("table", Entry("adamw", lr), 0, 2) for lr in (-1.0, 1e-3, 1e-2)]
    kept: list[Job] = []
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        running.run_all(jobs, 2, lambda _: None, lambda job, _: kept.append(job))
    assert sorted(kept, key=jobs.index) == jobs[1:]


@pytest.mark.slow
def test_the_command_writes_a_page_and_all_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the real text, in processes of their own, but a few steps."""
    wish = Ablation("classifier", ["default", "AdamW"], [0], 2, None)
    said: list[str] = []
    steps = ablation.STEPS
    ablation.STEPS = {"classifier": 2}
    try:
        text = ablation.ablate(wish, tmp_path, "the command", said.append)
    finally:
        ablation.STEPS = steps
    assert (tmp_path / "classifier.md").read_text() == text
    assert "- command: the command" in text
    assert len(said) == 2
    runs = json.loads((tmp_path / "classifier.json").read_text())["runs"]
    assert [len(runs[name][0]["scores"]) for name in wish.variants] == [3, 3]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ablation"], "ablation needs --task NAME"),
        (["ablation", "--task", "gtp"], "Did you mean 'gpt'?"),
        (["ablation", "--task", "gpt", "--variants", "drawn label"], "Did you mean 'drawn labels'?"),
        (["ablation", "--task", "gpt", "--models", "vgg16"], "--models has no place here"),
        (["table-lr", "--task", "gpt"], "--task has no place here"),
        (["contest"], "contest needs --task NAME"),
        (["contest", "--task", "gpt", "--variants", "SOAP"], "--variants has no place here"),
        (["ablation", "--task", "gpt", "--entrants", "SOAP"], "--entrants has no place here"),
        (["untuned", "--task", "gpt"], "--task has no place here"),
        (["untuned", "--data-dir", "data"], "--data-dir has no place here"),
        (["table-lr", "--variants", "SOAP"], "it is for ablation"),
    ],
)
def test_bad_arguments_are_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *arguments]) == 1
    assert told in capsys.readouterr().err


def test_what_is_kept_back_of_the_text_is_not_trained_on() -> None:
    text = standard_library()
    for parts in zip(text.training, text.tuning, text.test, strict=True):
        whole = sum(map(len, parts))
        assert abs(len(parts[0]) - 0.9 * whole) <= 1
        assert all(abs(len(part) - 0.05 * whole) <= 1 for part in parts[1:])
    x, y = windows(text.training[0], 3, 10, torch.Generator().manual_seed(0))
    assert torch.equal(x[:, 1:], y[:, :-1])
