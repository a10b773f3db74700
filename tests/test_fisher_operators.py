"""`BlockDiagonal` is the block-diagonal matrix: on dicts of parameters, on vectors, and for SciPy's solvers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import linalg
from torch import Tensor, nn

import oracle
from dense import assert_close, normal
from tekfac import TEKFAC, fisher
from tekfac.curvature.blocks.block import Block
from tekfac.curvature.blocks.gram import GramBlock
from training import assert_identical, images, mlp, train, vectors

OPERATIONS = ("matvec", "solve", "sqrt_matvec", "inv_sqrt_matvec")
DAMPED = ("solve", "sqrt_matvec", "inv_sqrt_matvec")
DAMPINGS: Mapping[str, float | Mapping[str, float]] = {
    "one number": 0.3,
    "one for each layer": {"conv": 0.3, "norm": 0.05, "grouped": 0.01, "head": 2.0},
}
every_damping = pytest.mark.parametrize("damping", DAMPINGS)


@cache
def network() -> nn.Module:
    """Convolutions, one with groups and no bias, a batch norm, a linear layer; its slopes have no block."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(1, 2, 2))
    model.add_module("norm", nn.BatchNorm2d(2))
    model.add_module("tanh", nn.Tanh())
    model.add_module("grouped", nn.Conv2d(2, 4, 2, groups=2, bias=False))
    model.add_module("slopes", nn.PReLU(4))
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(36, 3))
    return model.double()


KINDS: dict[str, Callable[[], fisher.BlockDiagonal[Any]]] = {
    **{
        name: lambda name=name: fisher.estimate(network(), images(3), method=name)  # type: ignore[misc]
        for name in ("kfac", "ekfac", "tkfac", "tekfac")
    },
    "exact": lambda: fisher.exact_blocks(network(), images(3)),
    "rows": lambda: fisher.BlockDiagonal(
        GramBlock(block.shape, normal(block.shape.groups, 7, block.size // block.shape.groups, seed=i), 7)
        for i, block in enumerate(fisher.exact_blocks(network(), images(1)).values())
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def blocks_of(kind: str) -> fisher.BlockDiagonal[Block]:
    return KINDS[kind]()


@cache
def dense_of(kind: str) -> Tensor:
    """Over vectors: each layer's weight, flattened, then its bias."""
    parts = []
    for block in blocks_of(kind).values():
        rows, columns = block.matrix_shape
        index = torch.arange(block.size).reshape(rows, columns)
        order = index.flatten()
        if block.shape.has_bias:  # the matrix has the bias as its last column, the vector has it last
            order = torch.cat([index[:, :-1].flatten(), index[:, -1]])
        parts.append(block.to_dense()[order][:, order])
    return torch.block_diag(*parts)


def ridge_of(kind: str, damping: float | Mapping[str, float]) -> Tensor:
    """The diagonal matrix of a damping."""
    numbers = [
        torch.full(
            (block.size,), damping[name] if isinstance(damping, Mapping) else damping, dtype=torch.float64
        )
        for name, block in blocks_of(kind).items()
    ]
    return torch.diag(torch.cat(numbers))


def function_of(matrix: Tensor, operation: str) -> Tensor:
    """The matrix that an operation multiplies with, by a dense eigendecomposition."""
    values, vectors = torch.linalg.eigh(matrix)
    power = {"matvec": 1.0, "solve": -1.0, "sqrt_matvec": 0.5, "inv_sqrt_matvec": -0.5}[operation]
    return vectors @ torch.diag(values.clamp_min(0) ** power) @ vectors.T


def random_tensors(kind: str, *leading: int, seed: int = 1) -> dict[str, Tensor]:
    shapes = blocks_of(kind).parameters
    return {name: normal(*leading, *shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def flat(tensors: Mapping[str, Tensor], kind: str) -> Tensor:
    """By hand, in the order of the model's parameters."""
    names = [name for name, _ in network().named_parameters() if not name.startswith("slopes")]
    assert names == list(blocks_of(kind).parameters)
    return torch.cat([tensors[name].reshape(-1) for name in names])


# -- products ------------------------------------------------------------------------------------------


@every_kind
def test_its_parameters_are_those_of_the_layers_in_the_order_of_the_model(kind: str) -> None:
    blocks = blocks_of(kind)
    expected = {
        name: tuple(p.shape) for name, p in network().named_parameters() if not name.startswith("slopes")
    }
    assert list(blocks.parameters.items()) == list(expected.items())
    assert blocks.size == sum(math.prod(shape) for shape in expected.values())
    assert list(blocks) == ["conv", "norm", "grouped", "head"]
    assert len(blocks) == 4
    assert "conv" in blocks
    assert "norm" in blocks
    assert "slopes" not in blocks


def fisher_of_norm() -> Tensor:
    """Of every unit's scale and shift, [2, 2, 2], sample by sample and column by column, by autograd."""
    model = copy.deepcopy(network()).eval()
    own = list(model.get_submodule("norm").parameters())
    gradients, samples = [], torch.cat([x for x, _ in images(3)])
    for x in samples:
        logits = model(x[None])
        for k in range(3):
            parts = torch.autograd.grad(oracle.softmax_column(k)(logits, logits), own, retain_graph=True)
            gradients.append(torch.stack(parts, dim=1))  # [units, 2]
    return torch.stack([oracle.mean_outer(3**0.5 * unit) for unit in torch.stack(gradients, dim=1)])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "rows"])
def test_the_block_of_a_norm_is_exact_unit_by_unit(kind: str) -> None:
    assert_close(blocks_of(kind)["norm"].to_dense(), torch.block_diag(*fisher_of_norm()))


def test_the_parameters_of_an_optimizers_curvature_are_in_the_order_of_the_model_too() -> None:
    """Even where the first layer was seen last."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.both = nn.Linear(5, 3), nn.Linear(5, 3), False
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x) + (self.first(x) if self.both else 0)  # type: ignore[no-any-return]

    model = Late()
    optimizer = TEKFAC.natural(model, factors_every=1)
    train(model, optimizer, vectors(1))
    assert list(optimizer.curvature) == ["second"]
    model.both = True
    train(model, optimizer, vectors(1))
    assert list(optimizer.curvature.parameters) == [name for name, _ in model.named_parameters()]


@pytest.mark.every_pair
@every_kind
@every_damping
@pytest.mark.parametrize("operation", OPERATIONS)
def test_products_with_parameters_are_those_of_the_dense_matrix(
    kind: str, damping: str, operation: str
) -> None:
    tensors = random_tensors(kind)
    keywords = {"damping": DAMPINGS[damping]} if operation in DAMPED else {}
    ridge = ridge_of(kind, DAMPINGS[damping]) if operation in DAMPED else torch.zeros(())
    products = getattr(blocks_of(kind), operation)(tensors, **keywords)
    assert {name: tuple(part.shape) for name, part in products.items()} == blocks_of(kind).parameters
    expected = function_of(dense_of(kind) + ridge, operation) @ flat(tensors, kind)
    assert_close(flat(products, kind), expected)


@every_kind
@pytest.mark.parametrize("operation", OPERATIONS)
def test_leading_axes_are_so_many_dicts(kind: str, operation: str) -> None:
    keywords = {"damping": 0.3} if operation in DAMPED else {}
    many = random_tensors(kind, 2, 3)
    products = getattr(blocks_of(kind), operation)(many, **keywords)
    for i in range(2):
        for j in range(3):
            one = {name: tensor[i, j] for name, tensor in many.items()}
            expected = getattr(blocks_of(kind), operation)(one, **keywords)
            for name, part in expected.items():
                assert_close(products[name][i, j], part)


@every_kind
def test_the_order_of_the_dict_makes_no_difference(kind: str) -> None:
    tensors = random_tensors(kind)
    backwards = dict(reversed(tensors.items()))
    assert_identical(blocks_of(kind).matvec(backwards), blocks_of(kind).matvec(tensors))
    assert torch.equal(blocks_of(kind).to_vector(backwards), blocks_of(kind).to_vector(tensors))


@every_kind
def test_what_it_is_given_is_left_as_it_was(kind: str) -> None:
    tensors = random_tensors(kind)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for operation in OPERATIONS:
        getattr(blocks_of(kind), operation)(tensors, *([0.3] if operation in DAMPED else []))
    vector = np.ones(blocks_of(kind).size)
    blocks_of(kind).linear_operator(0.3) @ vector
    assert_identical(tensors, before)
    assert (vector == 1).all()


def test_it_takes_gradients_as_they_are() -> None:
    """An optimizer's step without momentum is `solve` of its gradients."""
    model, other = mlp(), mlp()
    optimizer = TEKFAC.natural(model, lr=1.0, momentum=0.0, damping=0.1, fisher="exact")
    (batch,) = vectors(1)
    train(model, optimizer, [batch])
    blocks = fisher.estimate(other, [batch])
    nn.functional.cross_entropy(other(batch[0]), batch[1]).backward()
    steps = blocks.solve({name: p.grad for name, p in other.named_parameters()}, damping=0.1)  # type: ignore[misc]
    for (name, p), q in zip(other.named_parameters(), model.parameters(), strict=True):
        assert_close(q.detach(), p.detach() - steps[name])


# -- numbers -------------------------------------------------------------------------------------------


@every_kind
@every_damping
def test_numbers_are_those_of_the_dense_matrix(kind: str, damping: str) -> None:
    blocks, dense = blocks_of(kind), dense_of(kind)
    assert_close(blocks.trace(), dense.trace())
    assert_close(blocks.frobenius_norm(), dense.norm())
    assert_close(blocks.eigenvalues(), torch.linalg.eigvalsh(dense))
    damped = dense + ridge_of(kind, DAMPINGS[damping])
    assert_close(blocks.logdet(DAMPINGS[damping]), torch.logdet(damped))


# -- vectors -------------------------------------------------------------------------------------------


@every_kind
def test_vectors_are_the_parameters_one_after_the_other(kind: str) -> None:
    blocks = blocks_of(kind)
    tensors = random_tensors(kind)
    assert torch.equal(blocks.to_vector(tensors), flat(tensors, kind))
    assert_identical(blocks.from_vector(flat(tensors, kind)), tensors)
    many = random_tensors(kind, 2, 3)
    assert blocks.to_vector(many).shape == (2, 3, blocks.size)
    assert_identical(blocks.from_vector(blocks.to_vector(many)), many)
    vector = torch.nn.utils.parameters_to_vector(
        [p for name, p in network().named_parameters() if not name.startswith("slopes")]
    )
    own = {name: p for name, p in network().named_parameters() if not name.startswith("slopes")}
    assert torch.equal(blocks.to_vector(own), vector)


# -- SciPy ---------------------------------------------------------------------------------------------


@every_kind
@every_damping
def test_the_linear_operator_is_the_damped_dense_matrix(kind: str, damping: str) -> None:
    blocks, dense = blocks_of(kind), dense_of(kind) + ridge_of(kind, DAMPINGS[damping])
    operator = blocks.linear_operator(DAMPINGS[damping])
    assert operator.shape == (blocks.size, blocks.size)
    assert operator.dtype == np.float64
    x, many = normal(blocks.size), normal(blocks.size, 3)
    assert_close(torch.as_tensor(operator @ x.numpy()), dense @ x)
    assert_close(torch.as_tensor(operator.rmatvec(x.numpy())), dense @ x)
    assert_close(torch.as_tensor(operator @ many.numpy()), dense @ many)
    assert_close(torch.as_tensor(operator.T @ many.numpy()), dense @ many)
    assert_close(torch.as_tensor(operator @ x[:, None].numpy()), (dense @ x)[:, None])
    assert_close(torch.as_tensor(operator @ np.eye(blocks.size)), dense)


@every_kind
@every_damping
def test_the_inverse_linear_operator_is_the_inverse_of_the_damped_dense_matrix(kind: str, damping: str) -> None:
    blocks, dense = blocks_of(kind), dense_of(kind) + ridge_of(kind, DAMPINGS[damping])
    operator = blocks.inverse_linear_operator(DAMPINGS[damping])
    many = normal(blocks.size, 3)
    assert_close(torch.as_tensor(operator @ many.numpy()), torch.linalg.solve(dense, many))


@every_kind
@every_damping
def test_conjugate_gradients_solve_with_it(kind: str, damping: str) -> None:
    blocks, dense = blocks_of(kind), dense_of(kind) + ridge_of(kind, DAMPINGS[damping])
    right = normal(blocks.size)
    solution, failed = linalg.cg(blocks.linear_operator(DAMPINGS[damping]), right.numpy(), rtol=1e-13)
    assert not failed
    assert_close(torch.as_tensor(solution), torch.linalg.solve(dense, right))


@pytest.mark.parametrize("kind", ["kfac", "ekfac", "tkfac", "tekfac"])
def test_an_approximation_preconditions_conjugate_gradients_on_the_exact_blocks(kind: str) -> None:
    exact, damping = blocks_of("exact"), 1e-4
    right = normal(exact.size)
    counts: dict[bool, int] = {}
    for preconditioned in (False, True):
        steps: list[None] = []
        solution, failed = linalg.cg(
            exact.linear_operator(damping),
            right.numpy(),
            rtol=1e-12,
            M=blocks_of(kind).inverse_linear_operator(damping) if preconditioned else None,
            callback=lambda _, steps=steps: steps.append(None),  # type: ignore[misc]
        )
        assert not failed
        expected = torch.linalg.solve(dense_of("exact") + ridge_of("exact", damping), right)
        assert_close(torch.as_tensor(solution), expected, rtol=1e-8)
        counts[preconditioned] = len(steps)
    assert counts[True] <= counts[False]


@every_kind
def test_a_matrix_preconditions_itself_in_one_step(kind: str) -> None:
    blocks = blocks_of(kind)
    steps: list[None] = []
    _, failed = linalg.cg(
        blocks.linear_operator(0.1),
        normal(blocks.size).numpy(),
        rtol=1e-10,
        M=blocks.inverse_linear_operator(0.1),
        callback=lambda _: steps.append(None),
    )
    assert not failed
    assert len(steps) == 1


@every_kind
@every_damping
def test_the_lanczos_method_finds_its_largest_eigenvalues(kind: str, damping: str) -> None:
    blocks, dense = blocks_of(kind), dense_of(kind) + ridge_of(kind, DAMPINGS[damping])
    operator = blocks.linear_operator(DAMPINGS[damping])
    values, vectors = linalg.eigsh(operator, k=4, which="LA", v0=np.ones(blocks.size), tol=1e-13)
    assert_close(torch.as_tensor(np.sort(values)), torch.linalg.eigvalsh(dense)[-4:])
    found = torch.as_tensor(vectors)
    assert_close(dense @ found, found * torch.as_tensor(values), rtol=1e-6)


VECTORS: dict[str, Callable[[int], Any]] = {
    "backwards": lambda size: np.arange(size, dtype=np.float64)[::-1],
    "every second": lambda size: np.arange(2 * size, dtype=np.float64)[::2],
    "whole numbers": lambda size: np.arange(size),
    "float32": lambda size: np.arange(size, dtype=np.float32),
    "read-only": lambda size: np.broadcast_to(np.float64(2), size),
    "in columns, Fortran's way": lambda size: np.asfortranarray(np.arange(2.0 * size).reshape(size, 2)),
}


@pytest.mark.parametrize("which", VECTORS)
def test_the_linear_operator_takes_whatever_array_numpy_would(which: str) -> None:
    blocks, vector = blocks_of("tekfac"), VECTORS[which](blocks_of("tekfac").size)
    expected = dense_of("tekfac").numpy() @ vector
    assert_close(torch.as_tensor(blocks.linear_operator() @ vector), torch.as_tensor(expected))


def test_the_linear_operator_of_a_float32_model_is_float32() -> None:
    blocks = fisher.estimate(mlp(dtype=torch.float32), vectors(2, dtype=torch.float32))
    operator = blocks.linear_operator(0.1)
    assert operator.dtype == np.float32
    product = operator @ np.ones(blocks.size, dtype=np.float32)
    assert product.dtype == np.float32
    expected = torch.block_diag(*(block.to_dense() for block in blocks.values())).norm()
    assert float(expected) == pytest.approx(blocks.frobenius_norm(), rel=1e-5)


# -- what does not fit ---------------------------------------------------------------------------------

CALLS: dict[str, Callable[[fisher.BlockDiagonal[Any], dict[str, Tensor]], Any]] = {
    "matvec": lambda blocks, tensors: blocks.matvec(tensors),
    "solve": lambda blocks, tensors: blocks.solve(tensors, 0.1),
    "sqrt_matvec": lambda blocks, tensors: blocks.sqrt_matvec(tensors),
    "inv_sqrt_matvec": lambda blocks, tensors: blocks.inv_sqrt_matvec(tensors, 0.1),
    "to_vector": lambda blocks, tensors: blocks.to_vector(tensors),
}
every_call = pytest.mark.parametrize("call", CALLS)


@every_call
def test_a_missing_parameter_is_named(call: str) -> None:
    tensors = random_tensors("tekfac")
    del tensors["conv.bias"]
    with pytest.raises(ValueError, match=r"missing: conv\.bias.*BlockDiagonal\.parameters"):
        CALLS[call](blocks_of("tekfac"), tensors)


@every_call
def test_a_parameter_of_no_block_is_named(call: str) -> None:
    tensors = {**random_tensors("tekfac"), "slopes.weight": normal(4)}
    with pytest.raises(ValueError, match=r"of no block: slopes\.weight.*BlockDiagonal\.parameters"):
        CALLS[call](blocks_of("tekfac"), tensors)


@every_call
@pytest.mark.parametrize(
    "shape", [(2, 1, 2), (2, 2, 2, 1), (1,), (), (8,)], ids=lambda shape: "x".join(map(str, shape)) or "scalar"
)
def test_a_wrong_shape_is_named_with_the_one_that_fits(call: str, shape: tuple[int, ...]) -> None:
    tensors = {**random_tensors("tekfac"), "conv.weight": torch.zeros(shape, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"conv\.weight has shape.*Expected \[\.\.\., 2, 1, 2, 2\]") as error:
        CALLS[call](blocks_of("tekfac"), tensors)
    assert str(list(shape)) in str(error.value)


@every_call
def test_leading_axes_that_differ_from_parameter_to_parameter_are_refused(call: str) -> None:
    """As many numbers, but of other samples, must not be taken for the right ones."""
    tensors = random_tensors("tekfac", 2, 3)
    tensors["conv.bias"] = normal(3, 2, 2)
    with pytest.raises(ValueError, match=r"conv\.bias"):
        CALLS[call](blocks_of("tekfac"), tensors)


def test_a_vector_of_another_length_is_refused_with_the_right_one() -> None:
    blocks = blocks_of("tekfac")
    with pytest.raises(ValueError, match=rf"{blocks.size + 1} numbers.*Expected {blocks.size}"):
        blocks.from_vector(normal(blocks.size + 1))


@pytest.mark.parametrize("operation", [*DAMPED, "logdet", "linear_operator", "inverse_linear_operator"])
def test_a_damping_that_leaves_out_a_layer_is_refused_by_its_name(operation: str) -> None:
    blocks, damping = blocks_of("tekfac"), {"conv": 0.1, "norm": 0.1, "head": 0.1}
    with pytest.raises(ValueError, match=r"damping of layer 'grouped' is missing.*'conv', 'norm', 'head'"):
        damped(blocks, operation, damping)


@pytest.mark.parametrize("operation", [*DAMPED, "logdet", "linear_operator", "inverse_linear_operator"])
def test_a_damping_of_a_layer_that_is_not_there_is_refused_by_its_name(operation: str) -> None:
    blocks, damping = blocks_of("tekfac"), {"conv": 0.1, "norm": 0.1, "grouped": 0.1, "head": 0.1, "haed": 0.2}
    with pytest.raises(ValueError, match="'haed'"):
        damped(blocks, operation, damping)


@pytest.mark.parametrize("operation", [*DAMPED, "logdet", "linear_operator", "inverse_linear_operator"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", True, None], ids=repr)
def test_a_damping_that_is_no_number_from_zero_on_is_refused(operation: str, value: Any) -> None:
    for damping in (value, {"conv": 0.1, "norm": 0.1, "grouped": value, "head": 0.1}):
        with pytest.raises(ValueError, match="damping") as error:
            damped(blocks_of("tekfac"), operation, damping)
        assert repr(value) in str(error.value)


def damped(blocks: fisher.BlockDiagonal[Any], operation: str, damping: Any) -> None:
    """The operation, carried out; operators are products once they are used."""
    if operation in DAMPED:
        getattr(blocks, operation)(random_tensors("tekfac"), damping)
    elif operation == "logdet":
        blocks.logdet(damping)
    else:
        getattr(blocks, operation)(damping) @ np.ones(blocks.size)


def test_a_layer_without_a_block_is_named_with_those_that_have_one() -> None:
    with pytest.raises(KeyError, match=r"'slopes'.*'conv', 'norm', 'grouped', 'head'"):
        blocks_of("tekfac")["slopes"]


def test_it_shows_its_blocks() -> None:
    assert "'conv': KroneckerBlock of 10 rows" in repr(blocks_of("tekfac"))
    assert "'norm': KroneckerBlock of 4 rows" in repr(blocks_of("tekfac"))
    assert "'head': DenseBlock of 111 rows" in repr(blocks_of("exact"))


def test_the_whole_matrix_can_be_formed_in_the_order_of_vectors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    blocks = fisher.estimate(model, [torch.randn(9, 3).double()])
    dense, vector = blocks.to_dense(), torch.randn(blocks.size).double()
    assert_close(dense @ vector, blocks.to_vector(blocks.matvec(blocks.from_vector(vector))))
    assert_close(torch.linalg.eigvalsh(dense), blocks.eigenvalues())
    with pytest.raises(ValueError, match=r"26 rows, the limit is 10.*to_dense\(limit=26\)"):
        blocks.to_dense(limit=10)


def test_inner_products_are_summed_over_all_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    blocks = fisher.estimate(model, [torch.randn(9, 3).double()])
    first, second = (blocks.white_noise(2, 5) for _ in range(2))
    expected = sum((first[name] * second[name]).flatten(2).sum(-1) for name in first)
    assert_close(blocks.inner(first, second), torch.as_tensor(expected))


def test_white_noise_follows_its_generator_and_is_white() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    blocks = fisher.estimate(model, [torch.randn(9, 3).double()])
    noise, again = (blocks.white_noise(4000, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert all(torch.equal(noise[name], again[name]) for name in blocks.parameters)
    vectors = blocks.to_vector(noise)
    assert vectors.dtype == torch.float64
    covariance = vectors.mT @ vectors / len(vectors)
    assert float((covariance - torch.eye(blocks.size)).abs().max()) < 0.1


def test_select_takes_what_has_a_block() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.PReLU(4), nn.Linear(4, 2)).double()
    blocks = fisher.estimate(model, [torch.randn(9, 3).double()])
    own = dict(model.named_parameters())
    selected = blocks.select(own)
    assert list(selected) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert all(selected[name] is own[name] for name in selected)
