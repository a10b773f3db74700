"""Calls of a layer, as they were noted in a forward pass, turned into one batch of rows.

A layer may be called more than once in a forward pass (a module used twice, modules that share their
parameters). Its gradient is the sum over the calls, so the calls are simply further positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from tekfac.layers import Layer
from tekfac.likelihoods import OutputShapeError
from tekfac.rows import BatchShape, LayerBatch, Rows


@dataclass
class Call:
    """One call of a layer's module in a forward pass.

    Attributes:
        layer: whose call it is.
        module: which of the layer's modules.
        inputs: what the module received, [L, ...].
        edge: where the gradient of the output passes; None where the output is the model's own.
        version: of the inputs, to notice a change in place.
        gradients: of the output, [L, ...] each, one for every back-propagated vector.
        probe: the gradient of the output that a single sample of the model's outputs causes, [L, ...]; only
            taken where the shape alone does not tell which axis holds the samples.
    """

    layer: Layer
    module: nn.Module
    inputs: Tensor
    edge: GradientEdge | None
    version: int
    gradients: list[Tensor] = field(default_factory=list)
    probe: Tensor | None = None


Arrangement = Callable[[Tensor], Tensor]


def layer_batch(
    calls: Sequence[Call],
    num_outputs: int,
    num_terms: int,
    counted: Tensor,
    *,
    any_coarser: bool,
    probed_sample: int,
) -> tuple[LayerBatch, str | None]:
    """All calls of one layer as one batch, each sample's positions one after the other.

    Args:
        calls: of the same layer, in the same forward pass, samples first.
        num_outputs: the number of samples in the model's outputs.
        num_terms: the number of loss terms M.
        counted: [num_outputs, P], which of each sample's terms take part in the loss.
        any_coarser: whether several samples may be treated as one. With sampled labels they may:
            gradients of different terms are independent and have mean zero, so that a coarser grouping
            adds noise but no bias (docs/mathematics.md, section 6).
        probed_sample: whose outputs the calls' probes come from.

    Returns:
        The batch, and what is doubtful about it, in words.

    Raises:
        OutputShapeError: if rows cannot be told apart by sample but have to be.
    """
    layer = calls[0].layer
    lengths = [len(call.inputs) for call in calls]
    samples = num_outputs
    if any(length % num_outputs for length in lengths):
        samples = math.gcd(num_outputs, *lengths) if len(calls) == 1 else 1
    doubt = None
    if samples != num_outputs or _share_of_probe(calls, num_outputs, probed_sample) < 0.5:
        doubt = (
            f"the rows of layer {layer.name!r} cannot be told apart by sample: the model's outputs have "
            f"{num_outputs} samples, the layer was called with first axes of {lengths}, and gradients of one "
            "sample's outputs do not stay with one sample's rows. If the samples are another axis of the "
            "outputs, say which: batch_dim=..."
        )
    if doubt is not None and not any_coarser:
        raise OutputShapeError(
            f"{doubt[0].upper()}{doubt[1:]}. Otherwise leave the layer to first order "
            f"(first_order=[{layer.name!r}]), or use fisher='sampled'."
        )
    ignored = None if bool(counted.all()) else ~counted

    def slice_rows(start: int, stop: int) -> Rows:
        return _joined([_rows(call, samples, start, stop, ignored) for call in calls])

    positions = sum(call.gradients[0].numel() for call in calls) // (layer.weight.shape[0] * samples)
    columns = len(calls[0].gradients)
    sizes = layer.shape
    shape = BatchShape(columns, sizes.groups, samples, positions, sizes.d_in, sizes.d_out)
    return LayerBatch(shape, num_terms, slice_rows), doubt if samples == num_outputs else None


def arrangements(call: Call, num_samples: int) -> list[Arrangement]:
    """The ways to bring the samples of a call to the front, as far as its shape tells, likely ones first.

    The first axis may hold the samples, or k rows of each sample one after the other, or k times all the
    samples (several views put together by `torch.cat`); in sequence-first models the second axis holds them.
    """
    inputs, length = call.inputs, len(call.inputs)
    if inputs.ndim == call.layer.unbatched_ndim:
        return [lambda x: x[None]]
    found: list[Arrangement] = [lambda x: x]
    if length != num_samples and length % num_samples == 0:

        def views_together(x: Tensor) -> Tensor:
            views = x.reshape(length // num_samples, num_samples, *x.shape[1:])
            return views.transpose(0, 1).reshape(x.shape)

        found.append(views_together)
    if not call.layer.is_convolution and inputs.ndim > 2 and inputs.shape[1] == num_samples:
        found.insert(1 if length == num_samples else 0, lambda x: x.transpose(0, 1))
    return found


def samples_first(call: Call, num_samples: int, probed_sample: int) -> Call:
    """The call with the samples as axis 0.

    Of several possible arrangements the one is taken that gives the probed sample most of the probe.
    """

    def arranged(arrange: Arrangement) -> Call:
        probe = None if call.probe is None else arrange(call.probe)
        gradients = [arrange(gradient) for gradient in call.gradients]
        return replace(call, inputs=arrange(call.inputs), gradients=gradients, probe=probe)

    candidates = [arranged(arrange) for arrange in arrangements(call, num_samples)]
    if len(candidates) == 1:
        return candidates[0]
    return max(candidates, key=lambda candidate: _share_of_probe([candidate], num_samples, probed_sample))


def _share_of_probe(calls: Sequence[Call], num_samples: int, probed_sample: int) -> float:
    """How much of the probe's gradient is in the rows of the probed sample; 1 where nothing was probed."""
    probes = [call.probe for call in calls if call.probe is not None]
    total = sum(float(probe.square().sum()) for probe in probes)
    if total == 0:
        return 1.0
    inside = 0.0
    for probe in probes:
        fold = max(1, len(probe) // num_samples)
        inside += float(probe[probed_sample * fold : (probed_sample + 1) * fold].square().sum())
    return inside / total


def _rows(call: Call, samples: int, start: int, stop: int, ignored: Tensor | None) -> Rows:
    """Rows of some samples of one call; a first axis of k * samples holds k positions per sample."""
    fold = len(call.inputs) // samples
    part = slice(start * fold, stop * fold)
    a = call.layer.input_rows(call.module, call.inputs[part])
    u = call.layer.output_rows(call.module, torch.stack([g[part] for g in call.gradients]))
    a = a.reshape(a.shape[0], stop - start, -1, a.shape[-1])
    u = u.reshape(*u.shape[:2], stop - start, -1, u.shape[-1])
    counted = None
    if ignored is not None and len(ignored) == samples:
        if ignored.shape[1] != a.shape[2]:  # no position per term: by sample
            ignored = ignored.all(dim=1, keepdim=True)
        counted = ~ignored[start:stop] | (u != 0).any(dim=-1).any(dim=0).any(dim=0)
    return Rows(a, u, counted)


def _joined(parts: Sequence[Rows]) -> Rows:
    """Rows of several calls as further positions of the same samples."""
    if len(parts) == 1:
        return parts[0]
    counted = None
    if any(part.counted is not None for part in parts):
        everything = [torch.ones(part.a.shape[1:3], dtype=torch.bool, device=part.a.device) for part in parts]
        masks = zip(parts, everything, strict=True)
        counted = torch.cat([all_ if part.counted is None else part.counted for part, all_ in masks], dim=1)
    return Rows(
        torch.cat([part.a for part in parts], dim=2), torch.cat([part.u for part in parts], dim=3), counted
    )
