"""Promise: a transposed convolution is preconditioned like a convolution, by what reaches each output pixel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocks_oracle import (
    EVERY,
    OWN,
    Case,
    Part,
    Tape,
    assert_blocks_and_step,
    assert_chunks_change_nothing,
    assert_ignored_samples_do_not_count,
    assert_rows_give_autograds_gradients,
    net_case,
    places,
)
from dense import normal

Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
KINDS: dict[str, Callable[[], tuple[Transposed, tuple[int, ...], list[int] | None]]] = {
    "1d": lambda: (nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1), (2, 4), None),
    "1d without bias": lambda: (nn.ConvTranspose1d(3, 2, 2, bias=False), (3, 3), None),
    "1d dilated, with more outputs": lambda: (
        nn.ConvTranspose1d(2, 2, 3, stride=3, dilation=2, padding=2, output_padding=1),
        (2, 3),
        None,
    ),
    "1d in groups": lambda: (nn.ConvTranspose1d(4, 6, 2, stride=2, groups=2), (4, 3), None),
    "2d": lambda: (
        nn.ConvTranspose2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0), output_padding=(1, 0)),
        (2, 2, 3),
        None,
    ),
    "2d in groups without bias": lambda: (
        nn.ConvTranspose2d(4, 4, 2, padding=1, dilation=(2, 1), groups=2, bias=False),
        (4, 3, 3),
        None,
    ),
    "2d depthwise": lambda: (nn.ConvTranspose2d(3, 6, 2, groups=3), (3, 2, 2), None),
    "2d with a size": lambda: (nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1), (2, 2, 3), [4, 5]),
    "3d": lambda: (nn.ConvTranspose3d(2, 2, (1, 2, 2), stride=(1, 2, 1)), (2, 2, 1, 2), None),
}
FULL = ("1d", "2d in groups without bias")


def transposed_patches(conv: Transposed, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """For every output pixel p and offset k the input pixel q with p = q * stride - padding + k * dilation.

    [N, T, G * d_in]: channels of a group, then offsets, then a one for the bias.
    """
    axes = range(len(sizes))
    rows = []
    for p in product(*map(range, sizes)):
        pixels = []
        for k in product(*map(range, conv.kernel_size)):
            steps = [p[i] + conv.padding[i] - k[i] * conv.dilation[i] for i in axes]
            q = [steps[i] // conv.stride[i] for i in axes]
            there = all(steps[i] % conv.stride[i] == 0 and 0 <= q[i] < x.shape[2 + i] for i in axes)
            pixels.append(x[(..., *q)] if there else torch.zeros_like(x.flatten(2)[..., 0]))
        row = torch.stack(pixels, -1).reshape(len(x), conv.groups, -1)
        rows.append(row if conv.bias is None else torch.cat([row, torch.ones_like(row[..., :1])], -1))
    return torch.stack(rows, 1).flatten(2)


def conv_matrix_places(conv: Transposed) -> Tensor:
    """[G, d_out, d_in] of weight [C_in, C_out / G, *kernel] and bias [C_out]."""
    groups = conv.groups
    index = places({"weight": conv.weight.shape, "bias": (conv.out_channels,)})
    c_in, c_out = conv.in_channels // groups, conv.out_channels // groups
    matrix = index["weight"].reshape(groups, c_in, c_out, -1).transpose(1, 2).reshape(groups, c_out, -1)
    return matrix if conv.bias is None else torch.cat([matrix, index["bias"].reshape(groups, c_out, 1)], -1)


def written(conv: Transposed, tape: Tape, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    rows = transposed_patches(conv, x, sizes)
    index = conv_matrix_places(conv)
    flat = torch.cat([p.reshape(-1) for p in conv.parameters()])
    s = torch.einsum(
        "ntgi,goi->ntgo", rows.reshape(len(x), rows.shape[1], conv.groups, -1), flat[index]
    ).flatten(2)
    return tape.keep("conv", rows, s).mT.reshape(len(x), conv.out_channels, *sizes)


@cache
def case_of(kind: str) -> Case:
    conv, shape, size = KINDS[kind]()
    x = normal(14, *shape)
    options: dict[str, Any] = {} if size is None else {"output_size": size}
    sizes = tuple(conv.double()(x[:1], **options).shape[2:])
    names = [f"layer.{name}" for name, _ in conv.named_parameters()]
    parts = [Part("conv", matrix, group=g) for g, matrix in enumerate(conv_matrix_places(conv))]
    return net_case(
        conv,
        x,
        lambda layer, tape, x: written(layer, tape, x, sizes),
        {"layer": (names, parts)},
        call=lambda layer, x: layer(x, **options),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_written_out_give_autograds_gradients(kind: str) -> None:
    assert_rows_give_autograds_gradients(case_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_steps_are_those_of_the_definitions(kind: str) -> None:
    assert_blocks_and_step(case_of(kind), EVERY if kind in FULL else OWN)


@pytest.mark.parametrize("kind", FULL)
def test_samples_with_ignored_targets_do_not_count(kind: str) -> None:
    assert_ignored_samples_do_not_count(case_of(kind), OWN)


@pytest.mark.parametrize("kind", FULL)
def test_samples_may_be_measured_one_at_a_time(kind: str) -> None:
    assert_chunks_change_nothing(case_of(kind))
