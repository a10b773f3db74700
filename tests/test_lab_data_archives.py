"""Promise: an archive is unpacked as a whole or not at all, and chooses no path."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab_data import archive, contents, parts
from tekfac.lab.data.archives import unpack
from tekfac.lab.data.catalogue import CIFAR100

LAYOUT = CIFAR100.layouts[1]


def members() -> dict[str, bytes]:
    """What the official archive has, with fewer images, and the readme that nobody needs."""
    files = contents(CIFAR100, LAYOUT, parts(CIFAR100, LAYOUT, 30))
    return {
        **{f"{LAYOUT.folder}/{name}": raw for name, raw in files.items()},
        f"{LAYOUT.folder}/readme.html": b"hello",
    }


def left(folder: Path) -> list[str]:
    """All that is in a folder, hidden things too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def with_member(path: Path, change: Callable[[tarfile.TarInfo], Any], size: int = 0) -> Path:
    """The archive with one member more, before the others."""
    with tarfile.open(path, "w:gz") as tar:
        extra = tarfile.TarInfo(f"{LAYOUT.folder}/extra")
        extra.size = size
        change(extra)
        tar.addfile(extra, io.BytesIO(bytes(size)))
        for name, raw in members().items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return path


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_the_files_of_the_layout_are_unpacked_and_nothing_else(mode: str, tmp_path: Path) -> None:
    packed = archive(tmp_path / "archive", members(), mode)
    to = tmp_path / "to"
    paths = unpack(packed, LAYOUT, to)
    assert [path.name for path in paths] == [file.name for file in LAYOUT.files]
    assert left(to) == sorted([LAYOUT.folder, *(f"{LAYOUT.folder}/{file.name}" for file in LAYOUT.files)])
    assert all(path.read_bytes() == members()[f"{LAYOUT.folder}/{path.name}"] for path in paths)


def test_a_dot_and_folders_among_the_members_do_no_harm(tmp_path: Path) -> None:
    packed = archive(tmp_path / "archive", {f"./{name}": raw for name, raw in members().items()})
    assert len(unpack(packed, LAYOUT, tmp_path / "to")) == len(LAYOUT.files)
    folder = with_member(tmp_path / "other", lambda member: setattr(member, "type", tarfile.DIRTYPE))
    assert len(unpack(folder, LAYOUT, tmp_path / "to")) == len(LAYOUT.files)


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({"name": "../outside"}, 3, r"'\.\./outside', which points out of the folder"),
        ({"name": f"{LAYOUT.folder}/../../outside"}, 3, "points out of the folder"),
        ({"name": "/tmp/outside"}, 3, "points out of the folder"),
        ({"name": "..\\outside"}, 3, "points out of the folder"),
        ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, 0, "is a link or a device"),
        (
            {"type": tarfile.SYMTYPE, "name": f"{LAYOUT.folder}/train.bin", "linkname": "/x"},
            0,
            "link or a device",
        ),
        ({"type": tarfile.LNKTYPE, "linkname": f"{LAYOUT.folder}/train.bin"}, 0, "is a link or a device"),
        ({"type": tarfile.FIFOTYPE}, 0, "is a link or a device"),
        ({"type": tarfile.CHRTYPE}, 0, "is a link or a device"),
        ({"name": f"{LAYOUT.folder}/fine_label_names.txt"}, 20_000, "of 20,000 bytes, more than 16,384"),
        ({"name": "large"}, (1 << 20) + 1, "of 1,048,577 bytes, more than 1,048,576"),
        ({"name": f"{LAYOUT.folder}/train.bin"}, 10, r"train\.bin' twice"),
    ],
)
def test_members_that_no_official_archive_has_are_refused(
    change: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    def apply(member: tarfile.TarInfo) -> None:
        for name, value in change.items():
            setattr(member, name, value)

    packed = with_member(tmp_path / "archive", apply, size)
    with pytest.raises(ValueError, match=message):
        unpack(packed, LAYOUT, tmp_path / "to")
    assert left(tmp_path) == ["archive", "to"]


def test_too_many_members_are_refused(tmp_path: Path) -> None:
    packed = archive(tmp_path / "archive", {**{f"a{n}": b"" for n in range(200)}, **members()})
    with pytest.raises(ValueError, match="more members than any official one"):
        unpack(packed, LAYOUT, tmp_path / "to")


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9])
def test_an_archive_that_is_cut_off_leaves_nothing(mode: str, share: float, tmp_path: Path) -> None:
    packed = archive(tmp_path / "archive", members(), mode)
    packed.write_bytes(packed.read_bytes()[: int(share * packed.stat().st_size)])
    with pytest.raises(ValueError, match=r"Cannot unpack .*archive'|archive' lacks"):
        unpack(packed, LAYOUT, tmp_path / "to")
    assert left(tmp_path) == ["archive", "to"]


def test_a_changed_byte_leaves_nothing(tmp_path: Path) -> None:
    packed = archive(tmp_path / "archive", members(), "w:xz")
    raw = bytearray(packed.read_bytes())
    raw[len(raw) // 2] ^= 255
    packed.write_bytes(raw)
    with pytest.raises(ValueError, match="Cannot unpack"):
        unpack(packed, LAYOUT, tmp_path / "to")
    assert left(tmp_path) == ["archive", "to"]


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    packed = archive(tmp_path / "archive", {"cifar-10-batches-bin/test_batch.bin": b"1"})
    with pytest.raises(ValueError, match=r"lacks cifar-100-binary/train\.bin, .*It is another archive"):
        unpack(packed, LAYOUT, tmp_path / "to")


def test_a_failed_archive_leaves_earlier_files_alone(tmp_path: Path) -> None:
    unpack(archive(tmp_path / "archive", members()), LAYOUT, tmp_path / "to")
    before = (tmp_path / "to" / LAYOUT.folder / "train.bin").read_bytes()
    with pytest.raises(ValueError, match="lacks"):
        unpack(archive(tmp_path / "archive", dict(list(members().items())[1:])), LAYOUT, tmp_path / "to")
    assert (tmp_path / "to" / LAYOUT.folder / "train.bin").read_bytes() == before


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    to = tmp_path / "to"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    abandoned = to / f".{LAYOUT.folder}.{ended.pid}.unfinished"
    others = [
        to / f".{LAYOUT.folder}.{os.getppid()}.unfinished",
        to / f".{LAYOUT.folder}.1.unfinished",
        to / f".other.{ended.pid}.unfinished",
        to / f".{LAYOUT.folder}.mine.unfinished",
        to / f".{LAYOUT.folder}.{ended.pid}.unfinished.mine",
    ]
    for path in (abandoned, *others):
        path.mkdir(parents=True)
        (path / "train.bin").write_bytes(b"1")
    unpack(archive(tmp_path / "archive", members()), LAYOUT, to)
    assert not abandoned.exists()
    assert all((path / "train.bin").is_file() for path in others)
