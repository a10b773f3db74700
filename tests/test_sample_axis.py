"""Promise: rows are put together by sample, wherever in a layer's input the samples are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dense import assert_close, dense_block, measured
from tekfac import TEKFAC, TKFAC

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


@pytest.mark.every_pair
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


class Recurrent(nn.Module):
    """Sequence-first, as nn.LSTM is by itself: [T, N, D] -> [T, N, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(D, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0])
        return out


@pytest.mark.parametrize(
    ("steps", "batch_dim", "told"),
    [(8, 0, True), (8, 1, False), (7, 0, True), (7, 1, False), (7, "auto", False)],
)
def test_sequence_first_outputs_are_noticed_where_a_layer_knows_its_samples(
    steps: int, batch_dim: Any, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Recurrent()
    optimizer = TKFAC.natural(model, batch_dim=batch_dim)
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(torch.randn(steps, N, D))
        cross_entropy(logits.flatten(0, 1), torch.randint(CLASSES, (steps * N,))).backward()
        optimizer.step()
    messages = [
        r.getMessage() for r in caplog.records if "batch_dim=1" in r.getMessage() and "lstm" in r.getMessage()
    ]
    assert bool(messages) == told
    assert len(set(messages)) == len(messages)


class Transcriber(nn.Module):
    """Pieces of sound [N, D, T] -> letters [T, N, C], as a CTC loss has them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv1d(D, 4, 3, padding=1), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.convolution(x).tanh().movedim(2, 0))
        return out


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("network", [Recurrent, Transcriber])
def test_sequence_first_outputs_are_found_where_a_layer_knows_its_samples(
    network: type[nn.Module], fisher: str
) -> None:
    x = torch.randn((7, N, D) if network is Recurrent else (N, D, 7), dtype=torch.float64)
    labels = torch.arange(7 * N) % CLASSES
    blocks = []
    for settings in ({}, {"batch_dim": 1}):
        torch.manual_seed(0)
        model = network().double()
        optimizer = measured(
            TKFAC, model, x, lambda z: cross_entropy(z.flatten(0, 1), labels), fisher=fisher, **settings
        )
        blocks.append({name: dense_block(curvature) for name, curvature in optimizer.curvature.items()})
    found, told = blocks
    assert found.keys() == told.keys()
    assert len(found) >= 2
    for name, block in told.items():
        assert_close(found[name], block)


def test_as_many_classes_as_frames_are_not_taken_for_samples() -> None:
    """[N, F, 1, T] folded to N * F frames for the convolution, as many as there are classes."""

    class Film(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.head = nn.Conv1d(1, 2, 3), nn.Linear(2, 6)

        def forward(self, x: Tensor) -> Tensor:
            frames = self.convolution(x.flatten(0, 1)).mean(2)
            out: Tensor = self.head(frames.reshape(len(x), -1, 2).mean(1))
            return out

    x, labels = torch.randn(3, 2, 1, 5, dtype=torch.float64), torch.tensor([0, 2, 5])
    blocks = []
    for settings in ({}, {"batch_dim": 0}):
        torch.manual_seed(0)
        optimizer = measured(
            TKFAC, Film().double(), x, lambda z: cross_entropy(z, labels), fisher="exact", **settings
        )
        blocks.append(dense_block(optimizer.curvature["head"]))
    assert_close(*blocks)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_single_sample_without_an_axis_is_a_batch_of_one(fisher: str) -> None:
    blocks = []
    for batched in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
        x, label = torch.randn(D, dtype=torch.float64), torch.tensor(1)
        inputs, labels = (x[None], label[None]) if batched else (x, label)
        optimizer = measured(TEKFAC, model, inputs, lambda z, y=labels: cross_entropy(z, y), fisher=fisher)
        blocks.append({name: dense_block(curvature) for name, curvature in optimizer.curvature.items()})
    for name in ("0", "2"):
        assert_close(blocks[1][name], blocks[0][name])
