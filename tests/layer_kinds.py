"""One small float64 network for every kind of layer, and the dense block each method should give it.

The layer under test is called "layer"; a linear head, "head", follows it. Every position reaches the
head through weights of its own, so no two positions see the same gradient.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import assert_close, dense_block, gradient_step, oracle_block
from tekfac import KFAC, TEKFAC, TKFAC
from tekfac.capture.capture import Capture
from tekfac.capture.measurement import FisherKind, LossReduction, Measurement
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.curvature.layer_curvature import LayerCurvature
from tekfac.layers.batch import BatchShape, LayerBatch
from tekfac.layers.inventory import take_inventory
from tekfac.layers.rows import Rows
from tekfac.likelihoods import Likelihood, SampledLoss
from tekfac.optim.natural_gradient import NaturalGradient

Shape = tuple[int, ...]
KINDS: Mapping[str, Callable[[bool], tuple[oracle.Layer, Shape]]] = {
    "linear": lambda bias: (nn.Linear(4, 3, bias=bias), (4,)),
    "sequence": lambda bias: (nn.Linear(4, 3, bias=bias), (5, 4)),
    "sequence of sequences": lambda bias: (nn.Linear(3, 4, bias=bias), (2, 3, 3)),
    "conv1d": lambda bias: (
        nn.Conv1d(2, 3, 3, stride=2, padding=1, padding_mode="circular", bias=bias),
        (2, 7),
    ),
    "conv2d": lambda bias: (
        nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2), bias=bias),
        (2, 4, 5),
    ),
    "conv2d same": lambda bias: (
        nn.Conv2d(1, 3, (3, 2), padding="same", dilation=(1, 2), padding_mode="reflect", bias=bias),
        (1, 4, 4),
    ),
    "conv3d": lambda bias: (
        nn.Conv3d(1, 2, 2, padding=(1, 0, 0), padding_mode="replicate", bias=bias),
        (1, 2, 3, 2),
    ),
    "grouped": lambda bias: (
        nn.Conv2d(4, 4, (2, 1), groups=2, stride=(1, 2), padding=(0, 1), bias=bias),
        (4, 3, 3),
    ),
    "grouped 1d": lambda bias: (nn.Conv1d(4, 6, 2, groups=2, dilation=2, bias=bias), (4, 6)),
    "depthwise": lambda bias: (nn.Conv2d(3, 6, 2, groups=3, stride=2, padding=1, bias=bias), (3, 4, 3)),
}
BIASES = (True, False)
SAMPLES, CLASSES = 14, 3  # more samples than inputs, so that reduced factors have no null space


@dataclass(frozen=True)
class Case:
    """A network, its data, and its mean cross-entropy."""

    model: nn.Sequential
    inputs: Tensor
    labels: Tensor

    def loss(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, self.labels)

    def to_matrix(self, layer: str, of: Literal["grad", "data"] = "grad") -> Tensor:
        """[weight | bias] of a layer, or of its gradient: [G, d_out, d_in]."""
        module = self.model.get_submodule(layer)
        groups = getattr(module, "groups", 1)
        parts = [getattr(p, of).detach() for p in (module.weight, module.bias) if isinstance(p, Tensor)]
        return torch.cat([part.reshape(groups, len(part) // groups, -1) for part in parts], dim=-1).clone()


def make_case(layer: oracle.Layer, shape: Shape, samples: int = SAMPLES, seed: int = 0) -> Case:
    """The layer (in float64, freshly initialised), tanh, and a linear head over all positions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer.double().reset_parameters()
        inputs = torch.randn(samples, *shape, dtype=torch.float64)
        with torch.no_grad():
            features = layer(inputs[:1]).numel()
        model = nn.Sequential()
        model.add_module("layer", layer)
        model.add_module("activation", nn.Tanh())
        model.add_module("flatten", nn.Flatten())
        model.add_module("head", nn.Linear(features, CLASSES).double())
        return Case(model, inputs, torch.randint(CLASSES, (samples,)))


@cache
def _shared_case(kind: str, bias: bool) -> Case:
    return make_case(*KINDS[kind](bias), seed=zlib.crc32(kind.encode()))


def case_of(kind: str, bias: bool) -> Case:
    """The case of a kind, to be trained at will."""
    return copy.deepcopy(_shared_case(kind, bias))


@cache
def samples_of(
    kind: str, bias: bool, fisher: Literal["empirical", "exact"] = "empirical", layer: str = "layer"
) -> oracle.Samples:
    """What the oracle sees of a layer at the case's own parameters."""
    case = _shared_case(kind, bias)
    if fisher == "exact":
        return oracle.per_column(oracle.softmax_column, case.model, case.inputs, layer)
    return oracle.per_sample(case.model, F.cross_entropy, case.inputs, case.labels, layer)


def groups_of(samples: oracle.Samples) -> range:
    return range(samples.a.shape[1])


def fisher_of(samples: oracle.Samples, group: int = 0) -> Tensor:
    """The exact block, from autograd's per-sample gradients."""
    return oracle.exact_fisher(samples.gradients[:, group])


def own_sharing(method: type[NaturalGradient]) -> str:
    """The sharing that is right for the method with no setting: exact where it has that, or expand."""
    return "exact" if method in (TKFAC, TEKFAC) else "expand"


# -- the library ---------------------------------------------------------------------------------------


def captured(
    model: nn.Module,
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    fisher: FisherKind = "empirical",
    likelihood: str | Likelihood | SampledLoss = "categorical",
    loss_reduction: LossReduction = "mean",
) -> dict[str, list[LayerBatch]]:
    """What the library captures in one forward and backward pass; `.grad` is left in place."""
    measurement = Measurement(likelihood=likelihood, fisher=fisher, loss_reduction=loss_reduction)
    capture = Capture(model, take_inventory(model, []).layers.values(), measurement)
    capture.arm()
    model.zero_grad()
    loss(model(inputs)).backward()
    capture.disarm()
    assert not capture.problems
    return capture.batches()


def all_rows(batch: LayerBatch) -> Rows:
    return batch.rows(0, batch.samples)


@dataclass(frozen=True)
class RowBatch:
    """Rows as the mathematics receives them from a LayerBatch; every sample is one term."""

    whole: Rows

    @property
    def shape(self) -> BatchShape:
        columns, groups, samples, positions, d_out = self.whole.u.shape
        return BatchShape(columns, groups, samples, positions, self.whole.a.shape[-1], d_out)

    @property
    def num_terms(self) -> int:
        return self.shape.samples

    def chunks(self, samples_per_chunk: int) -> Iterator[Rows]:
        for start in range(0, self.shape.samples, samples_per_chunk):
            part = slice(start, start + samples_per_chunk)
            yield Rows(self.whole.a[:, part], self.whole.u[:, :, part])


def as_samples(rows: Rows) -> oracle.Samples:
    """Rows in the oracle's layout: K columns of N samples become K * N samples, times sqrt(K)."""
    columns, groups, samples, positions, d_out = rows.u.shape
    a = rows.a.transpose(0, 1).repeat(columns, 1, 1, 1)
    u = columns**0.5 * rows.u.transpose(1, 2).reshape(columns * samples, groups, positions, d_out)
    gradients = torch.stack([oracle.gradient_matrices(a[:, g], u[:, g]) for g in range(groups)], dim=1)
    return oracle.Samples(gradients, a, u)


def random_rows(
    columns: int = 1,
    groups: int = 1,
    samples: int = 9,
    positions: int = 1,
    d_in: int = 4,
    d_out: int = 3,
    seed: int = 0,
) -> Rows:
    """Correlated inputs and gradients, with correlated norms, so that no identity is luck."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a = normal(groups, samples, positions, d_in) @ normal(groups, 1, d_in, d_in) + 0.3
    a[..., -1] = 1.0
    u = normal(columns, groups, samples, positions, d_out) @ normal(groups, 1, d_out, d_out)
    return Rows(a, u * a.norm(dim=-1, keepdim=True))


def identity(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def random_orthogonal(size: int, seed: int, groups: int = 1) -> Tensor:
    """[G, size, size]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(groups, size, size, generator=generator, dtype=torch.float64))[0]


def random_basis(d_in: int, d_out: int, groups: int = 1, seed: int = 7) -> Eigenbasis:
    """A basis that has nothing to do with any factor."""
    ones = torch.ones(groups, 1, dtype=torch.float64)
    return Eigenbasis(
        random_orthogonal(d_in, seed, groups),
        random_orthogonal(d_out, seed + 1, groups),
        ones.expand(groups, d_in),
        ones.expand(groups, d_out),
        ones[:, 0],
    )


def step_of(
    method: type[NaturalGradient],
    case: Case,
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
    **settings: Any,
) -> tuple[NaturalGradient, dict[str, Tensor]]:
    """One real step with lr=1 and no momentum: the optimizer, and how far each layer's matrix moved."""
    optimizer = method.natural(case.model, lr=1.0, momentum=0.0, **{"fisher": "empirical", **settings})
    layers = list(take_inventory(case.model, []).layers)
    before = {layer: case.to_matrix(layer, "data") for layer in layers}
    gradient_step(optimizer, case.model, loss or case.loss, case.inputs)
    return optimizer, {layer: before[layer] - case.to_matrix(layer, "data") for layer in layers}


# -- what it should give -------------------------------------------------------------------------------


def expected_factors(
    method: type[NaturalGradient], samples: oracle.Samples, sharing: str, group: int
) -> oracle.Factored:
    """The factors whose eigenbasis the method uses, from the definitions."""
    a, u = samples.a[:, group], samples.u[:, group]
    if method in (TKFAC, TEKFAC):
        return oracle.tkfac(a, u, sharing)
    return {"expand": oracle.kfac_expand, "reduce": oracle.kfac_reduce}[sharing](a, u)


def expected_block(
    method: type[NaturalGradient],
    samples: oracle.Samples,
    sharing: str,
    curvature: LayerCurvature,
    group: int,
) -> Tensor:
    """The dense block of the definitions.

    Eigenvectors are not unique where eigenvalues meet, so for the corrected methods the library's basis
    is first shown to diagonalise the definition's factors, and then used.
    """
    if method in (KFAC, TKFAC):
        return oracle_block(method, samples, sharing, group)
    factors = expected_factors(method, samples, sharing, group)
    q_out, q_in = curvature.basis.vectors_out[group], curvature.basis.vectors_in[group]
    assert_diagonalises(q_in, factors.inputs)
    assert_diagonalises(q_out, factors.outputs)
    return oracle.eigen_corrected(fisher_of(samples, group), q_out.contiguous(), q_in.contiguous())


def assert_diagonalises(q: Tensor, matrix: Tensor) -> None:
    """Q is orthogonal, and Q^T M Q has nothing off its diagonal."""
    assert_close(q.T @ q, identity(len(q)))
    turned = q.T @ matrix @ q
    assert_close(turned, torch.diag(turned.diagonal()))


def assert_blocks_agree(
    method: type[NaturalGradient], samples: oracle.Samples, sharing: str, curvature: LayerCurvature
) -> None:
    """Every group's block of the library is that of the definitions."""
    assert curvature.rescaling.shape[0] == samples.a.shape[1]
    for group in groups_of(samples):
        expected = expected_block(method, samples, sharing, curvature, group)
        assert_close(dense_block(curvature, group), expected)


every_kind = pytest.mark.parametrize("kind", KINDS)


every_bias = pytest.mark.parametrize("bias", BIASES, ids=["bias", "no bias"])


class Pool(nn.Module):
    """Mean or sum over the positions of [N, T, d] or, with channels first, of [N, C, ...]."""

    def __init__(self, how: str, channels_first: bool = False) -> None:
        super().__init__()
        self.how, self.channels_first = how, channels_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).mT if self.channels_first else x
        return x.mean(1) if self.how == "mean" else x.sum(1)
