"""Param groups have their own lr, momentum, weight decay and damping, as given and as changed later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, dense_block
from tekfac import EKFAC, TEKFAC
from tekfac.damping import Tikhonov, TraceBased
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, cnn, everything, images, mlp, train, vectors


def deltas(model: nn.Module, optimizer: NaturalGradient, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """What one step adds to each parameter."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, [batch])
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def one_step(**settings: Any) -> dict[str, Tensor]:
    model = mlp()
    optimizer = TEKFAC.natural(
        model, **{"lr": 2.0**-6, "momentum": 0.0, "damping": 1e-2, "seed": 0, **settings}
    )
    return deltas(model, optimizer, vectors(1)[0])


def test_without_param_groups_there_is_one_for_layers_and_one_for_the_rest() -> None:
    model = cnn()
    optimizer = TEKFAC.natural(model, lr=0.1, first_order=[nn.BatchNorm2d], first_order_lr=0.5)
    layers, rest = optimizer.param_groups
    assert {id(p) for p in layers["params"]} == {id(p) for m in (model[0], model[4]) for p in m.parameters()}
    assert {id(p) for p in rest["params"]} == {id(p) for p in model[1].parameters()}
    assert (layers["lr"], layers["first_order"]) == (0.1, False)
    assert (rest["lr"], rest["first_order"]) == (0.5, True)
    (only,) = TEKFAC.natural(model, lr=0.1, first_order_lr=0.5).param_groups  # norms are layers like any other
    assert [id(p) for p in only["params"]] == [id(p) for p in model.parameters()]
    assert (only["lr"], only["first_order"]) == (0.1, False)


def test_a_group_takes_what_it_does_not_say_from_the_optimizer() -> None:
    optimizer = TEKFAC.natural(
        mlp(), lr=0.1, momentum=0.5, weight_decay=0.01, damping=0.2, param_groups=[{"params": ["0"]}]
    )
    for group in optimizer.param_groups:
        assert (group["lr"], group["momentum"], group["weight_decay"], group["damping"]) == (
            0.1,
            0.5,
            0.01,
            0.2,
        )


def test_learning_rates_are_per_group() -> None:
    plain = one_step()
    grouped = one_step(param_groups=[{"params": ["2"], "lr": 2.0**-8}])
    assert_close(grouped["2.weight"], plain["2.weight"] / 4, rtol=1e-9)
    assert_close(grouped["0.weight"], plain["0.weight"], rtol=1e-12)


def test_weight_and_bias_of_a_layer_may_have_different_rates() -> None:
    plain = one_step()
    grouped = one_step(param_groups=[{"params": ["0.bias"], "lr": 2.0**-8}])
    assert_close(grouped["0.bias"], plain["0.bias"] / 4, rtol=1e-9)
    assert_close(grouped["0.weight"], plain["0.weight"], rtol=1e-12)


def test_weight_decay_is_per_group() -> None:
    plain, start = one_step(), dict(mlp().named_parameters())
    grouped = one_step(param_groups=[{"params": ["0.weight"], "weight_decay": 0.5}])
    assert_close(grouped["0.weight"], plain["0.weight"] - 2.0**-6 * 0.5 * start["0.weight"].detach(), rtol=1e-9)
    assert_close(grouped["0.bias"], plain["0.bias"], rtol=1e-12)


def test_momentum_is_per_group() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.01, momentum=0.9, param_groups=[{"params": ["0"], "momentum": 0.0}])
    train(model, optimizer, vectors(2))
    with_buffer = {n for n, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p]}
    assert with_buffer == {"2.weight", "2.bias"}


@pytest.mark.parametrize("method", METHODS)
def test_damping_is_per_group_and_equals_the_dense_solve(method: type[NaturalGradient]) -> None:
    model, (batch,) = mlp(), vectors(1)
    optimizer = method.natural(
        model,
        lr=1.0,
        momentum=0.0,
        damping=0.1,
        param_groups=[{"params": ["2"], "damping": 0.7}],
        fisher="exact",
    )
    steps = deltas(model, optimizer, batch)
    for name, damping in (("0", 0.1), ("2", 0.7)):
        module = model.get_submodule(name)
        gradient = torch.cat([module.weight.grad, module.bias.grad[:, None]], 1)  # type: ignore[union-attr,index,arg-type]
        expected = oracle.damped_solve(dense_block(optimizer.curvature[name]), damping, gradient)
        assert_close(steps[f"{name}.weight"], -expected[:, :-1])
        assert_close(steps[f"{name}.bias"], -expected[:, -1])


@pytest.mark.parametrize("new", [0.5, Tikhonov(0.5), TraceBased(2.0)])
def test_damping_changed_between_refreshes_acts_in_the_next_step(new: Any) -> None:
    data = vectors(2)

    def second_step(first: Any) -> dict[str, Tensor]:
        model = mlp()
        optimizer = EKFAC.natural(model, lr=0.5, momentum=0.0, damping=first, seed=0)
        with torch.no_grad():  # the first step measures but does not move
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        train(model, optimizer, data[:1])
        for group in optimizer.param_groups:
            group["lr"], group["damping"] = 0.5, new
        return deltas(model, optimizer, data[1])

    assert_identical(second_step(0.01), second_step(new))


def test_params_may_be_names_modules_parameters_or_named_pairs() -> None:
    def grouped(choose: Any) -> list[list[str]]:
        model = mlp()
        names = {p: n for n, p in model.named_parameters()}
        optimizer = TEKFAC.natural(model, param_groups=[{"params": choose(model), "lr": 0.5}])
        return [[names[p] for p in group["params"]] for group in optimizer.param_groups]

    expected = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert grouped(lambda m: ["0"]) == expected
    assert grouped(lambda m: "0") == expected
    assert grouped(lambda m: ["0.weight", "0.bias"]) == expected
    assert grouped(lambda m: m[0]) == expected
    assert grouped(lambda m: [m[0]]) == expected
    assert grouped(lambda m: list(m[0].parameters())) == expected
    assert grouped(lambda m: m[0].parameters()) == expected
    assert grouped(lambda m: [(f"0.{n}", p) for n, p in m[0].named_parameters()]) == expected


def test_a_first_order_group_may_be_given_as_a_generator_like_any_other() -> None:
    model = cnn()
    optimizer = TEKFAC.natural(
        model, lr=0.1, param_groups=[{"params": model[4].parameters(), "lr": 0.7, "first_order": True}]
    )
    group = optimizer.param_groups[0]
    assert [id(p) for p in group["params"]] == [id(p) for p in model[4].parameters()]
    assert group["lr"] == 0.7
    train(model, optimizer, images(1))
    assert set(optimizer.curvature) == {"0", "1"}


def test_the_groups_themselves_may_come_from_a_generator() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(
        model, lr=0.1, param_groups=({"params": [name], "lr": 0.5} for name in ("0", "2"))
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_layer_can_be_left_to_first_order_by_its_group() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(
        model, lr=0.1, momentum=0.0, param_groups=[{"params": ["0"], "lr": 0.25, "first_order": True}]
    )
    steps = deltas(model, optimizer, vectors(1)[0])
    assert set(optimizer.curvature) == {"2"}
    assert torch.equal(steps["0.weight"], mlp()[0].weight - 0.25 * model[0].weight.grad - mlp()[0].weight)


def test_a_first_order_group_without_a_rate_has_the_first_order_rate() -> None:
    optimizer = TEKFAC.natural(
        mlp(),
        lr=0.001,
        first_order_lr=0.1,
        param_groups=[{"params": ["0"], "first_order": True, "momentum": 0.5}],
    )
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_weight_and_bias_of_a_layer_cannot_have_different_damping() -> None:
    with pytest.raises(ValueError, match=r"layer '0'.*damping"):
        TEKFAC.natural(mlp(), param_groups=[{"params": ["0.bias"], "damping": 0.5}])


def test_a_parameter_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="more than one parameter group"):
        TEKFAC.natural(mlp(), param_groups=[{"params": ["0"]}, {"params": ["0.bias"]}])


def test_a_name_that_the_model_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"param_groups\[1\].*'encoder'"):
        TEKFAC.natural(mlp(), param_groups=[{"params": ["0"]}, {"params": ["encoder"]}])


def test_a_parameter_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"param_groups\[0\].*not one of the model's"):
        TEKFAC.natural(mlp(), param_groups=[{"params": mlp().parameters()}])


@pytest.mark.parametrize("group", [{"lr": 0.1}, {"lr": 0.1, "first_order": True}])
def test_a_group_without_params_is_refused(group: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"param_groups\[0\] has no 'params'"):
        TEKFAC.natural(mlp(), param_groups=[group])


BAD_VALUES = [
    ("lr", -1.0),
    ("momentum", 1.0),
    ("weight_decay", -0.1),
    ("damping", -1.0),
    ("first_order", "yes"),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_bad_values_in_a_group_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        TEKFAC.natural(mlp(), param_groups=[{"params": ["0"], key: value}])


def test_a_refused_group_is_not_added() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model)
    before = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": -1.0})
    assert len(optimizer.param_groups) == before


def test_an_added_group_is_trained_by_momentum_sgd() -> None:
    model, extra, twin = mlp(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = TEKFAC.natural(model, lr=0.01)
    optimizer.add_param_group({"params": [extra], "lr": 0.1, "momentum": 0.5})
    sgd = torch.optim.SGD([twin], lr=0.1, momentum=0.5)
    for batch in vectors(3):
        optimizer.zero_grad()
        sgd.zero_grad()
        backward(model, batch)
        for parameter in (extra, twin):
            (parameter**2).sum().backward()
        optimizer.step()
        sgd.step()
    assert torch.equal(extra, twin)


def test_groups_that_say_nothing_new_change_nothing() -> None:
    data = vectors(3)
    plain, grouped = mlp(), mlp()
    first = TEKFAC.natural(plain, lr=0.05, seed=0)
    second = TEKFAC.natural(grouped, lr=0.05, seed=0, param_groups=[{"params": ["2"]}])
    train(plain, first, data)
    train(grouped, second, data)
    assert_identical(everything(grouped, second)["model"], everything(plain, first)["model"])


def test_a_key_that_means_nothing_in_a_group_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    TEKFAC.natural(model, param_groups=[{"params": model, "kl_clip": 0.1, "name": "all"}])
    assert "'kl_clip'" in caplog.text
    assert "'name'" not in caplog.text


def test_parameters_that_come_later_are_said_to_be_first_order(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = TEKFAC.natural(mlp())
    optimizer.add_param_group({"params": torch.nn.Linear(2, 2).parameters()})
    assert "2 parameter(s)" in caplog.text


@pytest.mark.parametrize("given", ["a module", "its name", "its parameters", "one parameter"])
def test_a_group_that_is_added_may_hold_what_the_first_ones_may(given: str) -> None:
    model = mlp(sizes=(5, 4, 4, 3))
    optimizer = TEKFAC.natural(model, lr=0.05)
    model.add_module("5", nn.Linear(3, 3).double())
    new = model[5]
    params = {
        "a module": new,
        "its name": "5",
        "its parameters": new.parameters(),
        "one parameter": new.weight,
    }[given]
    optimizer.add_param_group({"params": params, "lr": 0.1})
    expected = [new.weight] if given == "one parameter" else list(new.parameters())
    assert all(p is q for p, q in zip(optimizer.param_groups[-1]["params"], expected, strict=True))
    assert optimizer.param_groups[-1]["param_names"] == ["5.weight", "5.bias"][: len(expected)]


def test_parameters_that_change_places_between_groups_have_the_damping_of_the_new_one() -> None:
    model = mlp()
    groups = [{"params": model[0], "damping": 1.0}, {"params": model[2], "damping": 1e-3}]
    optimizer = TEKFAC.natural(model, param_groups=groups)
    train(model, optimizer, vectors(1))
    before = {name: own.damping for name, own in optimizer.signals().items()}
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    after = {name: own.damping for name, own in optimizer.signals().items()}
    assert after["0"] == pytest.approx(before["2"], rel=1e-6)
    assert after["2"] == pytest.approx(before["0"], rel=1e-6)
