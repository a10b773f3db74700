"""Our blocks against those of two independent implementations, on the same model and data.

curvlinops has KFAC and EKFAC, kfac-jax has TKFAC under the name TNT. All in float64; two blocks agree if the
largest difference is below 1e-10 of the largest entry (what the comparison promises is 1e-6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlinops_blocks import ekfac_blocks, kfac_blocks
from dense import assert_close, dense_block, measured
from kfac_jax_tnt import tnt_blocks
from tekfac import EKFAC, KFAC, TKFAC
from tekfac.likelihoods import Gaussian
from tekfac.optim.natural_gradient import NaturalGradient

FISHER = {"empirical": "empirical", "exact": "type-2"}  # our name: theirs


@dataclass(frozen=True)
class Problem:
    """A model with data, the referees' loss, and how our library is told of the same loss."""

    model: nn.Sequential
    inputs: Tensor
    targets: Tensor
    loss: nn.CrossEntropyLoss | nn.MSELoss
    training_loss: Callable[[Tensor], Tensor]
    settings: dict[str, Any]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4, bias=False), nn.Sigmoid(), nn.Linear(4, 3))


def cnn() -> nn.Sequential:
    """Sizes for which the reduced input factors have full rank (else EKFAC-reduce is not unique)."""
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=2, padding=(0, 1)),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2, bias=False),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def problem(network: str, loss: str) -> Problem:
    torch.manual_seed(1)
    model = {"mlp": mlp, "cnn": cnn}[network]().double()
    shape = {"mlp": (40, 5), "cnn": (40, 2, 7, 3)}[network]
    inputs = torch.randn(shape, dtype=torch.float64)
    if loss == "cross-entropy":
        labels = torch.randint(3, (40,))
        criterion = nn.CrossEntropyLoss()
        return Problem(model, inputs, labels, criterion, lambda out: criterion(out, labels), {})
    values = torch.randn(40, 3, dtype=torch.float64)
    summed = nn.MSELoss(reduction="sum")
    settings = {"likelihood": Gaussian(variance=0.5), "loss_reduction": "batchmean"}
    return Problem(model, inputs, values, summed, lambda out: summed(out, values) / 40, settings)


def assert_same_blocks(ours: NaturalGradient, theirs: dict[str, Tensor]) -> None:
    assert set(theirs) == set(ours.curvature)
    for name, block in theirs.items():
        assert_close(dense_block(ours.curvature[name]), block)


CASES = pytest.mark.parametrize(
    ("network", "loss", "fisher"),
    [(n, loss, f) for n in ("mlp", "cnn") for loss in ("cross-entropy", "squared error") for f in FISHER],
)


@CASES
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("method", "referee"), [(KFAC, kfac_blocks), (EKFAC, ekfac_blocks)])
def test_kfac_and_ekfac_blocks_equal_those_of_curvlinops(
    method: type[NaturalGradient],
    referee: Callable[..., dict[str, Tensor]],
    sharing: str,
    network: str,
    loss: str,
    fisher: str,
) -> None:
    p = problem(network, loss)
    theirs = referee(p.model, p.inputs, p.targets, p.loss, fisher=FISHER[fisher], sharing=sharing)
    ours = measured(method, p.model, p.inputs, p.training_loss, fisher=fisher, sharing=sharing, **p.settings)
    assert_same_blocks(ours, theirs)


@CASES
def test_tkfac_blocks_equal_those_of_kfac_jax(network: str, loss: str, fisher: str) -> None:
    """DenseTNT for linear layers; Conv2DTNT, weighted per location, is TKFAC with sharing='expand'."""
    p = problem(network, loss)
    theirs = tnt_blocks(p.model, p.inputs, p.targets, p.loss, fisher=FISHER[fisher])
    ours = measured(TKFAC, p.model, p.inputs, p.training_loss, fisher=fisher, sharing="expand", **p.settings)
    assert_same_blocks(ours, theirs)
