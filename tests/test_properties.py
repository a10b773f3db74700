"""Properties over random layers: what is captured is the gradient, and a step is the dense solve."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import oracle
from dense import METHODS, assert_close, sharings, solve_rtol
from layer_kinds import Case, captured, expected_block, groups_of, make_case, step_of
from tekfac.optim.natural_gradient import NaturalGradient

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

deterministic = settings(
    derandomize=True,
    deadline=None,
    max_examples=40,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Problem:
    """A layer and its data, in words; a failing example prints as one line."""

    kind: str
    arguments: tuple[tuple[str, object], ...]
    shape: tuple[int, ...]
    samples: int
    seed: int

    def build(self) -> Case:
        layer = getattr(nn, self.kind)(**dict(self.arguments))
        return make_case(layer, self.shape, samples=self.samples, seed=self.seed)


@st.composite
def linear_problems(draw: st.DrawFn) -> Problem:
    """Linear with zero to two axes of positions."""
    d_in = draw(st.integers(1, 5))
    positions = draw(st.lists(st.integers(1, 4), max_size=2))
    arguments = {
        "in_features": d_in,
        "out_features": draw(st.integers(1, 4)),
        "bias": draw(st.sampled_from([True, False])),
    }
    return Problem(
        "Linear",
        tuple(arguments.items()),
        (*positions, d_in),
        draw(st.integers(1, 7)),
        draw(st.integers(0, 2**16)),
    )


@st.composite
def convolution_problems(draw: st.DrawFn, axes: int) -> Problem:
    """Convolutions over one to three axes, with everything that moves a patch."""

    def per_axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    groups = draw(st.integers(1, 3))
    inputs, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, dilation = per_axis(1, 3 if axes < 3 else 2), per_axis(1, 2)
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding: str | tuple[int, ...] = draw(st.sampled_from(["same", "valid", "numbers", "numbers"]))
    stride = per_axis(1, 3)
    margins = [0] * axes
    if padding == "same":
        stride, margins = (1,) * axes, [r - r // 2 for r in reach]
    elif padding == "numbers":
        padding = per_axis(0, 2)
        margins = list(padding)
    # a kernel must fit; reflection and wrapping need more pixels than they add
    smallest = [
        max(1, r + 1 - 2 * m if padding != "same" else 1, m + 1 if mode in ("reflect", "circular") else 1)
        for r, m in zip(reach, margins, strict=True)
    ]
    extra = per_axis(0, 2 if axes < 3 else 1)
    sizes = tuple(s + e for s, e in zip(smallest, extra, strict=True))
    arguments = {
        "in_channels": inputs,
        "out_channels": outputs,
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.sampled_from([True, False])),
        "padding_mode": mode,
    }
    return Problem(
        f"Conv{axes}d",
        tuple(arguments.items()),
        (inputs, *sizes),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 2**16)),
    )


PROBLEMS = {
    "Linear": linear_problems(),
    "Conv1d": convolution_problems(axes=1),
    "Conv2d": convolution_problems(axes=2),
    "Conv3d": convolution_problems(axes=3),
}
every_kind = pytest.mark.parametrize("kind", PROBLEMS)


def functional_gradients(case: Case, layer: str) -> Tensor:
    """Per-sample gradients by torch.func, as matrices [N, G, d_out, d_in]."""
    parameters = {name: p.detach() for name, p in case.model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(case.model, parameters, (x[None],)), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, case.inputs, case.labels)
    groups = getattr(case.model.get_submodule(layer), "groups", 1)
    parts = [gradients[f"{layer}.{name}"] for name in ("weight", "bias") if f"{layer}.{name}" in gradients]
    samples = len(case.inputs)
    return torch.cat([p.reshape(samples, groups, p.shape[1] // groups, -1) for p in parts], dim=-1)


@every_kind
@given(data=st.data(), chunk=st.integers(1, 7))
@deterministic
def test_captured_gradients_are_those_of_torch_func(kind: str, data: st.DataObject, chunk: int) -> None:
    problem = data.draw(PROBLEMS[kind])
    case = problem.build()
    batches = captured(case.model, case.inputs, case.loss)
    for layer in ("layer", "head"):
        (batch,) = batches[layer]
        chunks = [rows.per_sample_gradients() for rows in batch.chunks(chunk)]
        assert len(chunks) == math.ceil(problem.samples / chunk)
        gradients = torch.cat(chunks, dim=2)[0].transpose(0, 1)  # [N, G, d_out, d_in]
        assert_close(gradients, functional_gradients(case, layer))


@every_kind
@given(data=st.data())
@deterministic
def test_mean_of_captured_gradients_is_the_gradient(kind: str, data: st.DataObject) -> None:
    problem = data.draw(PROBLEMS[kind])
    case = problem.build()
    for reduction in ("mean", "sum"):
        batches = captured(
            case.model,
            case.inputs,
            lambda logits, reduction=reduction: F.cross_entropy(logits, case.labels, reduction=reduction),
            loss_reduction=reduction,
        )
        for layer in ("layer", "head"):
            (batch,) = batches[layer]
            (rows,) = batch.chunks(problem.samples)
            total = rows.per_sample_gradients().sum((0, 2))
            divisor = problem.samples if reduction == "mean" else 1
            assert batch.num_terms == problem.samples
            assert_close(total / divisor, case.to_matrix(layer))


@pytest.mark.every_value  # the pairs are in test_oracles_algebra.py
@every_kind
@pytest.mark.parametrize("method", METHODS)
@given(data=st.data(), exponent=st.integers(-3, 2), budget=st.sampled_from([1, 2**14, 2**28]))
@deterministic
def test_a_step_is_the_dense_solve(
    kind: str, method: type[NaturalGradient], data: st.DataObject, exponent: int, budget: int
) -> None:
    problem = data.draw(PROBLEMS[kind])
    sharing = data.draw(st.sampled_from(sharings(method)), label="sharing")
    case, damping = problem.build(), 10.0**exponent
    samples = {
        layer: oracle.per_sample(case.model, F.cross_entropy, case.inputs, case.labels, layer)
        for layer in ("layer", "head")
    }
    optimizer, moved = step_of(method, case, sharing=sharing, damping=damping, memory_budget=budget)
    for layer, of_layer in samples.items():
        gradient = case.to_matrix(layer)
        for group in groups_of(of_layer):
            block = expected_block(method, of_layer, sharing, optimizer.curvature[layer], group)
            solution = oracle.damped_solve(block, damping, gradient[group])
            assert_close(moved[layer][group], solution, solve_rtol(block, damping))
            vector = moved[layer][group].reshape(-1)
            assert_close(block @ vector + damping * vector, gradient[group].reshape(-1))
