"""Plain values in JSON that carry a checksum of each entry, so that it can be told which has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tekfac.common.checksums import checksum_of
from tekfac.common.files import parse_json

CHECKSUMS = "checksums"
CHECKSUM = "checksum"
"""Of a line of a log."""


def checked(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The values, and their checksums."""
    return {**plain, CHECKSUMS: _checksums(plain)}


def unchecked(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The values alone."""
    return {key: value for key, value in plain.items() if key != CHECKSUMS}


def require_as_written(plain: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError, with the names of what differs, for values that are not those of their checksums."""
    told, own = plain.get(CHECKSUMS), _checksums(unchecked(plain))
    if not isinstance(told, dict):
        raise ValueError(f"{str(path)!r} has no {CHECKSUMS}: it is damaged. Put back a copy of it.")
    differing = [name for name in dict.fromkeys([*own, *told]) if own.get(name) != told.get(name)]
    if differing:
        raise ValueError(
            f"{str(path)!r} was changed after it was written, in {', '.join(differing)}. Put back what stood "
            "there. Other settings are another run: `tekfac train --config` takes them from a file of yours."
        )


def checked_line(row: Mapping[str, Any]) -> str:
    """A line of a log, with its checksum."""
    return json.dumps({**row, CHECKSUM: checksum_of(row)}, allow_nan=False)


def values_of_line(line: bytes) -> dict[str, Any]:
    """The values of a line of a log; those of earlier logs have no checksum.

    Raises:
        ValueError: if it is no object, or not as it was written.
    """
    try:
        row = parse_json(line)
        if not isinstance(row, dict):
            raise ValueError("not an object")
        told = row.pop(CHECKSUM, None)
        if told is not None and told != checksum_of(row):
            raise ValueError("its checksum is not that of its values")
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return row


def _checksums(plain: Mapping[str, Any]) -> dict[str, str]:
    """Of every entry; of those in a mapping, under both names."""
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        flat |= (
            {f"{name}.{key}": own for key, own in value.items()} if isinstance(value, dict) else {name: value}
        )
    return {name: checksum_of(value) for name, value in flat.items()}
