"""Promise: moments of rows are the sum of their outer products, however rows lie and whatever is left out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import assert_close, normal
from tekfac import TEKFAC
from tekfac.curvature.symmetric import STRIPS, WORTH_HALVING, sum_of_products
from tekfac.damping import Relative
from training import train

LAYOUTS = {
    "flat": lambda x: x,
    "positions first": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "by coordinates": lambda x: x.mT.contiguous().mT,
    "every other sample": lambda x: torch.stack([x, x], dim=-3).flatten(-4, -3)[..., ::2, :, :],
}


def rows(*leading: int, dim: int, layout: str, seed: int = 0) -> Tensor:
    return LAYOUTS[layout](normal(*leading, dim, seed=seed))


def expected(x: Tensor, y: Tensor, size: int) -> Tensor:
    """[G, d, b]: of each row of the whole the part that lies in its block."""
    whole = torch.einsum("kgnti,kgntj->gij", x.reshape(-1, *x.shape[-4:]), y.reshape(-1, *y.shape[-4:]))
    dim = whole.shape[-1]
    found = whole.new_zeros(len(whole), dim, size)
    for row in range(dim):
        start = row // size * size
        width = min(size, dim - start)
        found[:, row, :width] = whole[:, row, start : start + width]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("leading", [(1, 4, 3), (2, 4, 3), (1, 1, 4, 3), (3, 2, 4, 3), (1, 2, 30)], ids=str)
@pytest.mark.parametrize(("dim", "size"), [(7, 7), (7, 3), (7, 1), (6, 3), (1, 1)])
def test_of_rows_in_any_order(layout: str, leading: tuple[int, ...], dim: int, size: int) -> None:
    x, y = rows(*leading, dim=dim, layout=layout), rows(*leading, dim=dim, layout=layout, seed=1)
    assert_close(sum_of_products(x, y, size), expected(x, y, size), 1e-12)
    assert_close(sum_of_products(x, x, size), expected(x, x, size), 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [WORTH_HALVING, WORTH_HALVING + STRIPS - 1])
def test_of_large_sides_which_are_half_computed(layout: str, dim: int) -> None:
    x = rows(1, 5, 4, dim=dim, layout=layout)
    found = sum_of_products(x, x, dim)
    assert_close(found, expected(x, x, dim), 1e-12)
    assert torch.equal(found, found.mT)
    half = dim // 2 + 1
    assert_close(sum_of_products(x, x, half), expected(x, x, half), 1e-12)


def test_layers_that_are_damped_together_are_damped_as_each_by_itself() -> None:
    """Rules that are equal but not the same are asked layer by layer."""
    data = [(normal(6, 4, seed=seed), torch.arange(6) % 4) for seed in range(5)]

    def trained(apart: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        groups = [{"params": model[place].parameters(), "damping": Relative(0.01)} for place in (0, 2, 4)]
        optimizer = TEKFAC(model, damping=Relative(0.01), param_groups=groups if apart else [])
        train(model, optimizer, data, F.cross_entropy)
        return model

    pairs = zip(trained(True).parameters(), trained(False).parameters(), strict=True)
    assert all(torch.equal(apart, together) for apart, together in pairs)
