"""Promise: a layer that takes part later than the others soon has curvature, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dense import statistics
from tekfac import TEKFAC


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.task = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.heads[self.task](self.body(x).tanh())
        return out


def step(optimizer: TEKFAC, model: nn.Module) -> None:
    optimizer.zero_grad()
    cross_entropy(model(torch.randn(8, 5)), torch.randint(3, (8,))).backward()
    optimizer.step()


def test_a_second_head_has_its_block_from_its_second_step_on() -> None:
    model = TwoHeads()
    optimizer = TEKFAC.natural(model, lr=1e-3)
    for _ in range(3):
        step(optimizer, model)
    assert "heads.1" not in statistics(optimizer)
    model.task = 1
    step(optimizer, model)
    step(optimizer, model)
    assert "heads.1" in statistics(optimizer)


def test_the_other_layers_keep_their_blocks_meanwhile() -> None:
    model = TwoHeads()
    optimizer = TEKFAC.natural(model, lr=1e-3)
    step(optimizer, model)
    before = statistics(optimizer)["body"]
    model.task = 1
    for _ in range(3):
        step(optimizer, model)
    after = statistics(optimizer)["body"]
    assert torch.equal(before.moments.values.input, after.moments.values.input)
    assert before.moments.weight == after.moments.weight == 1.0


def test_until_then_it_moves_by_the_first_order_rate() -> None:
    model = TwoHeads()
    optimizer = TEKFAC.natural(model, lr=0.1, momentum=0.0, first_order_lr=1e-3)
    step(optimizer, model)
    model.task = 1
    before = model.heads[1].weight.detach().clone()
    step(optimizer, model)
    gradient = model.heads[1].weight.grad
    assert gradient is not None
    torch.testing.assert_close(model.heads[1].weight.detach(), before - 1e-3 * gradient)


def test_a_layer_that_is_never_called_costs_a_few_watched_steps_only() -> None:
    """Its weight is used, but not through its module: nothing can be captured."""

    class Functional(TwoHeads):
        def forward(self, x: Tensor) -> Tensor:
            h = nn.functional.linear(x, self.body.weight, self.body.bias).tanh()
            out: Tensor = self.heads[0](h)
            return out

    model = Functional()
    optimizer = TEKFAC.natural(model, lr=1e-3)
    watched = []
    for _ in range(8):
        watched.append(optimizer._capture.armed)
        step(optimizer, model)
    assert watched == [True, True, True] + [False] * 5


def test_freezing_at_construction_does_not_cost_the_bias_its_place() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = TEKFAC.natural(model, factors_every=1)
    step(optimizer, model)
    assert "0" not in statistics(optimizer)
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)
    step(optimizer, model)
    assert statistics(optimizer)["0"].rescaling.shape == (1, 4, 6)


def test_statistics_taken_in_another_way_are_not_mixed() -> None:
    model = TwoHeads()
    optimizer = TEKFAC.natural(model)
    step(optimizer, model)
    with pytest.raises(ValueError, match=r"sharing='exact'.*sharing='expand'"):
        TEKFAC.natural(TwoHeads(), sharing="expand").load_state_dict(optimizer.state_dict())
