"""Promise: a compiled model is trained like the same model in eager mode, whichever was made first."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tekfac import TEKFAC

SETTINGS = {"factors_every": 3, "basis_every": 3, "rescaling_every": 3, "seed": 0}


def losses(order: str) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)).double()
    called: nn.Module = model
    if order == "compiled, then optimizer":
        called = torch.compile(model, backend="aot_eager")
        optimizer = TEKFAC(model, **SETTINGS)
    elif order == "optimizer, then compiled":
        optimizer = TEKFAC(model, **SETTINGS)
        called = torch.compile(model, backend="aot_eager")
    elif order == "optimizer of the compiled model":
        called = torch.compile(model, backend="aot_eager")
        optimizer = TEKFAC(called, **SETTINGS)
    else:
        optimizer = TEKFAC(model, **SETTINGS)
    generator = torch.Generator().manual_seed(1)
    told = []
    for _ in range(7):
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = cross_entropy(called(x), torch.randint(3, (16,), generator=generator))
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    assert len(optimizer.curvature) == 2
    return told


@pytest.mark.filterwarnings("ignore")  # the compiler's own, which differ between versions
@pytest.mark.parametrize(
    "order", ["compiled, then optimizer", "optimizer, then compiled", "optimizer of the compiled model"]
)
def test_losses_are_those_of_the_eager_model(order: str) -> None:
    assert losses(order) == pytest.approx(losses("eager"), rel=1e-12)
