"""Promise: rows are put together by sample, wherever in a layer's input the samples are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dense import assert_close, dense_block, measured
from tekfac import TKFAC

N, D, CLASSES = 4, 3, 3


class SamplesFirst(nn.Module):
    """Tokens [N, T, D] through one linear layer, tanh, the mean over tokens, a fixed read-out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(D, CLASSES)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).tanh().mean(1) * torch.arange(1.0, CLASSES + 1).to(x)


class SequenceFirst(SamplesFirst):
    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x.transpose(0, 1)).transpose(0, 1)


class Folded(SamplesFirst):
    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x.flatten(0, 1)).reshape(*x.shape[:2], -1)


class ViewsTogether(SamplesFirst):
    def encode(self, x: Tensor) -> Tensor:
        views = self.encoder(torch.cat(x.unbind(1)))
        return torch.stack(views.split(len(x)), dim=1)


class CalledPerToken(SamplesFirst):
    def encode(self, x: Tensor) -> Tensor:
        return torch.stack([self.encoder(token) for token in x.unbind(1)], dim=1)


class CalledPerSample(SamplesFirst):
    """One sample at a time: a call's first axis are tokens."""

    def encode(self, x: Tensor) -> Tensor:
        return torch.stack([self.encoder(sample) for sample in x])


def block(network: type[SamplesFirst], tokens: int, fisher: str) -> Tensor:
    torch.manual_seed(0)
    model = network().double()
    x = torch.randn(N, tokens, D, dtype=torch.float64)
    labels = torch.arange(N) % CLASSES
    optimizer = measured(TKFAC, model, x, lambda out: cross_entropy(out, labels), fisher=fisher)
    return dense_block(optimizer.curvature["encoder"])


@pytest.mark.parametrize("fisher", ["exact", "empirical", "sampled"])
@pytest.mark.parametrize("tokens", [1, 2, N, 2 * N])  # as many tokens as samples: the shape does not tell
@pytest.mark.parametrize("network", [SequenceFirst, Folded, ViewsTogether, CalledPerToken])
def test_the_block_does_not_depend_on_how_the_model_arranges_its_rows(
    network: type[SamplesFirst], tokens: int, fisher: str
) -> None:
    assert_close(block(network, tokens, fisher), block(SamplesFirst, tokens, fisher))


def test_a_dead_sample_does_not_mislead_the_arrangement() -> None:
    """The probe is taken at a sample whose target is not ignored."""
    torch.manual_seed(0)
    x = torch.randn(N, 2, D, dtype=torch.float64)
    labels = torch.tensor([-100, 1, 2, 0])
    blocks = []
    for network in (SamplesFirst, ViewsTogether):
        torch.manual_seed(1)
        optimizer = measured(
            TKFAC, network().double(), x, lambda out: cross_entropy(out, labels), fisher="exact"
        )
        blocks.append(dense_block(optimizer.curvature["encoder"]))
    assert_close(blocks[1], blocks[0])


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("tokens", [2, N])
def test_rows_that_cannot_be_told_apart_by_sample_are_refused(fisher: str, tokens: int) -> None:
    with pytest.raises(ValueError, match="'encoder' cannot be told apart by sample"):
        block(CalledPerSample, tokens, fisher)


def test_rows_that_cannot_be_told_apart_are_one_group_where_labels_are_sampled() -> None:
    """Unbiased, if noisy: the trace is that of the whole batch's gradient as one sample."""
    torch.manual_seed(0)
    model = CalledPerSample().double()
    x, labels = torch.randn(N, 2, D, dtype=torch.float64), torch.arange(N) % CLASSES
    optimizer = measured(TKFAC, model, x, lambda out: cross_entropy(out, labels))
    curvature = optimizer.curvature["encoder"]
    assert int((curvature.basis.values_in > 1e-12).sum()) <= CLASSES
