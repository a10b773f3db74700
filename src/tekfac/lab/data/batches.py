"""The input pipeline: each batch is a function of the seed, the epoch and its number, and of nothing else."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tekfac.lab.data.augmentation import crop_and_flip, draw, padding_of
from tekfac.lab.data.images import Images

Batch = tuple[Tensor, Tensor]

AHEAD = 2
"""Batches that are made ahead for each worker."""


class Batches:
    """Images in batches, normalised, shuffled and augmented.

    All pixels sit on the device as they came, a byte each. A run that goes on in the middle of an epoch gets
    the batches that it would have got, and so does one with another number of workers.

    Args:
        images: what the batches are made of.
        mean: of each channel, subtracted from pixels scaled to 0..1.
        std: of each channel, divided by.
        batch_size: images of a batch; the last one of an epoch may have fewer.
        seed: of the order, the crops and the flips.
        augment: whether images are cropped and flipped at random.
        shuffle: whether every epoch has an order of its own; otherwise all have the order of `images`.
        device: where the batches are made.
        workers: threads that make batches ahead of time; with none they are made when they are asked for.
    """

    def __init__(
        self,
        images: Images,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        batch_size: int,
        seed: int,
        augment: bool,
        shuffle: bool,
        device: torch.device | str = "cpu",
        workers: int = 0,
    ) -> None:
        _check(images, mean, std, batch_size, workers)
        self._pixels, self._labels = images.pixels.to(device), images.labels.to(device)
        self._scale = torch.tensor([1 / (255 * s) for s in std], device=device)[:, None, None]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        self._shift = torch.tensor(shift, device=device)[:, None, None]
        self._batch_size, self._seed, self._workers = batch_size, seed, workers
        self._augment, self._shuffle = augment, shuffle
        self._count = -(-len(images) // batch_size)
        self._order: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._count

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from the one of number `start` on."""
        if not 0 <= start <= len(self):
            raise ValueError(f"Cannot start at batch {start} of an epoch of {len(self)} batches.")
        if self._workers:
            return self._ahead(epoch, start)
        return (self.batch(epoch, index) for index in range(start, len(self)))

    def batch(self, epoch: int, index: int) -> Batch:
        """Inputs, float32 [B, C, H, W], and labels, int64 [B], of the batch of a number in an epoch.

        Raises:
            IndexError: if the epoch has no such batch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"There is no batch {index} in an epoch of {len(self)} batches.")
        span = slice(index * self._batch_size, (index + 1) * self._batch_size)
        if self._shuffle:
            chosen = self._order_of(epoch)[span]
            pixels, labels = self._pixels.index_select(0, chosen), self._labels.index_select(0, chosen)
        else:
            pixels, labels = self._pixels[span], self._labels[span]
        if self._augment:
            padding = padding_of(min(pixels.shape[2:]))
            offsets, flips = draw(len(pixels), padding, _generator(self._seed, epoch, index))
            pixels = crop_and_flip(pixels, padding, offsets.to(pixels.device), flips.to(pixels.device))
        return pixels.float().mul_(self._scale).add_(self._shift), labels

    def _order_of(self, epoch: int) -> Tensor:
        """The order of the images in an epoch, int64 [N]; that of the latest epoch is kept."""
        kept = self._order
        if kept is None or kept[0] != epoch:
            order = torch.randperm(len(self._labels), generator=_generator(self._seed, epoch))
            self._order = kept = epoch, order.to(self._pixels.device)
        return kept[1]

    def _ahead(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches in their order, made by threads that are a few batches ahead."""
        executor = ThreadPoolExecutor(self._workers, thread_name_prefix="batches")
        waiting: deque[Future[Batch]] = deque()
        try:
            for index in range(start, len(self)):
                waiting.append(executor.submit(self.batch, epoch, index))
                if len(waiting) > AHEAD * self._workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            executor.shutdown(cancel_futures=True)


def _generator(*key: int) -> torch.Generator:
    """A generator of its own for each key; on the CPU, so that every device gets the same numbers."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def _check(images: Images, mean: Sequence[float], std: Sequence[float], batch_size: int, workers: int) -> None:
    channels = images.pixels.shape[1]
    if len(mean) != channels or len(std) != channels:
        raise ValueError(
            f"{len(mean)} means and {len(std)} deviations for {channels} channels. Expected one for each."
        )
    if not all(deviation > 0 for deviation in std):
        raise ValueError(f"The deviations are {tuple(std)}. Expected positive numbers.")
    if batch_size < 1 or workers < 0:
        raise ValueError(
            f"batch_size is {batch_size} and workers {workers}. Expected at least 1 and at least 0."
        )
