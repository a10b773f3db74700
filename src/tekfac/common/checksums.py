"""Checksums that files carry, of plain values or of all their other bytes: what has changed since is noticed.

They are there against accidents. Whoever changes a file on purpose can write the checksum that fits.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = 64
BLANK = b"0" * LENGTH
"""What stands in a file in place of its checksum until that is known."""

PIECE = 1 << 20


class DamagedError(ValueError):
    """A file does not have the checksum that it was written with, or none at all."""


def checksum_of(value: Any) -> str:
    """A short checksum of plain values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def seal(path: Path, place: int) -> None:
    """Write the checksum of a file into it, over the `BLANK` at an offset."""
    with path.open("r+b") as file:
        digest = _digest(file, place)
        file.seek(place)
        file.write(digest)


def is_sealed(file: BinaryIO, place: int) -> bool:
    """Whether the checksum at an offset of an open file is that of the rest; the file is at its start then."""
    digest = _digest(file, place)
    file.seek(place)
    found = file.read(LENGTH)
    file.seek(0)
    return found == digest


def _digest(file: BinaryIO, place: int) -> bytes:
    """Of all bytes, with `BLANK` at the offset."""
    sha = hashlib.sha256()
    file.seek(0)
    left = place
    while left and (piece := file.read(min(left, PIECE))):
        sha.update(piece)
        left -= len(piece)
    sha.update(BLANK)
    file.seek(place + LENGTH)
    while piece := file.read(PIECE):
        sha.update(piece)
    return sha.hexdigest().encode()
