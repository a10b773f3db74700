"""Normalisation layers: a scale, and perhaps a shift, for every unit.

Their block is small: for every unit the 2 x 2 matrix of its scale and shift. It is not approximated. The row
of a sample is its gradient itself, which makes all four methods exact here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac.layers.kinds.base import Application, Call, RowForm, SimpleKind
from tekfac.layers.shapes import LayerShape, Layout


@dataclass(frozen=True)
class UnitKind(SimpleKind):
    """y = weight * normalise(x) + bias, unit by unit.

    Attributes:
        normalise: (module, x) -> what the weight is multiplied with, shaped like x. None: x itself.
        channels: whether the units are axis 1, [N, C, ...]; otherwise they are the last axes, as many as the
            weight has.
    """

    layout: Layout = "units"
    normalise: Callable[[Any, Tensor], Tensor] | None = None
    channels: bool = False

    def applications(self, module: nn.Module, call: Call) -> list[Application]:
        """The only one, of the normalised input: normalised as a whole batch, as the module did."""
        inputs: Tensor = call.kept["input"].to(call.dtype)
        if self.normalise is not None:
            inputs = self.normalise(module, inputs)
        return super().applications(module, replace(call, kept={"input": inputs}))

    def form(self, module: nn.Module) -> RowForm:
        """Gradients as rows."""
        return UnitRows(None if self.channels else module.get_parameter(self.weight).ndim)


class UnitRows(RowForm):
    """a is the gradient of a sample, [K, C, N, 1, 2], for C units; u is 1."""

    def __init__(self, trailing: int | None) -> None:
        self.trailing = trailing

    def positions(self, shape: LayerShape, gradient: Tensor, samples: int) -> int:
        """Those of a sample are summed up."""
        return 1

    def rows(self, shape: LayerShape, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Summed over positions."""
        samples, units = len(inputs), shape.groups
        if self.trailing is None:  # [K, N, C, ...]
            inputs = inputs.reshape(samples, units, -1)
            gradients = gradients.reshape(-1, samples, units, inputs.shape[-1])
            of_weight, of_bias = torch.einsum("kncp,ncp->kcn", gradients, inputs), gradients.sum(-1).mT
        else:
            inputs = inputs.reshape(samples, -1, units)
            gradients = gradients.reshape(-1, samples, inputs.shape[1], units)
            of_weight, of_bias = torch.einsum("knpc,npc->kcn", gradients, inputs), gradients.sum(-2).mT
        parts = [of_weight, of_bias] if shape.has_bias else [of_weight]
        a = torch.stack(parts, dim=-1)[..., None, :]
        return a, a.new_ones(1, units, samples, 1, 1)


def _axes_of_a_sample(module: nn.Module) -> int:
    """Of [C, L], [C, H, W] or [C, D, H, W], as the module's type says."""
    return 2 if isinstance(module, nn.InstanceNorm1d) else 3 if isinstance(module, nn.InstanceNorm2d) else 4


@dataclass(frozen=True)
class InstanceNormKind(UnitKind):
    """A norm that also takes a single sample, [C, ...], without an axis for samples."""

    def applications(self, module: nn.Module, call: Call) -> list[Application]:
        """Of a single sample as of a batch of one."""
        if call.kept["input"].ndim == _axes_of_a_sample(module):
            call = replace(
                call,
                kept={"input": call.kept["input"][None]},
                gradients=[[g if g is None else g[None] for g in vector] for vector in call.gradients],
                probe=None if call.probe is None else [g if g is None else g[None] for g in call.probe],
            )
        return super().applications(module, call)


def _instance_norm(module: Any, x: Tensor) -> Tensor:
    if not module.training and module.track_running_stats:
        return _batch_norm(module, x)
    return F.instance_norm(x, eps=module.eps)


def _batch_norm(module: Any, x: Tensor) -> Tensor:
    mean, variance = module.running_mean, module.running_var
    if module.training or mean is None:
        return F.batch_norm(x, None, None, training=True, eps=module.eps)
    return F.batch_norm(x, mean.to(x), variance.to(x), eps=module.eps)


LAYER_NORM = UnitKind(normalise=lambda module, x: F.layer_norm(x, module.normalized_shape, eps=module.eps))
RMS_NORM = UnitKind(
    bias=None, normalise=lambda module, x: F.rms_norm(x, module.normalized_shape, eps=module.eps)
)
GROUP_NORM = UnitKind(
    channels=True, normalise=lambda module, x: F.group_norm(x, module.num_groups, eps=module.eps)
)
INSTANCE_NORM = InstanceNormKind(channels=True, normalise=_instance_norm)
BATCH_NORM = UnitKind(channels=True, normalise=_batch_norm)
