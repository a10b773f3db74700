"""Parameters that are not preconditioned are trained by momentum SGD, with their own rate, and named once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS, assert_close
from tekfac import TEKFAC
from tekfac.optim.first_order import EPSILON, adam_directions
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, cnn, images, mlp, train, vectors


def with_slopes() -> nn.Sequential:
    """A convolutional network whose norm is followed by nn.PReLU, a type of module that has no block."""
    model = cnn()
    model[2] = nn.PReLU(3).double()
    return model


FIRST_ORDER: dict[str, tuple[Callable[[], nn.Sequential], int, Any]] = {
    "a type without a block": (with_slopes, 2, ()),
    "norms, on request": (cnn, 1, [nn.BatchNorm2d]),
    "norms, in a word": (cnn, 1, "all norms"),
    "norms, by a type they are derived from": (cnn, 1, nn.modules.batchnorm._BatchNorm),
}
every_choice = pytest.mark.parametrize("choice", FIRST_ORDER)


@every_choice
@pytest.mark.parametrize("method", METHODS)
def test_other_parameters_follow_torch_sgd_bit_for_bit(method: type[NaturalGradient], choice: str) -> None:
    build, position, first_order = FIRST_ORDER[choice]
    model = build()
    other = model[position]
    optimizer = method.natural(
        model, lr=0.01, momentum=0.8, first_order=first_order, first_order_lr=0.3, damping=0.1
    )
    twins = {n: nn.Parameter(p.detach().clone()) for n, p in other.named_parameters()}
    assert twins
    sgd = torch.optim.SGD(twins.values(), lr=0.3, momentum=0.8)
    for x, y in images(4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, parameter in other.named_parameters():
            twins[name].grad = parameter.grad.clone()  # type: ignore[union-attr]
        optimizer.step()
        sgd.step()
        assert_identical(
            {n: p.detach() for n, p in other.named_parameters()}, {n: p.detach() for n, p in twins.items()}
        )
    assert set(optimizer.curvature) == {"0", "1", "4"} - {str(position)}


@every_choice
def test_their_rate_is_that_of_the_layers_where_none_is_given(choice: str) -> None:
    build, position, first_order = FIRST_ORDER[choice]
    model = build()
    (group,) = TEKFAC.natural(model, lr=0.02, first_order=first_order).param_groups
    assert group["lr"] == 0.02
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    layers, rest = TEKFAC.natural(model, lr=0.02, first_order=first_order, first_order_lr=0.03).param_groups
    assert [layers["lr"], rest["lr"]] == [0.02, 0.03]
    assert [id(p) for p in rest["params"]] == [id(p) for p in model[position].parameters()]


@pytest.mark.parametrize(
    "choose",
    [
        lambda m: ["4"],
        lambda m: m[4],
        lambda m: m[4].parameters(),
        lambda m: "4",
        lambda m: nn.Linear,
        lambda m: [nn.Linear],
    ],
)
def test_a_layer_can_be_left_to_first_order_by_name_module_type_or_parameters(choose: Any) -> None:
    model = cnn()
    optimizer = TEKFAC.natural(model, lr=0.01, momentum=0.0, first_order=choose(model), first_order_lr=0.25)
    start = model[4].weight.detach().clone()
    train(model, optimizer, images(1))
    assert set(optimizer.curvature) == {"0", "1"}
    assert torch.equal(model[4].weight, start - 0.25 * model[4].weight.grad)


def test_a_type_stands_for_all_modules_of_the_type() -> None:
    model = nn.Sequential(
        nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)
    ).double()
    optimizer = TEKFAC.natural(model, lr=0.01, momentum=0.0, first_order=[nn.LayerNorm], first_order_lr=0.25)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, vectors(1))
    assert set(optimizer.curvature) == {"0", "4"}
    for name in ("1.weight", "1.bias", "3.weight", "3.bias"):
        parameter = model.get_parameter(name)
        assert torch.equal(parameter, start[name] - 0.25 * parameter.grad)


def test_a_bias_can_be_left_to_first_order_alone() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.01, momentum=0.0, first_order=["0.bias"], first_order_lr=0.25)
    start = model[0].bias.detach().clone()
    train(model, optimizer, vectors(1))
    assert optimizer.curvature["0"].rescaling.shape == (1, 4, 5)
    assert torch.equal(model[0].bias, start - 0.25 * model[0].bias.grad)


@every_choice
def test_they_are_all_named_in_one_log_line(choice: str, caplog: pytest.LogCaptureFixture) -> None:
    build, position, first_order = FIRST_ORDER[choice]
    model = build()
    with caplog.at_level(logging.INFO, "tekfac"):
        optimizer = TEKFAC.natural(model, lr=0.01, first_order=first_order)
    naming = [r.getMessage() for r in caplog.records if f"{position}.weight" in r.getMessage()]
    assert len(naming) == 1
    for name, parameter in model.named_parameters():
        is_other = any(parameter is p for p in model[position].parameters())
        assert (f" {name}" in naming[0]) == is_other
    caplog.clear()
    with caplog.at_level(logging.INFO, "tekfac"):
        train(model, optimizer, images(3))
    assert [r.getMessage() for r in caplog.records] == [
        "The loss is that of a categorical likelihood, with classes along axis 1."
    ]


def test_where_all_types_have_blocks_nothing_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tekfac"):
        optimizer = TEKFAC.natural(cnn(), lr=0.01)
    (record,) = caplog.records
    assert "3 layer(s) with 100% of the trainable parameters. Nothing is left out." in record.getMessage()
    assert len(optimizer.param_groups) == 1


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"first_order names 'decoder'.*'0'"):
        TEKFAC.natural(mlp(), first_order=["decoder"])


def test_frozen_parameters_are_left_alone() -> None:
    model = cnn()
    for parameter in (*model[0].parameters(), model[1].weight):
        parameter.requires_grad_(False)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = TEKFAC.natural(model, lr=0.01, weight_decay=0.1)
    train(model, optimizer, images(3))
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == set(frozen)
    assert_identical({n: p.detach() for n, p in model.named_parameters() if n in frozen}, frozen)
    assert set(optimizer.curvature) == {"4"}


def test_a_trained_bias_beside_a_frozen_weight_has_the_first_order_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    with caplog.at_level(logging.INFO, "tekfac"):
        optimizer = TEKFAC.natural(model, lr=0.01, momentum=0.0, first_order_lr=0.25)
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
        optimizer = TEKFAC.natural(model, lr=0.01)
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
        optimizer = TEKFAC.natural(model, lr=0.01)
    assert "'0.weight'" in caplog.text
    train(model, optimizer, vectors(1))
    assert set(optimizer.curvature) == {"2"}


def test_a_subclass_that_computes_the_same_is_preconditioned() -> None:
    class Named(nn.Linear):
        """As nn.Linear, with another name."""

    model = mlp()
    model[0] = Named(5, 4).double()
    optimizer = TEKFAC.natural(model, lr=0.01)
    train(model, optimizer, vectors(1))
    assert set(optimizer.curvature) == {"0", "2"}


def test_a_parametrized_weight_is_left_to_first_order_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    with caplog.at_level(logging.WARNING, "tekfac"):
        optimizer = TEKFAC.natural(model, lr=0.01)
    assert "parametrized" in caplog.text
    train(model, optimizer, vectors(2))
    assert set(optimizer.curvature) == {"2"}


class Attention(nn.Module):
    """Attention over two tokens of every sample, and a head."""

    def __init__(self, bias_kv: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=bias_kv)
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x[:, :4], x[:, 1:]], dim=1)
        out: Tensor = self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))
        return out


def test_projections_of_multi_head_attention_are_preconditioned_and_none_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, (batch,) = Attention(), vectors(1)
    with caplog.at_level(logging.INFO, "tekfac"):
        optimizer = TEKFAC.natural(
            model, lr=1.0, momentum=0.0, damping=0.1, fisher="exact", first_order_lr=0.25
        )
    assert "Nothing is left out" in caplog.text
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, [batch])
    assert set(optimizer.curvature) == {"attention.in_proj", "attention.out_proj", "head"}
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert list(optimizer.curvature.parameters) == list(gradients)
    expected = optimizer.curvature.solve(gradients, damping=0.1)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        assert_close(before[name] - parameter.detach(), expected[name])


@pytest.mark.parametrize("how", ["bias_k and bias_v", "on request"])
def test_of_multi_head_attention_only_what_has_no_block_or_is_requested_is_left_to_first_order(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Attention(bias_kv=how != "on request")
    left, blocks = {"attention.bias_k", "attention.bias_v"}, {"attention.in_proj", "attention.out_proj", "head"}
    if how == "on request":
        left = {f"attention.{name}" for name, _ in model.attention.named_parameters()}
        blocks = {"head"}
    with caplog.at_level(logging.INFO, "tekfac"):
        optimizer = TEKFAC.natural(
            model,
            lr=0.01,
            momentum=0.0,
            first_order_lr=0.25,
            first_order=[nn.MultiheadAttention] if how == "on request" else (),
        )
    (record,) = caplog.records
    named = record.getMessage().partition("By first order: ")[2].removesuffix(".").split(", ")
    assert set(named) == left
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimizer, vectors(1))
    assert set(optimizer.curvature) == blocks
    for name, parameter in model.named_parameters():
        by_sgd = before[name] - 0.25 * parameter.grad  # type: ignore[operator]
        assert not torch.equal(parameter, before[name])
        assert torch.equal(parameter, by_sgd) == (name in left)


class Embedded(nn.Module):
    """Sparse gradients of a table, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 3)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(tokens))
        return out


TOKENS = (torch.tensor([0, 2, 2]), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("first_order", [["table"], [nn.Embedding], nn.Embedding], ids=str)
def test_a_sparse_gradient_of_an_embedding_left_to_first_order_is_used_as_sgd_uses_it(first_order: Any) -> None:
    model = Embedded()
    optimizer = TEKFAC.natural(model, lr=0.01, momentum=0.0, first_order=first_order, first_order_lr=0.25)
    start = model.table.weight.detach().clone()
    train(model, optimizer, [TOKENS])
    gradient = model.table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert set(optimizer.curvature) == {"head"}
    torch.testing.assert_close(model.table.weight.detach(), start - 0.25 * gradient.to_dense())


def test_a_sparse_gradient_of_an_embedding_is_preconditioned_as_a_dense_one() -> None:
    tables = []
    for sparse in (True, False):
        model = Embedded()
        model.table.sparse = sparse
        optimizer = TEKFAC.natural(model, lr=0.1, damping=0.1, seed=0)
        train(model, optimizer, [TOKENS] * 3)
        assert model.table.weight.grad.is_sparse == sparse  # type: ignore[union-attr]
        assert set(optimizer.curvature) == {"table", "head"}
        tables.append(model.table.weight.detach())
    assert_close(*tables)
    assert not torch.equal(tables[0], Embedded().table.weight)


# -- AdamW ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_adamw_moves_each_parameter_as_if_it_were_alone(precision: torch.dtype) -> None:
    """Of several sizes and pasts, one that gets a gradient later, and one without any number in it."""
    shapes = [(3, 2), (4,), (5,), (0,)]
    parameters = [torch.zeros(shape, dtype=precision) for shape in shapes]
    momenta = dict(zip(parameters, (0.9, 0.9, 0.5, 0.9), strict=True))
    together: dict[Tensor, dict[str, Any]] = {p: {} for p in parameters}
    alone: dict[Tensor, dict[str, Any]] = {p: {} for p in parameters}
    for step in range(4):
        present = [p for place, p in enumerate(parameters) if step > 1 or place != 1]
        gradients = {p: torch.randn(p.shape, generator=_numbers(step, i)).to(p) for i, p in enumerate(present)}
        finite = torch.tensor(step != 2)
        found = adam_directions(gradients, together, momenta, finite)
        assert set(found) == set(present)
        for parameter, gradient in gradients.items():
            (own,) = adam_directions({parameter: gradient}, alone, momenta, finite).values()
            assert found[parameter].dtype == precision
            assert torch.equal(found[parameter], own)
            assert torch.equal(together[parameter]["exp_avg_sq"], alone[parameter]["exp_avg_sq"])


def test_adamw_is_that_of_its_formula() -> None:
    parameter, state = torch.zeros(3).double(), {}
    states: dict[Tensor, dict[str, Any]] = {parameter: state}
    gradients = [torch.randn(3, generator=_numbers(step, 0)).double() for step in range(3)]
    for gradient in gradients:
        (direction,) = adam_directions({parameter: gradient}, states, {parameter: 0.9}, None).values()
    first = sum(0.9 ** (2 - i) * g for i, g in enumerate(gradients)) / (1 + 0.9 + 0.81)
    second = sum(0.95 ** (2 - i) * g.square() for i, g in enumerate(gradients)) / (1 + 0.95 + 0.95**2)
    assert_close(direction, first / (second + EPSILON * second.mean()).sqrt())


def _numbers(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed) % 2**31)
