"""What `tekfac.fisher` makes of a network and a data set, against the linear operators of curvlinops.

`estimate` is compared with its KFAC and EKFAC operators and their inverses (exact damping), `exact_blocks`
with the diagonal blocks of its generalised Gauss-Newton matrix and of its empirical Fisher, on a CNN and on a
transformer, over batches of unequal size. All in float64, layer by layer; two vectors agree if the largest
difference is below RTOL of the largest entry (what the comparison promises is 1e-6).

There are more samples than inputs of any layer, so that no factor has a null space of more than one dimension
and the basis of EKFAC is unique, with sharing="reduce" too. The keys of the transformer are left out there:
a softmax does not see what is added to all of them, so that their gradients sum to 0 over the positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
)
from torch import Tensor, nn

from dense import assert_close
from tekfac import fisher
from tekfac.fisher import BlockDiagonal

RTOL = 1e-9
DAMPING = 1e-3
BATCHES = (12, 12, 7)
CLASSES = 4
LOSS = nn.CrossEntropyLoss()
FISHER = {"empirical": "empirical", "exact": "type-2"}  # our name: theirs
OPERATORS = {"kfac": KFACLinearOperator, "ekfac": EKFACLinearOperator}


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, (2, 3), padding=(0, 1), bias=False),
        nn.Tanh(),
        nn.Conv2d(4, 3, 2, dilation=2),
        nn.GELU(),
        nn.AvgPool2d((2, 1)),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


class Transformer(nn.Module):
    """One block, with the norms first; it labels a sequence, or each of its positions, [N, classes, T]."""

    def __init__(self, *, pooled: bool, width: int = 6, heads: int = 2) -> None:
        super().__init__()
        self.pooled, self.heads = pooled, heads
        self.embed = nn.Linear(7, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 10), nn.Linear(10, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        x = x + self.attend(self.norms[0](x))
        x = x + self.narrow(F.gelu(self.widen(self.norms[1](x))))
        x = self.norms[2](x)
        return self.head(x.mean(1)) if self.pooled else self.head(x).mT

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@dataclass(frozen=True)
class Problem:
    """A network, data, and the names of the layers to look at."""

    model: nn.Module
    data: list[tuple[Tensor, Tensor]]
    layers: list[str]

    def operator(self, kind: type, like: BlockDiagonal, **settings: Any) -> Any:
        """One of curvlinops' operators over the parameters of our blocks, in the same order."""
        parameters = [self.model.get_parameter(name) for name in like.parameters]
        return kind(self.model, LOSS, parameters, self.data, **settings)


def problem(network: str, sharing: str | None = None) -> Problem:
    torch.manual_seed(0)
    model = {
        "cnn": cnn,
        "transformer": lambda: Transformer(pooled=True),
        "tagger": lambda: Transformer(pooled=False),
    }[network]().double()
    inputs = torch.randn(sum(BATCHES), *((2, 11, 8) if network == "cnn" else (5, 7)), dtype=torch.float64)
    targets = torch.randint(CLASSES, inputs.shape[:2] if network == "tagger" else inputs.shape[:1])
    data = list(zip(inputs.split(BATCHES), targets.split(BATCHES), strict=True))
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    if sharing == "reduce":
        layers = [name for name in layers if name != "key"]
    return Problem(model, data, layers)


def some_vectors(blocks: BlockDiagonal) -> Tensor:
    """[size, 4]."""
    return torch.randn(blocks.size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


Product = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def on_dicts(blocks: BlockDiagonal, product: Product, vectors: Tensor) -> Tensor:
    """A product that takes tensors by parameter name, on the columns of a matrix."""
    return blocks.to_vector(product(blocks.from_vector(vectors.T))).T


def assert_close_by_layer(blocks: BlockDiagonal, actual: Any, expected: Tensor) -> None:
    """Rows of each layer beside each other, [size, k]; `actual` is ours, of torch or of NumPy."""
    sizes = [block.size for block in blocks.values()]
    for ours, theirs in zip(torch.as_tensor(actual).split(sizes), expected.split(sizes), strict=True):
        assert_close(ours, theirs, RTOL)


# -- the approximations ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Our blocks and curvlinops' operator."""

    ours: BlockDiagonal
    theirs: Any


@pytest.fixture(
    scope="module",
    params=[
        (network, method, sharing, kind)
        for network in ("cnn", "transformer")
        for method in OPERATORS
        for sharing in ("expand", "reduce")
        for kind in FISHER
    ],
    ids="-".join,
)
def pair(request: pytest.FixtureRequest) -> Pair:
    network, method, sharing, kind = request.param
    p = problem(network, sharing)
    ours = fisher.estimate(p.model, p.data, method=method, sharing=sharing, fisher=kind, layers=p.layers)
    assert list(ours) == p.layers
    settings = {"fisher_type": FISHER[kind], "kfac_approx": sharing, "separate_weight_and_bias": False}
    return Pair(ours, p.operator(OPERATORS[method], ours, **settings))


def test_products_with_vectors_are_equal(pair: Pair) -> None:
    vectors = some_vectors(pair.ours)
    expected = pair.theirs @ vectors
    assert_close_by_layer(pair.ours, on_dicts(pair.ours, pair.ours.matvec, vectors), expected)
    assert_close_by_layer(pair.ours, pair.ours.linear_operator() @ vectors.numpy(), expected)


def test_products_with_the_inverse_are_equal(pair: Pair) -> None:
    vectors = some_vectors(pair.ours)
    expected = KFACInverseLinearOperator(pair.theirs, damping=DAMPING, use_exact_damping=True) @ vectors
    actual = on_dicts(pair.ours, lambda tensors: pair.ours.solve(tensors, DAMPING), vectors)
    assert_close_by_layer(pair.ours, actual, expected)
    assert_close_by_layer(pair.ours, pair.ours.inverse_linear_operator(DAMPING) @ vectors.numpy(), expected)


def test_traces_and_norms_are_equal(pair: Pair) -> None:
    assert_close(pair.ours.trace(), pair.theirs.trace, RTOL)
    assert_close(pair.ours.frobenius_norm(), pair.theirs.frobenius_norm, RTOL)


@pytest.mark.parametrize("kind", FISHER)
def test_reduced_blocks_of_keys_are_zero(kind: str) -> None:
    """Why they are left out above."""
    p = problem("transformer")
    ours = fisher.estimate(p.model, p.data, method="kfac", sharing="reduce", fisher=kind, layers=["key"])
    theirs = p.operator(KFACLinearOperator, ours, fisher_type=FISHER[kind], kfac_approx="reduce")
    assert ours.trace() < 1e-25
    assert theirs.trace < 1e-25


# -- the exact blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "kind", "operator"),
    [
        ("cnn", "exact", GGNLinearOperator),
        ("cnn", "empirical", EFLinearOperator),
        ("transformer", "exact", GGNLinearOperator),
        ("transformer", "empirical", EFLinearOperator),
        ("tagger", "exact", GGNLinearOperator),  # the empirical Fishers differ with several terms per sample
    ],
)
def test_exact_blocks_are_the_diagonal_blocks_of_the_whole_matrix(
    network: str, kind: str, operator: type
) -> None:
    p = problem(network)
    ours = fisher.exact_blocks(p.model, p.data, fisher=kind, layers=p.layers)  # norms: unit by unit
    assert list(ours) == p.layers
    identity, vectors = torch.eye(ours.size, dtype=torch.float64), some_vectors(ours)
    whole = p.operator(operator, ours) @ identity
    expected = whole * torch.block_diag(*(torch.ones(block.size, block.size) for block in ours.values()))
    assert_close_by_layer(ours, ours.linear_operator() @ identity.numpy(), expected)
    assert_close_by_layer(ours, on_dicts(ours, ours.matvec, vectors), expected @ vectors)
    assert_close(ours.trace(), expected.trace(), RTOL)

    solutions = torch.linalg.solve(expected + DAMPING * identity, vectors)
    actual = on_dicts(ours, lambda tensors: ours.solve(tensors, DAMPING), vectors)
    assert_close_by_layer(ours, actual, solutions)
