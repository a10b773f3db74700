"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a neighbouring file, then put it in place; a failure leaves what was there before.

    Raises:
        OSError: with the path, what the system said (a full disk, say), and that the earlier file is untouched.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:  # torch.save wraps what the system says into a RuntimeError
        unfinished.unlink(missing_ok=True)
        kept = "the earlier one is untouched" if path.exists() else "nothing was left behind"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OSError(
            f"Cannot write {str(path)!r}: {reason}; {kept}. Free some room, or choose another folder."
        ) from error
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def exclusive(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold a file's lock, which the system lets go of when this process ends, however it does.

    Raises:
        ValueError: if another process holds it and it is not to be waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise ValueError(
                    f"Another process is at work in {str(path.parent)!r}. Wait for it, or use another folder."
                ) from error
        yield


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8, whole or not at all."""
    write_whole(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write plain values, whole or not at all; numbers that are not finite are an error."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The plain values in a file.

    Raises:
        ValueError: for a file that is not there or not JSON; the message says which.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {str(path)!r}.") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"Cannot read {str(path)!r} as JSON: {error}") from error
