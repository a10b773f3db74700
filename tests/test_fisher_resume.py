"""Promise: an interrupted estimate goes on where it was, and gives the same blocks bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tekfac import fisher
from tekfac.common.data_hash import DataHash, hash_of
from tekfac.fisher.metadata import fingerprint

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


# -- hashes --------------------------------------------------------------------------------------------

X = torch.arange(1.0, 13.0).reshape(4, 3)
Y = torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_signs_that_are_flipped_are_noticed(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    seen = DataHash().then((x, Y))
    for rows, columns in ((slice(None), slice(None)), (0, slice(0, 2)), (slice(0, 2), 1)):
        flipped = x.clone()
        flipped[rows, columns] *= -1
        assert DataHash().then((flipped, Y)).content != seen.content
    assert hash_of(-x) != hash_of(x)


def test_every_class_has_a_hash_of_its_own() -> None:
    one_hot = torch.eye(1000)
    assert len({hash_of(row) for row in one_hot}) == 1000
    assert len({hash_of(torch.tensor(k)) for k in range(1000)}) == 1000


def test_content_is_of_samples_and_sequence_of_their_order_and_batches() -> None:
    whole, order = DataHash().then((X, Y)), torch.tensor([2, 0, 3, 1])
    shuffled = DataHash().then((X[order], Y[order]))
    halves = DataHash().then((X[:2], Y[:2])).then((X[2:], Y[2:]))
    assert whole.content == shuffled.content == halves.content
    assert len({whole.sequence, shuffled.sequence, halves.sequence}) == 3
    assert DataHash().then((X, Y.flip(0))).content != whole.content  # pairs put together anew
    assert DataHash().then((X, Y)) == whole


@pytest.mark.parametrize(
    "batch",
    [
        (X.reshape(4, 3, 1), Y),
        {"x": X, "y": Y},
        {"y": X, "x": Y},
        (X, Y, 3),
        (X, Y, 4),
        (X, Y, "a"),
        (X, Y, None),
        (X, Y, Y.numpy()),
        (X, Y, X.numpy()),
    ],
    ids=str,
)
def test_what_is_not_in_tensors_counts_too(batch: Any) -> None:
    others = [(X, Y), (X, Y, 5), {"x": Y, "y": X}]
    assert DataHash().then(batch).sequence not in {DataHash().then(other).sequence for other in others}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.zeros(3, 0),
        torch.tensor(1.0),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.float16),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        torch.ones(4, 4).T[::2],
        torch.tensor([torch.nan, torch.inf]),
    ],
    ids=str,
)
def test_any_tensor_has_a_hash(tensor: Tensor) -> None:
    assert hash_of(tensor) == hash_of(tensor.clone())
    assert DataHash().then((X, tensor)) == DataHash().then((X, tensor.clone()))


def scaled(factor: float) -> Any:
    return lambda model, batch: factor * cross_entropy(model(batch[0]), batch[1])


def scaled_by_default(model: nn.Module, batch: Any, factor: float = 1.0) -> Tensor:
    return factor * cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (scaled(1.0), scaled(2.0)),
        (partial(scaled_by_default, factor=1.0), partial(scaled_by_default, factor=2.0)),
        (scaled_by_default, partial(scaled_by_default, factor=1.0)),
    ],
    ids=["closure", "partial", "function and partial"],
)
def test_functions_that_differ_in_what_they_hold_are_told_apart(
    first: Any, second: Any, tmp_path: Path
) -> None:
    path = tmp_path / "survey"
    with pytest.raises(InterruptedLoaderError):
        estimate(Loader(3), path, loss=first)
    with pytest.raises(ValueError, match="of another survey: loss was"):
        estimate(Loader(), path, loss=second)
    estimate(Loader(), path, loss=first)


class Activated(nn.Module):
    """A network whose activation is a plain function."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.activation, self.layer = activation, nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.activation(x.flatten(1)))
        return out


def test_models_that_differ_in_a_function_are_told_apart() -> None:
    assert fingerprint(Activated(torch.tanh)) == fingerprint(Activated(torch.tanh))
    assert fingerprint(Activated(torch.tanh)) != fingerprint(Activated(torch.relu))


@pytest.mark.slow
def test_the_words_for_a_survey_are_the_same_in_every_process() -> None:
    code = (
        "from torch import nn; from tekfac.fisher.metadata import metadata_of, fingerprint;"
        "from tekfac.fisher.options import Options; from tekfac.likelihoods import Custom;"
        "import torch; torch.manual_seed(0);"
        "loss = lambda model, batch: 0 if 'a' in {'a', 'b', 'c', 'd'} else 1;"
        "draw = lambda outputs, generator: outputs.sum();"
        "print(metadata_of(nn.Linear(2, 2), Options(loss=loss, likelihood=Custom(draw))))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1
