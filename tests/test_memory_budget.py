"""The memory budget decides how many samples are unfolded at a time and changes nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense import METHODS, assert_close, sharings, statistics
from tekfac import TEKFAC
from tekfac.layers.batch import LayerBatch
from tekfac.layers.rows import Rows
from tekfac.optim.natural_gradient import NaturalGradient
from training import Batch, mlp, train, vectors

BUDGETS = (1, 700, 5000, 20_000)
UNLIMITED = 10**12


class Mixed(nn.Module):
    """A convolution, a grouped one, a layer on sequences, and one on single vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.grouped = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 2, groups=2, bias=False)
        self.tokens, self.head = nn.Linear(4, 3), nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.grouped(torch.tanh(self.conv(x))))
        x = torch.tanh(self.tokens(x.flatten(2).mT))
        out: Tensor = self.head(x.mean(1))
        return out


def data() -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(7, 1, 5, 5, generator=generator, dtype=torch.float64),
            torch.randint(3, (7,), generator=generator),
        )
    ]


def measured(method: type[NaturalGradient], budget: int, **settings: Any) -> NaturalGradient:
    model = Mixed()
    optimizer = method.natural(model, lr=1e-30, memory_budget=budget, seed=0, **settings)
    train(model, optimizer, data())
    return optimizer


@pytest.mark.parametrize(("method", "sharing"), [(m, s) for m in METHODS for s in sharings(m)])
@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_statistics_are_the_same_for_any_budget(
    method: type[NaturalGradient], sharing: str, fisher: str
) -> None:
    whole = measured(method, UNLIMITED, sharing=sharing, fisher=fisher)
    for budget in BUDGETS:
        parts = measured(method, budget, sharing=sharing, fisher=fisher)
        assert set(statistics(parts)) == set(statistics(whole)) == {"conv", "grouped", "tokens", "head"}
        for name, block in statistics(whole).items():
            for ours, theirs in zip(statistics(parts)[name].moments.values, block.moments.values, strict=True):
                assert_close(ours, theirs, rtol=1e-12)
            assert_close(statistics(parts)[name].rescaling.sum(), block.rescaling.sum(), rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_the_steps_are_the_same_for_any_budget(method: type[NaturalGradient]) -> None:
    weights = []
    for budget in (1, UNLIMITED):
        model = Mixed()
        optimizer = method.natural(model, lr=0.05, memory_budget=budget, seed=0, damping=0.1)
        train(model, optimizer, data() * 2)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close(weights[0], weights[1], rtol=1e-9)


class Sizes:
    """Records how many samples each chunk had and how many bytes its rows took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.samples: list[int] = []
        self.bytes: list[int] = []
        original = LayerBatch.chunks

        def chunks(batch: LayerBatch, samples_per_chunk: int) -> Iterator[Rows]:
            for rows in original(batch, samples_per_chunk):
                self.samples.append(rows.a.shape[1])
                self.bytes.append(rows.a.nbytes + rows.u.nbytes)
                yield rows

        monkeypatch.setattr(LayerBatch, "chunks", chunks)


def test_the_smallest_budget_takes_one_sample_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(monkeypatch)
    measured(TEKFAC, 1)
    assert set(sizes.samples) == {1}
    assert len(sizes.samples) == 2 * 4 * 7  # factors and re-scaling, four layers, seven samples


def test_a_large_budget_takes_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(monkeypatch)
    measured(TEKFAC, UNLIMITED)
    assert sizes.samples == [7] * 4  # of four layers, once for the moments and Theta


@pytest.mark.parametrize("budget", [5000, 20_000, 60_000])
def test_the_rows_of_a_chunk_fit_the_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(monkeypatch)
    measured(TEKFAC, budget, fisher="exact")
    assert any(samples > 1 for samples in sizes.samples)
    for samples, used in zip(sizes.samples, sizes.bytes, strict=True):
        assert samples == 1 or used <= budget


def test_a_last_chunk_may_be_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(monkeypatch)
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=1e-30, memory_budget=1000)
    train(model, optimizer, vectors(1, samples=7))
    assert len(set(sizes.samples)) > 1
    assert sum(sizes.samples) == 2 * 2 * 7
