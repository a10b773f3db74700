"""The one way to write files: whole or not at all, or lines that are added to a log."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

LOCK_SECONDS = 0.2
"""Between two tries to get a lock."""


def write_whole(path: Path, write: Callable[[Path], object], *, earlier: Path | None = None) -> None:
    """Let `write` fill a neighbouring file, then put it in place; a failure leaves what was there before.

    The neighbour's name is of this call alone: threads and processes may write one path at the same time, and
    the last to finish wins, with a whole file. Only a killed process leaves its neighbour, `*.unfinished`.

    Args:
        path: of the file; folders above it are made if need be.
        write: given the path of the neighbour, writes all of it.
        earlier: what the file that was there before is called from then on; None not to keep it. A process
            that is killed between the two may leave that one alone.

    Raises:
        OSError: with the path, what the system said (a full disk, say), and that the earlier file is untouched.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        settle_on_disk(unfinished)
        if earlier is not None and path.is_file():
            path.replace(earlier)
        unfinished.replace(path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        kept = "the earlier one is untouched" if path.is_file() else "nothing was left behind"
        raise OSError(
            f"Cannot write {str(path)!r}: {error.strerror or error}; {kept}. Free some room, or choose another "
            "folder."
        ) from error
    with suppress(OSError):  # some network disks cannot; the file itself is in place
        settle_on_disk(path.parent)


def settle_on_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would outlive a loss of power."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders, and writes their names at once
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows settles no read-only file
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(path: Path, waiting: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Hold a file's lock, which the system lets go of when this process ends, however it does.

    Args:
        path: of the file, made if need be.
        waiting: asked now and then while another process holds the lock, whether to go on waiting for it.

    Raises:
        ValueError: if another process holds it and it is not waited for.
    """
    make_folder(path.parent)
    with path.open("w") as file:
        while fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not waiting():
                    raise ValueError(
                        f"Another process is at work in {str(path.parent)!r}. Wait for it, or use another "
                        "folder."
                    ) from error
                time.sleep(LOCK_SECONDS)
        yield


def make_folder(path: Path) -> None:
    """Make a folder and those above it, unless they are there.

    Raises:
        OSError: with what is in the way.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"Cannot make the folder {str(path)!r}: {error.strerror}. Choose another one (--out)."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8, whole or not at all; what UTF-8 has no code for is escaped, as JSON does."""
    write_whole(
        path, lambda unfinished: unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
    )


def append_text(path: Path, text: str, advice: str) -> None:
    """Add text to a file, in UTF-8, all of it or nothing; `settle_on_disk` makes it outlive a loss of power.

    Raises:
        OSError: with the path, what the system said, that earlier lines are untouched, and the advice.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        if path.exists():
            os.truncate(path, size)
        raise OSError(
            f"Cannot write {str(path)!r}: {error.strerror or error}; its earlier lines are untouched. {advice}"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write plain values, whole or not at all; numbers that are not finite are an error."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The plain values in a file.

    Raises:
        ValueError: for a file that is not there or not JSON; the message says which.
    """
    return read_parsed(path, parse_json, "JSON")


def parse_json(text: str | bytes) -> Any:
    """Plain values; raises ValueError for a key that stands twice in an object, too."""
    return json.loads(text, object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return values


def read_parsed(path: Path, parse: Callable[[str], Any], language: str) -> Any:
    """What a parser makes of the text in a file.

    Args:
        path: of the file.
        parse: the text; it raises ValueError for what it cannot read.
        language: the name of what it reads.

    Raises:
        ValueError: for a file that is not there or cannot be read; the message says which, and why.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {str(path)!r}.") from error
    except RecursionError as error:
        raise ValueError(f"Cannot read {str(path)!r} as {language}: it is nested too deep.") from error
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"Cannot read {str(path)!r} as {language}: {error}") from error
