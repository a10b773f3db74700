"""The official sets: where their files lie, and how they are read, each checked for what it must hold."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tekfac.lab.data import cifar, svhn
from tekfac.lab.data.catalogue import CIFAR100, FOLDER, KNOWN, File, Known, Layout, Role
from tekfac.lab.data.images import DataSet, Images, joined

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


def read_official(place: Place, *, allow_partial: bool = False) -> DataSet:
    """All of an official set, or, if that is allowed, what there is of it.

    Raises:
        ValueError: if a file is damaged, or if images are missing and that is not allowed.
        FileNotFoundError: if there are no images at all to train on, or to test on.
    """
    known, layout = place.known, place.layout
    train, test = _split(place, "train"), _split(place, "test")
    found, official = (len(train), len(test)), known.counts
    notes = tuple(
        f"{have:,} of the official {of:,} {what} images of {known.name}"
        for have, of, what in zip(found, official, ("training", "test"), strict=True)
        if have != of
    )
    if notes and not allow_partial:
        missing = [file.name for file in layout.of("train", "test") if not (place.folder / file.name).is_file()]
        without = f" (without {', '.join(missing)})" if missing else ""
        raise ValueError(
            f"{str(place.folder)!r} has {found[0]:,} images to train on and {found[1]:,} to test on"
            f"{without}; {known.name} has {official[0]:,} and {official[1]:,}. Pass --allow-partial if "
            "that is meant."
        )
    classes = read_classes(place)
    return DataSet(known.name, train, test, classes, known.mean, known.std, known.augmented, notes)


def read_images(place: Place, file: File) -> Images:
    """The images of one of the official files, with labels that are known to be in range.

    Raises:
        ValueError: if the file is damaged; the message says how.
    """
    path, fine = place.folder / file.name, place.known.name == CIFAR100.name
    _require_size(path, file)
    if place.layout.kind == "python":
        images = cifar.images_in_pickle(path, "fine_labels" if fine else "labels")
    elif place.layout.kind == "binary":
        images = cifar.images_in_records(path, 2 if fine else 1)
    else:
        images = svhn.images_in_mat(path)
    classes = len(place.known.classes)
    wrong = (images.labels < 0) | (images.labels >= classes)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ValueError(
            f"Image {first:,} of {str(path)!r} has label {int(images.labels[first])}. Expected 0 to "
            f"{classes - 1}; the file is damaged, or of another data set."
        )
    return images


def read_classes(place: Place) -> tuple[str, ...]:
    """The names of the classes as the files tell them; the official ones, where no file does.

    Raises:
        ValueError: if the file is damaged, or has not a name for each class.
    """
    expected = place.known.classes
    for file in place.layout.of("classes"):
        path = place.folder / file.name
        if not path.is_file():
            return expected
        _require_size(path, file)
        key = "fine_label_names" if place.known.name == CIFAR100.name else "label_names"
        names = cifar.names_in_pickle(path, key) if place.layout.kind == "python" else cifar.names_in_text(path)
        if len(names) != len(expected):
            raise ValueError(
                f"{str(path)!r} names {len(names)} classes. Expected {len(expected)}; fetch it again."
            )
        return names
    return expected


def _require_size(path: Path, file: File) -> None:
    if path.stat().st_size > file.largest:
        raise ValueError(
            f"{str(path)!r} has {path.stat().st_size:,} bytes. Expected at most {file.largest:,}, four times "
            "the official size; fetch it again."
        )


def _split(place: Place, role: Role) -> Images:
    """The images of the files of a role that are there."""
    files = [file for file in place.layout.of(role) if (place.folder / file.name).is_file()]
    if not files:
        wanted = ", ".join(str(place.folder / file.name) for file in place.layout.of(role))
        raise FileNotFoundError(f"There are no images to {role} on: missing {wanted}.")
    return joined([read_images(place, file) for file in files])
