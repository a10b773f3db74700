"""Promise: blocks work with NumPy. An array in gives an array out; as an array, a block is its matrix.

The numbers are those of tensors, bit for bit; what cannot be done is refused, not wrapped in an object array.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tekfac import fisher
from training import images

OPERATIONS = ("matvec", "solve", "sqrt_matvec", "inv_sqrt_matvec")
every_operation = pytest.mark.parametrize("operation", OPERATIONS)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(32, 3)).to(dtype)


def by_rows() -> fisher.BlockDiagonal[fisher.Block]:
    return fisher.BlockDiagonal(
        fisher.GramBlock(block.shape, torch.randn(1, 7, block.size).double(), 7)
        for block in fisher.estimate(network(), images(1)).values()
    )


KINDS: dict[str, Callable[[], fisher.BlockDiagonal[Any]]] = {
    "a method's": lambda: fisher.estimate(network(), images(2)),
    "a method's, single": lambda: fisher.estimate(network(torch.float32), images(2, dtype=torch.float32)),
    "exact": lambda: fisher.exact_blocks(network(), images(2)),
    "by rows": by_rows,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def arguments(operation: str) -> list[float]:
    return [] if operation == "matvec" else [0.3]


def assert_same(array: object, tensor: Tensor) -> None:
    assert type(array) is np.ndarray
    assert array.dtype == tensor.numpy().dtype
    assert np.array_equal(array, tensor.numpy())


# -- products ------------------------------------------------------------------------------------------


@every_kind
@every_operation
def test_a_blocks_product_with_an_array_is_the_one_with_a_tensor_as_an_array(kind: str, operation: str) -> None:
    for block in KINDS[kind]().values():
        matrices = torch.randn(2, *block.matrix_shape, dtype=torch.float64)
        expected = getattr(block, operation)(matrices, *arguments(operation))
        assert_same(getattr(block, operation)(matrices.numpy(), *arguments(operation)), expected)
        assert isinstance(expected, Tensor)


@every_kind
@every_operation
def test_a_dict_of_arrays_gives_a_dict_of_arrays(kind: str, operation: str) -> None:
    blocks = KINDS[kind]()
    tensors = blocks.white_noise(3)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    products = getattr(blocks, operation)(arrays, *arguments(operation))
    expected = getattr(blocks, operation)(tensors, *arguments(operation))
    assert list(products) == list(expected)
    for name, product in products.items():
        assert_same(product, expected[name])


@every_kind
def test_matrices_vectors_and_inner_products_of_arrays_are_arrays(kind: str) -> None:
    blocks = KINDS[kind]()
    tensors = blocks.white_noise(3)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    vector = blocks.to_vector(arrays)
    assert_same(vector, blocks.to_vector(tensors))
    for name, part in blocks.from_vector(vector).items():
        assert_same(part, tensors[name])
    assert_same(blocks.inner(arrays, arrays), blocks.inner(tensors, tensors))
    assert list(blocks.select({**arrays, "other": np.zeros(2)})) == list(arrays)
    for block in blocks.values():
        names = list(block.shape.parameters)
        matrix = block.to_matrix(*(arrays[name] for name in names))
        assert_same(matrix, block.to_matrix(*(tensors[name] for name in names)))
        for name, part in zip(names, block.from_matrix(matrix), strict=True):
            assert_same(part, tensors[name])


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    array = array.copy()
    array.flags.writeable = False
    return array


LAYOUTS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "read-only": read_only,
    "backwards": lambda array: array[::-1].copy()[::-1],
    "by columns": np.asfortranarray,
    "big-endian": lambda array: array.astype(">f8"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_may_lie_in_memory_in_any_way_and_is_left_as_it_was(layout: str) -> None:
    block = fisher.estimate(network(), images(1))["0"]
    matrix = np.random.default_rng(0).normal(size=block.matrix_shape)
    given = LAYOUTS[layout](matrix)
    assert np.array_equal(block.solve(given, 0.1), block.solve(matrix, 0.1))
    assert np.array_equal(given, matrix)


def test_whole_numbers_are_taken_as_numbers() -> None:
    block = fisher.estimate(network(), images(1))["0"]
    ones = np.ones(block.matrix_shape, dtype=np.int64)
    assert np.array_equal(block.matvec(ones), block.matvec(ones.astype(float)))


def test_what_is_no_tensor_and_no_array_is_refused_by_its_type() -> None:
    blocks = fisher.estimate(network(), images(1))
    with pytest.raises(TypeError, match=r"Got a list\. Expected a tensor or a NumPy array"):
        blocks["0"].matvec([[1.0]])  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"Got a list\. Expected a tensor or a NumPy array"):
        blocks.from_vector([1.0])  # type: ignore[type-var]


def test_tensors_and_arrays_in_one_dict_are_refused_by_their_names() -> None:
    blocks = fisher.estimate(network(), images(1))
    mixed: dict[str, Any] = {**blocks.white_noise(), "2.bias": np.zeros(3)}
    with pytest.raises(TypeError, match=r"or NumPy arrays, for all.*0\.weight a Tensor.*2\.bias a ndarray"):
        blocks.solve(mixed, 0.1)


# -- the matrix itself ---------------------------------------------------------------------------------


@every_kind
def test_as_an_array_a_block_is_its_dense_matrix(kind: str) -> None:
    blocks = KINDS[kind]()
    for own in (blocks, *blocks.values()):
        assert_same(np.asarray(own), own.to_dense())
        assert_same(np.array(own), own.to_dense())
        assert_same(np.asarray(own, dtype=np.float32), own.to_dense().float())


@every_kind
def test_writing_into_the_array_does_not_change_the_block(kind: str) -> None:
    blocks = KINDS[kind]()
    for own in (blocks, *blocks.values()):
        before = own.to_dense().clone()
        np.asarray(own)[:] = 7
        assert torch.equal(own.to_dense(), before)


def test_a_block_too_large_to_be_formed_is_refused_as_an_array_too() -> None:
    blocks = fisher.estimate(nn.Linear(89, 100), [torch.ones(2, 89)], fisher="sampled")
    with pytest.raises(ValueError, match=r"has 9000 rows.*to_dense\(limit=9000\)"):
        np.asarray(blocks[""])
    with pytest.raises(ValueError, match=r"has 9000 rows.*to_dense\(limit=9000\)"):
        np.asarray(blocks)


def test_an_array_without_a_copy_is_refused() -> None:
    blocks = fisher.estimate(network(), images(1))
    for own in (blocks, blocks["0"]):
        with pytest.raises(ValueError, match=r"copy=False cannot be kept"):
            np.array(own, copy=False)


def test_tensors_need_no_numpy() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; import tekfac, torch; "
        "blocks = tekfac.fisher.estimate(torch.nn.Linear(2, 3), [torch.ones(4, 2)]); "
        "print(len(blocks.solve(blocks.white_noise(), 0.1)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "2"
