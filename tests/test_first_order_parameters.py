"""Parameters that are not preconditioned are trained by momentum SGD, with their own rate, and named once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS
from tekfac import TEKFAC
from tekfac.natural_gradient import NaturalGradient
from training import assert_identical, cnn, images, mlp, train, vectors


@pytest.mark.parametrize("method", METHODS)
def test_other_parameters_follow_torch_sgd_bit_for_bit(method: type[NaturalGradient]) -> None:
    model = cnn()
    optimizer = method(model, lr=0.01, momentum=0.8, first_order_lr=0.3, damping=0.1)
    twins = {n: nn.Parameter(p.detach().clone()) for n, p in model[1].named_parameters()}
    sgd = torch.optim.SGD(twins.values(), lr=0.3, momentum=0.8)
    for x, y in images(4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, parameter in model[1].named_parameters():
            twins[name].grad = parameter.grad.clone()  # type: ignore[union-attr]
        optimizer.step()
        sgd.step()
        assert_identical(
            {n: p.detach() for n, p in model[1].named_parameters()}, {n: p.detach() for n, p in twins.items()}
        )


def test_their_rate_is_that_of_the_layers_where_none_is_given() -> None:
    assert [group["lr"] for group in TEKFAC(cnn(), lr=0.02).param_groups] == [0.02, 0.02]


@pytest.mark.parametrize(
    "choose", [lambda m: ["4"], lambda m: m[4], lambda m: m[4].parameters(), lambda m: "4"]
)
def test_a_layer_can_be_left_to_first_order_by_name_module_or_parameters(choose: Any) -> None:
    model = cnn()
    optimizer = TEKFAC(model, lr=0.01, momentum=0.0, first_order=choose(model), first_order_lr=0.25)
    start = model[4].weight.detach().clone()
    train(model, optimizer, images(1))
    assert set(optimizer.curvature) == {"0"}
    assert torch.equal(model[4].weight, start - 0.25 * model[4].weight.grad)


def test_a_bias_can_be_left_to_first_order_alone() -> None:
    model = mlp()
    optimizer = TEKFAC(model, lr=0.01, momentum=0.0, first_order=["0.bias"], first_order_lr=0.25)
    start = model[0].bias.detach().clone()
    train(model, optimizer, vectors(1))
    assert optimizer.curvature["0"].rescaling.shape == (1, 4, 5)
    assert torch.equal(model[0].bias, start - 0.25 * model[0].bias.grad)


def test_they_are_all_named_in_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    model = cnn()
    with caplog.at_level(logging.INFO, "tekfac"):
        optimizer = TEKFAC(model, lr=0.01)
    naming = [r.getMessage() for r in caplog.records if "1.weight" in r.getMessage()]
    assert len(naming) == 1
    assert "1.bias" in naming[0]
    assert "0.weight" not in naming[0]
    assert "4.weight" not in naming[0]
    caplog.clear()
    with caplog.at_level(logging.INFO, "tekfac"):
        train(model, optimizer, images(3))
    assert not caplog.records


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"first_order names 'decoder'.*'0'"):
        TEKFAC(mlp(), first_order=["decoder"])


def test_frozen_parameters_are_left_alone() -> None:
    model = cnn()
    for parameter in (*model[0].parameters(), model[1].weight):
        parameter.requires_grad_(False)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = TEKFAC(model, lr=0.01, weight_decay=0.1)
    train(model, optimizer, images(3))
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == set(frozen)
    assert_identical({n: p.detach() for n, p in model.named_parameters() if n in frozen}, frozen)
    assert "4" in optimizer.curvature


def test_a_trained_bias_beside_a_frozen_weight_has_the_first_order_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    with caplog.at_level(logging.INFO, "tekfac"):
        optimizer = TEKFAC(model, lr=0.01, momentum=0.0, first_order_lr=0.25)
    assert "0.bias" in caplog.text
    start = model[0].bias.detach().clone()
    train(model, optimizer, vectors(1))
    assert torch.equal(model[0].bias, start - 0.25 * model[0].bias.grad)


class Doubled(nn.Linear):
    """A linear layer whose own forward pass is not that of nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2 * self.weight, self.bias)


class Standardised(nn.Conv2d):
    """Weight standardisation, as many residual networks have it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


@pytest.mark.parametrize("layer", [Doubled(27, 3), Standardised(1, 3, 3)])
def test_a_subclass_that_computes_something_else_is_left_to_first_order_with_a_reason(
    layer: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    model = cnn()
    position = 4 if isinstance(layer, nn.Linear) else 0
    model[position] = layer.double()
    with caplog.at_level(logging.WARNING, "tekfac"):
        optimizer = TEKFAC(model, lr=0.01)
    assert type(layer).__name__ in caplog.text
    train(model, optimizer, images(1))
    assert str(position) not in optimizer.curvature


def test_a_module_whose_own_forward_was_replaced_is_left_to_first_order_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As adapters and quantisers do it: on the instance, not in a class."""
    model = mlp()
    layer = model[0]
    layer.forward = lambda x: F.linear(x, 2 * layer.weight, layer.bias)
    with caplog.at_level(logging.WARNING, "tekfac"):
        optimizer = TEKFAC(model, lr=0.01)
    assert "'0.weight'" in caplog.text
    train(model, optimizer, vectors(1))
    assert set(optimizer.curvature) == {"2"}


def test_a_subclass_that_computes_the_same_is_preconditioned() -> None:
    class Named(nn.Linear):
        """As nn.Linear, with another name."""

    model = mlp()
    model[0] = Named(5, 4).double()
    optimizer = TEKFAC(model, lr=0.01)
    train(model, optimizer, vectors(1))
    assert set(optimizer.curvature) == {"0", "2"}


def test_a_parametrized_weight_is_left_to_first_order_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    with caplog.at_level(logging.WARNING, "tekfac"):
        optimizer = TEKFAC(model, lr=0.01)
    assert "parametrized" in caplog.text
    train(model, optimizer, vectors(2))
    assert set(optimizer.curvature) == {"2"}


def test_projections_of_multi_head_attention_are_left_to_first_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 3)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            tokens = x[:, :4].reshape(-1, 1, 4).expand(-1, 2, 4)
            out: Tensor = self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))
            return out

    model = Attention()
    with caplog.at_level(logging.WARNING, "tekfac"):
        optimizer = TEKFAC(model, lr=0.01)
    assert "MultiheadAttention" in caplog.text
    before = model.attention.out_proj.weight.detach().clone()
    train(model, optimizer, vectors(2))
    assert set(optimizer.curvature) == {"head"}
    assert not torch.equal(model.attention.out_proj.weight, before)


def test_a_sparse_gradient_of_an_embedding_is_used_as_sgd_uses_it() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 3)
            self.double()

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.table(tokens))
            return out

    model = Embedded()
    optimizer = TEKFAC(model, lr=0.01, momentum=0.0, first_order_lr=0.25)
    start = model.table.weight.detach().clone()
    train(model, optimizer, [(torch.tensor([0, 2, 2]), torch.tensor([0, 1, 2]))])
    gradient = model.table.weight.grad
    assert gradient is not None
    torch.testing.assert_close(model.table.weight.detach(), start - 0.25 * gradient.to_dense())
