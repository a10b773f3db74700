"""From a config to batches: the images of a run, cut to size, and the way they are handed out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F

from tekfac.common.files import write_whole
from tekfac.lab.config import OF_DATA, RunConfig
from tekfac.lab.data.batches import Batches
from tekfac.lab.data.images import DataSet, Images, held_back
from tekfac.lab.data.loading import load
from tekfac.lab.sealed_files import save

TEST_BATCH = 500
SAMPLE_SEED = 4096
"""Of the one order in which images are taken where a run does not use all."""


def read(config: RunConfig) -> DataSet:
    """Load and check what the config names, and cut it to size.

    Raises:
        ValueError: for data that are not as they should be, or that the config cannot be met with.
    """
    data = load(
        config.data,
        config.data_dir,
        allow_partial=config.allow_partial,
        image_size=config.image_size if config.data == "folder" else None,
    )
    data = _cut(data, config)
    height, width = data.train.pixels.shape[2:]
    if height != width:
        raise ValueError(
            f"The images of {config.data} are {height} x {width} pixels. Set image_size to make them square."
        )
    return data


class SharedData:
    """The data of many runs: read and hashed once, and mapped into memory by every process that trains."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="tekfac-data-")
        self._paths: dict[tuple[Any, ...], Path] = {}

    def path(self, config: RunConfig) -> Path | None:
        """A file with what the config names; None if it cannot be had, which the run itself will tell."""
        key = tuple(getattr(config, name) for name in OF_DATA)
        if key not in self._paths:
            path = Path(self._folder.name) / f"{len(self._paths)}.pt"
            try:
                data = read(config)
                _ = data.digest  # is kept with the data
                write_whole(path, partial(save, data))
            except (OSError, ValueError):
                return None
            self._paths[key] = path
        return self._paths[key]

    def close(self) -> None:
        """Remove the files; processes that have them mapped may go on."""
        self._folder.cleanup()


def mapped(path: Path) -> DataSet:
    """The data in a file of `SharedData`; processes that map the same file share its memory."""
    return torch.load(path, mmap=True, weights_only=False)  # type: ignore[no-any-return]


def batches(data: DataSet, config: RunConfig, device: torch.device) -> tuple[Batches, Batches]:
    """The batches of a run, to train on and to test on."""
    augment = data.augmented if config.augment is None else config.augment

    def of(images: Images, size: int, *, is_training: bool) -> Batches:
        return Batches(
            images,
            mean=data.mean,
            std=data.std,
            batch_size=size,
            seed=config.seed,
            augment=augment and is_training,
            shuffle=is_training,
            device=device,
            workers=config.workers,
        )

    return of(data.train, config.batch_size, is_training=True), of(data.test, TEST_BATCH, is_training=False)


def given(data: DataSet) -> dict[str, int]:
    """What a network may ask for (see models.GIVEN)."""
    _, channels, _, size = data.train.pixels.shape
    return {"channels": channels, "classes": len(data.classes), "size": size}


def _cut(data: DataSet, config: RunConfig) -> DataSet:
    """Hold images back, take as many as the config asks for, and bring them to size."""
    if config.held_back:
        share = config.held_back < 1
        data = held_back(data, round(config.held_back * len(data.train)) if share else int(config.held_back))
    else:
        data = replace(data, test=_sample(data.test, config.test_samples, "test_samples"))
    data = replace(data, train=_sample(data.train, config.train_samples, "train_samples"))
    size = config.image_size
    if size is not None and size != data.train.pixels.shape[-1]:
        data = replace(data, train=_resized(data.train, size), test=_resized(data.test, size))
    return data


def _sample(images: Images, count: int | None, setting: str) -> Images:
    """Some of the images, the same for everybody, whatever order they lie in; None for all."""
    if count is None:
        return images
    if count > len(images):
        raise ValueError(f"Invalid {setting}: {count}. There are {len(images)} images; leave it out for all.")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SAMPLE_SEED))
    return images.chosen(order[:count])


def _resized(images: Images, size: int) -> Images:
    """Every pixel the mean of those that it covers."""
    pixels = torch.cat(
        [F.interpolate(part.float(), (size, size), mode="area") for part in torch.split(images.pixels, 1000)]
    )
    return Images(pixels.round().to(torch.uint8), images.labels)
