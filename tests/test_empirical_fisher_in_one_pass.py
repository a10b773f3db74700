"""With fisher="empirical" the user's own backward pass is enough; what it leaves is what a second one would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import assert_close, dense_block, every_method, normal, seeded, statistics
from tekfac import TEKFAC
from tekfac.capture.autograd import Descent
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, everything


class Counting(torch.autograd.Function):
    """The identity; counts the backward passes that come by."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Counting.passes += 1
        return gradient


class Net(nn.Module):
    """Two branches that meet again, a module that is called twice, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.left, self.right = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.twice, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(Counting.apply(torch.tanh(self.embed(x))))
        x = torch.tanh(self.left(x)) + self.right(x).relu()
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        out: Tensor = self.head(x.mean(1))
        return out


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal(5, 4, 3, seed=seed), torch.arange(5) % 3


def step(model: nn.Module, optimizer: NaturalGradient, seed: int = 0) -> None:
    x, y = data(seed)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def clocks(method: type[NaturalGradient]) -> dict[str, int]:
    names = ["factors_every", "basis_every", *(["rescaling_every"] if method.method.rescaling.measured else [])]
    return dict.fromkeys(names, 1)


@pytest.mark.parametrize(("fisher", "expected"), [("empirical", 1), ("sampled", 2), ("exact", 4)])
def test_so_many_backward_passes_are_made(fisher: Any, expected: int) -> None:
    """Once it is known which rows are whose: a probe goes down at first, where modules are called twice."""

    class Plain(Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(Counting.apply(self.embed(x[:, 0]))))
            return out

    model = seeded(Plain)
    optimizer = TEKFAC.natural(model, fisher=fisher, **clocks(TEKFAC))
    Counting.passes = 0
    step(model, optimizer)
    assert Counting.passes == expected
    assert {"embed", "head"} <= set(statistics(optimizer))


@every_method
def test_the_blocks_are_those_of_a_second_pass(
    monkeypatch: pytest.MonkeyPatch, method: type[NaturalGradient]
) -> None:
    found = []
    for own_pass in (True, False):
        if not own_pass:
            monkeypatch.setattr(Descent, "will_run", lambda self: False)
        model = seeded(Net)
        optimizer = method.natural(model, lr=1e-30, fisher="empirical", **clocks(method))
        step(model, optimizer)
        found.append(statistics(optimizer))
    assert list(found[0]) == list(found[1])
    for name, block in found[0].items():
        for group in range(len(block.rescaling)):
            assert_close(dense_block(block, group), dense_block(found[1][name], group))


def test_micro_batches_add_up() -> None:
    runs = []
    for parts in (1, 5):
        model = seeded(Net)
        optimizer = TEKFAC.natural(model, lr=1e-30, fisher="empirical", **clocks(TEKFAC))
        x, y = data()
        for own_x, own_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(model(own_x), own_y) / parts).backward()
        optimizer.step()
        runs.append(statistics(optimizer))
    for name, block in runs[0].items():
        assert_close(dense_block(block), dense_block(runs[1][name]), 1e-8)


def test_a_second_backward_pass_through_the_same_graph_is_not_measured() -> None:
    runs = []
    for times in (1, 2):
        model = seeded(Net)
        optimizer = TEKFAC.natural(model, lr=1e-30, fisher="empirical", **clocks(TEKFAC))
        x, y = data()
        loss = F.cross_entropy(model(x), y)
        for _ in range(times):
            loss.backward(retain_graph=True)
        optimizer.step()
        runs.append(statistics(optimizer))
    for name, block in runs[0].items():
        assert torch.equal(block.rescaling, runs[1][name].rescaling)


def test_a_pass_that_stops_early_gets_a_second_one() -> None:
    """backward(inputs=...) does not come to all layers: their gradients are then sent down as before."""
    model = seeded(Net)
    optimizer = TEKFAC.natural(model, fisher="empirical", **clocks(TEKFAC))
    x, y = data()
    F.cross_entropy(model(x), y).backward(inputs=list(model.head.parameters()))
    optimizer.step()
    assert set(statistics(optimizer)) == set(optimizer._layers)


def test_a_skipped_backward_pass_leaves_nothing_behind() -> None:
    """zero_grad() without a step drops what the pass has left."""
    runs = []
    for abandoned in (False, True):
        model = seeded(Net)
        optimizer = TEKFAC.natural(model, fisher="empirical", **clocks(TEKFAC))
        if abandoned:
            x, y = data(9)
            F.cross_entropy(model(x), y).backward()
        step(model, optimizer)
        runs.append(everything(model, optimizer))
    assert_identical(*runs)


def test_the_mode_of_the_pass_counts_and_not_that_of_the_step() -> None:
    """Batch norm normalises by the batch in training, whatever mode it is in when the step is taken."""
    found = []
    for mode in (True, False):
        model = seeded(
            lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 3))
        )
        optimizer = TEKFAC.natural(model, fisher="empirical")
        F.cross_entropy(model(normal(6, 3, 4)), torch.arange(6) % 3).backward()
        model.train(mode)
        optimizer.step()
        found.append(statistics(optimizer)["1"].rescaling)
    assert torch.equal(*found)


def test_what_cannot_be_divided_is_said_once_and_counted_never() -> None:
    """A step that raises has let go of all passes: those that were fine are not counted twice afterwards."""

    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine, self.layer = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(self.fine(x).reshape(2, 3, 5)).flatten(0, 1)
            return out[:5]

    model = seeded(Flattened)
    optimizer = TEKFAC.natural(model, fisher="empirical")
    F.cross_entropy(model(normal(6, 5)), torch.arange(5) % 3).backward()
    with pytest.raises(ValueError, match="cannot be told apart"):
        optimizer.step()
    assert not optimizer._capture.batches()
