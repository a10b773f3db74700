"""Promise: a file that cannot be read or written is told in one line: which, why, what to do."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from lab_runs import write_run
from tekfac.cli.main import main
from tekfac.common.files import read_json
from tekfac.lab import inputs
from tekfac.lab.config import RunConfig
from tekfac.lab.run_folder import RunFolder, read_plain
from tekfac.lab.sweeping import read_trials

DEEP = 100_000


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "[" * DEEP, r"a\.json' as JSON: it is nested too deep"),
        ("a.toml", "a = " + "[" * DEEP, r"a\.toml' as TOML: it is nested too deep"),
        ("a.json", "9" * 5000, r"a\.json' as JSON: Exceeds the limit"),
        ("a.toml", f"lr = {'9' * 5000}", r"a\.toml' as TOML: Exceeds the limit"),
        ("a.json", '{"lr": 0.1, "lr": 0.2}', r"a\.json' as JSON: it has 'lr' twice"),
        ("a.json", "\x00", r"a\.json' as JSON: Expecting value"),
        ("a.toml", "lr = 0.1\nlr = 0.2", r"a\.toml' as TOML: Cannot overwrite a value"),
        ("a.toml", 'data = "\\ud800"', r"a\.toml' as TOML: "),
    ],
)
def test_what_cannot_be_read_is_named(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=said):
        read_plain(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"[" * DEEP, "nested too deep"),
        (b'{"epoch": 1e999}', "cannot convert float infinity to integer"),
        (b'{"epoch": "one"}', "'epoch' is 'one', expected a number"),
        (b"\xff", "can't decode"),
        (b'{"epoch": 1, "epoch": 2}', "it has 'epoch' twice"),
    ],
)
def test_a_line_of_a_log_that_cannot_be_read_is_named(line: bytes, said: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.5, 0.6])
    log = folder / "epochs.jsonl"
    log.write_bytes(line + b"\n" + log.read_bytes())
    with pytest.raises(ValueError, match=rf"epochs\.jsonl' is damaged in line 1: .*{said}"):
        RunFolder(folder).epochs()


@pytest.mark.parametrize("content", ["[1]", "[{}]", "3", '[{"point": {}, "accuracy": 1, "runs": 3}]'])
def test_a_sweep_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "trials.json").write_text(content)
    with pytest.raises(ValueError, match=r"trials\.json' is damaged"):
        read_trials(tmp_path)


@pytest.mark.parametrize("seeds", [(0, "one"), (None, 1), ([1], 2)])
def test_runs_whose_seeds_are_not_all_numbers_are_reported(seeds: Any, tmp_path: Path) -> None:
    for number, seed in enumerate(seeds):
        write_run(tmp_path / f"run-{number}", [0.5], seed=seed)
    runs = [str(path) for path in tmp_path.glob("run-*")]
    assert main(["report", *runs, "--out", str(tmp_path / "out")]) in (0, 1)


@pytest.mark.parametrize("place", ["/dev/full", "a folder"])
def test_messages_that_cannot_be_written_are_told_once_and_do_not_end_a_run(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = tmp_path / "messages.log"
    if place == "a folder":
        messages.mkdir()
    else:
        messages.symlink_to(place)
    logger = logging.getLogger("tekfac")
    with RunFolder(tmp_path).messages():
        for _ in range(3):
            logger.warning("something to say")
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("Cannot write") == 1
    assert "messages.log" in told.replace(" ", "")
    assert "The run goes on; its messages are lost." in told
    assert "Traceback" not in told


def test_letters_without_a_code_are_no_reason_to_lose_a_message(tmp_path: Path) -> None:
    with RunFolder(tmp_path).messages():
        logging.getLogger("tekfac").warning("a\udcff")
    assert "a\\udcff" in (tmp_path / "messages.log").read_text()


@pytest.mark.parametrize("numbers", [10, 10**4, 10**6])
def test_a_full_disk_is_what_the_error_says(numbers: int, tmp_path: Path) -> None:
    """Wherever in the file the disk is full; torch would speak of positions."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limit[1]))
    values = {str(number): torch.zeros(numbers) for number in range(3)}
    try:
        with pytest.raises(
            OSError, match=r"checkpoint\.pt': File too large; nothing was left behind\. Free some"
        ):
            RunFolder(tmp_path).checkpoints.write(values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_for_shared_data_is_no_crash() -> None:
    """The run then reads the data itself."""
    data = inputs.SharedData()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        assert data.path(RunConfig()) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    path = data.path(RunConfig())
    assert path is not None
    assert len(inputs.mapped(path).train) > 0
    data.close()


def test_a_name_that_is_not_in_utf8_can_be_trained_with_and_read_again(tmp_path: Path) -> None:
    task = ["--model", "mlp", "--optimizer", "sgd", "--epochs", "1", "--train-samples", "50", "--threads", "1"]
    assert main(["train", *task, "--quiet", "--out", str(tmp_path / "run\udcff")]) == 0
    whole = read_json(tmp_path / "run\udcff" / "run.json")
    assert "run\udcff" in whole["provenance"]["command"]
    assert main(["train", "--resume", str(tmp_path / "run\udcff")]) == 0
    assert torch.get_num_threads() == 1
