"""Promise: folders of the user's own images are a data set, and what is wrong with them is said."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from PIL import Image

from lab_data import classes, draw
from tekfac.lab.data import load
from tekfac.lab.data.folder import folder_of_images


def test_train_and_test_are_read_with_sorted_classes(tmp_path: Path) -> None:
    classes(tmp_path / "train", 3, "zebra", "ant")
    classes(tmp_path / "test", 2, "zebra", "ant")
    found = load("folder", tmp_path)
    assert found.classes == ("ant", "zebra")
    assert found.train.pixels.shape == (6, 1, 4, 6)
    assert found.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.train.pixels[:, 0, 0, 0].tolist() == [100, 101, 102, 0, 1, 2]
    assert found.test.pixels[:, 0, 0, 0].tolist() == [100, 101, 0, 1]
    assert not found.augmented


def test_of_classes_alone_every_fifth_image_is_to_test_on(tmp_path: Path) -> None:
    classes(tmp_path, 11, "a", "b")
    found = load("folder", tmp_path)
    assert found.test.pixels[:, 0, 0, 0].tolist() == [4, 9, 104, 109]
    assert found.test.labels.tolist() == [0, 0, 1, 1]
    assert len(found.train) == 18


def test_channels_come_first_and_mean_and_deviation_are_those_of_the_training_images(tmp_path: Path) -> None:
    for half in ("train", "test"):
        for name in ("a", "b"):
            for number in range(4):
                path = tmp_path / half / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = torch.randint(256, (5, 7, 3), dtype=torch.uint8)
                Image.frombytes("RGB", (7, 5), noise.numpy().tobytes()).save(path)
    found = load("folder", tmp_path)
    with Image.open(tmp_path / "train" / "a" / "0.png") as image:
        assert tuple(found.train.pixels[0, :, 2, 3].tolist()) == image.getpixel((3, 2))
    scaled = found.train.pixels.double().transpose(0, 1).flatten(1) / 255
    assert torch.allclose(torch.tensor(found.mean).double(), scaled.mean(1))
    assert torch.allclose(torch.tensor(found.std).double(), scaled.std(1, correction=0))


def test_one_coloured_image_makes_all_of_them_coloured(tmp_path: Path) -> None:
    classes(tmp_path, 5, "a", "b")
    draw(tmp_path / "a" / "00.png", (1, 2, 3))
    found = load("folder", tmp_path)
    assert found.train.pixels[0, :, 0, 0].tolist() == [1, 2, 3]
    assert found.train.pixels[1, :, 0, 0].tolist() == [1, 1, 1]


def test_images_of_one_brightness_are_not_divided_by_zero(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(5):
            draw(tmp_path / name / f"{number}.bmp", 51)
    found = load("folder", tmp_path)
    assert (found.mean, found.std) == (pytest.approx((0.2,)), (1.0,))


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    classes(tmp_path, 5, "a", "b")
    draw(tmp_path / "b" / "wide.jpg", 7, size=(9, 3))
    with pytest.raises(ValueError, match=r"00\.png is 6x4, wide\.jpg is 9x3\. Pass --image-size"):
        load("folder", tmp_path)
    found = load("folder", tmp_path, image_size=8)
    assert found.train.pixels.shape[1:] == (1, 8, 8)
    assert found.train.pixels[0].unique().tolist() == [0]
    with pytest.raises(ValueError, match=r"--image-size is 0\. Expected at least 1"):
        load("folder", tmp_path, image_size=0)


@pytest.mark.parametrize("kept", [0, 20, 45])
def test_an_unreadable_image_is_named(kept: int, tmp_path: Path) -> None:
    classes(tmp_path, 5, "a", "b")
    path = tmp_path / "b" / "03.png"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"Cannot read '.*b/03\.png' as an image: .* Remove or replace it"):
        load("folder", tmp_path)


def test_images_of_more_than_eight_bits_are_refused(tmp_path: Path) -> None:
    classes(tmp_path, 5, "a", "b")
    Image.new("I;16", (6, 4)).save(tmp_path / "b" / "deep.png")
    with pytest.raises(ValueError, match=r"deep\.png' is of mode I;16\. Expected 8 bits"):
        load("folder", tmp_path)


def test_other_files_and_hidden_folders_are_passed_over(tmp_path: Path) -> None:
    classes(tmp_path, 5, "a", "b")
    (tmp_path / "a" / "notes.txt").write_text("hello")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "list.csv").write_text("hello")
    assert load("folder", tmp_path).classes == ("a", "b")


def test_folders_that_are_laid_out_otherwise_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"has 0 folders with images\. Expected at least 2, one for each class"
    ):
        load("folder", tmp_path)
    classes(tmp_path, 3, "a", "b")
    with pytest.raises(ValueError, match="has 5 images, so that none is to test on"):
        load("folder", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"The classes empty in .* have no images"):
        load("folder", tmp_path)
    classes(tmp_path / "split" / "train", 3, "a", "b")
    with pytest.raises(ValueError, match="split/test' is missing"):
        load("folder", tmp_path / "split")
    classes(tmp_path / "split" / "test", 3, "a", "c")
    with pytest.raises(ValueError, match="has the classes c, which 'train' has not"):
        load("folder", tmp_path / "split")
    with pytest.raises(ValueError, match="Say which folder DIR is"):
        load("folder")


def test_a_small_file_with_more_pixels_than_a_camera_makes_is_not_unpacked(tmp_path: Path) -> None:
    classes(tmp_path, 5, "a", "b")
    image = Image.new("L", (7000, 7000))
    image.save(tmp_path / "a" / "large.png", compress_level=1)
    image.close()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"large\.png' as an image: it has 7000 x 7000 pixels, more than"):
            folder_of_images(tmp_path, image_size=4)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
