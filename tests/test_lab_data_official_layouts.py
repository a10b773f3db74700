"""Promise: the official files of every layout are read, wherever a user may have put them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import loadmat, savemat

from lab_data import SHARED, parts, python2_pickle, python3_pickle, random_images, write_set
from tekfac.lab.config import RunConfig
from tekfac.lab.data import DataSet, Images, load
from tekfac.lab.data.catalogue import CIFAR10, CIFAR100, KNOWN, SVHN, Known, Layout
from tekfac.lab.data.cifar import images_in_pickle
from tekfac.lab.data.digits import read_digits
from tekfac.lab.data.images import held_back, joined
from tekfac.lab.data.official import Place, place_in, read_official
from tekfac.lab.data.plain_pickles import read_pickle, short_text
from tekfac.lab.data.svhn import read_mat
from tekfac.lab.inputs import read

LAYOUTS = [(known, layout) for known in (CIFAR10, CIFAR100, SVHN) for layout in known.layouts]
every_layout = pytest.mark.parametrize(
    ("known", "layout"), LAYOUTS, ids=[f"{known.name}-{layout.kind}" for known, layout in LAYOUTS]
)


def same(one: Images, other: Images) -> bool:
    return torch.equal(one.pixels, other.pixels) and torch.equal(one.labels, other.labels)


@every_layout
@pytest.mark.parametrize("inside", [True, False])
def test_a_set_is_read_from_its_folder_and_from_the_one_around_it(
    known: Known, layout: Layout, inside: bool, tmp_path: Path
) -> None:
    written = write_set(known, layout, tmp_path / layout.folder)
    found = load(known.name, tmp_path if inside else tmp_path / layout.folder, allow_partial=True)
    assert same(found.train, joined([written[file.name] for file in layout.of("train")]))
    assert same(found.test, joined([written[file.name] for file in layout.of("test")]))
    assert found.classes == known.classes
    assert (found.mean, found.std, found.augmented) == (known.mean, known.std, known.name != "svhn")


@every_layout
def test_fewer_images_are_refused_unless_allowed_and_then_noted(
    known: Known, layout: Layout, tmp_path: Path
) -> None:
    write_set(known, layout, tmp_path)
    train, test = 12 * len(layout.of("train")), 12
    message = f"has {train} images to train on and {test} to test on; {known.name} has .*--allow-partial"
    with pytest.raises(ValueError, match=message):
        load(known.name, tmp_path)
    assert load(known.name, tmp_path, allow_partial=True).notes == (
        f"{train} of the official {known.counts[0]:,} training images of {known.name}",
        f"{test} of the official {known.counts[1]:,} test images of {known.name}",
    )


@every_layout
def test_all_images_need_no_allowance_and_no_note(known: Known, layout: Layout, tmp_path: Path) -> None:
    write_set(known, layout, tmp_path)
    small = replace(known, counts=(12 * len(layout.of("train")), 12))
    assert read_official(Place(small, layout, tmp_path)).notes == ()


def test_a_set_without_some_of_its_batches_is_partial(tmp_path: Path) -> None:
    write_set(CIFAR10, CIFAR10.layouts[0], tmp_path)
    (tmp_path / "data_batch_2").unlink()
    with pytest.raises(ValueError, match=r"without data_batch_2.*--allow-partial"):
        load("cifar10", tmp_path)
    assert len(load("cifar10", tmp_path, allow_partial=True).train) == 4 * 12


def test_without_test_images_there_is_no_set(tmp_path: Path) -> None:
    write_set(CIFAR100, CIFAR100.layouts[1], tmp_path)
    (tmp_path / "test.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"no images to test on: missing .*test\.bin"):
        load("cifar100", tmp_path, allow_partial=True)


def test_python_files_are_preferred(tmp_path: Path) -> None:
    python, binary = CIFAR10.layouts
    write_set(CIFAR10, binary, tmp_path, count=3)
    write_set(CIFAR10, python, tmp_path / python.folder, count=4)
    assert len(load("cifar10", tmp_path, allow_partial=True).test) == 4


def test_whole_files_are_preferred_to_a_part(tmp_path: Path) -> None:
    python, binary = CIFAR10.layouts

    def resize(layout: Layout) -> None:
        """Files of the official sizes that take no space."""
        for file in layout.of("train", "test"):
            with (tmp_path / layout.folder / file.name).open("r+b") as opened:
                opened.truncate(file.size)

    def preferred() -> str:
        place = place_in(CIFAR10, tmp_path)
        assert place is not None
        return place.layout.kind

    for layout in (python, binary):
        write_set(CIFAR10, layout, tmp_path / layout.folder, count=3)
    assert preferred() == "python"
    resize(binary)
    assert preferred() == "binary"
    resize(python)
    assert preferred() == "python"
    (tmp_path / python.folder / "data_batch_5").unlink()
    assert preferred() == "binary"
    (tmp_path / binary.folder / "test_batch.bin").unlink()
    assert preferred() == "python"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_python_3_are_read_as_those_of_python_2(protocol: int, tmp_path: Path) -> None:
    images = random_images(300, 10)
    (tmp_path / "two").write_bytes(python2_pickle(images))
    (tmp_path / "three").write_bytes(python3_pickle(images, protocol=protocol))
    assert same(images_in_pickle(tmp_path / "two", "labels"), images)
    assert same(images_in_pickle(tmp_path / "three", "labels"), images)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("writable", [True, False])
def test_a_whole_batch_that_python_3_pickled_again_is_read(
    protocol: int, writable: bool, tmp_path: Path
) -> None:
    """As large as the official ones: in protocol 2 each name of a file is a call of its own."""
    pixels = np.arange(10_000 * 3072, dtype=np.uint8).reshape(10_000, 3072)
    pixels.flags.writeable = writable
    batch = {
        b"batch_label": b"training batch 1 of 5",
        b"labels": [number % 10 for number in range(10_000)],
        b"data": pixels,
        b"filenames": [f"image_{number}.png".encode() for number in range(9_999)] + [b""],
    }
    (tmp_path / "batch").write_bytes(pickle.dumps(batch, protocol=protocol))
    data, labels, label, names = read_pickle(tmp_path / "batch", "data", "labels", "batch_label", "filenames")
    assert (data.shape, bytes(data.data)) == (pixels.shape, pixels.tobytes())
    assert labels == batch[b"labels"]
    assert short_text(label) == "training batch 1 of 5"
    assert [short_text(name) for name in names] == [name.decode() for name in batch[b"filenames"]]


def test_names_of_classes_come_from_the_files_and_otherwise_from_the_catalogue(tmp_path: Path) -> None:
    write_set(CIFAR10, CIFAR10.layouts[1], tmp_path)
    names = tmp_path / "batches.meta.txt"
    names.write_text(names.read_text().replace("airplane", "aeroplane"))
    assert load("cifar10", tmp_path, allow_partial=True).classes[0] == "aeroplane"
    names.unlink()
    assert load("cifar10", tmp_path, allow_partial=True).classes == CIFAR10.classes


def test_official_counts_are_those_of_the_files() -> None:
    for known, layout in LAYOUTS:
        counts = [sum(file.images for file in layout.of(role)) for role in ("train", "test")]
        assert tuple(counts) == known.counts


def test_digits_are_split_once_and_for_all() -> None:
    found = load("digits")
    assert (len(found.train), len(found.test)) == KNOWN["digits"].counts
    assert found.train.pixels.shape[1:] == (1, 8, 8)
    assert int(found.train.pixels.max()) == 255
    pixels, labels = read_digits(torch.float64)
    assert torch.equal(found.test.labels, labels[:360])
    assert torch.equal(found.train.pixels.double(), (pixels[360:] * 255).round())


def test_digits_are_in_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'digits' is in no folder: .*Leave --data-dir '/nonexistent' out"):
        load("digits", "/nonexistent")
    with pytest.raises(ValueError, match="is in no folder"):
        read(RunConfig(data="digits", data_dir=str(tmp_path)))
    monkeypatch.setenv("TEKFAC_DATA", str(tmp_path))
    assert len(load("digits").train) == 1_437


def test_the_default_folder_is_the_one_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEKFAC_DATA", str(tmp_path))
    write_set(SVHN, SVHN.layouts[0], tmp_path / "svhn")
    assert len(load("svhn", allow_partial=True).test) == 12
    monkeypatch.delenv("TEKFAC_DATA")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(FileNotFoundError, match=r"home/\.cache/tekfac/data' does not exist"):
        load("svhn")


def test_held_back_images_are_mixed_and_no_longer_trained_on() -> None:
    images = Images(torch.arange(200, dtype=torch.uint8).view(200, 1, 1, 1), torch.arange(200) // 100)
    dataset = DataSet("some", images, images.part(5), ("a", "b"), (0.0,), (1.0,))
    held = held_back(dataset, 40)
    seen = torch.cat([held.train.pixels, held.test.pixels]).flatten()
    assert (len(held.train), len(held.test)) == (160, 40)
    assert torch.equal(seen.sort().values, images.pixels.flatten())
    assert 10 < int(held.test.labels.sum()) < 30
    assert torch.equal(held_back(dataset, 40).test.pixels, held.test.pixels)
    assert "held-back" in held.notes[0]
    with pytest.raises(ValueError, match=r"Cannot hold back 200 of the 200 .* Expected 1 to 199"):
        held_back(dataset, 200)


def test_a_run_is_tested_on_all_held_back_images_however_few_of_the_test_set_it_asks_for() -> None:
    config = RunConfig(data="digits", train_samples=100, test_samples=50)
    assert (len(read(config).train), len(read(config).test)) == (100, 50)
    tuned = read(replace(config, held_back=300))
    assert (len(tuned.train), len(tuned.test)) == (100, 300)
    with pytest.raises(ValueError, match=r"Invalid train_samples: 1400. There are 1137 images"):
        read(replace(config, held_back=300, train_samples=1400))


@pytest.mark.skipif(not (SHARED / "svhn").is_dir(), reason=f"no SVHN in {SHARED}")
def test_real_svhn_has_the_published_statistics() -> None:
    found = load("svhn", SHARED, allow_partial=True)
    pixels = found.train.pixels.float() / 255
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.tensor(found.mean), atol=5e-3)
    assert found.train.labels.bincount().argmax() == 1, "house numbers begin with 1 more often than with others"


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", "float32", "float64"])
def test_matlab_files_are_read_as_scipy_reads_them(dtype: str, compressed: bool, tmp_path: Path) -> None:
    numbers = {"X": np.arange(210).reshape(5, 7, 2, 3).astype(dtype), "y": np.arange(3)[:, None].astype(dtype)}
    savemat(tmp_path / "file.mat", numbers, do_compression=compressed)
    expected = loadmat(tmp_path / "file.mat")
    for name, found in zip("Xy", read_mat(tmp_path / "file.mat"), strict=True):
        assert torch.equal(found.double(), torch.from_numpy(expected[name].astype("float64")))


def test_parts_are_the_first_images() -> None:
    images = parts(SVHN, SVHN.layouts[0], 5)["test_32x32.mat"]
    assert same(images.part(2), Images(images.pixels[:2], images.labels[:2]))
    with pytest.raises(ValueError, match=r"Cannot take 6 of 5 images\. Expected 1 to 5"):
        images.part(6)
