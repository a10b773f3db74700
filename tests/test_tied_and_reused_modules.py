"""Modules used twice and tied parameters are preconditioned rightly, or left to first order with a reason."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import METHODS, RTOL, assert_close, dense_block, statistics
from tekfac import EKFAC, KFAC, TEKFAC
from tekfac.likelihoods import Categorical, OutputShapeError
from tekfac.optim.natural_gradient import NaturalGradient
from training import Batch, train, vectors


class Twice(nn.Module):
    """The same hidden layer applied twice."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.second = self.first
        if tied:  # two modules, one weight and one bias
            self.second = nn.Linear(5, 5)
            self.second.weight, self.second.bias = self.first.weight, self.first.bias
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


def column_gradients(model: nn.Module, batch: Batch, weight: Tensor, bias: Tensor) -> Tensor:
    """Per-sample gradients of [weight | bias] for all columns of the softmax Fisher, by autograd."""
    matrices = []
    for n in range(len(batch[0])):
        logits = model(batch[0][n : n + 1])
        for k in range(logits.shape[-1]):
            grads = torch.autograd.grad(
                oracle.softmax_column(k)(logits, logits), [weight, bias], retain_graph=True
            )
            matrices.append(torch.cat([grads[0], grads[1][:, None]], 1))
    return torch.stack(matrices) * logits.shape[-1] ** 0.5


def dense_tekfac(gradients: Tensor) -> Tensor:
    block = oracle.exact_fisher(gradients)
    d_out, d_in = gradients.shape[1:]
    n_phi, n_psi = oracle.partial_traces(block, d_out, d_in)
    return oracle.eigen_corrected(block, torch.linalg.eigh(n_psi)[1], torch.linalg.eigh(n_phi)[1])


@pytest.mark.parametrize("tied", [False, True])
def test_a_layer_used_twice_has_the_block_of_its_whole_gradient(tied: bool) -> None:
    model, (batch,) = Twice(tied), vectors(1)
    gradients = column_gradients(model, batch, model.first.weight, model.first.bias)
    optimizer = TEKFAC.natural(model, lr=1e-30, momentum=0.0, fisher="exact", damping=1e-3)
    train(model, optimizer, [batch])
    assert set(statistics(optimizer)) == {"first", "head"}
    assert_close(dense_block(statistics(optimizer)["first"]), dense_tekfac(gradients))
    assert_close(statistics(optimizer)["first"].rescaling.sum(), oracle.exact_fisher(gradients).trace())


@pytest.mark.parametrize("method", METHODS)
def test_a_module_used_twice_and_two_tied_modules_train_alike(method: type[NaturalGradient]) -> None:
    weights = []
    for tied in (False, True):
        model = Twice(tied)
        train(
            model,
            method.natural(model, lr=0.05, damping=0.1, seed=0, factors_every=2, basis_every=2),
            vectors(4),
        )
        weights.append(model.first.weight.detach())
    assert torch.equal(weights[0], weights[1])


def test_a_tied_parameter_is_moved_once() -> None:
    model = Twice(tied=True)
    optimizer = TEKFAC.natural(model, lr=0.05)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(parameters) == len(set(parameters)) == 4


def test_convolutions_that_share_weights_but_not_strides_are_one_layer() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine, self.coarse = nn.Conv1d(1, 2, 3), nn.Conv1d(1, 2, 3, stride=2, padding=1)
            self.coarse.weight, self.coarse.bias = self.fine.weight, self.fine.bias
            self.head = nn.Linear(2, 3)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            maps = torch.cat([self.fine(x[:, None]), self.coarse(x[:, None])], dim=2)
            out: Tensor = self.head(torch.tanh(maps).mean(2))
            return out

    model, (batch,) = Pyramid(), vectors(1)
    weight, bias = model.fine.weight, model.fine.bias
    assert bias is not None
    matrices = []
    for x in batch[0]:
        logits = model(x[None])
        for k in range(3):
            loss = oracle.softmax_column(k)(logits, logits)
            grads = torch.autograd.grad(loss, [weight, bias], retain_graph=True)
            matrices.append(torch.cat([grads[0].flatten(1), grads[1][:, None]], 1))
    optimizer = TEKFAC.natural(model, lr=1e-30, momentum=0.0, fisher="exact", damping=1e-3)
    train(model, optimizer, [batch])
    assert set(statistics(optimizer)) == {"fine", "head"}
    assert_close(dense_block(statistics(optimizer)["fine"]), dense_tekfac(3**0.5 * torch.stack(matrices)))


class LanguageModel(nn.Module):
    """An embedding whose matrix is also the output layer's."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(self.embedding(tokens))))
        return out

    def add_bag(self) -> nn.EmbeddingBag:
        """A module of a type that has no block."""
        self.bag = nn.EmbeddingBag(6, 4)
        return self.bag


PER_TOKEN = Categorical(class_dim=-1)


def token_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randint(6, (4, 3), generator=generator), torch.randint(6, (4, 3), generator=generator))
        for _ in range(count)
    ]


def token_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def tied_gradients(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Gradients of the shared matrix for all columns of all tokens' softmax Fisher, by autograd."""
    matrices = []
    for sample in tokens:
        for logits in model(sample[None])[0]:
            for k in range(len(logits)):
                loss = oracle.softmax_column(k)(logits, logits)
                matrices += torch.autograd.grad(loss, [model.embedding.weight], retain_graph=True)
    return torch.stack(matrices) * 6**0.5


def test_a_weight_tied_to_an_embedding_is_one_layer_with_the_block_of_its_whole_gradient(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both uses count, and what one sees of a sample goes with what the other sees of it."""
    model, (batch,) = LanguageModel(), token_batches(1)
    gradients = tied_gradients(model, batch[0])
    with caplog.at_level(logging.INFO, "tekfac"):
        optimizer = TEKFAC.natural(
            model, lr=1.0, first_order_lr=0.25, momentum=0.0, damping=0.1, fisher="exact", likelihood=PER_TOKEN
        )
    assert "Nothing is left out" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    start = model.head.weight.detach().clone()
    train(model, optimizer, [batch], token_loss)
    assert set(statistics(optimizer)) == {"embedding", "body"}
    assert model.head.weight is model.embedding.weight
    fisher = oracle.exact_fisher(gradients)
    n_phi, _ = oracle.partial_traces(fisher, 6, 4)
    q_in = torch.linalg.eigh(n_phi)[1].contiguous()
    block = oracle.eigen_corrected(fisher, torch.eye(6, dtype=torch.float64), q_in)
    assert_close(optimizer.curvature["embedding"].to_dense(), block)
    gradient = model.head.weight.grad
    assert gradient is not None
    assert_close(start - model.head.weight.detach(), oracle.damped_solve(block, 0.1, gradient))


def test_an_embedding_and_a_head_with_weights_of_their_own_are_two_layers() -> None:
    model = LanguageModel(tied=False)
    optimizer = TEKFAC.natural(model, lr=0.05)
    train(model, optimizer, token_batches(1), token_loss)
    assert set(statistics(optimizer)) == {"embedding", "body", "head"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.embedding, "max_norm", 10.0), "'head.weight'.*shared with Embedding 'embedding'"),
        (lambda m: setattr(m.embedding, "scale_grad_by_freq", True), "shared with Embedding 'embedding'"),
        (lambda m: m.register_parameter("also", m.head.weight), "shared with LanguageModel"),
        (lambda m: setattr(m.add_bag(), "weight", m.head.weight), "shared with EmbeddingBag 'bag'"),
    ],
)
def test_a_weight_tied_to_an_embedding_in_a_way_that_one_block_cannot_hold_is_trained_by_sgd_with_a_reason(
    change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = LanguageModel()
    change(model)
    with caplog.at_level(logging.WARNING, "tekfac"):
        optimizer = TEKFAC.natural(model, lr=0.05, first_order_lr=0.25, momentum=0.5)
    assert re.search(reason, caplog.text)
    start = model.head.weight.detach().clone()
    train(model, optimizer, token_batches(1), token_loss)
    assert set(statistics(optimizer)) == {"body"}
    assert torch.equal(model.head.weight, start - 0.25 * model.head.weight.grad)
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.second, "bias", nn.Parameter(torch.zeros(5).double())), "another bias"),
        (lambda m: setattr(m.second, "bias", None), "another bias"),
        (lambda m: m.register_parameter("also", m.first.weight), "shared with Twice"),
    ],
)
def test_weights_tied_in_ways_that_one_block_cannot_hold_are_left_with_a_reason(
    change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Twice(tied=True)
    change(model)
    with caplog.at_level(logging.WARNING, "tekfac"):
        optimizer = KFAC.natural(model, lr=0.05)
    assert reason in caplog.text
    train(model, optimizer, vectors(2))
    assert set(statistics(optimizer)) == {"head"}


def test_a_bias_shared_between_layers_is_first_order_and_the_weights_are_not() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].bias = model[0].bias
    optimizer = EKFAC.natural(model, lr=0.05)
    train(model, optimizer, vectors(1))
    assert statistics(optimizer)["0"].rescaling.shape == (1, 3, 5)
    assert statistics(optimizer)["2"].rescaling.shape == (1, 3, 3)


def test_one_sequence_layer_called_per_token_or_on_all_tokens_has_the_same_block() -> None:
    class Tokenwise(nn.Module):
        def __init__(self, loop: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.head, self.loop = nn.Linear(2, 4), nn.Linear(4, 3), loop
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            tokens = x[:, :4].reshape(-1, 2, 2)
            if self.loop:
                hidden = torch.stack([self.layer(tokens[:, t]) for t in range(2)], dim=1)
            else:
                hidden = self.layer(tokens)
            out: Tensor = self.head(torch.tanh(hidden).mean(1))
            return out

    for method in METHODS:
        blocks = []
        for loop in (False, True):
            model = Tokenwise(loop)
            optimizer = method.natural(model, lr=1e-30, fisher="exact")
            train(model, optimizer, vectors(1))
            blocks.append(dense_block(statistics(optimizer)["layer"]))
        assert_close(blocks[1], blocks[0], rtol=100 * RTOL)


def test_a_module_used_in_one_forward_pass_and_not_in_the_next_keeps_its_block() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.extra, self.use = nn.Linear(5, 3), nn.Linear(3, 3), True
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x)
            return self.extra(torch.tanh(out)) if self.use else out

    model = Sometimes()
    optimizer = TEKFAC.natural(model, lr=0.05, factors_every=1, basis_every=1, rescaling_every=1)
    data = vectors(2)
    train(model, optimizer, data[:1])
    moments, extra = statistics(optimizer)["extra"].moments, model.extra.weight.detach().clone()
    model.use = False
    train(model, optimizer, data[1:])
    assert statistics(optimizer)["extra"].moments is moments
    assert torch.equal(model.extra.weight, extra)


class TwoViews(nn.Module):
    """An encoder that sees two views of every sample: in two calls, or in one with the views concatenated."""

    def __init__(self, concatenated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head, self.concatenated = nn.Linear(2, 4), nn.Linear(4, 3), concatenated
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        views = (x[:, :2], x[:, 2:4])
        if self.concatenated:
            first, second = self.encoder(torch.cat(views)).chunk(2)
        else:
            first, second = (self.encoder(view) for view in views)
        out: Tensor = self.head(torch.tanh(first) * torch.tanh(second))
        return out


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_two_views_of_a_sample_in_one_call_are_told_apart_by_sample_or_refused(fisher: Any) -> None:
    """Rows n and N + n belong to sample n, not rows 2 n and 2 n + 1."""
    blocks = []
    for concatenated in (False, True):
        model = TwoViews(concatenated)
        optimizer = TEKFAC.natural(model, lr=1e-30, momentum=0.0, fisher=fisher, damping=1e-3)
        try:
            train(model, optimizer, vectors(1))
        except OutputShapeError as error:
            assert concatenated
            assert "'encoder'" in str(error)  # noqa: PT017 - to refuse is as good
            return
        blocks.append(dense_block(statistics(optimizer)["encoder"]))
    assert_close(blocks[1], blocks[0])
