"""CIFAR's files, as python pickles and as binary records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tekfac.lab.data.images import Images
from tekfac.lab.data.plain_pickles import PlainArray, read_pickle, short_text

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


def images_in_pickle(path: Path, key: str) -> Images:
    """The images of a python batch, and its labels of a key: "labels", or "fine_labels" of CIFAR-100.

    Raises:
        ValueError: if the file is damaged; the message says how.
    """
    data, labels = read_pickle(path, "data", key)
    if not isinstance(data, PlainArray) or len(data.shape) != 2 or data.shape[1] != PIXELS:
        found = f"of shape {list(data.shape)}" if isinstance(data, PlainArray) else "missing"
        raise ValueError(f"The array 'data' in {str(path)!r} is {found}. Expected [N, {PIXELS}].")
    if not isinstance(labels, list) or not all(map(_is_label, labels)):
        found = "not small whole numbers" if isinstance(labels, list) else "missing"
        raise ValueError(f"The labels {key!r} in {str(path)!r} are {found}. Expected a list of whole numbers.")
    if len(labels) != data.shape[0]:
        raise ValueError(
            f"{str(path)!r} has {len(labels):,} labels for {data.shape[0]:,} images. Fetch it again."
        )
    if not labels:
        raise ValueError(f"{str(path)!r} holds no images.")
    pixels = torch.frombuffer(bytearray(data.data), dtype=torch.uint8)
    return Images(pixels.view(-1, *SHAPE), torch.tensor(labels))


def images_in_records(path: Path, label_bytes: int) -> Images:
    """The images of a binary file of records: label bytes, the last of which counts, then 3,072 pixels.

    Raises:
        ValueError: if the file is empty or does not end with a record.
    """
    raw = bytearray(path.read_bytes())
    record = label_bytes + PIXELS
    if not raw:
        raise ValueError(f"{str(path)!r} is empty. Fetch it again.")
    if len(raw) % record:
        raise ValueError(
            f"{str(path)!r} has {len(raw):,} bytes, which is {len(raw) // record:,} records of {record:,} and "
            f"{len(raw) % record:,} bytes more. Expected whole records; fetch it again."
        )
    records = torch.frombuffer(raw, dtype=torch.uint8).view(-1, record)
    pixels = records[:, label_bytes:].reshape(-1, *SHAPE)
    return Images(pixels, records[:, label_bytes - 1].long())


def names_in_pickle(path: Path, key: str) -> tuple[str, ...]:
    """The names of the classes in a python meta file.

    Raises:
        ValueError: if there are none.
    """
    [found] = read_pickle(path, key)
    names = [short_text(name) for name in found] if isinstance(found, list) else [None]
    if None in names:
        raise ValueError(f"{str(path)!r} has no list of names {key!r}. Fetch it again.")
    return tuple(map(str, names))


def names_in_text(path: Path) -> tuple[str, ...]:
    """The names of the classes in a text file, one in a line."""
    return tuple(path.read_text(encoding="utf-8", errors="replace").split())


def _is_label(value: Any) -> bool:
    return type(value) is int and value.bit_length() < 32
