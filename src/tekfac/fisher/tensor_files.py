"""Tensors with plain metadata in a safetensors file, written whole or not at all, with its checksum.

The checksum stands beside our metadata in the header: who reads safetensors reads these files, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from tekfac.common.checksums import BLANK, LENGTH, DamagedError, is_sealed, seal
from tekfac.common.extras import require
from tekfac.common.files import write_whole

KEY, CHECKSUM = "tekfac", "sha256"
PLACE = re.compile(rb'"%s":"[0-9a-f]{%d}"' % (CHECKSUM.encode(), LENGTH))
"""The checksum in a header; inside of other texts there the quotes are escaped."""

LENGTH_OF_HEADER = 8
LARGEST_HEADER = 100_000_000
"""As the format has it."""


def require_safetensors(purpose: str) -> Any:
    """The package, or an error that names its extra, before any work is done."""
    require("numpy", purpose)
    require("safetensors", purpose)
    return require("safetensors.torch", purpose)


def write(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a file that those may read who may read any other that is written here.

    Raises:
        OSError: with the path and what the system said, where it cannot be written.
    """
    safetensors = require_safetensors("Saving Fisher blocks")
    own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}

    def fill(unfinished: Path) -> None:
        unfinished.touch()
        permissions = unfinished.stat().st_mode  # safetensors would give them to the owner alone
        try:
            told = {KEY: json.dumps(metadata), CHECKSUM: BLANK.decode()}
            safetensors.save_file(own, unfinished, metadata=told)
        except require("safetensors", "Saving Fisher blocks").SafetensorError as error:
            raise OSError(str(error)) from error
        unfinished.chmod(permissions)
        with unfinished.open("rb") as file:
            place = _place(file)
        assert place is not None  # it has just been written
        seal(unfinished, place)

    write_whole(Path(path), fill)


def read(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of a file that holds the given kind of thing.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file that was not written here, that is not as it was written, or that holds something
            else.
    """
    safetensors = require("safetensors", "Loading Fisher blocks")
    if Path(path).is_dir():
        raise ValueError(f"{str(path)!r} is a folder. Expected a file.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    whole = _is_whole(Path(path))
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get(KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not a safetensors file: {error}") from error
    found = metadata.get("kind") if isinstance(metadata, dict) else None
    if found != kind:
        raise ValueError(
            f"{str(path)!r} holds {found or 'something that tekfac did not write'}. Expected {kind}."
        )
    if whole is None:
        raise DamagedError(
            f"{str(path)!r} has no checksum: it is of an earlier tekfac, or damaged. Make it anew."
        )
    return tensors, metadata


def _is_whole(path: Path) -> bool | None:
    """Whether a file is as it was written; None where nothing says so.

    Raises:
        DamagedError: if it is not.
    """
    with path.open("rb") as file:
        place = _place(file)
        if place is None:
            return None
        if not is_sealed(file, place):
            raise DamagedError(
                f"{str(path)!r} is damaged: its checksum is not that of its content. Use a copy of it, or make "
                "it anew."
            )
    return True


def _place(file: BinaryIO) -> int | None:
    """Where the checksum of an open file is, if it has one."""
    size = int.from_bytes(file.read(LENGTH_OF_HEADER), "little")
    found = PLACE.search(file.read(min(size, LARGEST_HEADER)))
    return None if found is None else LENGTH_OF_HEADER + found.end() - LENGTH - 1
