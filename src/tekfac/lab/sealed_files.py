"""Tensors and plain values in a file of torch's that carries its checksum, in the comment of its ZIP archive.

`torch.load` reads it as any other of its files.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tekfac.common.checksums import BLANK, LENGTH, DamagedError, is_sealed, seal

MARK = b"tekfac sha256 "
"""Before the checksum, at the end of the file."""


def write(values: Mapping[str, Any], unfinished: Path) -> None:
    """Write plain values and tensors, and their checksum; `write_whole` puts the file in place.

    Raises:
        OSError: with what the system says, where they cannot be written.
    """
    save(dict(values), unfinished)
    with zipfile.ZipFile(unfinished, "a") as archive:
        archive.comment = MARK + BLANK
    seal(unfinished, unfinished.stat().st_size - LENGTH)


def save(value: Any, unfinished: Path) -> None:
    """What `torch.save` does, but where the system cannot write, the error is the system's.

    Raises:
        OSError: with what the system says.
    """
    with unfinished.open("wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:  # torch's own on the way out, of positions that it did not get to
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote.

    Raises:
        DamagedError: if it is not as it was written.
        ValueError: if it holds something else than `write` writes, such as more than the file has room for.
        OSError: if the system cannot read it.
    """
    with path.open("rb") as file:
        if not has_mark(file):
            raise DamagedError(
                f"Cannot read {str(path)!r}: it has no checksum at its end. It is cut off, or of an earlier "
                "tekfac."
            )
        if not is_sealed(file, path.stat().st_size - LENGTH):
            raise DamagedError(
                f"Cannot read {str(path)!r}: it is damaged, its checksum is not that of its content."
            )
        try:
            _require_plain_archive(file)
            values = torch.load(file, map_location="cpu", weights_only=True)
            _require_room(values, path.stat().st_size)
        except Exception as error:  # what another program wrote can end in nearly any error
            raise ValueError(
                f"Cannot read {str(path)!r}: {' '.join(str(error).split())[:200] or type(error).__name__}. "
                "Something else than tekfac wrote it."
            ) from error
    return dict(values)


def has_mark(file: BinaryIO) -> bool:
    """Whether a file was written here; the file is at its start then."""
    size = file.seek(0, 2)
    file.seek(max(size - LENGTH - len(MARK), 0))
    found = file.read(len(MARK))
    file.seek(0)
    return found == MARK


def require_sealed(path: Path) -> None:
    """Raise DamagedError where a file that was written here is not as it was; others are not looked at."""
    with path.open("rb") as file:
        if has_mark(file) and not is_sealed(file, path.stat().st_size - LENGTH):
            raise DamagedError(
                f"{str(path)!r} is damaged: its checksum is not that of its content. Use a copy of it, or "
                "train the run again."
            )


def _require_plain_archive(file: BinaryIO) -> None:
    """Raise ValueError for an archive that would unpack to more than its size; torch compresses nothing."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if packed or sum(member.file_size for member in members) > file.seek(0, 2):
        raise ValueError("it unpacks to more than its size")
    file.seek(0)


def _require_room(values: Any, size: int) -> None:
    """Raise ValueError for anything but a dict, or for a tensor with more numbers than the file can hold."""
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}, expected a dict")
    for tensor in _tensors(values):
        if tensor.layout != torch.strided or tensor.numel() * tensor.element_size() > size:
            raise ValueError(f"it has a tensor of shape {list(tensor.shape)}, larger than the file itself")


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors; what is held in several places is looked at once, or a small file could take for ever."""
    left, seen = [values], set[int]()
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, Mapping) else value
