"""The result in its folder: bench.json, to which a run adds its networks; those of earlier runs stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tekfac.common.files import exclusive, read_json, write_json

FILE = "bench.json"
LOCK = ".bench.lock"
FORMAT = 1

Result = Mapping[str, Any]
"""Plain values: `networks` by name, each with its provenance, and `growth`, or None."""


def read(out: Path) -> Result:
    """What is in a folder; nothing yet, if there is no such file.

    Raises:
        ValueError: for a file of something else.
    """
    path = out / FILE
    if not path.exists():
        return {"format": FORMAT, "networks": {}, "growth": None}
    found = read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT or "networks" not in found:
        raise ValueError(
            f"{str(path)!r} is no result of this version of tekfac bench. Choose another folder (--out), or "
            "remove the file."
        )
    return found


def merged(result: Result, networks: Mapping[str, Any], growth: Any = None) -> Result:
    """The result with some networks in place of those of the same name, or beside the others."""
    return {
        "format": FORMAT,
        "networks": {**result["networks"], **networks},
        "growth": result["growth"] if growth is None else growth,
    }


def part(result: Result, networks: Sequence[str], *, growth: bool) -> Result:
    """Of a result only some networks, and the growth if it is wished for."""
    chosen = {name: result["networks"][name] for name in networks}
    return {"format": FORMAT, "networks": chosen, "growth": result["growth"] if growth else None}


def add(out: Path, networks: Mapping[str, Any], growth: Any = None) -> Result:
    """Add to what is in a folder; all that is in it then."""
    with exclusive(out / LOCK):
        result = merged(read(out), networks, growth)
        write_json(out / FILE, result)
    return result
