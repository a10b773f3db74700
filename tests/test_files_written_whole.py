"""Promise: files are written whole or not at all, whoever else writes them, and all of them in one way."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tekfac
from tekfac.common.files import append_text, read_json, write_json, write_text, write_whole
from tekfac.common.tables import csv_of
from tekfac.lab.config import RunConfig
from tekfac.lab.training import train

SOURCE = Path(tekfac.__file__).parent


def test_threads_that_write_the_same_file_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    path, writers = tmp_path / "file", 8
    together = threading.Barrier(writers)

    def write(letter: str) -> None:
        def fill(unfinished: Path) -> None:
            together.wait(timeout=30)  # every file is begun before any is finished
            unfinished.write_text(letter * 1000)

        write_whole(path, fill)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in {letter * 1000 for letter in "abcdefgh"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_the_earlier_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_text("earlier")

    def fail(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise error

    with pytest.raises(type(error)):
        write_whole(path, fail)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_what_the_system_says_is_passed_on_with_the_path(tmp_path: Path) -> None:
    def fail(unfinished: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(
        OSError, match=r"Cannot write '.*file': No space left on device; nothing was left behind"
    ):
        write_whole(tmp_path / "file", fail)


def test_the_earlier_file_can_be_kept_under_another_name(tmp_path: Path) -> None:
    path, earlier = tmp_path / "file", tmp_path / "before"
    for text in ("one", "two", "three"):
        write_whole(path, lambda unfinished, text=text: unfinished.write_text(text), earlier=earlier)
    assert (path.read_text(), earlier.read_text()) == ("three", "two")

    def fail(unfinished: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, fail, earlier=earlier)
    assert (path.read_text(), earlier.read_text()) == ("three", "two")


def test_what_cannot_be_added_is_not_added_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    append_text(path, "one\n", "")
    opened = Path.open

    class Full:
        """A file on a disk that is full after three letters."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, text: str) -> None:
            self.file.write(text[:3])
            self.file.flush()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda *arguments, **settings: Full(opened(*arguments, **settings)))
    with pytest.raises(
        OSError, match=r"log': No space left on device; its earlier lines are untouched\. Do this"
    ):
        append_text(path, "two and more\n", "Do this.")
    monkeypatch.undo()
    assert path.read_text() == "one\n"


def test_letters_that_have_no_code_in_a_file_are_escaped(tmp_path: Path) -> None:
    """As those of arguments and names of files that are not in UTF-8."""
    write_json(tmp_path / "file.json", {"name": "a\udcff"})
    assert read_json(tmp_path / "file.json") == {"name": "a\udcff"}
    write_text(tmp_path / "file", "a\udcff")
    assert (tmp_path / "file").read_text() == "a\\udcff"


def test_the_logs_of_a_run_are_on_the_disk_before_it_is_said_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: dict[str, int] = {}
    fsync, replace = os.fsync, Path.replace
    at_the_end: dict[str, int] = {}

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        settled[path.name] = path.stat().st_size

    def replaced(path: Path, target: Path) -> Path:
        if target.name == "result.json":
            at_the_end.update(settled)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "replace", replaced)
    task = {"model": "mlp", "train_samples": 100, "test_samples": 50, "epochs": 2, "threads": 1}
    train(RunConfig(**task), tmp_path)
    for log in ("epochs.jsonl", "curvature.jsonl"):
        assert at_the_end[log] == (tmp_path / log).stat().st_size


# -- one way ------------------------------------------------------------------------------------------------


def writes(module: Path) -> Iterator[tuple[int, str]]:
    """Lines in which a file is opened to be written, and what is named there as the file."""
    for node in ast.walk(ast.parse(module.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, ast.unparse(node.func.value)
        texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        opened = name == "open" and any(mode[:1] in ("w", "a", "x") or "+" in mode for mode in texts)
        if opened or (name in ("write_text", "write_bytes") and owner != "files"):
            yield node.lineno, owner
        elif name == "savefig":
            yield node.lineno, ast.unparse(node.args[0])
        elif (owner, name) in (("torch", "save"), ("safetensors", "save_file")):
            yield node.lineno, ast.unparse(node.args[1])


def test_what_is_written_is_written_whole() -> None:
    """Only files.py opens others to be written than unfinished ones, which `write_whole` names."""
    allowed = {"unfinished", "file"}  # the latter an open one
    strange = [
        f"{path.relative_to(SOURCE)}:{line} writes {what}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, what in writes(path)
        if what not in allowed and path.name not in ("files.py", "checksums.py")
    ]
    assert strange == []
    assert any(what == "unfinished" for path in SOURCE.rglob("*.py") for _, what in writes(path))


def test_no_cell_of_a_table_is_a_formula() -> None:
    cells = [
        "=cmd|' /C calc'!A0",
        "+1+1",
        "-1+1",
        "@SUM(A1)",
        "\t=1",
        "-0.5",
        "+1e-3",
        "-inf",
        "a",
        "",
        3,
        -0.5,
    ]
    first, second = csv_of([cells, ["a=1", "b,c"]]).splitlines()
    assert first == "'=cmd|' /C calc'!A0,'+1+1,'-1+1,'@SUM(A1),'\t=1,-0.5,+1e-3,-inf,a,,3,-0.5"
    assert second == 'a=1,"b,c"'
