"""Who is benchmarked: names, intervals and options as they are given, and the optimizers that come of them."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tekfac.cli.bench import CONTESTANTS, QUICK_CONTESTANTS, contestants
from tekfac.lab.bench.contestants import ALL, Contestant, Together, fitting, hidden_matrices, present
from tekfac.lab.bench.networks import NETWORKS, TINY


class Soap(torch.optim.SGD):
    """Takes any keyword, as the real one does, and notes them."""

    def __init__(self, params: Any, lr: float = 1.0, precondition_frequency: int = 1, **other: Any) -> None:
        super().__init__(params, lr=lr)
        self.every = precondition_frequency


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def _with_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", SimpleNamespace(SOAP=Soap))  # type: ignore[arg-type]


def test_a_list_is_read_as_names_intervals_and_options() -> None:
    text = "sgd, adamw,kfac@10,tekfac@50,fisher=empirical,kl_clip=1e-3,Muon"
    assert contestants(text) == [
        Contestant("sgd"),
        Contestant("adamw"),
        Contestant("kfac", 10),
        Contestant("tekfac", 50, {"fisher": "empirical", "kl_clip": 1e-3}),
        Contestant("muon"),
    ]
    assert [one.label for one in contestants(text)][3] == "tekfac@50,fisher=empirical,kl_clip=0.001"


@pytest.mark.parametrize("text", [CONTESTANTS, QUICK_CONTESTANTS])
def test_a_label_reads_as_what_it_is_the_label_of(text: str) -> None:
    assert ",".join(one.label for one in contestants(text)) == text
    assert [Contestant(**one.plain()) for one in contestants(text)] == contestants(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sgd,tekfax@10", "Unknown contestant: 'tekfax'. Did you mean 'tekfac'?"),
        ("zzz", f"Unknown contestant: 'zzz'. Expected one of {', '.join(ALL)}."),
        ("tekfac@ten", "Cannot read 'tekfac@ten'; expected names as in sgd,tekfac@10"),
        ("tekfac@", "Cannot read 'tekfac@'"),
        ("sgd,,kfac@10", "Cannot read ''"),
        ("tekfac@0", "Invalid interval of tekfac: 0. Expected a whole number of steps, at least 1"),
        ("adamw@10", "Invalid contestant: 'adamw@10'. adamw does the same at every step; leave out @10."),
        ("fisher=empirical,tekfac@10", "The option 'fisher=empirical' stands before any name"),
    ],
)
def test_what_cannot_be_read_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        contestants(text)


@pytest.mark.parametrize("name", ["kfac", "ekfac", "tkfac", "tekfac"])
def test_an_interval_is_that_of_all_clocks_a_method_has(name: str) -> None:
    optimizer = Contestant(name, 7, {"damping": 0.5, "rescaling": "measured"}).make(TINY["mlp"].make())
    settings = optimizer._settings  # type: ignore[attr-defined]
    assert type(optimizer).__name__.lower() == name
    assert (settings.factors_every, settings.basis_every, settings.damping) == (7, 7, 0.5)
    if name in ("ekfac", "tekfac"):
        assert settings.rescaling_every == 7


def test_a_cycle_is_as_long_as_everything_takes_to_happen_equally_often() -> None:
    assert Contestant("sgd").cycle == Contestant("muon").cycle == 1
    assert Contestant("kfac", 10).cycle == Contestant("soap", 10).cycle == 10
    assert Contestant("tekfac", 10, {"basis_every": 25}).cycle == 50
    assert Contestant("tekfac").cycle == 50


def test_which_steps_measure_follows_from_the_interval() -> None:
    def steps(contestant: Contestant) -> list[int]:
        return [step for step in range(9) if contestant.measures_at(step)]

    assert steps(Contestant("sgd")) == steps(Contestant("muon")) == []
    assert steps(Contestant("tekfac", 4)) == [0, 4, 8]
    assert steps(Contestant("kfac", 4, {"basis_every": 6})) == [0, 4, 6, 8]
    assert steps(Contestant("soap", 4)) == [0, 4, 8]
    assert steps(Contestant("shampoo", 4)) == [3, 7]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_has_hidden_matrices_and_adamw_all_the_rest() -> None:
    model = TINY["gpt"].make()
    optimizer = Contestant("muon").make(model)
    assert isinstance(optimizer, Together)
    muon, adamw = ([p for group in part.param_groups for p in group["params"]] for part in optimizer.parts)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p] for p in muon} == {f"blocks.0.{layer}.weight" for layer in ("qkv", "out", "up", "down")}
    assert {*muon, *adamw} == set(model.parameters())
    before = [parameter.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    assert all((was != now).any() for was, now in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_muon_is_left_out_with_a_word_where_no_linear_layer_is_inside(said: list[str]) -> None:
    with torch.device("meta"):
        networks = {name: one.make() for name, one in NETWORKS.items()}
    fit = {
        name: len(fitting([Contestant("sgd"), Contestant("muon")], model, name, said.append))
        for name, model in networks.items()
    }
    assert fit == {"mlp": 2, "cnn": 2, "gpt": 2, "resnet20-he": 1, "resnet20": 1, "vgg16": 1}
    assert said[0] == "muon is left out of resnet20-he, which has no linear layer inside."
    assert not hidden_matrices(nn.Sequential(nn.Linear(2, 3)))


@pytest.mark.usefixtures("_with_rivals")
def test_a_rival_gets_its_interval_under_its_own_name() -> None:
    model = TINY["mlp"].make()
    assert [Contestant("soap", every).make(model).every for every in (7, None)] == [7, 10]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_with_rivals")
def test_an_option_that_a_rival_would_swallow_is_refused() -> None:
    with pytest.raises(TypeError, match=r"unknown keyword 'precondition_frequeny'\. Did you mean"):
        Contestant("soap", 7, {"precondition_frequeny": 3}).make(TINY["mlp"].make())


def test_a_missing_package_leaves_its_contestant_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    found = present(contestants("kfac@2,soap@10,shampoo,adamw"), said.append)
    assert [one.label for one in found] == ["sgd", "kfac@2", "adamw"]
    assert [text.partition(".")[0] for text in said] == ["soap@10 is left out", "shampoo is left out"]
    assert "pip install 'tekfac[bench]'" in said[0]


def test_a_torch_without_muon_leaves_it_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    assert [one.label for one in present(contestants("muon,sgd"), said.append)] == ["sgd"]
    assert "has none" in said[0]


def test_the_reference_comes_first_and_is_never_missing(said: list[str]) -> None:
    for text in ("tekfac@2,sgd", "tekfac@2", "tekfac@2,sgd,lr=0.1"):
        assert present(contestants(text), said.append)[0] == Contestant("sgd")
    assert said == []


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("kfac@2,kfac@2", ValueError, "Contestant 'kfac@2' is there twice"),
        ("kfac@2,fishr=exact", TypeError, "Did you mean 'fisher'?"),
        ("kfac@2,fisher=sometimes", ValueError, "Unknown fisher: 'sometimes'"),
        ("kfac@2,rescaling_every=3", TypeError, "KFAC takes no 'rescaling_every'"),
        ("adamw,momentum=3", TypeError, "momentum"),
    ],
)
def test_options_are_checked_before_anything_is_measured(
    text: str, error: type[Exception], told: str, said: list[str]
) -> None:
    with pytest.raises(error, match=re.escape(told)):
        present(contestants(text), said.append)


def test_every_name_but_those_of_packages_makes_an_optimizer_that_steps() -> None:
    for name in ("sgd", "adamw", "kfac", "ekfac", "tkfac", "tekfac"):
        model = TINY["mlp"].make()
        optimizer = Contestant(name).make(model)
        before = [parameter.clone() for parameter in model.parameters()]
        model(torch.randn(4, 1, 8, 8)).square().sum().backward()
        optimizer.step()
        assert any((was != now).any() for was, now in zip(before, model.parameters(), strict=True))
