"""Tensors with plain metadata in a safetensors file, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tekfac.common.extras import require
from tekfac.common.files import write_whole

KEY = "tekfac"


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
            safetensors.save_file(own, unfinished, metadata={KEY: json.dumps(metadata)})
        except require("safetensors", "Saving Fisher blocks").SafetensorError as error:
            raise OSError(str(error)) from error
        unfinished.chmod(permissions)

    write_whole(Path(path), fill)


def read(path: str | Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of a file that holds the given kind of thing.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file that was not written here, or that holds something else.
    """
    safetensors = require("safetensors", "Loading Fisher blocks")
    if Path(path).is_dir():
        raise ValueError(f"{str(path)!r} is a folder. Expected a file.")
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get(KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{str(path)!r} is not a safetensors file: {error}") from error
    if metadata.get("kind") != kind:
        found = metadata.get("kind", "something that tekfac did not write")
        raise ValueError(f"{str(path)!r} holds {found}. Expected {kind}.")
    return tensors, metadata
