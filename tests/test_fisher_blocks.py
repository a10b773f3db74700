"""A Fisher block is the matrix it stands for: every number and product of it is that of `to_dense()`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, measured, normal
from layer_kinds import (
    KINDS,
    assert_blocks_agree,
    case_of,
    every_kind,
    expected_block,
    expected_factors,
    fisher_of,
    groups_of,
    identity,
    own_sharing,
    random_basis,
    samples_of,
)
from tekfac import fisher
from tekfac.curvature.blocks.block import Block
from tekfac.curvature.blocks.dense import DenseBlock
from tekfac.curvature.blocks.gram import GramBlock
from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.curvature.eigenbasis import decompose
from tekfac.curvature.factors import KroneckerFactors
from tekfac.layers.shapes import LayerShape
from tekfac.optim.natural_gradient import NaturalGradient

CASES = [(kind, True) for kind in KINDS] + [(kind, False) for kind in ("linear", "conv2d", "grouped")]
every_case = pytest.mark.parametrize(
    ("kind", "bias"), CASES, ids=[kind if bias else f"{kind}, no bias" for kind, bias in CASES]
)
TYPICAL = [("linear", True), ("linear", False), ("conv2d", True), ("grouped", True), ("grouped", False)]
every_shape = pytest.mark.parametrize(
    ("kind", "bias"),
    [case if case in TYPICAL else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
    ids=[kind if bias else f"{kind}, no bias" for kind, bias in CASES],
)
DAMPINGS = (1.0, 1e-2)  # of the mean eigenvalue


def shape_of(kind: str, bias: bool) -> LayerShape:
    """Written down from the module, not taken from the library's inventory."""
    module = case_of(kind, bias).model.get_submodule("layer")
    return LayerShape("layer", tuple(module.weight.shape), bias, getattr(module, "groups", 1))


def size_of_group(shape: LayerShape) -> int:
    return shape.size // shape.groups


def dense_of_rows(rows: Tensor, num_terms: int) -> Tensor:
    """J^T J / M for [G, R, d], groups one after the other."""
    return torch.block_diag(*(group.T @ group / num_terms for group in rows))


# -- blocks and what they stand for --------------------------------------------------------------------


def measured_block(method: type[NaturalGradient]) -> Callable[[str, bool], KroneckerBlock]:
    """The approximation that one step of an optimizer makes."""

    def build(kind: str, bias: bool) -> KroneckerBlock:
        case = case_of(kind, bias)
        return measured(method, case.model, case.inputs, case.loss, fisher="empirical").curvature["layer"]

    return build


def regular_kronecker(kind: str, bias: bool) -> KroneckerBlock:
    """A random basis with eigenvalues between 0.5 and 2.5."""
    shape = shape_of(kind, bias)
    basis = random_basis(shape.d_in, shape.d_out, shape.groups)
    return KroneckerBlock(shape, basis, 0.5 + 2 * normal(shape.groups, shape.d_out, shape.d_in).sigmoid())


def gram_of(rows_per_parameter: float) -> Callable[[str, bool], GramBlock]:
    def build(kind: str, bias: bool) -> GramBlock:
        shape = shape_of(kind, bias)
        count = max(1, int(rows_per_parameter * size_of_group(shape)))
        return GramBlock(shape, normal(shape.groups, count, size_of_group(shape)), count + 3)

    return build


def dense_of_samples(kind: str, bias: bool) -> DenseBlock:
    samples = samples_of(kind, bias)
    return DenseBlock(shape_of(kind, bias), torch.stack([fisher_of(samples, g) for g in groups_of(samples)]))


def gram_of_samples(kind: str, bias: bool) -> GramBlock:
    samples = samples_of(kind, bias)
    rows = samples.gradients.transpose(0, 1).flatten(2)
    return GramBlock(shape_of(kind, bias), rows, rows.shape[1])


def regular_dense(kind: str, bias: bool) -> DenseBlock:
    gram = gram_of(3)(kind, bias)
    return DenseBlock(gram.shape, gram.rows.mT @ gram.rows / gram.num_terms)


REGULAR: dict[str, Callable[[str, bool], Block]] = {
    "kronecker, regular": regular_kronecker,
    "dense, regular": regular_dense,
    "gram, more rows": gram_of(3),
}
BLOCKS: dict[str, Callable[[str, bool], Block]] = {
    **{method.__name__: measured_block(method) for method in METHODS},
    "dense, of samples": dense_of_samples,
    "gram, of samples": gram_of_samples,
    "gram, fewer rows": gram_of(0.5),
    **REGULAR,
}
every_block = pytest.mark.parametrize("which", BLOCKS)
every_regular_block = pytest.mark.parametrize("which", REGULAR)


@cache
def block_of(which: str, kind: str, bias: bool) -> Block:
    return BLOCKS[which](kind, bias)


@cache
def dense_of(which: str, kind: str, bias: bool) -> Tensor:
    return block_of(which, kind, bias).to_dense()


def dampings_of(block: Block) -> list[float]:
    return [factor * block.trace() / block.size for factor in DAMPINGS]


def columns_of(function: Callable[[Tensor], Tensor], block: Block) -> Tensor:
    """The matrix of a linear function of gradient matrices."""
    identities = identity(block.size).reshape(block.size, *block.matrix_shape)
    return function(identities).reshape(block.size, block.size).T


# -- to_dense ------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("method", METHODS)
def test_the_dense_matrix_of_a_kronecker_block_is_that_of_the_definition(
    kind: str, bias: bool, method: type[NaturalGradient]
) -> None:
    block, samples = block_of(method.__name__, kind, bias), samples_of(kind, bias)
    assert isinstance(block, KroneckerBlock)
    assert_blocks_agree(method, samples, own_sharing(method), block)  # type: ignore[arg-type]
    expected = [
        expected_block(method, samples, own_sharing(method), block, group)  # type: ignore[arg-type]
        for group in groups_of(samples)
    ]
    assert_close(dense_of(method.__name__, kind, bias), torch.block_diag(*expected))


@every_case
@pytest.mark.parametrize("which", ["dense, of samples", "gram, of samples"])
def test_the_dense_matrix_of_an_exact_block_is_the_mean_outer_product_of_autograds_gradients(
    kind: str, bias: bool, which: str
) -> None:
    samples = samples_of(kind, bias)
    expected = torch.block_diag(*(oracle.exact_fisher(samples.gradients[:, g]) for g in groups_of(samples)))
    assert_close(dense_of(which, kind, bias), expected)


@every_shape
@every_block
def test_the_dense_matrix_is_symmetric_and_nothing_connects_two_groups(
    kind: str, bias: bool, which: str
) -> None:
    block, dense = block_of(which, kind, bias), dense_of(which, kind, bias)
    assert dense.shape == (block.size, block.size)
    assert dense.dtype == block.dtype == torch.float64
    assert_close(dense, dense.T)
    size = size_of_group(block.shape)
    for one, other in itertools.permutations(range(block.shape.groups), 2):
        between = dense[one * size : (one + 1) * size, other * size : (other + 1) * size]
        assert not between.any()


@every_case
@pytest.mark.parametrize("which", ["gram, fewer rows", "gram, more rows"])
def test_the_dense_matrix_of_a_gram_block_divides_by_its_terms_not_by_its_rows(
    kind: str, bias: bool, which: str
) -> None:
    block = block_of(which, kind, bias)
    assert isinstance(block, GramBlock)
    assert block.num_terms != block.rows.shape[1]
    assert_close(dense_of(which, kind, bias), dense_of_rows(block.rows, block.num_terms))


@every_case
@pytest.mark.parametrize("method", METHODS)
def test_the_factors_of_a_kronecker_block_are_those_it_was_decomposed_from(
    kind: str, bias: bool, method: type[NaturalGradient]
) -> None:
    block, samples = block_of(method.__name__, kind, bias), samples_of(kind, bias)
    assert isinstance(block, KroneckerBlock)
    for group in groups_of(samples):
        expected = expected_factors(method, samples, own_sharing(method), group)
        assert_close(block.factors.input[group], expected.inputs)
        assert_close(block.factors.output[group], expected.outputs)
        assert_close(block.factors.scale[group], expected.scale)


# -- numbers -------------------------------------------------------------------------------------------


@every_shape
@every_block
def test_numbers_are_those_of_the_dense_matrix(kind: str, bias: bool, which: str) -> None:
    block, dense = block_of(which, kind, bias), dense_of(which, kind, bias)
    assert (block.name, block.size) == ("layer", len(dense))
    assert_close(block.trace(), dense.trace())
    assert_close(block.frobenius_norm(), torch.linalg.matrix_norm(dense))
    values = block.eigenvalues()
    assert values.shape == (block.size,)
    assert torch.equal(values, values.sort().values)
    assert bool((values >= 0).all())
    assert_close(values, torch.linalg.eigvalsh(dense))


@every_shape
@every_block
def test_logdet_is_that_of_the_damped_dense_matrix(kind: str, bias: bool, which: str) -> None:
    block, dense = block_of(which, kind, bias), dense_of(which, kind, bias)
    for damping in dampings_of(block):
        assert_close(block.logdet(damping), torch.logdet(dense + damping * identity(block.size)))


@every_shape
@every_regular_block
def test_logdet_of_a_regular_block_needs_no_damping(kind: str, bias: bool, which: str) -> None:
    assert_close(block_of(which, kind, bias).logdet(), torch.logdet(dense_of(which, kind, bias)))


# -- products ------------------------------------------------------------------------------------------


@every_shape
@every_block
def test_matvec_is_the_product_with_the_dense_matrix(kind: str, bias: bool, which: str) -> None:
    block, dense = block_of(which, kind, bias), dense_of(which, kind, bias)
    matrix = normal(*block.matrix_shape, seed=3)
    product = block.matvec(matrix)
    assert product.shape == matrix.shape
    assert_close(product.reshape(-1), dense @ matrix.reshape(-1))


@every_shape
@every_block
def test_solve_is_the_solution_with_the_damped_dense_matrix(kind: str, bias: bool, which: str) -> None:
    block, dense = block_of(which, kind, bias), dense_of(which, kind, bias)
    matrix = normal(*block.matrix_shape, seed=3)
    for damping in dampings_of(block):
        assert_close(block.solve(matrix, damping), oracle.damped_solve(dense, damping, matrix))


@every_shape
@every_regular_block
def test_solve_of_a_regular_block_needs_no_damping(kind: str, bias: bool, which: str) -> None:
    block, dense = block_of(which, kind, bias), dense_of(which, kind, bias)
    matrix = normal(*block.matrix_shape, seed=3)
    expected = torch.linalg.solve(dense, matrix.reshape(-1)).reshape(matrix.shape)
    assert_close(block.solve(matrix), expected)
    assert_close(block.matvec(block.solve(matrix)), matrix)


@every_kind
@every_regular_block
def test_a_damping_far_below_the_smallest_eigenvalue_costs_no_digits(kind: str, which: str) -> None:
    block, dense = block_of(which, kind, True), dense_of(which, kind, True)
    matrix = normal(*block.matrix_shape, seed=3)
    damping = 1e-9 * float(block.eigenvalues()[0])
    assert_close(block.solve(matrix, damping), oracle.damped_solve(dense, damping, matrix))


@every_shape
@every_block
def test_the_square_root_is_the_positive_matrix_whose_square_is_the_block(
    kind: str, bias: bool, which: str
) -> None:
    block, dense = block_of(which, kind, bias), dense_of(which, kind, bias)
    matrix = normal(*block.matrix_shape, seed=3)
    for damping in (0.0, *dampings_of(block)):
        damped = dense + damping * identity(block.size)
        root = columns_of(lambda x, damping=damping: block.sqrt_matvec(x, damping), block)
        assert_close(root, root.T)
        assert float(torch.linalg.eigvalsh(root)[0]) > -1e-12 * float(root.norm())
        assert_close(root @ root, damped)
        once = block.sqrt_matvec(matrix, damping)
        assert_close(once.reshape(-1), root @ matrix.reshape(-1))
        twice = block.sqrt_matvec(once, damping)
        assert_close(twice.reshape(-1), damped @ matrix.reshape(-1))


@every_shape
@every_block
def test_the_inverse_square_root_is_the_positive_matrix_whose_square_is_the_inverse(
    kind: str, bias: bool, which: str
) -> None:
    block, dense = block_of(which, kind, bias), dense_of(which, kind, bias)
    for damping in dampings_of(block):
        inverse = torch.linalg.inv(dense + damping * identity(block.size))
        root = columns_of(lambda x, damping=damping: block.inv_sqrt_matvec(x, damping), block)
        assert_close(root, root.T)
        assert float(torch.linalg.eigvalsh(root)[0]) > 0
        assert_close(root @ root, inverse)
        there_and_back = block.sqrt_matvec(block.inv_sqrt_matvec(normal(*block.matrix_shape), damping), damping)
        assert_close(there_and_back, normal(*block.matrix_shape))


@every_shape
@every_regular_block
def test_the_inverse_square_root_of_a_regular_block_needs_no_damping(kind: str, bias: bool, which: str) -> None:
    block, dense = block_of(which, kind, bias), dense_of(which, kind, bias)
    root = columns_of(block.inv_sqrt_matvec, block)
    assert_close(root @ root, torch.linalg.inv(dense))


@pytest.mark.parametrize("which", ["TEKFAC", "gram, fewer rows", "dense, of samples"])
def test_roots_turn_white_noise_into_noise_of_the_blocks_covariance(which: str) -> None:
    block = block_of(which, "grouped", True)
    dense = dense_of(which, "grouped", True)
    (damping, _), draws = dampings_of(block), 40_000
    white = normal(draws, *block.matrix_shape, seed=5)
    for noise, covariance in (
        (block.sqrt_matvec(white), dense),
        (block.inv_sqrt_matvec(white, damping), torch.linalg.inv(dense + damping * identity(block.size))),
    ):
        found = noise.flatten(1).T @ noise.flatten(1) / draws
        deviation = (covariance.diagonal().outer(covariance.diagonal()) + covariance.square()).sqrt()
        assert bool(((found - covariance).abs() <= 6 * deviation / draws**0.5 + 1e-15).all())


# -- axes ----------------------------------------------------------------------------------------------


@pytest.mark.every_pair
@every_kind
@pytest.mark.parametrize("which", ["TKFAC", "dense, regular", "gram, fewer rows", "gram, more rows"])
@pytest.mark.parametrize("operation", ["matvec", "solve", "sqrt_matvec", "inv_sqrt_matvec"])
def test_leading_axes_are_so_many_matrices_one_by_one(kind: str, which: str, operation: str) -> None:
    block = block_of(which, kind, True)
    keywords = {} if operation == "matvec" else {"damping": dampings_of(block)[0]}
    for leading in ((1,), (2, 3), (0,)):
        matrices = normal(*leading, *block.matrix_shape, seed=7)
        results = getattr(block, operation)(matrices, **keywords)
        assert results.shape == matrices.shape
        for index in itertools.product(*map(range, leading)):
            assert_close(results[index], getattr(block, operation)(matrices[index], **keywords))


@every_shape
@every_block
def test_parameters_become_the_matrix_that_the_block_acts_on(kind: str, bias: bool, which: str) -> None:
    """Rows are outputs, of all groups one below the other; columns are inputs, the bias is the last."""
    block, case = block_of(which, kind, bias), case_of(kind, bias)
    case.loss(case.model(case.inputs)).backward()
    module = case.model.get_submodule("layer")
    gradients = [p.grad for p in (module.weight, module.bias) if p is not None]
    matrix = block.to_matrix(*gradients)
    assert matrix.shape == block.matrix_shape
    assert_close(matrix, case.to_matrix("layer").flatten(0, 1))
    back = block.from_matrix(matrix)
    assert len(back) == 1 + bias
    for part, gradient in zip(back, gradients, strict=True):
        assert torch.equal(part, gradient)
    stacked = [torch.stack([gradient, 2 * gradient]).unsqueeze(1) for gradient in gradients]
    many = block.to_matrix(*stacked)
    assert torch.equal(many, torch.stack([matrix, 2 * matrix]).unsqueeze(1))
    for part, tensor in zip(block.from_matrix(many), stacked, strict=True):
        assert torch.equal(part, tensor)


def test_a_bias_that_is_not_given_counts_as_zero() -> None:
    block = block_of("TEKFAC", "grouped", True)
    weight = normal(*block.shape.weight)
    matrix = block.to_matrix(weight)
    assert torch.equal(matrix, block.to_matrix(weight, torch.zeros(len(weight), dtype=torch.float64)))
    assert not matrix[:, -1].any()


@every_block
def test_what_it_is_given_is_computed_in_the_precision_of_the_block(which: str) -> None:
    block = block_of(which, "conv2d", True)
    matrix = normal(*block.matrix_shape).float()
    damping = dampings_of(block)[0]
    for found, expected in (
        (block.matvec(matrix), block.matvec(matrix.double())),
        (block.solve(matrix, damping), block.solve(matrix.double(), damping)),
        (block.sqrt_matvec(matrix), block.sqrt_matvec(matrix.double())),
        (block.inv_sqrt_matvec(matrix, damping), block.inv_sqrt_matvec(matrix.double(), damping)),
    ):
        assert found.dtype == torch.float64
        assert torch.equal(found, expected)


# -- singular blocks -----------------------------------------------------------------------------------


def singular_blocks() -> dict[str, Block]:
    """The same two groups of rank one, each with its length; and blocks of nothing at all."""
    shape = LayerShape("stem", (4, 2), has_bias=True, groups=2)
    rows = torch.zeros(2, 1, 6, dtype=torch.float64)
    rows[0, 0, 1], rows[1, 0, 4] = 2.0, 3.0
    basis = random_basis(3, 2, groups=2)
    theta = torch.zeros(2, 2, 3, dtype=torch.float64)
    theta[0, 0, 0], theta[1, 1, 2] = 4.0, 9.0
    return {
        "kronecker": KroneckerBlock(shape, basis, theta),
        "dense": DenseBlock(shape, rows.mT @ rows),
        "gram": GramBlock(shape, rows, 1),
        "kronecker, zero": KroneckerBlock(shape, basis, torch.zeros_like(theta)),
        "dense, zero": DenseBlock(shape, torch.zeros(2, 6, 6, dtype=torch.float64)),
        "gram, rows of zeros": GramBlock(shape, torch.zeros_like(rows), 1),
        "gram, no rows": GramBlock(shape, rows[:, :0], 1),
    }


every_singular_block = pytest.mark.parametrize("which", singular_blocks())


@every_singular_block
def test_a_singular_block_has_the_numbers_of_its_matrix(which: str) -> None:
    block = singular_blocks()[which]
    expected = [] if "zero" in which or "no rows" in which else [4.0, 9.0]
    assert block.trace() == pytest.approx(sum(expected))
    assert block.frobenius_norm() == pytest.approx(math.hypot(*expected))
    assert torch.allclose(block.eigenvalues(), torch.tensor([0.0] * (12 - len(expected)) + expected).double())
    assert block.to_dense().trace() == pytest.approx(sum(expected))
    matrix = normal(*block.matrix_shape)
    assert_close(block.solve(matrix, 0.5), oracle.damped_solve(block.to_dense(), 0.5, matrix))


@every_singular_block
def test_logdet_of_a_singular_block_is_minus_infinity_unless_it_is_damped(which: str) -> None:
    block = singular_blocks()[which]
    assert block.logdet() == -math.inf
    assert_close(block.logdet(0.5), torch.logdet(block.to_dense() + 0.5 * identity(12)))


@every_singular_block
@pytest.mark.parametrize("operation", ["solve", "inv_sqrt_matvec"])
def test_the_inverse_of_a_singular_block_is_refused_by_layer_and_eigenvalues(
    which: str, operation: str
) -> None:
    block = singular_blocks()[which]
    with pytest.raises(ValueError, match=r"layer 'stem' is singular.*eigenvalues.*damping > 0") as error:
        getattr(block, operation)(normal(*block.matrix_shape))
    largest = f"{block.eigenvalues()[-1]:.3g}"
    assert f"from 0 to {largest}" in str(error.value)
    assert f"{block.trace() / 12:.3g}" in str(error.value)  # a damping to begin with


@pytest.mark.parametrize("kept", ["as a matrix", "by its rows", "by its factors"])
def test_a_block_that_cannot_be_solved_with_has_a_logdet_of_minus_infinity(kept: str) -> None:
    """Rounding leaves eigenvalues of 1e-17 where there are none, above 0 or below."""
    shape = LayerShape("layer", (3, 4), has_bias=False)
    found = []
    for seed in range(10):
        rows = normal(1, 11, 12, seed=seed)
        inputs, outputs, one = normal(1, 4, 3, seed=seed), normal(1, 3, 3, seed=seed), normal(1).square()
        factors = KroneckerFactors(inputs @ inputs.mT, outputs @ outputs.mT, one)
        block = {
            "as a matrix": DenseBlock(shape, rows.mT @ rows / 11),
            "by its rows": GramBlock(shape, rows, 11),
            "by its factors": KroneckerBlock(shape, decompose(factors)),
        }[kept]
        with pytest.raises(ValueError, match="singular"):
            block.solve(normal(3, 4))
        found.append(block.logdet())
    assert found == [-math.inf] * 10


def test_blocks_are_what_the_public_names_give() -> None:
    assert (fisher.Block, fisher.DenseBlock) == (Block, DenseBlock)
    assert (fisher.GramBlock, fisher.KroneckerBlock) == (GramBlock, KroneckerBlock)


def test_a_block_says_what_it_is_in_a_line() -> None:
    (block,) = fisher.exact_blocks(nn.Linear(2, 3), [(torch.randn(4, 2), torch.arange(4) % 3)]).values()
    assert re.fullmatch(r"DenseBlock\('', 3 x 3, float32, trace [\d.e-]+\)", repr(block))
