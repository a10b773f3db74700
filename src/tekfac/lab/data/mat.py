"""Arrays in MATLAB files of version 5, as much of the format as SVHN needs.

SciPy reads these files too, but a damaged one can crash it, and the interpreter with it.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

HEADER = 128
MATRIX, COMPRESSED = 14, 15
LARGEST = 1 << 30
"""The most bytes that the arrays of a file may have together; those of SVHN's largest have a fifth of that."""

MOST_ELEMENTS = 1000
"""SVHN's files have two arrays."""

AXES = range(2, 5)
LONGEST_NAME = 63
"""MATLAB has no longer ones."""

TYPES = {
    1: torch.int8,
    2: torch.uint8,
    3: torch.int16,
    4: torch.uint16,
    5: torch.int32,
    6: torch.uint32,
    7: torch.float32,
    9: torch.float64,
    12: torch.int64,
}
"""How MATLAB numbers the types of what is stored."""

Element = tuple[int, memoryview]


def read_mat(path: Path) -> dict[str, Tensor]:
    """The arrays of numbers in a file, by name, in the type in which they are stored.

    Raises:
        ValueError: if the file is damaged or of another format.
    """
    raw = memoryview(bytearray(path.read_bytes()))
    try:
        if len(raw) < HEADER or bytes(raw[124:128]) != b"\x00\x01IM":
            raise ValueError("it does not begin as a MATLAB file of version 5 does")
        return dict(_array(content) for kind, content in _matrices(raw[HEADER:]) if kind == MATRIX)
    except (ValueError, struct.error, zlib.error) as error:
        raise ValueError(f"Cannot read {str(path)!r} as a MATLAB file: {error}. Fetch it again.") from error


def _matrices(raw: memoryview) -> Iterator[Element]:
    """What the file holds, unpacked where it is compressed; no more bytes altogether than `LARGEST`."""
    left = LARGEST
    for kind, content in _elements(raw):
        if kind != COMPRESSED:
            yield kind, content
            continue
        stream = zlib.decompressobj()
        whole = stream.decompress(content, left + 1)
        left -= len(whole)
        if left < 0:
            raise ValueError(f"its arrays have more than {LARGEST:,} bytes when unpacked")
        if not stream.eof:
            raise ValueError("a compressed array is cut off")
        yield from _elements(memoryview(bytearray(whole)))


def _elements(raw: memoryview) -> Iterator[Element]:
    """Types and bytes, one after the other, filled up to eight; up to four bytes may sit in the tag itself."""
    position = count = 0
    while position < len(raw):
        count += 1
        if count > MOST_ELEMENTS:
            raise ValueError(f"it has more than {MOST_ELEMENTS:,} elements")
        kind, size = struct.unpack_from("<II", raw, position)
        start = position + 8
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, position + 4
            if size > 4:
                raise ValueError("a short element is longer than four bytes")
            position += 8
        else:
            position = start + size + (0 if kind == COMPRESSED else -size % 8)
        if start + size > len(raw):
            raise ValueError(f"it ends {start + size - len(raw):,} bytes too early")
        yield kind, raw[start : start + size]


def _array(raw: memoryview) -> tuple[str, Tensor]:
    """Name and numbers of an array; its first axis is stored with stride one."""
    parts = list(islice(_elements(raw), 4))
    if len(parts) < 4:
        raise ValueError("an array has no content")
    (_, _), (_, lengths), (_, name), (kind, content) = parts[:4]
    if len(lengths) % 4 or len(lengths) // 4 not in AXES:
        raise ValueError(f"an array has another number of axes than {AXES[0]} to {AXES[-1]}")
    shape = [length for (length,) in struct.iter_unpack("<i", lengths)]
    if kind not in TYPES:
        raise ValueError(f"an array is of type {kind}, which is none of numbers")
    if len(name) > LONGEST_NAME:
        raise ValueError(f"the name of an array is longer than {LONGEST_NAME} letters")
    if min(shape) < 0:
        raise ValueError("an array has a negative length")
    if math.prod(max(length, 1) for length in shape) > LARGEST:
        raise ValueError(f"an array of shape {shape} is too large")
    count = math.prod(shape)
    if count * TYPES[kind].itemsize != len(content):
        raise ValueError(f"an array of shape {shape} has {len(content):,} bytes")
    flat = torch.frombuffer(content, dtype=TYPES[kind]) if count else torch.empty(0, dtype=TYPES[kind])
    return bytes(name).decode("latin1"), flat.view(shape[::-1]).permute(*reversed(range(len(shape))))
