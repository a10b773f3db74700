"""Promise: the inputs of a convolution may be kept by the frequencies of its kernel, exactly as defined."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocks_oracle import (
    EVERY,
    OWN,
    Case,
    Part,
    Tape,
    assert_blocks_and_step,
    assert_chunks_change_nothing,
    assert_rows_give_autograds_gradients,
    matrix_places,
    net_case,
    numbers,
)
from dense import assert_close, normal
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC, explain, fisher
from tekfac.curvature import frequencies, symmetric
from tekfac.layers.side_forms import SideRule

SAMPLES = 12
METHODS = (KFAC, EKFAC, TKFAC, TEKFAC)


def turned(channels: int, kernel: tuple[int, ...]) -> Tensor:
    """From coordinates (channel, position) to (frequency, channel), written out entry by entry."""
    places = list(itertools.product(*map(range, kernel)))
    found = torch.zeros(len(places) * channels, channels * len(places), dtype=torch.float64)
    for (f, waves), (p, place), c in itertools.product(enumerate(places), enumerate(places), range(channels)):
        entry = 1.0
        for size, wave, at in zip(kernel, waves, place, strict=True):
            norm = math.sqrt((1 if wave == 0 else 2) / size)
            entry *= norm * math.cos(math.pi * wave * (2 * at + 1) / (2 * size))
        found[f * channels + c, c * len(places) + p] = entry
    return found


def convolution(layer: Any, tape: Tape, x: Tensor) -> Tensor:
    """In groups, without padding."""
    windows = x
    for axis, size in enumerate(layer.kernel_size, start=2):
        windows = windows.unfold(axis, size, 1)  # [N, C, *positions, *kernel]
    axes = len(layer.kernel_size)
    flat = windows.flatten(2, 1 + axes).flatten(3).transpose(1, 2).flatten(2)  # [N, T, C P]
    groups = flat.unflatten(2, (layer.groups, -1))
    matrix = layer.weight.flatten(1).unflatten(0, (layer.groups, -1))
    s = torch.einsum("ntgi,goi->ntgo", groups, matrix).flatten(2)
    found = tape.keep("layer", flat, s if layer.bias is None else s + layer.bias).mT
    return found.reshape(layer(x).shape)


def case(layer: Any, inputs: Tensor, in_a_block: int, **settings: Any) -> Case:
    """Of a convolution whose bias is left to first order."""
    kernel, groups = layer.kernel_size, layer.groups
    channels = layer.in_channels // groups
    index = matrix_places((layer.out_channels, channels * math.prod(kernel)), False).unflatten(0, (groups, -1))
    sizes = [in_a_block] * (channels * math.prod(kernel) // in_a_block)
    parts = [
        Part("layer", own, group=g, turned=turned(channels, kernel), cut_in=sizes)
        for g, own in enumerate(index)
    ]
    settings = {"large_dims": "frequencies", **settings}
    layers = {"layer": (["layer.weight"], parts)}
    return net_case(layer, inputs, convolution, layers, settings=settings)


CASES: dict[str, Callable[[], Case]] = {
    "all channels": lambda: case(nn.Conv2d(4, 5, (2, 3), bias=False), normal(SAMPLES, 4, 3, 4), 4, max_dim=5),
    "channels in blocks": lambda: case(nn.Conv2d(4, 2, 2, bias=False), normal(SAMPLES, 4, 3, 3), 2, max_dim=3),
    "single channels": lambda: case(nn.Conv2d(3, 1, 2, bias=False), normal(SAMPLES, 3, 3, 3), 1, max_dim=1),
    "beside a bias": lambda: case(nn.Conv1d(3, 4, 3), normal(SAMPLES, 3, 5), 3, max_dim=4),
    "three axes": lambda: case(nn.Conv3d(2, 2, 2), normal(SAMPLES, 2, 3, 2, 3), 2, max_dim=2),
    "in groups": lambda: case(nn.Conv1d(4, 6, 3, groups=2), normal(SAMPLES, 4, 4), 2, max_dim=3),
}


@cache
def case_of(kind: str) -> Case:
    return CASES[kind]()


@pytest.mark.parametrize("kernel", [(1,), (4,), (3, 3), (2, 3, 2)])
def test_the_transform_is_orthogonal_and_the_one_written_out(kernel: tuple[int, ...]) -> None:
    waves = frequencies.transform(kernel, normal(1))
    assert_close(waves @ waves.T, torch.eye(len(waves)).double(), 1e-14)
    assert_close(waves, turned(1, kernel), 1e-14)


@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_split_into_frequencies_is_joined_again(groups: int) -> None:
    rows, kernel = normal(groups, 5, 3 * 6), (2, 3)
    waves = frequencies.transform(kernel, rows)
    split = frequencies.split(rows, waves)
    expected = (rows @ turned(3, kernel).T).unflatten(2, (6, 3)).transpose(1, 2)
    assert_close(split, expected, 1e-13)
    assert_close(frequencies.joined(split, waves), rows, 1e-13)


@pytest.mark.parametrize("kind", CASES)
def test_the_rows_written_out_give_autograds_gradients(kind: str) -> None:
    assert_rows_give_autograds_gradients(case_of(kind))


@pytest.mark.parametrize("kind", CASES)
def test_blocks_and_steps_are_those_of_the_restricted_factors(kind: str) -> None:
    assert_blocks_and_step(case_of(kind), EVERY if kind in ("all channels", "in groups") else OWN)


@pytest.mark.parametrize("kind", ["all channels", "in groups"])
def test_a_few_samples_at_a_time_give_the_same(kind: str) -> None:
    assert_chunks_change_nothing(case_of(kind))


# -- which convolutions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "kernel", "block"),
    [
        (7, (3, 3), None),  # 63 inputs are whole
        (8, (3, 3), 8),
        (8, (3,), None),  # 24 inputs, too
        (64, (3,), 64),
        (3, (7, 7), None),  # too few channels
        (400, (3, 3), 400),
        (512, (3, 3), 256),
        (401, (3, 3), None),  # that no number of blocks near two divides
        (402, (3, 3), 201),
        (64, (1, 1), None),  # no frequencies
    ],
)
def test_by_default_those_of_some_channels_are(
    channels: int, kernel: tuple[int, ...], block: int | None
) -> None:
    assert SideRule("auto").channels_in_a_block(channels, kernel) == block
    assert SideRule("auto", "blocks").channels_in_a_block(channels, kernel) is None
    assert SideRule(800).channels_in_a_block(channels, kernel) is None


def test_a_size_may_be_asked_for() -> None:
    rule = SideRule(30, "frequencies")
    assert rule.channels_in_a_block(3, (3, 3)) is None  # 27 inputs
    assert rule.channels_in_a_block(4, (3, 3)) == 4
    assert rule.channels_in_a_block(60, (3, 3)) == 30
    assert rule.block_size(60) == 30  # other layers: in blocks
    assert SideRule(27, "frequencies").channels_in_a_block(3, (3, 3), bias=True) == 3  # 28 are no longer whole


def network() -> nn.Module:
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 3)).double()


BATCH = normal(10, 1, 8, 8), torch.arange(10) % 3


def train(optimizer: Any, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
        optimizer.step()


def test_explain_tells_them_and_what_becomes_of_the_bias() -> None:
    text = str(explain(network(), file=None))
    assert "72 by 3 x 3 frequencies" in text
    assert "2.bias" in text
    assert "no room" in text
    assert "0.bias" not in text


@pytest.mark.parametrize("method", METHODS)
def test_the_bias_moves_as_by_adamw(method: Any) -> None:
    model = network()
    optimizer = method(model, lr=0.01)
    before = model[2].bias.detach().clone()
    train(optimizer, model, 1)
    moved = before - model[2].bias.detach()
    assert_close(moved.abs(), torch.full_like(moved, 0.01), 1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_where_it_was(method: Any) -> None:
    whole, model = network(), network()
    one = method(whole, lr=0.01)
    train(one, whole, 30)
    first = method(model, lr=0.01)
    train(first, model, 17)
    other = network()
    other.load_state_dict(model.state_dict())
    second = method(other, lr=0.01)
    second.load_state_dict(first.state_dict())
    train(second, other, 13)
    for expected, found in zip(whole.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("other", [{"large_dims": "blocks"}, {"large_dims": "blocks", "max_dim": 8}])
@pytest.mark.parametrize("bias", [True, False])
def test_a_state_of_another_form_is_refused_by_name(other: dict[str, Any], bias: bool) -> None:
    """Blocks of eight neighbours and of eight channels have the same size."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, bias=bias), nn.Flatten(), nn.Linear(128, 3))
    optimizer = TEKFAC(model.double(), **other)
    train(optimizer, model, 1)
    same = {**other, "large_dims": "frequencies"} if "max_dim" in other else {}
    with pytest.raises(ValueError, match=r"layer '1' keeps its sides as .*large_dims"):
        TEKFAC(model, **same).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernels", [((3,), (3,)), ((1, 3), (3, 1))])
def test_tiny_layers_are_refreshed_together(method: Any, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of equal kernels; with all of them one by one it is the same."""
    ends = []
    for together in (True, False):
        torch.manual_seed(0)
        of = nn.Conv1d if len(kernels[0]) == 1 else nn.Conv2d
        layers = [of(4, 4, kernel, padding="same", bias=False) for kernel in kernels]
        model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Flatten(), nn.LazyLinear(3)).double()
        x, y = normal(9, *(4, 5, 5)[: len(kernels[0]) + 1]), torch.arange(9) % 3
        model(x)
        if not together:
            monkeypatch.setattr("tekfac.curvature.together._is_tiny", lambda layer: False)
        optimizer = method(model, lr=0.01, max_dim=5, large_dims="frequencies", turns=False)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        monkeypatch.undo()
        assert optimizer.curvature["0"].basis.vectors_in.shape == (1, *kernels[0], 4, 4)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close(*ends, 1e-9)


def test_layers_of_equal_size_and_other_kernels_are_not_stacked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 8, (3, 5)), nn.Tanh(), nn.Conv2d(8, 8, (5, 3)), nn.Flatten(), nn.Linear(72, 3)
    )
    model = model.double()
    x, y = normal(9, 8, 9, 9), torch.arange(9) % 3
    optimizer = TEKFAC(model, lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    shapes = [tuple(optimizer.curvature[name].basis.vectors_in.shape) for name in ("0", "2")]
    assert shapes == [(1, 3, 5, 8, 8), (1, 5, 3, 8, 8)]


def test_the_default_device_and_kinds_of_tensors_around_a_step_do_not_matter() -> None:
    """The transform is made of numbers, so that nothing of the first call stays."""
    expected, found = network(), network()
    train(TEKFAC(expected, lr=0.01), expected, 2)
    with torch.inference_mode():
        frequencies.transform((3, 3), torch.ones(1))
    optimizer = TEKFAC(found, lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(found(BATCH[0]), BATCH[1]).backward()
        with torch.device("meta"):
            optimizer.step()
    for one, other in zip(expected.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)
    rows = normal(1, 2, 18).requires_grad_()
    frequencies.split(rows, frequencies.transform((3, 3), rows)).sum().backward()


@pytest.mark.parametrize("setting", [{"track_basis": True}, {"basis_tolerance": 0.3}])
def test_bases_may_be_kept_or_tracked(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tekfac.curvature.eigenbasis.WORTH_A_LOOK", 1)
    monkeypatch.setattr("tekfac.curvature.eigenbasis.WORTH_TRACKING", 1)
    model = network()
    optimizer = TEKFAC(model, lr=0.01, **setting)
    train(optimizer, model, 25)
    for name in ("2", "4"):
        vectors = symmetric.in_blocks(optimizer.curvature[name].basis.vectors_in).unflatten(1, (9, 8))
        assert_close(vectors.mT @ vectors, torch.eye(8).double().expand(1, 9, 8, 8), 1e-6)
    assert F.cross_entropy(model(BATCH[0]), BATCH[1]).item() < 0.5


@pytest.mark.parametrize("method", METHODS)
def test_equal_layers_together_move_as_each_alone(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    together, alone = network(), network()
    train(method(together, lr=0.01, first_interval=1), together, 12)
    monkeypatch.setattr("tekfac.curvature.stacks.STACKED", 0)
    train(method(alone, lr=0.01, first_interval=1), alone, 12)
    for expected, found in zip(together.parameters(), alone.parameters(), strict=True):
        assert_close(found.detach(), expected.detach(), 1e-9)


def test_blocks_of_a_data_set_are_saved_and_loaded(tmp_path: Path) -> None:
    how = {"large_dims": "frequencies", "max_dim": 8}
    blocks = fisher.estimate(network(), [BATCH], method="tekfac", likelihood="categorical", **how)
    fisher.save(blocks, tmp_path / "blocks.safetensors")
    loaded = fisher.load(tmp_path / "blocks.safetensors")
    assert loaded["2"].shape == blocks["2"].shape
    assert loaded["2"].shape.kernel == (3, 3)
    assert torch.equal(loaded["2"].to_dense(), blocks["2"].to_dense())


def test_what_is_kept_is_small() -> None:
    model = nn.Sequential(nn.Conv2d(32, 16, 3), nn.Flatten(), nn.Linear(16, 3))
    optimizer = TEKFAC(model)
    F.cross_entropy(model(torch.randn(8, 32, 3, 3)), torch.arange(8) % 3).backward()
    optimizer.step()
    state = optimizer.state_dict()["state"][0]["curvature"]
    assert max(numbers(state)) == 9 * 32**2
    assert state["basis"]["vectors_in"].shape == (1, 3, 3, 32, 32)


@pytest.mark.parametrize("method", METHODS)
def test_a_transposed_convolution_is_one_by_the_kernel_turned_round(method: Any) -> None:
    """Frequencies of a kernel that is turned round differ in their signs alone."""
    torch.manual_seed(0)
    transposed = nn.Sequential(nn.ConvTranspose2d(8, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(400, 3)).double()
    usual = nn.Sequential(nn.Conv2d(8, 4, 3, padding=2), nn.Tanh(), nn.Flatten(), nn.Linear(400, 3)).double()
    usual[3].load_state_dict(transposed[3].state_dict())
    with torch.no_grad():
        usual[0].weight.copy_(turned_round(transposed[0].weight))
        usual[0].bias.copy_(transposed[0].bias)
    x, y = normal(40, 8, 8, 8), torch.arange(40) % 3
    for model in (transposed, usual):
        more = {"damping": 1e-3, "statistics_samples": None, "first_interval": 1}
        optimizer = method(model, lr=0.01, seed=0, **more)
        assert optimizer._layers["0"].shape.kernel == (3, 3)
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert_close(usual[0].weight.detach(), turned_round(transposed[0].weight.detach()), 1e-7)


def turned_round(weight: Tensor) -> Tensor:
    """The kernel of a transposed convolution as that of a usual one, and back."""
    return weight.transpose(0, 1).flip(2, 3)
