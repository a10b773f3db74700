"""Promise: scale and shift of a norm are preconditioned by their own exact blocks, unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocks_oracle import (
    DAMPING,
    EVERY,
    OWN,
    Case,
    Part,
    Tape,
    assert_blocks_and_step,
    assert_chunks_change_nothing,
    assert_ignored_samples_do_not_count,
    assert_rows_give_autograds_gradients,
    matrix_places,
    net_case,
    places,
)
from dense import every_method, normal
from tekfac import TEKFAC, TKFAC
from tekfac.optim.natural_gradient import NaturalGradient

SAMPLES = 8
Normalised = Callable[[nn.Module, Tensor], Tensor]


def centred(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    mean = x.mean(axes, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(axes, keepdim=True) + eps).sqrt()


def of_last_axes(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    axes = tuple(range(-len(layer.normalized_shape), 0))
    return centred(x, axes, layer.eps).flatten(x.ndim - len(axes))


def root_mean_square(layer: nn.RMSNorm, x: Tensor) -> Tensor:
    axes = tuple(range(-len(layer.normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
    return (x / (x.square().mean(axes, keepdim=True) + eps).sqrt()).flatten(x.ndim - len(axes))


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1)


def of_groups(layer: nn.GroupNorm, x: Tensor) -> Tensor:
    groups = x.reshape(len(x), layer.num_groups, -1)
    return channels_last(centred(groups, (2,), layer.eps).reshape(x.shape))


def of_batch(layer: nn.BatchNorm1d, x: Tensor) -> Tensor:
    if layer.training:
        return channels_last(centred(x, (0, *range(2, x.ndim)), layer.eps))
    x = channels_last(x)
    return (x - layer.running_mean) / (layer.running_var + layer.eps).sqrt()


def of_instances(layer: nn.InstanceNorm2d, x: Tensor) -> Tensor:
    return channels_last(centred(x, tuple(range(2, x.ndim)), layer.eps))


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Normalised]] = {
    "LayerNorm of [N, d]": (lambda: nn.LayerNorm(4), (4,), of_last_axes),
    "LayerNorm of [N, T, d]": (lambda: nn.LayerNorm(4), (3, 4), of_last_axes),
    "LayerNorm of two axes": (lambda: nn.LayerNorm((2, 3)), (2, 3), of_last_axes),
    "LayerNorm of two axes of four": (lambda: nn.LayerNorm((3, 2)), (2, 3, 2), of_last_axes),
    "LayerNorm without bias": (lambda: nn.LayerNorm(4, bias=False), (3, 4), of_last_axes),
    "RMSNorm": (lambda: nn.RMSNorm(4), (4,), root_mean_square),
    "RMSNorm of [N, T, d]": (lambda: nn.RMSNorm(4, eps=1e-3), (3, 4), root_mean_square),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 3), of_groups),
    "GroupNorm of images": (lambda: nn.GroupNorm(2, 4), (4, 2, 2), of_groups),
    "BatchNorm1d of [N, C]": (lambda: nn.BatchNorm1d(4), (4,), of_batch),
    "BatchNorm1d of [N, C, L]": (lambda: nn.BatchNorm1d(3), (3, 4), of_batch),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (3, 2, 2), of_batch),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), (2, 2, 1, 2), of_batch),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 4), of_instances),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 2, 2), of_instances),
}
FULL = ("LayerNorm of [N, T, d]", "BatchNorm2d", "GroupNorm of images")


def written_norm(normalised: Normalised) -> Callable[[nn.Module, Tape, Tensor], Tensor]:
    """The normalised input, then scale and shift; the layer's own layout."""

    def written(layer: nn.Module, tape: Tape, x: Tensor) -> Tensor:
        bias = None if layer.bias is None else layer.bias.reshape(-1)
        s = tape.scaled("norm", normalised(layer, x), layer.weight.reshape(-1), bias)
        return s.reshape(x.shape) if isinstance(layer, nn.LayerNorm | nn.RMSNorm) else s.movedim(-1, 1)

    return written


def norm_part(layer: nn.Module) -> tuple[list[str], Part]:
    """Names of the parameters, and places [units, 2] of scale and shift."""
    shapes = {name: parameter.shape for name, parameter in layer.named_parameters()}
    index = torch.stack([place.reshape(-1) for place in places(shapes).values()], 1)
    return list(shapes), Part("norm", index, units=True)


def norm_case(layer: nn.Module, shape: tuple[int, ...], normalised: Normalised, **options: Any) -> Case:
    if not hasattr(layer, "bias"):
        layer.bias = None
    names, part = norm_part(layer)
    return net_case(
        layer,
        normal(SAMPLES, *shape),
        written_norm(normalised),
        {"layer": ([f"layer.{name}" for name in names], [part])},
        together="Batch" in type(layer).__name__,
        **options,
    )


@cache
def case_of(kind: str) -> Case:
    build, shape, normalised = KINDS[kind]
    return norm_case(build(), shape, normalised)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_written_out_give_autograds_gradients(kind: str) -> None:
    assert_rows_give_autograds_gradients(case_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_steps_are_exact_unit_by_unit(kind: str) -> None:
    assert_blocks_and_step(case_of(kind), EVERY if kind in FULL else OWN)


# -- batch norm in other places ------------------------------------------------------------------------


class Frozen(nn.BatchNorm2d):
    """Stays in eval mode inside a training model, as torchvision's detection models have it."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


class Below(nn.Module):
    """A convolution, a batch norm, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).tanh().flatten(1))


def written_below(model: Below, tape: Tape, x: Tensor) -> Tensor:
    patches = x.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).flatten(3)
    s = tape.linear("conv", patches, model.conv.weight.flatten(1), model.conv.bias).movedim(-1, 1)
    normalised = of_batch(model.norm, s)
    s = tape.scaled("norm", normalised, model.norm.weight, model.norm.bias).movedim(-1, 1)
    return model.head(s.tanh().flatten(1))


def with_trained_statistics(layer: nn.BatchNorm2d) -> nn.BatchNorm2d:
    layer.running_mean = normal(layer.num_features, seed=5)
    layer.running_var = normal(layer.num_features, seed=6).square() + 0.5
    return layer


def test_batch_norm_in_eval_mode_inside_a_training_model() -> None:
    """Running statistics are constants: samples do not interact."""
    case = norm_case(with_trained_statistics(Frozen(3).eval()), (3, 2, 2), of_batch)
    assert not case.together
    assert_rows_give_autograds_gradients(case)
    assert_blocks_and_step(case, OWN)
    assert torch.equal(case.model.layer.running_mean, normal(3, seed=5))


@every_method
def test_a_batch_norm_put_into_eval_mode_by_hand(method: type[NaturalGradient]) -> None:
    """model.train(), then model.layer.eval(): against the definitions at running statistics."""
    case = norm_case(with_trained_statistics(nn.BatchNorm2d(3)), (3, 2, 2), of_batch)
    layer = case.model.layer
    optimizer = method.natural(case.model, lr=1e-30, momentum=0.0, damping=DAMPING, fisher="empirical")
    case.model.train()
    layer.eval()
    (x,) = case.inputs
    normalised = of_batch(layer, x)
    seen = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(output))
    logits = case.model(x)
    handle.remove()
    (u,) = torch.autograd.grad(SAMPLES * case.loss(logits), seen[0], retain_graph=True)
    u = u.movedim(1, -1)
    case.loss(logits).backward()
    optimizer.step()
    axes = (1, 2)
    g = torch.stack([(u * normalised).sum(axes), u.sum(axes)], -1)  # [N, C, 2]
    dense = optimizer.curvature.to_dense()
    index = places(optimizer.curvature.parameters)
    for c in range(3):
        where = torch.stack([index["layer.weight"][c], index["layer.bias"][c]])
        expected = g[:, c].T @ g[:, c] / SAMPLES
        assert float((dense[where][:, where] - expected).abs().max()) < 1e-10 * float(expected.abs().max())


@cache
def case_below() -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = Below().double()
        model.norm.weight.data.uniform_(-1, 1)
    parts = {
        "conv": (["conv.weight", "conv.bias"], [Part("conv", matrix_places((3, 2, 2, 2), True))]),
        "norm": (["norm.weight", "norm.bias"], [norm_part(model.norm)[1]]),
    }
    labels = torch.arange(16) % 3
    return Case(model, (normal(16, 2, 3, 3),), labels, written_below, parts, together=True)


def test_layers_below_a_batch_norm_see_rows_of_the_whole_batchs_gradient() -> None:
    assert_rows_give_autograds_gradients(case_below())
    assert_blocks_and_step(case_below())


# -- other uses ----------------------------------------------------------------------------------------


@cache
def case_used_twice() -> Case:
    layer = nn.LayerNorm(4)
    names, part = norm_part(layer)

    def twice(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(layer(x).sin() + x)

    def written(layer: nn.LayerNorm, tape: Tape, x: Tensor) -> Tensor:
        first = tape.scaled("norm", of_last_axes(layer, x), layer.weight, layer.bias)
        return tape.scaled("norm", of_last_axes(layer, first.sin() + x), layer.weight, layer.bias)

    layers = {"layer": ([f"layer.{name}" for name in names], [part])}
    return net_case(layer, normal(SAMPLES, 3, 4), written, layers, call=twice)


def test_a_norm_that_is_used_twice_has_the_positions_of_both_calls() -> None:
    assert_rows_give_autograds_gradients(case_used_twice())
    assert_blocks_and_step(case_used_twice())


def net(*norms: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *norms, nn.Tanh(), nn.Linear(4, 3)).double()


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(4, elementwise_affine=False),
        nn.RMSNorm(4, elementwise_affine=False),
        nn.BatchNorm1d(4, affine=False),
        nn.GroupNorm(2, 4, affine=False),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_without_parameters_are_no_layers(norm: nn.Module) -> None:
    model = net(norm)
    optimizer = TEKFAC.natural(model, damping=DAMPING)
    F.cross_entropy(model(normal(SAMPLES, 4)), torch.arange(SAMPLES) % 3).backward()
    optimizer.step()
    assert set(optimizer.curvature) == {"0", "3"}


def test_norms_can_be_left_to_first_order_by_their_type() -> None:
    model = net(nn.LayerNorm(4), nn.BatchNorm1d(4))
    optimizer = TKFAC.natural(
        model, lr=0.01, momentum=0.0, first_order=[nn.LayerNorm], first_order_lr=0.25, damping=DAMPING
    )
    start = model[1].weight.detach().clone()
    F.cross_entropy(model(normal(SAMPLES, 4)), torch.arange(SAMPLES) % 3).backward()
    optimizer.step()
    assert set(optimizer.curvature) == {"0", "2", "4"}
    assert torch.equal(model[1].weight, start - 0.25 * model[1].weight.grad)


def test_a_bias_can_be_frozen_alone() -> None:
    layer = nn.LayerNorm(4)
    layer.bias.requires_grad_(False)
    case = norm_case(layer, (3, 4), of_last_axes)
    index = torch.arange(4)[:, None]
    case.layers["layer"] = (["layer.weight"], [Part("norm", index, units=True)])
    assert_blocks_and_step(case, OWN)


@pytest.mark.parametrize("kind", ["LayerNorm of [N, T, d]", "RMSNorm", "GroupNorm"])
def test_samples_with_ignored_targets_do_not_count(kind: str) -> None:
    assert_ignored_samples_do_not_count(case_of(kind), OWN)


@pytest.mark.parametrize("kind", FULL)
def test_samples_may_be_measured_one_at_a_time(kind: str) -> None:
    assert_chunks_change_nothing(case_of(kind))


def test_a_label_for_every_position() -> None:
    names, part = norm_part(nn.LayerNorm(4))
    layers = {"layer": ([f"layer.{name}" for name in names], [part])}
    written = written_norm(of_last_axes)
    case = net_case(nn.LayerNorm(4), normal(SAMPLES, 3, 4), written, layers, per_position=True)
    assert_rows_give_autograds_gradients(case)
    assert_blocks_and_step(case)


@pytest.mark.parametrize("length", [3, SAMPLES])
def test_sequences_first(length: int) -> None:
    """[T, N, d] inside the model, also where the two axes are of the same length."""
    names, part = norm_part(nn.LayerNorm(4))
    case = net_case(
        nn.LayerNorm(4),
        normal(SAMPLES, length, 4),
        written_norm(of_last_axes),
        {"layer": ([f"layer.{name}" for name in names], [part])},
        call=lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1),
    )
    assert_blocks_and_step(case, OWN, ("empirical",))
