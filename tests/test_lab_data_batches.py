"""Promise: a batch is a function of the seed, the epoch and its number, however the pipeline is run."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from lab_data import random_images
from tekfac.lab.data import Batches, Images
from tekfac.lab.data.augmentation import crop_and_flip, draw, padding_of

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def batches(images: Images | None = None, **options: Any) -> Batches:
    settings: dict[str, Any] = {"batch_size": 16, "seed": 3, "augment": True, "shuffle": True, **options}
    return Batches(random_images(70, 10) if images is None else images, mean=MEAN, std=STD, **settings)


def numbered(count: int = 70) -> Images:
    """Images that are known by their labels."""
    return Images(random_images(count, 10).pixels, torch.arange(count))


def labels(made: Batches, epoch: int) -> Tensor:
    return torch.cat([batch[1] for batch in made.epoch(epoch)])


def equal(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in pairs)


def normalised(pixels: Tensor) -> Tensor:
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    return (pixels.float() / 255 - mean) / std


# -- what is in a batch ---------------------------------------------------------------------------------------


def test_an_epoch_has_every_image_once_in_an_order_of_its_own() -> None:
    made = batches(numbered())
    first, second = labels(made, 0), labels(made, 1)
    assert torch.equal(first.sort().values, torch.arange(70))
    assert torch.equal(second.sort().values, torch.arange(70))
    assert not torch.equal(first, second)
    assert not torch.equal(first, labels(batches(numbered(), seed=4), 0))


def test_without_shuffling_the_order_is_that_of_the_images() -> None:
    made = batches(numbered(), shuffle=False, augment=False)
    assert torch.equal(labels(made, 5), torch.arange(70))
    inputs = torch.cat([batch[0] for batch in made.epoch(0)])
    assert inputs.dtype == torch.float32
    assert torch.allclose(inputs, normalised(numbered().pixels), atol=1e-6)


def test_a_last_batch_that_is_not_full_is_kept() -> None:
    made = batches()
    assert [len(batch[1]) for batch in made.epoch(0)] == [16, 16, 16, 16, 6]
    assert len(made) == 5


def test_images_keep_their_labels() -> None:
    images = numbered()
    inputs, found = batches(images, augment=False).batch(2, 1)
    assert torch.allclose(inputs, normalised(images.pixels[found]), atol=1e-6)


# -- the same, however it is run ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("start", [0, 2, 5])
def test_workers_and_a_later_start_change_nothing(workers: int, start: int) -> None:
    reference = [batches().batch(1, index) for index in range(start, 5)]
    assert equal(list(batches(workers=workers).epoch(1, start)), reference)


def test_batches_do_not_depend_on_what_was_made_before() -> None:
    made = batches()
    reference = made.batch(4, 3)
    list(made.epoch(0))
    torch.manual_seed(1)
    assert equal([made.batch(4, 3)], [reference])
    assert not torch.equal(made.batch(5, 3)[0], reference[0])


def test_crops_and_flips_are_others_in_every_epoch_and_every_batch() -> None:
    one = random_images(16, 10)
    twice = Images(one.pixels.repeat(2, 1, 1, 1), one.labels.repeat(2))
    made = batches(twice, shuffle=False)
    (first, _), (second, _) = made.epoch(0)
    assert not torch.equal(first, second)
    assert not torch.equal(first, made.batch(1, 0)[0])
    assert not torch.equal(first, batches(twice, shuffle=False, seed=4).batch(0, 0)[0])


def test_epochs_may_be_read_at_the_same_time() -> None:
    made = batches(workers=2)
    together = list(zip(made.epoch(0), made.epoch(1), strict=True))
    assert equal([pair[0] for pair in together], list(made.epoch(0)))
    assert equal([pair[1] for pair in together], list(made.epoch(1)))


def test_an_epoch_that_is_left_early_leaves_no_threads() -> None:
    before = threading.active_count()
    epoch = batches(workers=2).epoch(0)
    next(epoch)
    assert threading.active_count() > before
    epoch.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_pixels_are_not_changed() -> None:
    images = random_images(70, 10)
    before = images.pixels.clone()
    list(batches(images, shuffle=False).epoch(0))
    assert torch.equal(images.pixels, before)


# -- augmentation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "p"), [((50, 3, 32, 32), 4), ((20, 1, 8, 8), 1), ((9, 2, 5, 7), 3)])
def test_crops_and_flips_are_those_of_a_loop_over_images(shape: tuple[int, ...], p: int) -> None:
    pixels = torch.randint(1, 256, shape, dtype=torch.uint8)
    offsets, flips = draw(shape[0], p, torch.Generator().manual_seed(0))
    height, width = shape[2:]
    for image, (down, right), flip, found in zip(
        pixels, offsets.tolist(), flips.tolist(), crop_and_flip(pixels, p, offsets, flips), strict=True
    ):
        around = torch.zeros(shape[1], height + 2 * p, width + 2 * p, dtype=torch.uint8)
        around[:, p:-p, p:-p] = image
        crop = around[:, down : down + height, right : right + width]
        assert torch.equal(found, crop.flip(2) if flip else crop)


def test_every_offset_and_both_directions_occur_equally_often() -> None:
    offsets, flips = draw(20_000, 4, torch.Generator().manual_seed(0))
    for axis in (0, 1):
        counts = offsets[:, axis].bincount(minlength=9)
        assert len(counts) == 9
        assert torch.allclose(counts / 20_000, torch.tensor(1 / 9), atol=0.01)
    assert abs(float(flips.double().mean()) - 0.5) < 0.02


@pytest.mark.parametrize(("size", "padding"), [(32, 4), (16, 2), (8, 1), (4, 0)])
def test_images_are_padded_in_proportion_to_their_size(size: int, padding: int) -> None:
    assert padding_of(size) == padding


def test_what_is_around_an_image_is_black() -> None:
    """A pixel of zero, which is normalised like every other."""
    white = Images(torch.full((64, 3, 8, 8), 255, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64))
    inputs, _ = batches(white, batch_size=64).batch(0, 0)
    black, bright = normalised(torch.tensor([0, 255])[:, None, None, None].expand(2, 3, 1, 1))
    assert torch.isclose(inputs, black, atol=1e-6).any()
    assert (torch.isclose(inputs, black, atol=1e-6) | torch.isclose(inputs, bright, atol=1e-6)).all()


# -- bad input ------------------------------------------------------------------------------------------------


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="1 means and 3 deviations for 3 channels"):
        Batches(random_images(4, 2), mean=(0,), std=STD, batch_size=2, seed=0, augment=False, shuffle=False)
    with pytest.raises(ValueError, match="Expected positive numbers"):
        Batches(
            random_images(4, 2), mean=MEAN, std=(1, 0, 1), batch_size=2, seed=0, augment=False, shuffle=False
        )
    with pytest.raises(ValueError, match="batch_size is 0 and workers -1"):
        batches(batch_size=0, workers=-1)
    with pytest.raises(ValueError, match="Cannot start at batch 6 of an epoch of 5 batches"):
        batches().epoch(0, 6)
    with pytest.raises(IndexError, match="no batch 5 in an epoch of 5"):
        batches().batch(0, 5)
