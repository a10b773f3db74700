"""Official data sets, fetched from where they are published, and unpacked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tekfac.common.console import progress
from tekfac.common.extras import require
from tekfac.lab.data.archives import unpack
from tekfac.lab.data.catalogue import File, Layout, named
from tekfac.lab.data.official import default_folder

PIECE = 1 << 18
TIMEOUT = 60.0
MEGABYTE = 1_000_000


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
        published = replace(published, server=f"{mirror.rstrip('/')}/")
    return fetch_layout(published, default_folder(name) if folder is None else Path(folder), quiet=quiet)


def fetch_layout(layout: Layout, folder: Path, *, quiet: bool = False) -> Path:
    """Fetch the files of a layout into the official folder inside `folder`, and return that."""
    target = folder / layout.folder
    if is_complete(layout, target):
        return target
    if layout.archive is not None:
        unpack(download(layout.server, layout.archive, folder, quiet=quiet), layout, folder)
    else:
        for file in layout.files:
            download(layout.server, file, target, quiet=quiet)
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


def download(server: str, file: File, folder: Path, *, quiet: bool = False) -> Path:
    """Fetch a file into a folder, unless it is there already; it gets its name when its checksum is right.

    Raises:
        OSError: if the server cannot be reached or stops.
        ValueError: if the file has another checksum than the official one; it is removed.
    """
    pooch = require("pooch", "Fetching data")
    pooch.get_logger().setLevel("WARNING")
    address = f"{server}{file.name}"
    with progress("unit", quiet=quiet) as bars:
        bar = _Bar(bars, file.name)
        try:
            found = pooch.retrieve(
                address,
                f"md5:{file.md5}",
                fname=file.name,
                path=folder,
                downloader=_Bounded(
                    pooch.HTTPDownloader(progressbar=bar, chunk_size=PIECE, timeout=TIMEOUT), file.largest
                ),
            )
        except OSError as error:
            raise OSError(
                f"Cannot fetch {address}: {error}. Try again, or fetch it by hand and put it at "
                f"{str(folder / file.name)!r}."
            ) from error
        except ValueError as error:
            raise ValueError(
                f"What {address} sent is not the official file: {error} Try again, or another mirror."
            ) from error
    return Path(found)


def md5_of(path: Path) -> str:
    """The MD5 of a file, as the official pages give it: against accidents, not against forgery."""
    return str(require("pooch", "Checking data").file_hash(str(path), alg="md5"))


class _Bounded:
    """A downloader that hangs up on a server that sends more than so many bytes."""

    def __init__(self, downloader: Any, most: int) -> None:
        self._downloader, self._most = downloader, most

    def __call__(self, address: str, path: str, pooch: Any) -> None:
        """As pooch calls it."""
        unfinished = Path(path)  # pooch puts it in place
        with unfinished.open("wb") as file:
            self._downloader(address, _AtMost(file, self._most), pooch)


class _AtMost:
    """A file of at most so many bytes."""

    def __init__(self, file: Any, most: int) -> None:
        self._file, self._most = file, most
        self.flush = file.flush

    def write(self, piece: bytes) -> int:
        """Write a piece, if there is room for it."""
        if self._file.tell() + len(piece) > self._most:
            raise ValueError(f"it goes on after {self._most:,} bytes, four times the official size.")
        return int(self._file.write(piece))


class _Bar:
    """A progress bar as pooch drives it: it sets the total, and tells of bytes that have come."""

    def __init__(self, bars: Any, name: str) -> None:
        self._bars, self._task = bars, bars.add_task(name, total=None, unit="MB")
        self.total = self._come = 0

    def update(self, count: int) -> None:
        """So many bytes more."""
        self._come += count
        megabytes = {"completed": self._come // MEGABYTE, "total": self.total // MEGABYTE or None}
        self._bars.update(self._task, **megabytes)

    def reset(self) -> None:
        """Begin to count again."""
        self._come = 0

    def close(self) -> None:
        """The bars close themselves."""
