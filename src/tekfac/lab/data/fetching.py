"""Official data sets, fetched from where they are published, and unpacked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tekfac.lab.data.archives import unpack
from tekfac.lab.data.catalogue import Layout, named
from tekfac.lab.data.checksums import md5_of
from tekfac.lab.data.downloads import download
from tekfac.lab.data.places import default_folder


def fetch(
    name: str,
    folder: str | Path | None = None,
    *,
    layout: str | None = None,
    mirror: str | None = None,
    quiet: bool = False,
) -> Path:
    """Fetch an official set; nothing is done where it is complete already.

    Args:
        name: cifar10, cifar100 or svhn.
        folder: gets the archive and the official folder. Default: $TEKFAC_DATA, or ~/.cache/tekfac/data.
        layout: python (the default) or binary, for CIFAR.
        mirror: another address that has the official files under their names.
        quiet: show no progress.

    Returns:
        The folder that holds the files.

    Raises:
        ValueError: for a set or a layout that is not published, and for files that are not the official ones.
        OSError: if the server cannot be reached; the message says what to fetch by hand.
    """
    published = named(name).layout(layout)
    if mirror is not None:
        elsewhere = (replace(one, address=f"{mirror.rstrip('/')}/{one.file}") for one in published.downloads)
        published = replace(published, downloads=tuple(elsewhere))
    return fetch_layout(published, default_folder(name) if folder is None else Path(folder), quiet=quiet)


def fetch_layout(layout: Layout, folder: Path, *, quiet: bool = False) -> Path:
    """Fetch the files of a layout into the official folder inside `folder`, and return that."""
    target = folder / layout.folder
    if is_complete(layout, target):
        return target
    for one in layout.downloads:
        if layout.kind == "mat":
            download(one, target, quiet=quiet)
        else:
            unpack(download(one, folder, quiet=quiet), layout, folder)
    return target


def is_complete(layout: Layout, folder: Path) -> bool:
    """Whether all files are there: with the official checksums or, where there are none, the official sizes."""
    for file in layout.files:
        path = folder / file.name
        if not path.is_file():
            return False
        if file.md5 is not None and md5_of(path) != file.md5:
            return False
        if file.md5 is None and file.images and path.stat().st_size != file.size:
            return False
    return True
