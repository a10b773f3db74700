"""Promise: a side of more than max_dim dimensions is kept as blocks or as a diagonal, and nothing larger."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from blocks_oracle import (
    DAMPING,
    EVERY,
    FISHERS,
    OWN,
    Case,
    Part,
    Tape,
    assert_blocks_and_step,
    assert_rows_give_autograds_gradients,
    block_sizes,
    expected_part,
    matrix_places,
    net_case,
    numbers,
    one_step,
    rows_of,
)
from dense import assert_close, every_method, normal, oracle_block
from tekfac import KFAC, TEKFAC
from tekfac.layers.side_forms import SideRule
from tekfac.optim.natural_gradient import NaturalGradient

SAMPLES = 14


def linear(layer: nn.Linear, tape: Tape, x: Tensor) -> Tensor:
    return tape.linear("layer", x, layer.weight, layer.bias)


def convolution(layer: nn.Conv1d, tape: Tape, x: Tensor) -> Tensor:
    patches = x.unfold(2, layer.kernel_size[0], 1).transpose(1, 2)  # [N, T, C, k]
    groups = patches.unflatten(2, (layer.groups, -1)).flatten(3)  # [N, T, G, d]
    ones = torch.ones_like(groups[..., :1])
    matrix = torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1).unflatten(0, (layer.groups, -1))
    rows = torch.cat([groups, ones], -1)
    return tape.keep("layer", rows.flatten(2), torch.einsum("ntgi,goi->ntgo", rows, matrix).flatten(2)).mT


def linear_case(d_in: int, d_out: int, bias: bool, **settings: Any) -> Case:
    names = ["layer.weight", "layer.bias"] if bias else ["layer.weight"]
    part = Part("layer", matrix_places((d_out, d_in), bias))
    layer = nn.Linear(d_in, d_out, bias=bias)
    return net_case(layer, normal(SAMPLES, 3, d_in), linear, {"layer": (names, [part])}, settings=settings)


def grouped_case(**settings: Any) -> Case:
    """Two groups, each 5 outputs of 4 inputs and the bias."""
    index = matrix_places((10, 2, 2), True).unflatten(0, (2, 5))
    parts = [Part("layer", index[g], group=g) for g in range(2)]
    layer = nn.Conv1d(4, 10, 2, groups=2)
    layers = {"layer": (["layer.weight", "layer.bias"], parts)}
    return net_case(layer, normal(SAMPLES, 4, 3), convolution, layers, settings=settings)


CASES: dict[str, Callable[[], Case]] = {
    "inputs in blocks": lambda: linear_case(6, 3, True, max_dim=3, large_dims="blocks"),  # 7: 3 + 3 + 1
    "blocks nearly equal": lambda: linear_case(6, 3, True, max_dim=6, large_dims="blocks"),  # 4 + 3, not 6 + 1
    "inputs as a diagonal": lambda: linear_case(6, 3, True, max_dim=3, large_dims="diagonal"),
    "outputs in blocks": lambda: linear_case(2, 7, True, max_dim=4, large_dims="blocks"),  # 4 + 3
    "outputs as a diagonal": lambda: linear_case(2, 7, True, max_dim=4, large_dims="diagonal"),
    "both in blocks": lambda: linear_case(5, 5, False, max_dim=2, large_dims="blocks"),  # 2 + 2 + 1
    "both as a diagonal": lambda: linear_case(5, 4, True, max_dim=1, large_dims="diagonal"),
    "blocks of one": lambda: linear_case(3, 4, True, max_dim=1, large_dims="blocks"),
    "blocks beside a diagonal": lambda: linear_case(4, 9, False, max_dim=2),  # auto: 2 + 2, and 9 > 4 * 2
    "just not too large": lambda: linear_case(5, 6, True, max_dim=6),
    "as large as blocks go": lambda: linear_case(7, 2, True, max_dim=2),  # auto: 8 = 4 * 2
    "groups in blocks": lambda: grouped_case(max_dim=3),  # 3 + 2 on both sides
    "groups as a diagonal": lambda: grouped_case(max_dim=3, large_dims="diagonal"),
}


@cache
def case_of(kind: str) -> Case:
    return CASES[kind]()


def test_how_a_side_is_cut() -> None:
    """By the oracle that the blocks are compared with."""
    assert block_sizes(7, 7, "blocks") == [7]
    assert block_sizes(7, 6, "blocks") == [4, 3]
    assert block_sizes(7, 3, "auto") == [3, 3, 1]
    assert block_sizes(12, 3, "auto") == [3, 3, 3, 3]
    assert block_sizes(20_001, 3, "auto") == [1] * 20_001
    assert block_sizes(4, 3, "diagonal") == [1] * 4


@pytest.mark.parametrize("fisher", FISHERS)
def test_the_definitions_in_parameter_coordinates_are_the_oracles_own(fisher: str) -> None:
    """Sums over rows of any number, against tests/oracle.py, which needs as many rows of every sample."""
    case = case_of("just not too large")
    found = rows_of(case, fisher)["layer"]
    columns = found[0][1].shape[0]
    a = torch.cat([a for a, _ in found])[:, None]  # [N * K, 1, T, d_in]
    u = torch.cat([u for _, u in found])[:, None] * columns**0.5
    samples = oracle.Samples(oracle.gradient_matrices(a[:, 0], u[:, 0])[:, None], a, u)
    (part,) = case.layers["layer"][1]
    for method, sharing in EVERY:
        expected = oracle_block(method, samples, sharing)
        assert_close(expected_part(case, part, method, sharing, fisher).block, expected)


@pytest.mark.parametrize("kind", CASES)
def test_the_rows_written_out_give_autograds_gradients(kind: str) -> None:
    assert_rows_give_autograds_gradients(case_of(kind))


@pytest.mark.parametrize("kind", CASES)
def test_blocks_and_steps_are_those_of_the_restricted_factors(kind: str) -> None:
    assert_blocks_and_step(case_of(kind), EVERY if "both" in kind or "groups in" in kind else OWN)


@every_method
def test_a_diagonal_of_both_sides_keeps_the_diagonal_of_the_fisher_where_it_is_corrected(
    method: type[NaturalGradient],
) -> None:
    case = case_of("both as a diagonal")
    optimizer, _, _ = one_step(case, method, "expand", "empirical")
    dense = optimizer.curvature["layer"].to_dense()
    assert_close(dense, torch.diag(dense.diagonal()))


# -- very many classes ---------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("large_dims", ["auto", "blocks"])
def test_a_head_of_fifty_thousand_classes_trains(method: type[NaturalGradient], large_dims: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 50_000))
    max_dim = 5000 if large_dims == "auto" else 16
    optimizer = method.natural(model, lr=0.1, damping=DAMPING, large_dims=large_dims, max_dim=max_dim)
    x, y = torch.randn(5, 6), torch.randint(50_000, (5,))
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]
    assert max(numbers(optimizer.state_dict())) <= 50_000 * 16
    assert "2" in optimizer.curvature


def test_the_default_leaves_usual_sizes_whole() -> None:
    whole = one_step(linear_case(6, 5, True), KFAC, "expand", "empirical")
    given = one_step(linear_case(6, 5, True, max_dim=5000, large_dims="auto"), KFAC, "expand", "empirical")
    assert torch.equal(whole[0].curvature.to_dense(), given[0].curvature.to_dense())


# -- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -3, 2.5, "5000", True, None])
def test_a_max_dim_that_is_no_positive_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"max_dim") as caught:
        TEKFAC.natural(nn.Linear(3, 2), max_dim=value)
    assert repr(value) in str(caught.value)
    assert "xpected" in str(caught.value)


@pytest.mark.parametrize("value", ["block", "Diagonal", None, 3])
def test_unknown_large_dims_are_refused_with_those_there_are(value: Any) -> None:
    with pytest.raises(ValueError, match=r"large_dims") as caught:
        TEKFAC.natural(nn.Linear(3, 2), large_dims=value)
    said = str(caught.value)
    assert repr(value) in said
    assert all(known in said for known in ("auto", "blocks", "diagonal"))


@pytest.mark.parametrize(
    ("dim", "block"),
    [
        (1, 1),
        (4097, 4097),
        (4609, 4609),
        (5000, 5000),
        (5001, 2501),
        (16384, 4096),
        (20_000, 5000),
        (20_001, 1),
        (50_257, 1),
    ],
)
def test_a_side_is_whole_then_in_blocks_then_a_diagonal(dim: int, block: int) -> None:
    assert SideRule().block_size(dim) == block


@pytest.mark.parametrize(
    ("dim", "of_convolution", "block"),
    [
        (200, False, 200),
        (201, False, 101),
        (513, False, 129),
        (3072, False, 134),
        (800, True, 800),
        (801, True, 267),
        (4608, True, 384),
    ],
)
def test_by_default_convolutions_are_whole_up_to_a_larger_size(
    dim: int, of_convolution: bool, block: int
) -> None:
    assert SideRule("auto").block_size(dim, of_convolution=of_convolution) == block


@pytest.mark.parametrize(("dim", "block"), [(769, 769), (800, 800), (1153, 577), (4609, 769), (20_001, 1)])
def test_an_optimizer_keeps_smaller_sides_whole(dim: int, block: int) -> None:
    optimizer = TEKFAC.natural(nn.Linear(dim - 1, 2))
    (layer,) = optimizer._layers.values()
    assert (layer.shape.block_in or dim) == block


def test_a_wide_layer_trains_with_its_outputs_in_blocks() -> None:
    """An MLP's 4 x 4096 in small: 4 x 40, with max_dim = 41."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 160), nn.GELU(), nn.Linear(160, 3))
    optimizer = TEKFAC.natural(
        model, lr=0.03, max_dim=41, kl_clip=1e-2, factors_every=5, basis_every=5, rescaling_every=5
    )
    x = torch.randn(64, 40)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    basis = optimizer.curvature["0"].basis
    assert basis.vectors_out.shape == (1, 160, 40)
    assert basis.vectors_in.shape == (1, 41, 41)
    assert losses[-1] < 0.2 * losses[0]


def test_an_optimizer_cuts_linear_layers_sooner_than_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(56, 2, 3), nn.Flatten(), nn.Linear(500, 2), nn.Linear(2, 500))
    shapes = [layer.shape for layer in TEKFAC(model, large_dims="blocks")._layers.values()]
    assert [(shape.side_in, shape.side_out) for shape in shapes] == [(505, 2), (126, 2), (3, 125)]
