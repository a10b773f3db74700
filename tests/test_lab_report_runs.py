"""Promise: run folders are found and read, those that were killed too; what is damaged is named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lab_runs import write_run
from tekfac.lab import checkpoints, run_folder
from tekfac.lab.report.runs import find_runs, read_run


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(
        write_run(tmp_path / "run", [0.5, 0.75], losses=[1.0, 0.5], per_epoch=2.0, layers=("conv1",), seed=3)
    )
    assert (run.seed, run.optimizer, run.status) == (3, "sgdm", "finished")
    assert run.provenance["versions"]["tekfac"] == "0.3.0"
    last = run.epochs[-1]
    assert (last.epoch, last.step, last.test_accuracy, last.train_loss, last.seconds) == (2, 20, 0.75, 0.5, 4.0)
    assert last.parts == pytest.approx(
        {"data": 0.4, "forward": 0.8, "backward": 1.2, "curvature": 0.6, "update": 0.6}
    )
    assert [row.layer for row in run.layers] == ["conv1", "conv1"]
    assert math.isnan(run.layers[0].condition)


def test_only_the_run_folder_knows_its_files() -> None:
    lab = Path(run_folder.__file__).parent

    def knowing(*names: str) -> set[str]:
        return {path.stem for path in lab.rglob("*.py") if any(name in path.read_text() for name in names)}

    assert knowing(run_folder.RESULT, run_folder.MODEL, *run_folder.LOGS) == {"run_folder"}
    assert knowing(checkpoints.NEWEST, checkpoints.PREVIOUS) == {"checkpoints", "run_folder"}


def test_runs_are_found_anywhere_below_each_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b", "a/deep/er", "a/first"):
        write_run(tmp_path / name, [0.5])
    found = find_runs([tmp_path / "b", tmp_path, tmp_path / "a"])
    assert [run.path.relative_to(tmp_path).as_posix() for run in found] == ["a/deep/er", "a/first", "b"]


def test_a_run_without_a_result_is_unfinished(tmp_path: Path) -> None:
    assert read_run(write_run(tmp_path / "run", [0.5], status=None)).status == "unfinished"
    folder = write_run(tmp_path / "started", [], status=None)
    (folder / "epochs.jsonl").unlink()
    assert read_run(folder).epochs == ()


@pytest.mark.parametrize("cut", [b'{"epoch": 3, "st', b'{"layer": "\xc3', b"12"])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path, cut: bytes) -> None:
    file = write_run(tmp_path / "run", [0.5, 0.6]) / "epochs.jsonl"
    file.write_bytes(file.read_bytes() + cut)
    assert [row.epoch for row in read_run(file.parent).epochs] == [1, 2]


def test_losses_that_are_null_are_not_numbers(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [0.1], losses=[None], status="diverged"))
    assert math.isnan(run.epochs[0].train_loss)
    assert run.status == "diverged"


def _change_line(path: Path, number: int, text: str) -> None:
    lines = path.read_text().splitlines()
    lines[number - 1] = text
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ("[1]", "line 2: not an object"),
        ('{"epoch": 2}', "line 2: no 'step'"),
        ('{"epoch": 2, "step": "many"}', "line 2: 'step' is 'many', expected a number"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = write_run(tmp_path / "run", [0.5, 0.6, 0.7]) / "epochs.jsonl"
    _change_line(file, 2, line)
    with pytest.raises(ValueError, match=f"epochs.jsonl' is damaged in {said}"):
        find_runs([tmp_path])


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("run.json", "{", "Cannot read .*run.json"),
        ("run.json", "[]", "format 'list', expected 2"),
        ("run.json", '{"format": 3}', "format 3, expected 2"),
        ("run.json", '{"format": 2, "config": {"data": "d"}}', "has no checksums"),
        ("run.json", '{"format": 1, "config": {"data": "d"}}', "has no 'model'"),
        ("result.json", '{"status": "great"}', "status 'great', expected 'finished' or 'diverged'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, text: str, said: str) -> None:
    (write_run(tmp_path / "run", [0.5]) / file).write_text(text)
    with pytest.raises(ValueError, match=said):
        find_runs([tmp_path])


def test_a_folder_without_runs_and_no_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No run in .*no run\.json"):
        find_runs([tmp_path])
    with pytest.raises(ValueError, match="There is no folder"):
        find_runs([tmp_path / "nowhere"])
