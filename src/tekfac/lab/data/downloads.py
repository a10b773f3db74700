"""A file from a server: resumed where it was interrupted, checked, and put in place whole."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tekfac.common.console import progress
from tekfac.lab.data.catalogue import Download
from tekfac.lab.data.checksums import md5_of

PIECE = 1 << 18
TIMEOUT = 60.0
MEGABYTE = 1_000_000
RANGE_NOT_SATISFIABLE = 416
PARTIAL_CONTENT = 206


def download(source: Download, folder: Path, *, quiet: bool = False) -> Path:
    """Fetch a file into a folder, unless it is there already; what an interrupted fetch left is gone on with.

    Raises:
        OSError: if the server cannot be reached or stops; what has come so far is kept for the next time.
        ValueError: if the file has another checksum than the official one; it is removed.
    """
    target = folder / source.file
    if target.is_file() and md5_of(target) == source.md5:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{source.file}.part"
    resumed = part.is_file() and part.stat().st_size > 0
    found = _fetched(source, part, quiet)
    if found != source.md5 and resumed:  # the halves may be of two files: once more, from the start
        part.unlink()
        found = _fetched(source, part, quiet)
    if found != source.md5:
        part.unlink()
        raise ValueError(
            f"What {source.address} sent has the checksum {found}. Expected {source.md5}, the official one; "
            "the file was removed. Try again, or another mirror."
        )
    part.replace(target)
    return target


def _fetched(source: Download, part: Path, quiet: bool) -> str:
    """Fetch what is missing of the part; its checksum then."""
    try:
        _append(source.address, part, quiet)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error or type(error).__name__
        kept = (
            f" {part.stat().st_size:,} bytes are kept; the next try goes on from there."
            if part.is_file()
            else ""
        )
        raise OSError(
            f"Cannot fetch {source.address}: {reason}.{kept} You may also fetch it by hand and put it at "
            f"{str(part.with_suffix(''))!r}."
        ) from error
    return md5_of(part)


def _append(address: str, part: Path, quiet: bool) -> None:
    """Let the server send what is missing; all of it, if it cannot send less."""
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(address, headers={"User-Agent": "tekfac", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != RANGE_NOT_SATISFIABLE or not have:
            raise
        if error.headers.get("Content-Range", "").endswith(f"/{have}"):
            return  # all of it is here
        part.unlink()
        _append(address, part, quiet)
        return
    with response:
        _copy(response, part, have if response.status == PARTIAL_CONTENT else 0, quiet)


def _copy(response: Any, part: Path, have: int, quiet: bool) -> None:
    """Write what comes behind the first bytes; raise if less comes than was announced."""
    announced = response.headers.get("Content-Length")
    total = None if announced is None else have + int(announced)
    name = part.with_suffix("").name
    with part.open("r+b" if have else "wb") as file, progress("unit", quiet=quiet) as bars:
        file.seek(have)
        bar = bars.add_task(name, total=None if total is None else total // MEGABYTE, unit="MB")
        while piece := response.read(PIECE):
            file.write(piece)
            have += len(piece)
            bars.update(bar, completed=have // MEGABYTE)
    if total is not None and have < total:
        raise OSError(f"the connection ended after {have:,} of {total:,} bytes")
