"""Images in memory as they came: whole numbers from 0 to 255, with their labels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tekfac.common.data_hash import hash_of

HELD_BACK_SEED = 20_260_101
"""Of the one order in which training images are held back, for every data set and every run."""


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels, uint8 [N, C, H, W], and the number of each image's class, int64 [N]."""

    pixels: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.pixels.dtype != torch.uint8 or self.pixels.ndim != 4:
            raise ValueError(
                f"Pixels are {self.pixels.dtype} of shape {list(self.pixels.shape)}. "
                "Expected torch.uint8 of shape [N, C, H, W]."
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.pixels.shape[:1]:
            raise ValueError(
                f"Labels are {self.labels.dtype} of shape {list(self.labels.shape)}. "
                f"Expected torch.int64 of shape [{len(self.pixels)}], one for each image."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, count: int) -> Images:
        """The first images.

        Raises:
            ValueError: if there are not so many.
        """
        if not 1 <= count <= len(self):
            raise ValueError(f"Cannot take {count:,} of {len(self):,} images. Expected 1 to {len(self):,}.")
        return Images(self.pixels[:count], self.labels[:count])

    def chosen(self, indices: Tensor) -> Images:
        """The images of these indices, int64 [M], in this order."""
        return Images(self.pixels.index_select(0, indices), self.labels.index_select(0, indices))


@dataclass(frozen=True, eq=False)
class DataSet:
    """Images to train on and images to test on.

    Attributes:
        name: as the user says it.
        train: what is trained on.
        test: what is tested on.
        classes: their names; the label is the index.
        mean: of each channel, of pixels scaled to 0..1, to be subtracted.
        std: of each channel, to be divided by.
        augmented: whether random crops and flips are usual for this set.
        notes: what the user should know of this data.
    """

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmented: bool = False
    notes: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Of all images and labels."""
        tensors = [tensor for images in (self.train, self.test) for tensor in (images.pixels, images.labels)]
        return hashlib.sha256(repr([hash_of(tensor) for tensor in tensors]).encode()).hexdigest()[:16]


def joined(parts: Sequence[Images]) -> Images:
    """Images one after the other, in one tensor."""
    pixels, labels = [part.pixels for part in parts], [part.labels for part in parts]
    return parts[0] if len(parts) == 1 else Images(torch.cat(pixels), torch.cat(labels))


def held_back(dataset: DataSet, count: int) -> DataSet:
    """The same set with some of its training images in place of the test images, to tune on.

    The training images are shuffled once, the same way for everybody, so that classes are mixed; the last of
    them are held back. The test images are not looked at.

    Raises:
        ValueError: if no training image would be left, or none held back.
    """
    total = len(dataset.train)
    if not 1 <= count < total:
        raise ValueError(
            f"Cannot hold back {count:,} of the {total:,} training images of {dataset.name}. "
            f"Expected 1 to {total - 1:,}."
        )
    order = torch.randperm(total, generator=torch.Generator().manual_seed(HELD_BACK_SEED))
    note = f"tested on {count:,} held-back training images, not on the test set"
    return replace(
        dataset,
        train=dataset.train.chosen(order[:-count]),
        test=dataset.train.chosen(order[-count:]),
        notes=(*dataset.notes, note),
    )
