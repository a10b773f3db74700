"""A run of the lab: logged, rerun from its own file, resumed bit by bit, also in the middle of an epoch."""

from __future__ import annotations

import csv
import json
import math
import os
import pickle
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab_data import draw
from tekfac.lab import training
from tekfac.lab.config import RunConfig
from tekfac.lab.counting import PARTS
from tekfac.lab.interruption import Interrupted, Interruption
from tekfac.lab.optimizers import FACTORIES, NATURAL
from tekfac.lab.run_folder import RunFolder, read_plain
from tekfac.lab.run_log import Epoch
from tekfac.lab.training import Progress, learning_rate_factor, train

TINY = RunConfig(
    model="mlp", model_options={"width": 16}, train_samples=300, test_samples=100, epochs=3, batch_size=64
)
SETTINGS = {"adam": {"lr": 1e-3}, "sgdm": {"lr": 0.1}, "sgd": {"lr": 0.1}, "adamw": {"lr": 1e-3}}


def config_of(optimizer: str, **changes: Any) -> RunConfig:
    clocks = {"factors_every": 4, "basis_every": 4, "interval_growth": None}
    natural: dict[str, Any] = {"lr": 1e-2, "options": {"damping": 1e-3, **clocks}}
    return replace(TINY, optimizer=optimizer, threads=1, **{**SETTINGS.get(optimizer, natural), **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)  # type: ignore[no-any-return]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """What the logs say, but for times."""
    timed = ("seconds", "data", "forward", "backward", "curvature", "update")
    run = RunFolder(folder)
    rows = [line.plain() for line in (*run.epochs(), *run.layers())]
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]


def assert_equal_runs(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert torch.equal(values, second[name]), name
    assert numbers(one) == numbers(other)


def interrupted_at(step: int) -> Any:
    """A watcher that lets SIGTERM come after a step."""

    def watch(at: Progress) -> None:
        if at.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return watch


@pytest.fixture(autouse=True)
def _every_step_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is told at most a few times a second; here it is told after every step."""
    monkeypatch.setattr("tekfac.lab.training.WATCH_SECONDS", 0.0)


@pytest.mark.parametrize("optimizer", FACTORIES)
def test_a_run_leaves_everything_about_it_in_its_folder(optimizer: str, tmp_path: Path) -> None:
    result = train(config_of(optimizer), tmp_path / "run", command="tekfac train ...")
    run = RunFolder(tmp_path / "run")
    saved = json.loads((run.path / "run.json").read_text())
    assert RunConfig.from_plain(saved["config"]) == config_of(optimizer)
    assert saved["provenance"]["command"] == "tekfac train ..."
    assert set(saved["provenance"]) >= {"commit", "machine", "threads", "device", "versions", "date"}
    assert set(saved["provenance"]["versions"]) == {"python", "torch", "tekfac"}
    rows = [epoch.plain() for epoch in run.epochs()]
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 5), (2, 10), (3, 15)]
    assert all(0 <= row["test_accuracy"] <= 1 and math.isfinite(row["train_loss"]) for row in rows)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    parts = sum(rows[-1][part] for part in ("data", "forward", "backward", "curvature", "update"))
    assert rows[-1]["seconds"] == pytest.approx(parts)
    assert (rows[-1]["curvature"] > 0) == (optimizer in NATURAL)
    with (run.path / "epochs.csv").open() as file:
        assert [row["test_accuracy"] for row in csv.DictReader(file)] == [
            str(row["test_accuracy"]) for row in rows
        ]
    assert result == run.result()
    assert result["status"] == "finished"
    assert result["test_accuracy"] == rows[-1]["test_accuracy"]
    assert result["best_test_accuracy"] == max(row["test_accuracy"] for row in rows)
    assert not (run.path / "checkpoint.pt").exists()


def test_the_layers_of_natural_gradients_are_logged(tmp_path: Path) -> None:
    train(config_of("tekfac"), tmp_path)
    rows = RunFolder(tmp_path).layers()
    assert [row.layer for row in rows] == ["1", "3", "5"] * 3
    assert [row.staleness for row in rows[::3]] == [
        0,
        1,
        2,
    ]  # refreshed at steps 0, 4, 8, 12, ...; 5, 10, 15 done
    assert all(row.trace > 0 and row.damping > 0 and row.condition > 1 for row in rows)


def test_a_run_can_be_run_again_from_its_own_file(tmp_path: Path) -> None:
    train(config_of("ekfac", seed=3), tmp_path / "first")
    again = RunConfig.from_plain(read_plain(tmp_path / "first" / "run.json"))
    train(again, tmp_path / "second")
    assert_equal_runs(tmp_path / "first", tmp_path / "second")


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    train(config_of("sgdm", seed=0), tmp_path / "first")
    train(config_of("sgdm", seed=1), tmp_path / "second")
    assert not torch.equal(weights(tmp_path / "first")["1.weight"], weights(tmp_path / "second")["1.weight"])


@pytest.mark.parametrize("optimizer", ["sgdm", "adam", *NATURAL])
@pytest.mark.parametrize("step", [2, 5, 8])
def test_an_interrupted_run_goes_on_bit_by_bit(optimizer: str, step: int, tmp_path: Path) -> None:
    config = config_of(optimizer, schedule="cosine")
    train(config, tmp_path / "whole")
    with pytest.raises(Interrupted, match=f"saved at step {step}") as caught:
        train(config, tmp_path / "cut", watch=interrupted_at(step))
    assert caught.value.status == 128 + signal.SIGTERM
    assert RunFolder(tmp_path / "cut").result() is None
    train(config, tmp_path / "cut", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_dropout_goes_on_bit_by_bit_too(tmp_path: Path) -> None:
    file = tmp_path / "nets.py"
    file.write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(), nn.Linear(32, 10))\n"
    )
    config = config_of("sgdm", model=f"{file}:make", model_options={})
    train(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", watch=interrupted_at(7))
    torch.manual_seed(99)
    train(config, tmp_path / "cut", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_what_was_logged_after_the_last_checkpoint_is_not_logged_twice(tmp_path: Path) -> None:
    """As after a crash: the checkpoint is of step 7, the logs of epochs 2 and 3 have been written."""
    config = config_of("tkfac")
    train(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", watch=interrupted_at(7))
    for log in ("epochs.jsonl", "curvature.jsonl"):
        with (tmp_path / "cut" / log).open("ab") as file:
            file.write((tmp_path / "whole" / log).read_bytes() + b'{"half a li')
    train(config, tmp_path / "cut", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_a_run_that_crashed_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    class CrashError(RuntimeError):
        pass

    def crash(at: Progress) -> None:
        if at.step == 7:
            raise CrashError

    train(config_of("sgdm"), tmp_path / "whole")
    with pytest.raises(CrashError):
        train(config_of("sgdm"), tmp_path / "cut", watch=crash)
    train(config_of("sgdm"), tmp_path / "cut", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_batches_prepared_by_workers_make_no_difference(tmp_path: Path) -> None:
    train(config_of("sgdm", augment=True), tmp_path / "none")
    train(config_of("sgdm", augment=True, workers=3), tmp_path / "three")
    assert_equal_runs(tmp_path / "none", tmp_path / "three")


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = train(config_of("sgdm"), tmp_path)
    written = (tmp_path / "model.pt").stat().st_mtime_ns
    assert train(config_of("sgdm"), tmp_path, resume=True) == first
    assert (tmp_path / "model.pt").stat().st_mtime_ns == written


def test_a_folder_with_another_run_is_left_alone(tmp_path: Path) -> None:
    train(config_of("sgdm"), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"another config \(lr 0.1 -> 0.2\)"):
        train(config_of("sgdm", lr=0.2), tmp_path, resume=True)
    with pytest.raises(ValueError, match="already holds this run"):
        train(config_of("sgdm"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_run_on_other_images_is_not_taken_for_the_same(tmp_path: Path) -> None:
    for folder, brightness in (("one", 10), ("other", 200)):
        for label, name in enumerate(("a", "b")):
            for number in range(10):
                draw(tmp_path / folder / name / f"{number}.png", brightness + 20 * label + number, size=(8, 8))
    config = config_of(
        "sgdm", data="folder", data_dir=str(tmp_path / "one"), train_samples=None, test_samples=None
    )
    train(config, tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run with other images"):
        train(replace(config, data_dir=str(tmp_path / "other")), tmp_path / "run", resume=True)
    train(config, tmp_path / "run", resume=True)


def test_a_run_of_another_source_is_not_taken_for_the_same(tmp_path: Path) -> None:
    file = tmp_path / "other_nets.py"
    file.write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    config = config_of("sgdm", model=f"{file}:make", model_options={})
    train(config, tmp_path / "run")
    file.write_text(file.read_text() + "# another one\n")
    with pytest.raises(ValueError, match="other source code of the model"):
        train(config, tmp_path / "run", resume=True)


def test_a_run_goes_on_with_as_many_threads_as_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted):
        train(config_of("sgdm"), tmp_path, watch=interrupted_at(3))
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    train(replace(config_of("sgdm"), threads=2), tmp_path, resume=True)
    assert used == [1]


def test_a_run_goes_on_with_the_threads_that_torch_had_chosen(tmp_path: Path) -> None:
    config, threads = replace(config_of("sgdm"), threads=None), torch.get_num_threads()
    with pytest.raises(Interrupted):
        train(config, tmp_path, watch=interrupted_at(3))
    torch.set_num_threads(threads + 1)
    try:
        train(config, tmp_path, resume=True)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)
    assert read_plain(tmp_path)["threads"] == threads


@pytest.mark.parametrize(
    "wrong",
    [{"model": "mpl"}, {"model_options": {"bogus": 1}}, {"options": {"bogus": 1}}, {"device": "abacus"}],
)
def test_a_run_that_could_not_begin_is_not_in_the_way(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        train(config_of("tekfac", **wrong), tmp_path)
    assert train(config_of("tekfac"), tmp_path)["status"] == "finished"


def test_a_run_that_got_nowhere_may_begin_anew_with_other_settings(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        train(config_of("sgdm"), tmp_path, watch=broken)
    assert (tmp_path / "run.json").exists()
    assert train(config_of("sgdm", lr=0.2), tmp_path)["status"] == "finished"
    assert read_plain(tmp_path)["lr"] == 0.2


def broken(at: Progress) -> None:
    raise RuntimeError("broken")


def test_a_log_that_has_lost_lines_is_told_and_no_checkpoint_is_lost(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(config_of("sgdm"), tmp_path, watch=interrupted_at(8))
    log = tmp_path / "epochs.jsonl"
    log.write_bytes(log.read_bytes()[:-10])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"jsonl' is shorter than .* Remove checkpoint.pt to begin anew"):
            train(config_of("sgdm"), tmp_path, resume=True)
    assert (tmp_path / "checkpoint.pt").exists()


def test_a_signal_in_the_last_evaluation_ends_what_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = training.evaluate

    def signalled(*arguments: Any) -> Any:
        if len(RunFolder(tmp_path).epochs()) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)

    monkeypatch.setattr(training, "evaluate", signalled)
    with Interruption() as interruption:
        assert train(config_of("sgdm"), tmp_path)["status"] == "finished"
        assert interruption.number == signal.SIGTERM
        interruption.number = None


def test_settings_given_as_tuples_are_those_of_the_file(tmp_path: Path) -> None:
    config = config_of("adam", options={"betas": (0.8, 0.99)})
    with pytest.raises(Interrupted):
        train(config, tmp_path, watch=interrupted_at(3))
    assert train(config, tmp_path, resume=True)["status"] == "finished"


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt.123.unfinished").write_bytes(b"half")
    train(config_of("sgdm"), tmp_path)
    assert not list(tmp_path.glob("*.unfinished"))


def test_an_interruption_can_be_sent_to_another_process() -> None:
    sent = pickle.loads(pickle.dumps(Interrupted("stopped and saved", signal.SIGTERM)))
    assert (str(sent), sent.status) == ("stopped and saved", 143)


def test_a_log_that_cannot_be_written_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    epoch = Epoch(1, 5, 2.0, 0.5, 2.0, 0.5, 0.1, 1.0, dict.fromkeys(PARTS, 0.2), 0)
    run.log(epoch, [])
    before = (tmp_path / "epochs.jsonl").read_bytes()
    monkeypatch.setattr(json, "dumps", lambda *arguments, **settings: "x" * 10**6)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match=r"earlier lines are untouched.*goes on from its last checkpoint"):
            run.log(replace(epoch, epoch=2), [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (tmp_path / "epochs.jsonl").read_bytes() == before


def test_two_processes_cannot_work_in_one_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked(), pytest.raises(ValueError, match="Another process is at work"):
        train(config_of("sgdm"), tmp_path)


def test_a_damaged_checkpoint_is_named_and_kept(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(config_of("sgdm"), tmp_path, watch=interrupted_at(3))
    (tmp_path / "checkpoint.pt").write_bytes(b"half a fil")
    with pytest.raises(
        ValueError, match=r"Cannot read '.*checkpoint.pt': it has no checksum.*Remove checkpoint.pt to begin"
    ):
        train(config_of("sgdm"), tmp_path, resume=True)
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"half a fil"


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("tekfac")
    train(config, tmp_path / "whole")
    save, calls = torch.save, []
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(value: Any, file: Any) -> None:
        calls.append(file)
        if len(calls) == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        save(value, file)

    monkeypatch.setattr(torch, "save", full)
    try:
        with pytest.raises(OSError, match=r"checkpoint.pt': File too large; the earlier one is untouched"):
            train(config, tmp_path / "cut", checkpoint_seconds=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list((tmp_path / "cut").glob("*.unfinished"))
    monkeypatch.undo()
    assert torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["batch"] == 3
    train(config, tmp_path / "cut", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("optimizer", ["sgdm", "tekfac"])
def test_a_run_that_diverges_ends_as_such(optimizer: str, tmp_path: Path) -> None:
    options = {} if optimizer == "sgdm" else {"factors_every": 100, "basis_every": 100}
    result = train(config_of(optimizer, lr=1e30, options=options), tmp_path)
    assert result["status"] == "diverged"
    assert result["train_loss"] is None or result["test_loss"] is None
    written = json.loads((tmp_path / "result.json").read_text())
    assert {key: written[key] for key in result} == result == RunFolder(tmp_path).result()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0] * 6),
        ("step", [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]),
        ("cosine", [0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(6)]),
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule: Any, expected: list[float]) -> None:
    config = replace(TINY, schedule=schedule, decay_every=1)
    assert [learning_rate_factor(config, step // 2, step, 6) for step in range(6)] == pytest.approx(expected)


def test_what_the_library_has_to_say_goes_to_the_run(tmp_path: Path) -> None:
    train(config_of("tekfac", lr=1e30, options={}), tmp_path)
    assert "not finite" in (tmp_path / "messages.log").read_text()


@pytest.mark.parametrize("stopped_at", [None, 8])
def test_tensorboard_gets_the_same_numbers(tmp_path: Path, stopped_at: int | None) -> None:
    if stopped_at is not None:
        with pytest.raises(Interrupted):
            train(config_of("tekfac"), tmp_path, tensorboard=True, watch=interrupted_at(stopped_at))
    train(config_of("tekfac"), tmp_path, tensorboard=True, resume=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rows = [epoch.plain() for epoch in RunFolder(tmp_path).epochs()]
    for key in ("train_loss", "test_accuracy", "lr", "curvature"):
        read = [(event.step, event.value) for event in events.Scalars(f"run/{key}")]
        assert read == [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows]
    assert [event.value for event in events.Scalars("staleness/3")] == [0, 1, 2]
