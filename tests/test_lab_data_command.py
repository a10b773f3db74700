"""Promise: `tekfac data` lists, checks and fetches, and tells damage from a part of the data."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from lab_data import SHARED, classes, serving, write_set
from tekfac.cli.main import parser_of
from tekfac.lab.data.catalogue import CIFAR10, CIFAR100, KNOWN, SVHN
from tekfac.lab.data.checking import DIFFERS, OFFICIAL, UNKNOWN, check, check_place
from tekfac.lab.data.official import Place


def run(*arguments: str) -> None:
    options = parser_of("data").parse_args(arguments)
    options.run(options)


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    """Small sets of every kind, below one folder."""
    for known in (CIFAR10, CIFAR100, SVHN):
        for layout in known.layouts:
            write_set(known, layout, tmp_path / "deep" / layout.folder, count=4)
    return tmp_path


# -- list -----------------------------------------------------------------------------------------------------


def test_the_list_says_what_there_is_and_what_is_here(
    everything: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEKFAC_DATA", str(everything))
    monkeypatch.setenv("COLUMNS", "200")
    write_set(SVHN, SVHN.layouts[0], everything / "svhn", count=2)
    run("list")
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert set(KNOWN) <= set(lines)
    assert lines["svhn"].split()[:5] == ["svhn", "10", "73,257", "26,032", "yes"]
    assert lines["cifar100"].split()[:5] == ["cifar100", "100", "50,000", "10,000", "no"]
    assert str(everything) in lines["Official"]


# -- check ----------------------------------------------------------------------------------------------------


def test_every_set_below_a_folder_is_checked(everything: Path) -> None:
    found = check(everything)
    kinds = [(one.name, one.kind) for one in found]
    expected = [(known.name, layout.kind) for known in (CIFAR10, CIFAR100, SVHN) for layout in known.layouts]
    assert sorted(kinds) == sorted(expected)
    assert {one.state for one in found} == {"partial"}
    assert [one.kind for one in check(everything, "cifar100")] == ["binary", "python"]
    assert [(one.train, one.test) for one in check(everything, "cifar10")] == [(20, 4), (20, 4)]


def test_a_part_is_no_damage(everything: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (everything / "deep" / "cifar-10-batches-py" / "data_batch_4").unlink()
    run("check", str(everything), "--name", "cifar10")
    out = capsys.readouterr().out
    assert "cifar-10-batches-py: partial, 16 + 4 images" in out
    assert "only a part of the set: official are 50,000 + 10,000 images; a run on a part needs" in out
    assert "data_batch_4: missing" in out


def test_damage_is_said_and_is_an_error(everything: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = everything / "deep" / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"Damaged data in .*cifar-10-batches-bin; see above\.$"):
        run("check", str(everything))
    assert "test_batch.bin: " in capsys.readouterr().out
    states = {one.folder.name: one.state for one in check(everything)}
    assert states.pop("cifar-10-batches-bin") == "damaged"
    assert set(states.values()) == {"partial"}


def test_without_images_to_test_on_a_set_is_damaged(everything: Path) -> None:
    (everything / "deep" / "svhn" / "test_32x32.mat").unlink()
    (found,) = check(everything, "svhn")
    assert (found.state, found.message) == ("damaged", "no images to test on")


def test_checksums_tell_the_official_files_from_others(tmp_path: Path) -> None:
    python, binary = CIFAR10.layouts
    write_set(CIFAR10, python, tmp_path, count=4)
    raw = {file.name: (tmp_path / file.name).read_bytes() for file in python.files}
    files = tuple(
        replace(file, images=min(file.images, 4), md5=hashlib.md5(raw[file.name]).hexdigest())
        for file in python.files
    )
    place = Place(replace(CIFAR10, counts=(20, 4)), replace(python, files=files), tmp_path)
    found = check_place(place)
    assert found.state == "good"
    assert {file.checksum for file in found.files} == {OFFICIAL}

    changed = bytearray(raw["data_batch_2"])
    changed[-2000] ^= 1
    (tmp_path / "data_batch_2").write_bytes(changed)
    found = check_place(place)
    assert (found.state, found.files[1].state, found.files[1].checksum) == ("damaged", "damaged", DIFFERS)
    assert [file.state for file in found.files].count("good") == 6

    write_set(CIFAR10, binary, tmp_path / "binary", count=4)
    (found,) = check(tmp_path / "binary")
    assert {file.checksum for file in found.files} == {UNKNOWN}


def test_a_damaged_file_of_names_is_damage(everything: Path) -> None:
    (everything / "deep" / "cifar-100-python" / "meta").write_bytes(b"x")
    assert [one.state for one in check(everything, "cifar100")] == ["partial", "damaged"]


def test_own_images_are_recognised_and_all_of_them_read(tmp_path: Path) -> None:
    classes(tmp_path, 5, "a", "b")
    (found,) = check(tmp_path)
    assert (found.name, found.state, found.train, found.test) == ("folder", "good", 8, 2)
    (tmp_path / "a" / "01.png").write_bytes(b"x")
    (found,) = check(tmp_path)
    assert found.state == "damaged"
    assert "01.png" in found.message


def test_a_folder_without_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no files of any data set that tekfac knows"):
        run("check", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no files of svhn"):
        run("check", str(tmp_path), "--name", "svhn")
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        run("check", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="'digits' has no files to check"):
        run("check", str(tmp_path), "--name", "digits")
    with pytest.raises(ValueError, match="Did you mean 'svhn'"):
        run("check", str(tmp_path), "--name", "shvn")


@pytest.mark.skipif(not (SHARED / "svhn").is_dir(), reason=f"no SVHN in {SHARED}")
def test_the_real_part_of_svhn_is_a_part() -> None:
    (found,) = check(SHARED, "svhn")
    assert (found.state, found.train, found.test) == ("partial", 10_000, 4_000)


# -- fetch ----------------------------------------------------------------------------------------------------


def test_fetching_says_where_the_data_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving({"cifar-10-binary.tar.gz": b"anything"}) as server:
        arguments = (
            "fetch",
            "cifar10",
            "--to",
            str(tmp_path),
            "--layout",
            "binary",
            "--mirror",
            server.address,
        )
        with pytest.raises(ValueError, match="not the official file"):
            run(*arguments)
    layout = CIFAR10.layouts[1]
    write_set(CIFAR10, layout, tmp_path / layout.folder, count=1)
    for file in layout.of("train", "test"):
        with (tmp_path / layout.folder / file.name).open("r+b") as opened:
            opened.truncate(file.size)
    run(*arguments)
    assert capsys.readouterr().out.strip() == f"cifar10 is complete in {tmp_path / layout.folder}"
