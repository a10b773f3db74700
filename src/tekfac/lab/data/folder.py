"""The user's own images: a folder for each class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tekfac.common.extras import require
from tekfac.lab.data.catalogue import FOLDER
from tekfac.lab.data.images import DataSet, Images

ENDINGS = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"))
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
"""What such files may be inside: others, of which PostScript is one, would be handed on to other programs."""
MOST_PIXELS = 1 << 25
"""Of an image: more than a camera's; a small file can hold any number of equal ones."""
GREY = frozenset(("1", "L", "LA"))
COLOURED = frozenset(("P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV", "LAB"))
TEST_EVERY = 5

Labelled = list[tuple[Path, int]]


def folder_of_images(folder: Path, image_size: int | None = None) -> DataSet:
    """Images in DIR/train/CLASS and DIR/test/CLASS; or in DIR/CLASS, of which every fifth is for testing.

    They are grey if all of them are, otherwise RGB.

    Args:
        folder: DIR.
        image_size: height and width to which all are resized; without it all must be of one size.

    Raises:
        ValueError: if there are no images to train or test on, if one cannot be read, or if sizes differ.
    """
    if image_size is not None and image_size < 1:
        raise ValueError(f"--image-size is {image_size}. Expected at least 1.")
    classes, train, test = listed(folder)
    size, mode = _common(folder, [path for path, _ in (*train, *test)], image_size)
    images = _read(train, size, mode)
    mean, std = _statistics(images.pixels)
    return DataSet(FOLDER.name, images, _read(test, size, mode), classes, mean, std)


def listed(folder: Path) -> tuple[tuple[str, ...], Labelled, Labelled]:
    """The classes, and the files to train on and to test on, each with its label; always in the same order.

    Raises:
        ValueError: if the folder is not laid out as expected.
    """
    halves = [folder / half for half in ("train", "test")]
    missing = [half for half in halves if not half.is_dir()]
    if missing == halves:
        classes = _classes(folder)
        every = [list(enumerate(_files(folder / name))) for name in classes]
        train = [(p, label) for label, one in enumerate(every) for i, p in one if (i + 1) % TEST_EVERY]
        test = [(p, label) for label, one in enumerate(every) for i, p in one if not (i + 1) % TEST_EVERY]
        if not test:
            raise ValueError(
                f"No class in {str(folder)!r} has {TEST_EVERY} images, so that none is to test on."
            )
        return classes, train, test
    if missing:
        raise ValueError(
            f"{str(missing[0])!r} is missing. Expected a folder 'train' and a folder 'test' beside it."
        )
    classes = _classes(halves[0])
    strange = [name for name in _classes(halves[1], least=1) if name not in classes]
    if strange:
        raise ValueError(f"{str(halves[1])!r} has the classes {', '.join(strange)}, which 'train' has not.")
    train, test = (
        [(path, label) for label, name in enumerate(classes) for path in _files(half / name)] for half in halves
    )
    return classes, train, test


def _classes(folder: Path, least: int = 2) -> tuple[str, ...]:
    """Folders that hold images, in alphabetical order."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    empty = [path.name for path in inside if not _files(path)]
    if empty and len(empty) < len(inside):
        raise ValueError(
            f"The classes {', '.join(empty)} in {str(folder)!r} have no images. Remove or fill them."
        )
    if empty or len(inside) < least:
        raise ValueError(
            f"{str(folder)!r} has {len(inside) - len(empty)} folders with images. Expected at least {least}, "
            f"one for each class: {FOLDER.about}."
        )
    return tuple(path.name for path in inside)


def _files(folder: Path) -> list[Path]:
    """The images of a class, by name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS and path.is_file())


def _common(folder: Path, paths: list[Path], image_size: int | None) -> tuple[tuple[int, int], str]:
    """Width and height, and the mode, "L" or "RGB", that all images get."""
    sizes: dict[tuple[int, int], Path] = {}
    modes: dict[str, Path] = {}
    for path in paths:
        with _opened(path) as image:
            sizes.setdefault(image.size, path)
            modes.setdefault(image.mode, path)
    strange = [name for name in modes if name not in GREY | COLOURED]
    if strange:
        raise ValueError(
            f"{str(modes[strange[0]])!r} is of mode {strange[0]}. Expected 8 bits for each channel."
        )
    mode = "L" if modes.keys() <= GREY else "RGB"
    if image_size is not None:
        return (image_size, image_size), mode
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise ValueError(
            f"The images in {str(folder)!r} differ in size: {first.name} is {one[0]}x{one[1]}, {second.name} "
            f"is {other[0]}x{other[1]}. Pass --image-size to resize all of them."
        )
    return next(iter(sizes)), mode


def _read(files: Labelled, size: tuple[int, int], mode: str) -> Images:
    """The images of the files, [N, C, H, W]."""
    width, height = size
    channels = len(mode) if mode == "RGB" else 1
    pixels = torch.empty(len(files), channels, height, width, dtype=torch.uint8)
    bilinear = require("PIL.Image", "Reading images").Resampling.BILINEAR
    for row, path in zip(pixels, (path for path, _ in files), strict=True):
        with _opened(path) as image:
            fitting = image.convert(mode)
            if fitting.size != size:
                fitting = fitting.resize(size, bilinear)
            flat = torch.frombuffer(bytearray(fitting.tobytes()), dtype=torch.uint8)
        row.copy_(flat.view(height, width, channels).permute(2, 0, 1))
    return Images(pixels, torch.tensor([label for _, label in files], dtype=torch.int64))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open image; whatever is wrong with it, the error names its file."""
    pillow = require("PIL.Image", "Reading images")
    try:
        with pillow.open(path, formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ValueError(f"it has {width} x {height} pixels, more than {MOST_PIXELS:,}")
            yield image
    except Exception as error:  # a damaged image can end in nearly any error
        raise ValueError(f"Cannot read {str(path)!r} as an image: {error}. Remove or replace it.") from error


def _statistics(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of [N, C, H, W], of pixels scaled to 0..1."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in pixels.unbind(1):
        shares = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = float(shares @ values)
        means.append(mean)
        deviations.append(float(shares @ (values - mean) ** 2) ** 0.5 or 1.0)
    return tuple(means), tuple(deviations)
