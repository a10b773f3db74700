"""Where data lie: the default folder, and the official layouts in a folder or below it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tekfac.lab.data.catalogue import FOLDER, KNOWN, Known, Layout

VARIABLE = "TEKFAC_DATA"
WHOLE = 0.99
"""A file of images with less than this share of its official size is a part; pickles differ by less."""


@dataclass(frozen=True)
class Place:
    """A folder that holds files of a set in one of its layouts."""

    known: Known
    layout: Layout
    folder: Path


def default_folder(name: str) -> Path:
    """Where data are looked for and fetched to: $TEKFAC_DATA, or ~/.cache/tekfac/data.

    Raises:
        ValueError: for the user's own images, which are nowhere by default.
    """
    if name == FOLDER.name:
        raise ValueError(f"The data set {name!r} is {FOLDER.about}. Say which folder DIR is.")
    given = os.environ.get(VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "tekfac" / "data"


def place_in(known: Known, folder: Path) -> Place | None:
    """Where a set is: the folder itself or one of the official name inside it.

    Whole sets come before parts, and then preferred layouts first.
    """
    places = [
        Place(known, layout, candidate)
        for layout in known.layouts
        for candidate in (folder, folder / layout.folder)
        if holds(layout, candidate)
    ]
    return next((place for place in places if _is_whole(place)), places[0] if places else None)


def places_below(folder: Path) -> list[Place]:
    """Every official layout in a folder and in the folders inside it, two levels down."""
    inside = sorted(path for depth in ("*", "*/*") for path in folder.glob(depth) if path.is_dir())
    layouts = [(known, layout) for known in KNOWN.values() for layout in known.layouts]
    return [
        Place(known, layout, candidate)
        for candidate in (folder, *inside)
        for known, layout in layouts
        if holds(layout, candidate)
    ]


def holds(layout: Layout, folder: Path) -> bool:
    """Whether a folder has some of the layout's images."""
    return any((folder / file.name).is_file() for file in layout.of("train", "test"))


def _is_whole(place: Place) -> bool:
    """Whether all files of images are there, and as large as the official ones."""
    paths = [(place.folder / file.name, file.size) for file in place.layout.of("train", "test")]
    return all(path.is_file() and path.stat().st_size >= WHOLE * size for path, size in paths)
