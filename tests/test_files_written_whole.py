"""Files are written whole or not at all, whoever else writes them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tekfac.common.files import write_whole


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
