"""Whether the data in a folder are whole: every file read, counted, and compared with the official one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tekfac.lab.data.catalogue import DIGITS, FOLDER, File, named
from tekfac.lab.data.fetching import md5_of
from tekfac.lab.data.folder import folder_of_images, listed
from tekfac.lab.data.official import Place, places_below, read_classes, read_images

State = Literal["good", "partial", "damaged"]

OFFICIAL = "official"
DIFFERS = "differs from the official file"
UNKNOWN = "no official checksum"


@dataclass(frozen=True)
class FileFinding:
    """What is to say of a file: its state, its images, how its checksum compares, and what is wrong with it."""

    name: str
    state: State
    images: int = 0
    checksum: str = UNKNOWN
    message: str = ""


@dataclass(frozen=True)
class SetFinding:
    """What is to say of a data set: damaged if one of its files is, and partial where images are missing."""

    name: str
    kind: str
    folder: Path
    state: State
    train: int
    test: int
    files: tuple[FileFinding, ...]
    message: str = ""


def check(folder: str | Path, name: str | None = None) -> list[SetFinding]:
    """Read and check every data set in a folder and below it; with a name, that one only.

    Raises:
        FileNotFoundError: if there is no such folder, or no data set in it.
        ValueError: for an unknown name, or one of a set that has no files.
    """
    known, folder = None if name is None else named(name), Path(folder)
    if known is DIGITS:
        raise ValueError(f"The data set {DIGITS.name!r} has no files to check: {DIGITS.about}.")
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r}.")
    places = [place for place in places_below(folder) if known is None or place.known is known]
    if known is FOLDER or (known is None and not places and _has_classes(folder)):
        return [_check_folder(folder)]
    if not places:
        wanted = "any data set that tekfac knows (see `tekfac data list`)" if name is None else name
        raise FileNotFoundError(f"{str(folder)!r} has no files of {wanted}, nor have the folders in it.")
    return [check_place(place) for place in places]


def check_place(place: Place) -> SetFinding:
    """Read and check every file of an official set."""
    files = tuple(_check_file(place, file) for file in place.layout.files)
    counts = [
        sum(one.images for one, file in zip(files, place.layout.files, strict=True) if file.role == role)
        for role in ("train", "test")
    ]
    state: State = "good" if tuple(counts) == place.known.counts else "partial"
    official = f"official are {place.known.counts[0]:,} + {place.known.counts[1]:,} images"
    message = "" if state == "good" else official
    if any(one.state == "damaged" for one in files):
        state = "damaged"
    elif not all(counts):
        state, message = "damaged", "no images to " + ("test on" if counts[0] else "train on")
    elif state == "partial":
        message = f"only a part of the set: {official}; a run on a part needs --allow-partial"
    return SetFinding(
        place.known.name, place.layout.kind, place.folder, state, counts[0], counts[1], files, message
    )


def _check_file(place: Place, file: File) -> FileFinding:
    path = place.folder / file.name
    if not path.is_file():
        return FileFinding(file.name, "partial", message="missing")
    try:
        checksum = UNKNOWN if file.md5 is None else OFFICIAL if md5_of(path) == file.md5 else DIFFERS
        if file.role == "classes":
            read_classes(place)
        images = len(read_images(place, file)) if file.role in ("train", "test") else 0
    except (ValueError, OSError) as error:
        return FileFinding(file.name, "damaged", checksum=DIFFERS if file.md5 else UNKNOWN, message=str(error))
    if images == file.images:
        changed = checksum == DIFFERS and images > 0
        message = "as many images as the official file, but not the same bytes" if changed else ""
        return FileFinding(file.name, "damaged" if changed else "good", images, checksum, message)
    return FileFinding(file.name, "partial", images, checksum, f"the official file has {file.images:,} images")


def _check_folder(folder: Path) -> SetFinding:
    """The user's own images: all are read, and none is kept at its size."""
    try:
        found = folder_of_images(folder, image_size=1)
    except ValueError as error:
        return SetFinding(FOLDER.name, "images", folder, "damaged", 0, 0, (), str(error))
    message = f"{len(found.classes)} classes"
    return SetFinding(FOLDER.name, "images", folder, "good", len(found.train), len(found.test), (), message)


def _has_classes(folder: Path) -> bool:
    """Whether a folder is laid out as classes of images."""
    try:
        listed(folder)
    except ValueError:
        return False
    return True
