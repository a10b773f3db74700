"""Promise: what cannot be measured rightly is left to first order, or left out, and the log says why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tekfac import TEKFAC, explain


class Twice(nn.Linear):
    """A layer that has its weight under two names."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.again = self.weight


def sharing(first: nn.Module, second: nn.Module) -> nn.Module:
    second.weight = first.weight
    return nn.Sequential(first, second, nn.Linear(3, 3))


def tied_with_two_biases() -> nn.Module:
    table, one, other = nn.Embedding(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    one.weight = other.weight = table.weight
    return nn.Sequential(table, one, other, nn.Linear(3, 3))


SHARED = {
    "the weight is used twice by Twice '0'": lambda: nn.Sequential(Twice(), nn.Linear(3, 3)),
    "the weight is shared by modules with different biases": tied_with_two_biases,
    "the weight is shared with Conv1d '1'": lambda: sharing(nn.Linear(3, 3), nn.Conv1d(3, 3, 1)),
    "the weight is shared with Conv1d '1', which has another number of groups": lambda: sharing(
        nn.Conv1d(2, 4, 1, groups=2), nn.Conv1d(1, 4, 1)
    ),
    "the weight is shared with Linear '1', which has another bias": lambda: sharing(
        nn.Linear(3, 3), nn.Linear(3, 3)
    ),
}


@pytest.mark.parametrize("reason", SHARED)
def test_a_weight_that_is_used_in_several_ways_is_left_to_first_order_with_the_reason(reason: str) -> None:
    explained = explain(SHARED[reason](), file=None)
    assert {p.name: p.reason for p in explained.first_order}["0.weight"] == reason


class Changing(nn.Module):
    """An LSTM whose parameters change between its call and the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


def test_a_call_that_cannot_be_repeated_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Changing()
    optimizer = TEKFAC(model, lr=1e-30, factors_every=1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.randn(4, 5, 3)), torch.arange(4) % 3)
        for parameter in model.lstm.parameters():
            parameter.data = parameter.data + 1.0  # which autograd does not notice
        loss.backward()
        optimizer.step()
    told = [r.getMessage() for r in caplog.records if "could not be repeated" in r.getMessage()]
    assert len(told) == 1
    assert "'lstm" in told[0]
    assert "trained by first order" in told[0]
    assert list(optimizer.curvature) == ["head"]


@pytest.mark.parametrize(
    ("mask", "said"),
    [(lambda x: x, r"a mask of shape \[4, 5, 3\]"), (lambda x: None, "a mask of type NoneType")],
    ids=["too many axes", "none at all"],
)
def test_a_padding_mask_that_is_none_is_refused(mask: object, said: str) -> None:
    model = Changing()
    optimizer = TEKFAC(model, padding_mask=mask)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"The function padding_mask gave {said}"):
        model(torch.randn(4, 5, 3))
    assert optimizer.num_steps == 0
