"""Normalisation layers: a scale, and perhaps a shift, for every unit.

Their block is small: for every unit the 2 x 2 matrix of its scale and shift. It is not approximated. The row
of a sample is its gradient itself, which makes all four methods exact here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        by_sample: whether every sample is normalised by itself, so that some can be without the others.
    """

    layout: Layout = "units"
    normalise: Callable[[Any, Tensor], Tensor] | None = None
    channels: bool = False
    by_sample: bool = False

    def applications(self, module: nn.Module, call: Call) -> list[Application]:
        """The only one, of the normalised input: normalised as a whole batch, as the module did."""
        inputs = self.normalised(module, call.kept, call.dtype)
        return super().applications(module, replace(call, kept={"input": inputs}))

    def normalised(self, module: nn.Module, kept: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
        """What the weight is multiplied with, of all that is kept."""
        inputs: Tensor = kept["input"].to(dtype)
        if self.normalise is None or kept.get(NORMALISED, False):
            return inputs
        return self.normalise(module, inputs)

    def settled(self, module: nn.Module, kept: Mapping[str, Any], dtype: torch.dtype) -> Mapping[str, Any]:
        """The normalised input: how it is normalised may depend on the module's mode."""
        if self.normalise is None or self.by_sample or kept.keys() != {"input"}:
            return kept
        return {"input": self.normalise(module, kept["input"].to(dtype)), NORMALISED: True}

    def part(
        self, module: nn.Module, kept: Mapping[str, Any], rows: Tensor, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Some samples, normalised with the others unless each is by itself."""
        if self.normalise is None or self.by_sample:
            return super().part(module, kept, rows, dtype)
        return {"input": self.normalise(module, kept["input"].to(dtype))[rows], NORMALISED: True}

    def form(self, module: nn.Module) -> RowForm:
        """Gradients as rows."""
        return UnitRows(None if self.channels else module.get_parameter(self.weight).ndim)


NORMALISED = "is normalised"
"""Among what is kept of a call: that its input is already."""


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
            of_weight, of_bias = (gradients * inputs).sum(-1).mT, gradients.sum(-1).mT
        else:
            inputs = inputs.reshape(samples, -1, units)
            gradients = gradients.reshape(-1, samples, inputs.shape[1], units)
            of_weight, of_bias = (gradients * inputs).sum(-2).mT, gradients.sum(-2).mT
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


@dataclass(frozen=True)
class BatchNormKind(UnitKind):
    """A norm by mean and variance of the whole batch: these are enough to normalise some samples of it."""

    def part(
        self, module: nn.Module, kept: Mapping[str, Any], rows: Tensor, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Some samples, normalised by the statistics of all."""
        x: Tensor = kept["input"]
        if module.training or module.running_mean is None:
            mean, variance = _mean_and_variance(x.to(dtype))
        else:
            mean, variance = (part.to(dtype) for part in (module.running_mean, module.running_var))  # type: ignore[assignment]
        eps: float = module.eps  # type: ignore[assignment]
        return {"input": F.batch_norm(x[rows].to(dtype), mean, variance, eps=eps), NORMALISED: True}


def _mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of every channel of [N, C, ...]; torch.var_mean takes ten times as long on the CPU."""
    rows = x.flatten(2) if x.ndim > 2 else x[..., None]
    count = rows.shape[0] * rows.shape[2]
    mean = rows.sum((0, 2)) / count
    centred = rows - mean[:, None]
    return mean, torch.linalg.vector_norm(centred, dim=2).square().sum(0) / count


def _batch_norm(module: Any, x: Tensor) -> Tensor:
    mean, variance = module.running_mean, module.running_var
    if module.training or mean is None:
        return F.batch_norm(x, None, None, training=True, eps=module.eps)
    return F.batch_norm(x, mean.to(x), variance.to(x), eps=module.eps)


LAYER_NORM = UnitKind(
    by_sample=True,
    normalise=lambda module, x: F.layer_norm(x, module.normalized_shape, eps=module.eps),
)
RMS_NORM = UnitKind(
    by_sample=True,
    bias=None,
    normalise=lambda module, x: F.rms_norm(x, module.normalized_shape, eps=module.eps),
)
GROUP_NORM = UnitKind(
    by_sample=True,
    channels=True,
    normalise=lambda module, x: F.group_norm(x, module.num_groups, eps=module.eps),
)
INSTANCE_NORM = InstanceNormKind(by_sample=True, channels=True, normalise=_instance_norm)
BATCH_NORM = BatchNormKind(channels=True, normalise=_batch_norm)
