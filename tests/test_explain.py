"""Promise: before training, one table tells what is preconditioned, how and at what cost, and what is not."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import tekfac
from dense import METHODS, every_method
from tekfac.cli.main import main
from tekfac.explanation import HEADER, Explanation
from tekfac.lab import models
from tekfac.layers.inventory import A_NORM
from tekfac.optim.natural_gradient import NaturalGradient

EVERY_METHOD = [method.__name__.lower() for method in METHODS]


class Everything(nn.Module):
    """Layers of many kinds, one that has no block, and a table that is also the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.places = nn.Embedding(7, 6, max_norm=1.0)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True)
        self.norm = nn.LayerNorm(6)
        self.memory = nn.LSTM(6, 3, bidirectional=True, batch_first=True)
        self.slope = nn.PReLU()
        self.convolution = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]).expand_as(tokens))
        x = x + self.attention(self.norm(x), self.norm(x), self.norm(x))[0]
        x = self.slope(self.memory(x)[0])
        out: Tensor = self.head(self.convolution(x.mT).mT)
        return out


def everything() -> Everything:
    torch.manual_seed(0)
    return Everything()


def told(model: nn.Module, **settings: Any) -> Explanation:
    return tekfac.explain(model, file=None, **settings)


def test_every_parameter_is_in_a_layer_or_has_a_reason() -> None:
    model = everything()
    explanation = told(model, precondition_norms=True)
    in_layers = sum(layer.parameters for layer in explanation.layers)
    left = {parameter.name: parameter.parameters for parameter in explanation.first_order}
    assert in_layers + sum(left.values()) == sum(p.numel() for p in model.parameters())
    assert left == {
        "places.weight": 42,
        "attention.bias_k": 6,
        "attention.bias_v": 6,
        "slope.weight": 1,
    }
    reasons = {parameter.name: parameter.reason for parameter in explanation.first_order}
    assert "max_norm" in reasons["places.weight"]
    assert "register_layer" in reasons["slope.weight"]
    assert "MultiheadAttention" in reasons["attention.bias_k"]


@every_method
def test_layers_are_those_of_the_optimizer(method: type[NaturalGradient]) -> None:
    model = everything()
    optimizer = method(model)
    explanation = told(model, method=method.__name__)
    assert [layer.name for layer in explanation.layers] == list(optimizer._layers)
    assert explanation.method == method.__name__


@every_method
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_dim": 4}, {"max_dim": 4, "large_dims": "diagonal"}, {"curvature_dtype": torch.float64}],
    ids=["default", "blocks", "diagonal", "float64"],
)
def test_memory_is_what_the_curvature_takes(method: type[NaturalGradient], settings: dict[str, Any]) -> None:
    """To the byte: moments, eigenbasis and re-scaling, after a step."""
    model = everything()
    optimizer = method(model, damping=0.1, **settings)
    tokens = torch.randint(11, (4, 7))
    cross_entropy(model(tokens).mT, tokens).backward()
    optimizer.step()
    expected = {layer.name: layer.memory for layer in told(model, method=method.__name__, **settings).layers}
    blocks, motions = optimizer._network.blocks, optimizer._network.motions
    assert blocks.keys() == expected.keys()
    for name, block in blocks.items():
        held = [*block.moments.values, *block.basis]
        held += [] if block.theta is None else list(block.theta.values)
        held.append(motions[name].second.value)
        assert sum(tensor.numel() * tensor.element_size() for tensor in held) == expected[name], name


def test_the_table_says_how_each_layer_is_treated() -> None:
    rows = {layer.name: layer for layer in told(everything(), max_dim=4, precondition_norms=True).layers}
    assert rows["table"].module == "Embedding + Linear"
    assert rows["table"].treatment == "table and output projection"
    assert rows["table"].outputs == "11, diagonal"
    assert rows["table"].inputs == "7 in 2 blocks"
    assert rows["attention.in_proj"].treatment == "Kronecker, 3 groups"
    assert rows["norm"].treatment == "unit by unit, exact"
    assert rows["convolution"].treatment == "Kronecker, 2 groups"
    assert rows["memory.ih_l0_reverse"].module == "LSTM"


def test_a_refresh_costs_nine_times_the_cubes_of_what_is_decomposed() -> None:
    linear = nn.Sequential(nn.Linear(6, 5))
    assert told(linear).refresh_flops == 9 * (7**3 + 5**3)
    assert told(linear, max_dim=4).refresh_flops == 9 * (4**3 + 3**3 + 3**3 + 2**3)
    assert told(linear, max_dim=4, large_dims="diagonal").refresh_flops == 0


def test_it_is_printed_and_returned() -> None:
    file = io.StringIO()
    explanation = tekfac.explain(everything(), file=file)
    assert file.getvalue() == f"{explanation}\n"
    lines = file.getvalue().splitlines()
    assert lines[0].split() == list(HEADER)
    assert any(line.startswith("attention.out_proj") for line in lines)
    assert "By AdamW, on the raw gradient:" in lines
    assert repr(explanation).startswith("Explanation(TEKFAC: 8 layers with ")


def test_it_prints_to_standard_output_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    tekfac.explain(nn.Linear(3, 2), file=sys.stdout)
    assert "(the model)" in capsys.readouterr().out


def test_a_model_is_not_changed_and_not_watched() -> None:
    model = everything()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    told(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_any_layer_is_explained_too() -> None:
    explanation = told(nn.PReLU())
    assert not explanation.layers
    assert "0 layer(s)" in str(explanation)


def test_what_is_left_out_on_request_is_named_so() -> None:
    explanation = told(everything(), first_order=["memory", nn.LayerNorm])
    reasons = {parameter.name: parameter.reason for parameter in explanation.first_order}
    assert reasons["norm.weight"] == reasons["memory.weight_ih_l0"] == "left to first order on request"


def test_frozen_layers_are_listed_and_cost_nothing() -> None:
    model = everything()
    whole = told(model, precondition_norms=True)
    model.memory.requires_grad_(False)
    model.slope.requires_grad_(False)
    explanation = told(model, precondition_norms=True)
    frozen = {layer.name for layer in explanation.layers if layer.frozen}
    assert frozen == {"memory.ih_l0", "memory.hh_l0", "memory.ih_l0_reverse", "memory.hh_l0_reverse"}
    assert explanation.memory == sum(layer.memory for layer in whole.layers if layer.name not in frozen)
    assert "5 layer(s)" in str(explanation)
    assert "Kronecker; frozen" in str(explanation)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert explanation.share == pytest.approx((trainable - 42 - 12) / trainable)  # places, bias_k and bias_v


def test_where_little_is_preconditioned_the_log_warns(caplog: pytest.LogCaptureFixture) -> None:
    """As of a frozen network with adapters that no kind knows."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Bilinear(5, 5, 3))
    model[0].requires_grad_(False)
    tekfac.TEKFAC(model)
    assert "with 0% of the trainable parameters" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "tekfak"}, "Unknown method: 'tekfak'"),
        ({"max_dim": 0}, "Invalid max_dim: 0"),
        ({"first_order": ["hed"]}, "names 'hed'"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        told(everything(), **settings)


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"explain needs a model .* got list"):
        told([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Did you mean 'max_dim'"):
        told(everything(), max_dims=3)


# -- the command line ------------------------------------------------------------------------------------

NETWORK = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(6, 5), nn.PReLU(), nn.Linear(5, 3))

def number():
    return 3
"""


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(NETWORK)
    return path


def test_the_command_prints_the_same_table(network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", f"{network}:make", "--method", "kfac", "--max-dim", "4"]) == 0
    model = nn.Sequential(nn.Linear(6, 5), nn.PReLU(), nn.Linear(5, 3))
    assert capsys.readouterr().out == f"{told(model, method='kfac', max_dim=4)}\n"


def test_the_command_explains_the_optimizer_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    """Norms included, which it trains by AdamW, weight and bias alike."""
    assert main(["explain", "--model", "resnet20-he", "--channels", "3", "--classes", "10", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    optimizer = tekfac.TEKFAC(models.build("resnet20-he", options={}, channels=3, classes=10, size=32))
    assert [layer["name"] for layer in explained["layers"]] == list(optimizer._layers)
    assert {p["reason"] for p in explained["first_order"]} == {A_NORM}


def test_the_command_gives_json(network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", f"{network}:make", "--json", "--first-order", "0"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [layer["name"] for layer in data["layers"]] == ["2"]
    assert {p["name"] for p in data["first_order"]} == {"0.weight", "0.bias", "1.weight"}
    assert data["memory"] == sum(layer["memory"] for layer in data["layers"])


def test_the_command_says_what_is_wrong(network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", f"{network}:number"]) == 1
    assert "returned a int. Expected an nn.Module" in capsys.readouterr().err
    assert main(["explain", "--model", f"{network}:mak"]) == 1
    assert "Did you mean 'make'?" in capsys.readouterr().err


def test_the_command_tells_the_work_of_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "--model", "resnet20-he", "--channels", "3", "--classes", "10", "--size", "32"]
    rates = ["--flops", "1e12", "--link", "10", "--batch", "4"]
    assert main([*command, "--ranks", "4", *rates]) == 0
    printed = capsys.readouterr().out
    assert "A refresh by 4 processes:" in printed
    assert "Max/mean load 1.0" in printed
    assert "The mean step takes 1." in printed
    assert main([*command, "--ranks", "4", *rates, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["work"]["owned"]) == 4
    assert data["costs"]["passes"] == pytest.approx(4 * 3 * 2 * 41e6 / 1e12, rel=0.05)  # 41 million products


def test_the_command_needs_both_rates_and_the_size_of_images(
    network: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["explain", "--model", f"{network}:make"]
    assert main([*command, "--flops", "1e12"]) == 1
    assert "Add --flops RATE and --link GB/S" in capsys.readouterr().err
    assert main([*command, "--flops", "1e12", "--link", "1", "--batch", "3"]) == 1
    assert "Add --channels and --size" in capsys.readouterr().err


def test_the_command_needs_torch_alone(network: Path) -> None:
    """No extra is imported for it."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['numpy', 'rich', 'matplotlib', 'scipy', 'sklearn', 'optuna']))\n"
        "from tekfac.cli.main import main\n"
        f"sys.exit(main(['explain', '--model', {f'{network}:make'!r}]))"
    )
    finished = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "TEKFAC preconditions 2 layer(s)" in finished.stdout


def test_groups_that_are_left_to_first_order_are_explained_as_the_optimizer_treats_them() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    groups = [{"params": "2", "first_order": True}]
    explained = tekfac.explain(model, file=None, param_groups=groups)
    assert [layer.name for layer in explained.layers] == ["0"]
    assert [parameter.name for parameter in explained.first_order] == ["2.weight", "2.bias"]
    assert list(tekfac.TEKFAC(model, param_groups=groups)._model_layers.layers) == ["0"]


def test_the_learning_rate_and_what_else_groups_have_may_be_given_as_to_the_optimizer() -> None:
    model = nn.Linear(5, 4)
    explained = tekfac.explain(model, file=None, lr=0.1, momentum=0.5, weight_decay=0.0)
    assert str(explained) == str(tekfac.explain(model, file=None))
