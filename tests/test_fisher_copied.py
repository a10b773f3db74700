"""Promise: blocks are pickled and copied like other values, and do after that what they did before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tekfac import TEKFAC, fisher
from training import images, train


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(32, 3)).double()


def of_optimizer() -> fisher.BlockDiagonal[fisher.KroneckerBlock]:
    model = network()
    optimizer = TEKFAC(model)
    train(model, optimizer, images(1))
    return optimizer.curvature


def by_rows() -> fisher.BlockDiagonal[fisher.Block]:
    return fisher.BlockDiagonal(
        fisher.GramBlock(block.shape, torch.randn(1, 7, block.size).double(), 7)
        for block in fisher.estimate(network(), images(1)).values()
    )


KINDS: dict[str, Callable[[], fisher.BlockDiagonal[Any]]] = {
    "product of eigenvalues": lambda: fisher.estimate(network(), images(2), method="kfac"),
    "corrected": lambda: fisher.estimate(network(), images(2)),
    "exact": lambda: fisher.exact_blocks(network(), images(2)),
    "by rows": by_rows,
    "an optimizer's": of_optimizer,
}
every_kind = pytest.mark.parametrize("kind", KINDS)

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}
every_copy = pytest.mark.parametrize("how", COPIES)


def fields_of(block: fisher.Block) -> list[Tensor]:
    match block:
        case fisher.KroneckerBlock():
            return [*block.basis, *([] if block.theta is None else [block.theta])]
        case fisher.DenseBlock():
            return [block.matrices]
        case fisher.GramBlock():
            return [block.rows]
    raise AssertionError(block)


def assert_same(copied: fisher.Block, block: fisher.Block) -> None:
    assert type(copied) is type(block)
    assert copied.shape == block.shape
    assert all(torch.equal(a, b) for a, b in zip(fields_of(copied), fields_of(block), strict=True))
    matrix = torch.randn(block.matrix_shape).double()
    assert torch.equal(copied.matvec(matrix), block.matvec(matrix))
    assert torch.equal(copied.solve(matrix, 0.1), block.solve(matrix, 0.1))
    assert torch.equal(copied.inv_sqrt_matvec(matrix, 0.1), block.inv_sqrt_matvec(matrix, 0.1))
    assert copied.logdet(0.1) == block.logdet(0.1)


@every_kind
@every_copy
def test_a_block_comes_back_as_it_was(kind: str, how: str) -> None:
    for block in KINDS[kind]().values():
        assert_same(COPIES[how](block), block)


@every_kind
@every_copy
def test_a_network_of_blocks_comes_back_with_its_metadata(kind: str, how: str) -> None:
    blocks = KINDS[kind]()
    copied = COPIES[how](blocks)
    assert type(copied) is fisher.BlockDiagonal
    assert list(copied) == list(blocks)
    assert copied.metadata == blocks.metadata
    assert copied.parameters == blocks.parameters
    for name, block in blocks.items():
        assert_same(copied[name], block)
    with pytest.raises(TypeError):
        copied.metadata["method"] = "other"


@every_kind
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_shares_no_memory_with_what_it_is_of(kind: str, how: str) -> None:
    blocks = KINDS[kind]()
    copied = COPIES[how](blocks)
    before = {name: block.to_dense() for name, block in blocks.items()}
    for block in copied.values():
        for tensor in fields_of(block):
            tensor.zero_()
    assert all(torch.equal(block.to_dense(), before[name]) for name, block in blocks.items())


@every_kind
def test_what_was_computed_from_a_block_does_not_make_its_pickle_longer(kind: str) -> None:
    for block in KINDS[kind]().values():
        before = len(pickle.dumps(block))
        block.eigenvalues(), block.sqrt_matvec(torch.zeros(block.matrix_shape))
        assert len(pickle.dumps(block)) == before
