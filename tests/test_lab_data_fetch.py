"""Promise: files are fetched once, and kept only if they are whole and the official ones."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from lab_data import Server, archive, contents, parts, serving
from tekfac.lab.data import load
from tekfac.lab.data.catalogue import CIFAR10, SVHN, File, Layout
from tekfac.lab.data.fetching import download, fetch, fetch_layout, is_complete

BODY = bytes(range(256)) * 4096
HALF = len(BODY) // 2


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def md5(raw: bytes) -> str:
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def of(server: Server, body: bytes = BODY) -> tuple[str, File]:
    return f"{server.address}/", File("file.bin", "other", size=len(body), md5=md5(body))


# -- one file -------------------------------------------------------------------------------------------------


def test_a_file_is_fetched_whole_and_only_once(tmp_path: Path) -> None:
    with serving({"file.bin": BODY}) as server:
        assert download(*of(server), tmp_path / "new") == tmp_path / "new" / "file.bin"
        assert download(*of(server), tmp_path / "new").read_bytes() == BODY
    assert server.asked == ["file.bin"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.bin"]


def test_a_connection_that_ends_early_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    with serving({"file.bin": BODY}, stops_after=HALF) as server:
        with pytest.raises(OSError, match=rf"Cannot fetch {server.address}/file\.bin: .*{HALF}.*Try again"):
            download(*of(server), tmp_path)
        assert list(tmp_path.iterdir()) == []
        server.stops_after = None
        assert download(*of(server), tmp_path).read_bytes() == BODY


def test_another_file_than_the_official_one_is_removed(tmp_path: Path) -> None:
    with (
        serving({"file.bin": b"something else"}) as server,
        pytest.raises(
            ValueError,
            match=rf"not the official file: .*expected md5:{md5(BODY)} but got {md5(b'something else')}",
        ),
    ):
        download(*of(server), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_sends_more_than_the_official_file_is_hung_up_on(tmp_path: Path) -> None:
    with (
        serving({"file.bin": 5 * BODY}) as server,
        pytest.raises(
            ValueError, match=rf"it goes on after {4 * len(BODY):,} bytes, four times the official size"
        ),
    ):
        download(*of(server), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"damaged")
    with serving({"file.bin": BODY}) as server:
        assert download(*of(server), tmp_path).read_bytes() == BODY


def test_what_cannot_be_fetched_can_be_put_there_by_hand(tmp_path: Path) -> None:
    with serving({}) as server:
        message = (
            rf"Cannot fetch {server.address}/file\.bin: .*Not Found.*hand and put it at '{tmp_path}/file\.bin'"
        )
        with pytest.raises(OSError, match=message):
            download(*of(server), tmp_path)
    with pytest.raises(OSError, match=r"refused.*fetch it by hand"):
        download(*of(server), tmp_path)
    (tmp_path / "file.bin").write_bytes(BODY)
    assert download(*of(server), tmp_path) == tmp_path / "file.bin"


# -- a data set -----------------------------------------------------------------------------------------------


def published(server: Server, layout: Layout) -> Layout:
    """The layout with the checksums of what the server has."""

    def here(file: File) -> File:
        return replace(file, md5=md5(server.files[file.name]))

    layout = replace(layout, server=f"{server.address}/")
    if layout.archive is None:
        return replace(layout, files=tuple(map(here, layout.files)))
    return replace(layout, archive=here(layout.archive))


@pytest.mark.parametrize("kind", ["python", "binary"])
def test_an_archive_is_fetched_and_unpacked(kind: str, tmp_path: Path) -> None:
    layout = CIFAR10.layout(kind)
    files = contents(CIFAR10, layout, parts(CIFAR10, layout, 3))
    packed = archive(tmp_path / "packed", {f"{layout.folder}/{name}": raw for name, raw in files.items()})
    to = tmp_path / "to"
    assert layout.archive is not None
    with serving({layout.archive.name: packed.read_bytes()}) as server:
        assert fetch_layout(published(server, layout), to, quiet=True) == to / layout.folder
        assert len(load("cifar10", to, allow_partial=True).train) == 15
        (to / layout.folder / "batches.meta").unlink(missing_ok=True)
        fetch_layout(published(server, layout), to)
    assert server.asked == [layout.archive.name], "the archive is kept, and unpacked again"
    assert (to / layout.folder / layout.files[-1].name).is_file()


def test_plain_files_are_fetched_into_the_official_folder(tmp_path: Path) -> None:
    layout = SVHN.layouts[0]
    files = contents(SVHN, layout, parts(SVHN, layout, 3))
    with serving(files) as server:
        fetch_layout(published(server, layout), tmp_path)
    assert len(load("svhn", tmp_path, allow_partial=True).test) == 3


def test_complete_sets_are_not_fetched_again(tmp_path: Path) -> None:
    layout = CIFAR10.layout("binary")
    small = replace(
        layout, files=tuple(replace(file, size=3 * 3073) for file in layout.files), server="nowhere"
    )
    for name, raw in contents(CIFAR10, layout, parts(CIFAR10, layout, 3)).items():
        (tmp_path / layout.folder).mkdir(exist_ok=True)
        (tmp_path / layout.folder / name).write_bytes(raw)
    assert fetch_layout(small, tmp_path) == tmp_path / layout.folder
    assert is_complete(small, tmp_path / layout.folder)
    known = replace(small, files=(replace(small.files[0], md5="0"), *small.files[1:]))
    assert not is_complete(known, tmp_path / layout.folder)
    (tmp_path / layout.folder / "test_batch.bin").write_bytes(b"short")
    assert not is_complete(small, tmp_path / layout.folder)


def test_a_mirror_must_have_the_official_files(tmp_path: Path) -> None:
    with serving({"cifar-10-binary.tar.gz": b"anything"}) as server:
        with pytest.raises(ValueError, match=r"official file: .*expected md5:c32a1d4ab5d03f1284b67883e8d87530"):
            fetch("cifar10", tmp_path, layout="binary", mirror=f"{server.address}/")
        with pytest.raises(OSError, match=r"cifar-10-python\.tar\.gz: .*Not Found"):
            fetch("cifar10", tmp_path, mirror=server.address)


def test_what_is_not_published_cannot_be_fetched(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'digits' has no official files: .* come with scikit-learn"):
        fetch("digits", tmp_path)
    with pytest.raises(ValueError, match=r"svhn has no layout 'binary'\. Expected mat"):
        fetch("svhn", tmp_path, layout="binary")
