"""Official archives, unpacked: only files that are expected, and where they belong."""

from __future__ import annotations

import gzip
import lzma
import os
import re
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from tekfac.lab.data.catalogue import File, Layout
from tekfac.lab.interruption import is_running

OTHER_SIZE = 1 << 20
"""The largest file that is passed over: the archives have a readme, which nobody needs here."""

MOST_MEMBERS = 100
DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


def unpack(archive: Path, layout: Layout, folder: Path) -> list[Path]:
    """Unpack the files of a layout into the official folder inside `folder`; all of them or none.

    Raises:
        ValueError: if the archive is damaged, lacks a file, or has a member that such an archive does not have.
        OSError: if the files cannot be written.
    """
    target = folder / layout.folder
    unfinished = folder / f".{layout.folder}.{os.getpid()}.unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(layout, folder)
    try:
        _write_members(archive, layout, unfinished)
        target.mkdir(exist_ok=True)
        return [(unfinished / layout.folder / file.name).replace(target / file.name) for file in layout.files]
    except DAMAGE as error:
        raise ValueError(
            f"Cannot unpack {str(archive)!r}: {error}. It is no archive, or cut off; fetch it again."
        ) from error
    finally:
        shutil.rmtree(unfinished)


def _remove_abandoned(layout: Layout, folder: Path) -> None:
    """Remove what earlier processes left when they were killed; those that still run keep theirs."""
    pattern = re.compile(rf"\.{re.escape(layout.folder)}\.([1-9][0-9]{{0,8}})\.unfinished")
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match and not is_running(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _write_members(archive: Path, layout: Layout, into: Path) -> None:
    """Write the files of the layout; raise where one is missing, or where a member has no business there."""
    wanted = {f"{layout.folder}/{file.name}": file for file in layout.files}
    written = set()
    with tarfile.open(archive, "r:*") as tar:
        for count, member in enumerate(tar, start=1):
            name = str(PurePosixPath(member.name))
            wrong = _wrong(member, wanted.get(name))
            if name in written:
                wrong = f"the member {member.name!r} twice"
            elif count > MOST_MEMBERS:
                wrong = "more members than any official one"
            if wrong:
                raise ValueError(
                    f"{str(archive)!r} has {wrong}. It is no official archive; nothing was unpacked."
                )
            if name in wanted and member.isreg():
                written.add(name)
                tar.extract(member, into, filter="data")
    missing = [name for name in wanted if name not in written]
    if missing:
        raise ValueError(f"{str(archive)!r} lacks {', '.join(missing)}. It is another archive, or cut off.")


def _wrong(member: tarfile.TarInfo, file: File | None) -> str:
    """What no official archive has."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        return f"a member {member.name!r}, which points out of the folder"
    if not (member.isreg() or member.isdir()) or member.issparse():
        return f"a member {member.name!r}, which is a link or a device"
    most = OTHER_SIZE if file is None else file.largest
    if member.size > most:
        return f"a member {member.name!r} of {member.size:,} bytes, more than {most:,}"
    return ""
