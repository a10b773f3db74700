"""Promise: a run goes on from what it wrote, as it wrote it, or says by name why not, and changes nothing."""

from __future__ import annotations

import json
import logging
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tekfac.cli.main import main
from tekfac.common.checksums import BLANK, LENGTH, seal
from tekfac.lab import sealed_files
from tekfac.lab.config import RunConfig
from tekfac.lab.run_folder import RunFolder, read_plain
from tekfac.lab.training import Progress, train

CONFIG = RunConfig(
    model="mlp",
    model_options={"width": 8},
    train_samples=200,
    test_samples=50,
    epochs=3,
    batch_size=50,
    optimizer="tekfac",
    threads=1,
    options={"interval_growth": None, "factors_every": 2, "basis_every": 2},
)
STEPS = 4
"""Of an epoch."""


class CrashError(RuntimeError):
    """What ends a run without a word."""


def crash_at(step: int) -> Callable[[Progress], None]:
    def watch(at: Progress) -> None:
        if at.step == step:
            raise CrashError

    return watch


@pytest.fixture(autouse=True)
def _every_step_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tekfac.lab.training.WATCH_SECONDS", 0.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders: a whole run, and one that crashed at step 10, with a checkpoint after every step."""
    folder = tmp_path_factory.mktemp("runs")
    train(CONFIG, folder / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tekfac.lab.training.WATCH_SECONDS", 0.0)
        with pytest.raises(CrashError):
            train(CONFIG, folder / "cut", checkpoint_seconds=0, watch=crash_at(10))
    return folder


@pytest.fixture
def cut(made: Path, tmp_path: Path) -> Path:
    """A copy of the one that crashed."""
    return Path(shutil.copytree(made / "cut", tmp_path / "cut"))


def contents(folder: Path) -> dict[str, bytes]:
    """All but messages and the lock."""
    names = ("messages.log", "lock")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in names}


def resume(folder: Path, config: RunConfig = CONFIG) -> None:
    train(config, folder, resume=True)


def assert_same_end(one: Path, other: Path) -> None:
    first, second = (torch.load(folder / "model.pt", weights_only=True) for folder in (one, other))
    assert all(torch.equal(values, second[name]) for name, values in first.items())
    timeless = [
        [(line.epoch, line.step, line.test_loss, line.train_loss) for line in RunFolder(folder).epochs()]
        for folder in (one, other)
    ]
    assert timeless[0] == timeless[1]


def assert_refused(folder: Path, said: str, config: RunConfig = CONFIG) -> None:
    before = contents(folder)
    with pytest.raises(ValueError, match=said):
        resume(folder, config)
    assert contents(folder) == before


def flip(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint, and give it the checksum that fits."""
    values = torch.load(path, weights_only=True)
    change(values)
    sealed_files.write(values, path)


def edit(path: Path, name: str, value: Any) -> None:
    """Change a setting in run.json, as by hand."""
    whole = json.loads(path.read_text())
    whole["config"][name] = value
    path.write_text(json.dumps(whole))


# -- a checkpoint that is not as it was written -------------------------------------------------------------


def test_any_single_bit_that_is_another_one_is_noticed(cut: Path) -> None:
    path = cut / "checkpoint.pt"
    size = 8 * path.stat().st_size
    places = sorted({*range(0, size, size // 150), size - 1, size - 8 * LENGTH, size - 8 * LENGTH - 20})
    for bit in places:
        flip(path, bit)
        with pytest.raises(ValueError, match=r"Cannot read '.*checkpoint\.pt': it"):
            sealed_files.read(path)
        flip(path, bit)
    assert sealed_files.read(path)["epoch"] == 2


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(cut: Path, made: Path) -> None:
    flip(cut / "checkpoint.pt", 4000)
    damaged = (cut / "checkpoint.pt").read_bytes()
    steps: list[int] = []
    train(CONFIG, cut, resume=True, watch=lambda at: steps.append(at.step))
    assert steps[0] == 9  # of step 10, which was lost, the one before is 8
    assert_same_end(made / "whole", cut)
    said = (cut / "messages.log").read_text()
    assert "checkpoint.pt': it is damaged" in said
    assert "goes on from checkpoint.previous.pt" in said
    assert damaged
    assert not list(cut.glob("checkpoint*"))


def test_the_damaged_one_is_kept_and_does_not_take_the_place_of_the_one_before(cut: Path) -> None:
    flip(cut / "checkpoint.pt", 4000)
    damaged, before = (cut / "checkpoint.pt").read_bytes(), (cut / "checkpoint.previous.pt").read_bytes()
    with pytest.raises(CrashError):
        train(CONFIG, cut, resume=True, watch=crash_at(10))
    assert (cut / "checkpoint.damaged.pt").read_bytes() == damaged
    assert (cut / "checkpoint.previous.pt").read_bytes() == before
    assert not (cut / "checkpoint.pt").exists()


def test_where_the_newest_is_gone_the_one_before_is_gone_on_from(cut: Path, made: Path) -> None:
    """As after a kill between the two names."""
    (cut / "checkpoint.pt").unlink()
    resume(cut)
    assert_same_end(made / "whole", cut)


def test_where_both_are_damaged_nothing_is_changed(cut: Path) -> None:
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        flip(cut / name, 4000)
    assert_refused(cut, "Remove checkpoint.pt and checkpoint.previous.pt to begin anew")


def test_a_checkpoint_without_a_checksum_is_refused(cut: Path) -> None:
    """As an earlier version wrote them."""
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        torch.save(torch.load(cut / name, weights_only=True), cut / name)
    assert_refused(cut, "has no checksum at its end. It is cut off, or of an earlier tekfac")


def test_the_weights_at_the_end_carry_a_checksum_too(made: Path, tmp_path: Path) -> None:
    path = shutil.copy(made / "whole" / "model.pt", tmp_path / "model.pt")
    assert sealed_files.read(path).keys() == torch.load(path, weights_only=True).keys()
    flip(path, 4000)
    with pytest.raises(ValueError, match=r"model\.pt' is damaged"):
        sealed_files.require_sealed(path)


# -- a checkpoint of something else -------------------------------------------------------------------------


def test_a_checkpoint_of_another_run_is_refused(cut: Path, tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        train(CONFIG, tmp_path / "other", checkpoint_seconds=0, watch=crash_at(10))
    shutil.copy(tmp_path / "other" / "checkpoint.pt", cut / "checkpoint.pt")
    assert_refused(cut, "is of another run than the run.json beside it")


def test_a_checkpoint_of_another_config_is_refused_by_what_differs(cut: Path, tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        train(replace(CONFIG, lr=0.5), tmp_path / "other", checkpoint_seconds=0, watch=crash_at(10))
    shutil.copy(tmp_path / "other" / "checkpoint.pt", cut / "checkpoint.pt")
    assert_refused(cut, r"is of a run with another config \(lr 0.5 -> 0.001\)")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.update(format=99), "has the format 99, expected 2"),
        (lambda state: state.update(config=None), "has the format"),
        (lambda state: state.update(logs={}), "does not tell how long the logs were"),
        (lambda state: state.update(logs={"epochs.jsonl": -1, "curvature.jsonl": 0}), "is shorter than"),
        (lambda state: state.update(epoch=10**6), "is of epoch 1000000"),
        (lambda state: state.update(epoch="a"), "does not fit its run"),
        (lambda state: state.pop("optimizer"), "does not fit its run"),
        (lambda state: state["model"].popitem(), "does not fit its run"),
        (lambda state: state.update(wide=torch.zeros(1).expand(10**9)), "larger than the file itself"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    cut: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    rewrite(cut / "checkpoint.pt", change)
    assert_refused(cut, said)


def test_a_checkpoint_that_unpacks_to_more_than_its_size_is_not_unpacked(cut: Path) -> None:
    plain, packed = cut / "checkpoint.pt", cut / "packed"
    torch.save({"wide": torch.zeros(10**7)}, plain)
    with zipfile.ZipFile(plain) as before, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as after:
        for name in before.namelist():
            after.writestr(name, before.read(name))
        after.comment = sealed_files.MARK + BLANK
    seal(packed, packed.stat().st_size - LENGTH)
    assert packed.stat().st_size < 100_000
    packed.replace(plain)
    assert_refused(cut, "it unpacks to more than its size")


def test_references_to_references_do_not_take_for_ever(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    sealed_files.write({"nested": nested}, tmp_path / "file")
    assert list(sealed_files.read(tmp_path / "file")) == ["nested"]


# -- what stands beside it ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.5), ("seed", 1), ("batch_size", 25), ("epochs", 5), ("threads", 2)]
)
def test_settings_that_were_edited_are_refused_by_name(cut: Path, name: str, value: Any) -> None:
    edit(cut / "run.json", name, value)
    assert_refused(cut, rf"run.json' was changed after it was written, in config\.{name}\. Put back")
    assert_refused(cut, rf"in config\.{name}\.", replace(CONFIG, **{name: value}))


def test_settings_that_are_edited_meanwhile_do_not_end_a_run(tmp_path: Path, made: Path) -> None:
    def meddle(at: Progress) -> None:
        if at.step == 5:
            edit(tmp_path / "run.json", "lr", 0.5)

    train(CONFIG, tmp_path, checkpoint_seconds=0, watch=meddle)
    assert_same_end(made / "whole", tmp_path)


def test_the_command_refuses_them_too(cut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(cut / "run.json", "lr", 0.5)
    before = contents(cut)
    assert main(["train", "--resume", str(cut)]) == 1
    assert "in config.lr." in capsys.readouterr().err
    assert contents(cut) == before
    with pytest.raises(ValueError, match=r"in config\.lr"):
        read_plain(cut)


def test_settings_edited_with_their_checksums_are_not_those_of_the_checkpoint(cut: Path) -> None:
    run = RunFolder(cut)
    number = run.number()
    RunFolder(cut).begin(replace(CONFIG, seed=7), run.identity(), run.provenance())
    assert RunFolder(cut).number() != number
    assert_refused(cut, r"another config \(seed 0 -> 7\)", replace(CONFIG, seed=7))


def test_a_log_that_was_changed_is_noticed_before_the_run_goes_on(cut: Path) -> None:
    for log in ("epochs.jsonl", "curvature.jsonl"):
        before = (cut / log).read_text()
        first, digit = before.index('"step": ') + 8, before[before.index('"step": ') + 8]
        (cut / log).write_text(before[:first] + ("5" if digit != "5" else "6") + before[first + 1 :])
        assert_refused(cut, f"{log}' is damaged in line 1: its checksum is not that of its values")
        (cut / log).write_text(before)


def test_logs_of_earlier_versions_are_read(cut: Path) -> None:
    log = cut / "epochs.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    kept = RunFolder(cut).epochs()
    for row in rows:
        del row["checksum"]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert RunFolder(cut).epochs() == kept
    rows[0]["checksam"] = "0"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="line 1: unknown 'checksam'"):
        RunFolder(cut).epochs()


def test_a_result_that_was_changed_is_noticed(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "whole", tmp_path / "run"))
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "test_accuracy": 1.0}))
    with pytest.raises(ValueError, match=r"result.json' was changed after it was written, in test_accuracy"):
        RunFolder(folder).result()


# -- without a checkpoint -----------------------------------------------------------------------------------


def test_logs_of_a_run_without_a_checkpoint_are_put_aside_not_removed(tmp_path: Path, made: Path) -> None:
    folder = tmp_path / "run"
    kept = []
    for _ in range(2):
        with pytest.raises(CrashError):
            train(CONFIG, folder, resume=True, watch=crash_at(2 * STEPS + 1))
        kept.append(contents(folder))
    resume(folder)
    assert_same_end(made / "whole", folder)
    for log in ("epochs", "curvature"):
        for number, before in enumerate(kept, start=1):
            assert (folder / f"{log}.earlier-{number}.jsonl").read_bytes() == before[f"{log}.jsonl"]
    assert "There is no checkpoint: the run begins anew" in (folder / "messages.log").read_text()


def test_the_command_says_that_a_run_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CrashError):
        train(CONFIG, tmp_path / "run", watch=crash_at(2 * STEPS + 1))
    assert main(["train", "--resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert "has no checkpoint: it begins anew, and its logs are kept" in " ".join(
        capsys.readouterr().err.split()
    )


def test_logs_without_a_run_are_put_aside_too(cut: Path) -> None:
    before = contents(cut)
    (cut / "run.json").unlink()
    with pytest.raises(ValueError, match="is of another run"):
        train(CONFIG, cut)
    for path in cut.glob("checkpoint*"):
        path.unlink()
    train(CONFIG, cut)
    assert (cut / "epochs.earlier-1.jsonl").read_bytes() == before["epochs.jsonl"]


def test_a_run_of_an_earlier_format_that_has_ended_is_read(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(made / "whole", tmp_path / "run"))
    whole = json.loads((folder / "run.json").read_text())
    earlier = {"format": 1, **{key: whole[key] for key in ("config", "identity", "provenance")}}
    (folder / "run.json").write_text(json.dumps(earlier))
    with caplog.at_level(logging.WARNING):
        assert RunFolder(folder).config() == CONFIG
    whole["format"] = 1
    whole["config"]["lr"] = 0.5
    (folder / "run.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=r"in format, config\.lr"):
        RunFolder(folder).config()
