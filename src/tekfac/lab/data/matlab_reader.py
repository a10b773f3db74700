"""A program: reads X and y of a MATLAB file with SciPy, and writes them to standard output as NumPy's .npz.

A damaged file can crash SciPy, and a small one can unpack to any size, so this is run as a process of its own,
with bounds. It imports nothing of tekfac, so that it starts fast.
"""

from __future__ import annotations

import math
import struct
import sys
import warnings
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

HEADER = 128
COMPRESSED = 15
MOST_BYTES = 1 << 28
"""Of all arrays together; those of SVHN's largest file have 225,631,560 at most."""

MOST_TIMES, SLACK = 32, 1 << 20
"""Arrays may be so much larger than their file, and so many bytes; photographs are not twice as large."""

PIECE = 1 << 20

MOST_MEMORY = 2 << 30
MOST_SECONDS = 120
NUMBERS = frozenset(
    ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "single", "double")
)
WANTED = ("X", "y")


def main(path: str) -> None:
    """Read and write, within bounds."""
    warnings.simplefilter("ignore")
    _bound()
    import_module("numpy").savez(sys.stdout.buffer, **wanted_arrays(path))


def wanted_arrays(path: str) -> dict[str, Any]:
    """X and y of a file, checked.

    Raises:
        ValueError: if one is missing, too large, or not made of numbers.
    """
    raw = memoryview(Path(path).read_bytes())
    room = min(MOST_BYTES, MOST_TIMES * len(raw) + SLACK)
    _require_whole(raw, room)
    reader = import_module("scipy.io")
    found = {name: (shape, kind) for name, shape, kind in reader.whosmat(path, appendmat=False)}
    for name in WANTED:
        if name not in found:
            raise ValueError(f"it has no {name}")
        shape, kind = found[name]
        if kind not in NUMBERS:
            raise ValueError(f"its {name} is of type {kind}, which is none of numbers")
        if not 2 <= len(shape) <= 4 or min(shape) < 0:
            raise ValueError(f"its {name} is of shape {list(shape)}; expected two to four lengths")
        if math.prod(max(length, 1) for length in shape) * bytes_of(kind) > room:
            raise ValueError(f"its {name} of shape {list(shape)} is too large")
    arrays = reader.loadmat(path, appendmat=False, variable_names=WANTED)
    return {name: arrays[name] for name in WANTED}


def bytes_of(kind: str) -> int:
    """Of a number of a type of MATLAB's."""
    return {"single": 4, "double": 8}.get(kind) or int(kind.lstrip("uint")) // 8


def _require_whole(raw: memoryview, room: int) -> None:
    """See that what is compressed is whole, which SciPy does not, and not larger than it may be."""
    position, left = HEADER, room
    while position + 8 <= len(raw):
        kind, size = struct.unpack_from("<II", raw, position)
        position += 8
        if kind == COMPRESSED:
            stream = zlib.decompressobj()
            rest: bytes | memoryview = raw[position : position + size]
            while not stream.eof:
                piece = stream.decompress(rest, PIECE)
                left, rest = left - len(piece), stream.unconsumed_tail
                if left < 0:
                    raise ValueError(f"its arrays have more than {room:,} bytes when unpacked")
                if not piece and not rest and not stream.eof:
                    raise ValueError("a compressed array is cut off")
        position += size


def _bound() -> None:
    """Take no more memory and time than this, where the system can see to that."""
    try:
        resource = import_module("resource")
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Exception as error:  # a damaged file can end in nearly any error
        sys.exit(str(error) or type(error).__name__)
