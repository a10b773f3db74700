"""Promise: an interrupted estimate goes on where it was, and gives the same blocks bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tekfac import fisher

METHODS = ("kfac", "ekfac", "tkfac", "tekfac")
BATCHES = 5


class InterruptedLoaderError(Exception):
    """What the loader raises when it is told to fail."""


class Loader:
    """Batches in order; after `fail_after` of them, over all passes, it breaks off."""

    def __init__(self, fail_after: int | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.batches = [
            (torch.randn(size, 1, 6, 6, generator=generator), torch.randint(4, (size,), generator=generator))
            for size in (4, 4, 4, 4, 3)
        ]
        self.left = fail_after

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.batches:
            if self.left is not None:
                if self.left == 0:
                    raise InterruptedLoaderError
                self.left -= 1
            yield batch


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


Blocks = fisher.BlockDiagonal[fisher.KroneckerBlock]


def tensors(blocks: Blocks) -> list[Tensor]:
    return [tensor for block in blocks.values() for tensor in (*block.basis, block.rescaling)]


def estimate(loader: Any, path: Path | None = None, **keywords: Any) -> Blocks:
    return fisher.estimate(network(), loader, checkpoint=path, checkpoint_seconds=0, **keywords)


def assert_same(ours: Blocks, theirs: Blocks) -> None:
    assert list(ours) == list(theirs)
    assert ours.metadata == theirs.metadata
    for a, b in zip(tensors(ours), tensors(theirs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["exact", "sampled", "empirical"])
@pytest.mark.parametrize("method", METHODS)
def test_interrupted_at_any_batch_it_gives_the_same_blocks(method: str, kind: Any, tmp_path: Path) -> None:
    whole = estimate(Loader(), method=method, fisher=kind)
    passes = 1 if method in ("kfac", "tkfac") else 2
    for fail_after in range(1, passes * BATCHES):
        path = tmp_path / f"{fail_after}.safetensors"
        with pytest.raises(InterruptedLoaderError):
            estimate(Loader(fail_after), path, method=method, fisher=kind)
        assert_same(estimate(Loader(), path, method=method, fisher=kind), whole)


def test_it_may_be_interrupted_again_and_again(tmp_path: Path) -> None:
    whole, path = estimate(Loader(), fisher="sampled"), tmp_path / "survey"
    interruptions = 0
    while True:
        try:
            blocks = estimate(Loader(fail_after=2 + 2 * interruptions), path, fisher="sampled")
            break
        except InterruptedLoaderError:
            interruptions += 1
            assert interruptions < 20
    assert interruptions >= 2
    assert_same(blocks, whole)


def test_what_was_done_is_not_done_again(tmp_path: Path) -> None:
    path = tmp_path / "survey"
    with pytest.raises(InterruptedLoaderError):
        estimate(Loader(3), path, method="kfac")
    model, calls = network(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    fisher.estimate(model, Loader(), method="kfac", checkpoint=path)
    assert len(calls) == BATCHES - 3


def test_a_complete_estimate_is_taken_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "survey"
    whole = estimate(Loader(), path)
    model, calls = network(), []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert_same(fisher.estimate(model, Loader(), checkpoint=path), whole)
    assert not calls


def test_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    assert_same(estimate(Loader(), tmp_path / "survey"), estimate(Loader()))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "survey"
    with pytest.raises(InterruptedLoaderError):
        estimate(Loader(2), path)
    before = path.read_bytes()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fails)
        with pytest.raises(OSError, match="disk full"):
            estimate(Loader(), path)
    assert path.read_bytes() == before
    assert_same(estimate(Loader(), path), estimate(Loader()))


def test_other_data_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "survey"
    with pytest.raises(InterruptedLoaderError):
        estimate(Loader(3), path)
    with pytest.raises(ValueError, match=r"survey cannot be taken up: the loader gives other data.*shuffle"):
        estimate(Loader(seed=5), path)


def test_another_order_of_the_data_is_refused(tmp_path: Path) -> None:
    path, shuffled = tmp_path / "survey", Loader()
    with pytest.raises(InterruptedLoaderError):
        estimate(Loader(3), path)
    shuffled.batches[1], shuffled.batches[2] = shuffled.batches[2], shuffled.batches[1]
    with pytest.raises(ValueError, match="another order"):
        estimate(shuffled, path)
    order = torch.tensor([1, 0, 2, 3])
    permuted = Loader()
    permuted.batches[0] = (permuted.batches[0][0][order], permuted.batches[0][1][order])
    with pytest.raises(ValueError, match="another order"):
        estimate(permuted, path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": "ekfac"}, "method was TEKFAC, is EKFAC"),
        ({"fisher": "empirical"}, "fisher was exact, is empirical"),
        ({"sharing": "expand"}, "sharing was exact, is expand"),
        ({"seed": 4}, "seed was 0, is 4"),
        ({"layers": ["0"]}, "parameters was"),
    ],
)
def test_another_question_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "survey"
    with pytest.raises(InterruptedLoaderError):
        estimate(Loader(3), path)
    with pytest.raises(ValueError, match=f"of another survey: .*{named}.*remove this one"):
        estimate(Loader(), path, **change)


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "survey"
    with pytest.raises(InterruptedLoaderError):
        estimate(Loader(3), path)
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] += 1e-3
    with pytest.raises(ValueError, match="of another survey: model was"):
        fisher.estimate(model, Loader(), checkpoint=path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "blocks.safetensors"
    fisher.save(estimate(Loader()), path)
    with pytest.raises(ValueError, match=r"holds Fisher blocks\. Expected an unfinished survey"):
        estimate(Loader(), path)
    (tmp_path / "text").write_text("not a safetensors file")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        estimate(Loader(), tmp_path / "text")


def test_data_that_changed_anywhere_are_refused(tmp_path: Path) -> None:
    """Not only in the first batch and the last."""
    path = tmp_path / "survey"
    with pytest.raises(InterruptedLoaderError):
        estimate(Loader(4), path)
    for changed in range(4):
        loader = Loader()
        loader.batches[changed] = (loader.batches[changed][0] + 1, loader.batches[changed][1])
        with pytest.raises(ValueError, match="other data"):
            estimate(loader, path)
    assert_same(estimate(Loader(), path), estimate(Loader()))


def test_more_or_less_data_are_refused(tmp_path: Path) -> None:
    path, shorter, longer = tmp_path / "survey", Loader(), Loader()
    with pytest.raises(InterruptedLoaderError):
        estimate(Loader(4), path)
    del shorter.batches[2:]
    with pytest.raises(ValueError, match="other data"):
        estimate(shorter, path)
    estimate(Loader(), path)  # now it is complete
    longer.batches.append(longer.batches[0])
    with pytest.raises(ValueError, match="other data"):
        estimate(longer, path)


def test_another_loss_or_another_likelihood_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "survey"
    with pytest.raises(InterruptedLoaderError):
        estimate(Loader(3), path, loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    with pytest.raises(ValueError, match="of another survey: loss was"):
        estimate(Loader(), path, loss=lambda model, batch: 3 * cross_entropy(model(batch[0]), batch[1]))
    with pytest.raises(ValueError, match="of another survey: loss was"):
        estimate(Loader(), path)


def test_another_structure_with_the_same_parameters_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "survey", network()
    with pytest.raises(InterruptedLoaderError):
        estimate(Loader(3), path)
    model[2] = nn.Tanh()
    with pytest.raises(ValueError, match="of another survey: model was"):
        fisher.estimate(model, Loader(), checkpoint=path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        estimate(Loader(), tmp_path)
