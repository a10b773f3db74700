"""The networks of the lab: sizes as published, shapes, and networks of the user's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tekfac.lab.models import ProjectedResidual, build, count_parameters


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [
        ("vgg16", 10, 14_719_818),
        ("vgg16", 100, 14_765_988),
        ("resnet20", 10, 4_324_618),
        ("resnet20", 100, 4_347_748),
        ("resnet20-he", 10, 269_722),
    ],
)
def test_the_networks_have_as_many_parameters_as_those_they_are_read_from(
    name: str, classes: int, parameters: int
) -> None:
    with torch.device("meta"):
        model = build(name, channels=3, classes=classes, size=32)
    assert count_parameters(model) == parameters


@pytest.mark.parametrize("name", ["cnn", "mlp", "vgg16", "resnet20", "resnet20-he"])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 16), (3, 32), (3, 48)])
def test_every_network_takes_images_of_any_size(name: str, channels: int, size: int) -> None:
    model = build(name, channels=channels, classes=7, size=size, options={"width": 4})
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 7)


@pytest.mark.parametrize("name", ["vgg16", "resnet20"])
def test_the_networks_of_the_paper_are_initialised_and_normalised_as_there(name: str) -> None:
    model = build(name, channels=3, classes=10, size=32, options={"width": 8})
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert {(norm.eps, norm.momentum, norm.affine) for norm in norms} == {(1e-3, 0.01, False)}
    assert all(not layer.bias.any() for layer in layers if layer.bias is not None)
    for layer in layers:
        fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(layer.weight)
        bound = (6 / (fan_in + fan_out)) ** 0.5
        assert 0.8 * bound < float(layer.weight.detach().abs().max()) <= bound


@pytest.mark.parametrize("size", [8, 7])
def test_a_stride_pads_as_tensorflow_does(size: int) -> None:
    """SAME: ceil(n / 2) pixels come out; zeros are split evenly, the odd one goes below and to the right."""
    block = ProjectedResidual(2, 4, stride=2).double()
    x = torch.randn(1, 2, size, size, dtype=torch.float64)
    out = -(-size // 2)
    missing = (out - 1) * 2 + 3 - size
    padded = F.pad(x, (missing // 2, missing - missing // 2) * 2)
    assert block.conv1.bias is not None
    hidden = F.relu(block.norm1(F.conv2d(padded, block.conv1.weight, block.conv1.bias, stride=2)))
    expected = F.relu(block.norm2(block.conv2(hidden)) + block.shortcut(x))
    torch.testing.assert_close(block(x), expected)


def test_a_network_of_the_users_own_gets_what_it_asks_for(tmp_path: Path) -> None:
    file = tmp_path / "nets.py"
    file.write_text(
        "from torch import nn\n"
        "def asks(classes, size, hidden=5):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(size * size, hidden), nn.Linear(hidden, classes))\n"
        "def asks_nothing():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
        "def no_network():\n    return 3\n"
    )
    model = build(f"{file}:asks", channels=1, classes=3, size=8, options={"hidden": 2})
    assert count_parameters(model) == 64 * 2 + 2 + 2 * 3 + 3
    assert count_parameters(build(f"{file}:asks_nothing", channels=1, classes=3, size=8)) == 650
    with pytest.raises(ValueError, match="returned a int"):
        build(f"{file}:no_network", channels=1, classes=3, size=8)
    with pytest.raises(TypeError, match="hiden"):
        build(f"{file}:asks", channels=1, classes=3, size=8, options={"hiden": 2})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("resnet", "Did you mean 'resnet20'?"),
        ("zzz", "Expected one of cnn, mlp"),
        ("nowhere.to:be", "Cannot import"),
    ],
)
def test_an_unknown_network_is_named(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        build(name, channels=1, classes=3, size=8)


def test_a_depth_that_no_residual_network_has_is_refused() -> None:
    with pytest.raises(ValueError, match="6n \\+ 2"):
        build("resnet20", channels=3, classes=10, size=32, options={"depth": 18})
