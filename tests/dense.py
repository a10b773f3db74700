"""Dense matrices and small networks for the tests; the library's blocks beside the oracle's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC
from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.curvature.layer_curvature import LayerCurvature
from tekfac.optim.natural_gradient import NaturalGradient

METHODS = (KFAC, EKFAC, TKFAC, TEKFAC)
RTOL = 1e-10


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def assert_close(actual: Tensor | float, expected: Tensor | float, rtol: float = RTOL) -> None:
    """Largest difference below rtol times the largest expected entry."""
    actual, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    assert actual.shape == expected.shape, f"{list(actual.shape)} is not {list(expected.shape)}"
    error = relative_error(actual, expected)
    assert error < rtol, f"relative error {error:.2e}, allowed {rtol:.0e}"


def solve_rtol(block: Tensor, damping: float) -> float:
    """RTOL, or the error that any solve with block + damping I may have in float64: n eps condition."""
    values = torch.linalg.eigvalsh(block) + damping
    condition = float(values[-1] / values[0])
    return max(RTOL, len(block) * torch.finfo(torch.float64).eps * condition)


def statistics(optimizer: NaturalGradient) -> Mapping[str, LayerCurvature]:
    """What an optimizer keeps of each layer: running moments and Theta, beside the block they stand for."""
    return MappingProxyType(optimizer._network.blocks)


def dense_block(
    curvature: LayerCurvature | KroneckerBlock, group: int = 0, rescaling: Tensor | None = None
) -> Tensor:
    """Q diag(S) Q^T of one block, acting on row-major vectorised gradient matrices."""
    s = (curvature.rescaling if rescaling is None else rescaling)[group]
    q = torch.kron(
        curvature.basis.vectors_out[group].contiguous(), curvature.basis.vectors_in[group].contiguous()
    )
    return q @ torch.diag(s.reshape(-1)) @ q.T


def dense_factors(curvature: LayerCurvature | KroneckerBlock, group: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Input factor, output factor and scale, put together again from the eigenbasis."""
    basis = curvature.basis
    q_in, q_out = basis.vectors_in[group], basis.vectors_out[group]
    return (
        q_in @ torch.diag(basis.values_in[group]) @ q_in.T,
        q_out @ torch.diag(basis.values_out[group]) @ q_out.T,
        basis.scale[group],
    )


def gradient_step(
    optimizer: NaturalGradient, model: nn.Module, loss: Callable[[Tensor], Tensor], inputs: Tensor
) -> None:
    """Forward, backward and step, as a user writes them."""
    optimizer.zero_grad()
    loss(model(inputs)).backward()
    optimizer.step()


def measured(
    method: type[NaturalGradient],
    model: nn.Module,
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    **settings: Any,
) -> NaturalGradient:
    """An optimizer that has taken one step; gradients of that step are still in `.grad`."""
    optimizer = method.natural(model, lr=1e-30, momentum=0.0, **{"damping": 1e-3, **settings})
    gradient_step(optimizer, model, loss, inputs)
    return optimizer


def sample_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy of a batch of one."""
    return F.cross_entropy(logits, label)


def oracle_block(
    method: type[NaturalGradient], samples: oracle.Samples, sharing: str, group: int = 0
) -> Tensor:
    """The dense block the method stands for, from the definitions."""
    a, u = samples.a[:, group], samples.u[:, group]
    if method is KFAC:
        return {"expand": oracle.kfac_expand, "reduce": oracle.kfac_reduce}[sharing](a, u).dense()
    if method is EKFAC:
        return oracle.ekfac(a, u, sharing)  # type: ignore[arg-type]
    if method is TKFAC:
        return oracle.tkfac(a, u, sharing).dense()  # type: ignore[arg-type]
    return oracle.tekfac(a, u, sharing)  # type: ignore[arg-type]


def sharings(method: type[NaturalGradient]) -> tuple[str, ...]:
    return tuple(method.method.factors.sharings)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double()


every_method = pytest.mark.parametrize("method", METHODS)
