"""Applications of a layer's parameters in a forward pass, turned into one batch of rows.

A layer may be applied more than once in a forward pass (a module used twice, modules that share their
parameters). Its gradient is the sum over the applications, so they are simply further positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tekfac.layers.kinds.base import Application, RowForm
from tekfac.layers.layer import Layer
from tekfac.layers.rows import BatchShape, LayerBatch, Rows, Tokens
from tekfac.likelihoods import OutputShapeError

Arrangement = Callable[[Tensor], Tensor]


@dataclass
class Share:
    """The factor on captured gradients, known for sure only when a step's last pass has come.

    Attributes:
        terms: the loss terms of all passes, where gradients are those of a mean over all of them; else None.
        loss_scale: what the loss was multiplied by before the backward pass.
    """

    terms: int | None = None
    loss_scale: float = 1.0

    @property
    def factor(self) -> float:
        """What gradients are multiplied by, to be those of single terms."""
        return (1 if self.terms is None else self.terms) / self.loss_scale


@dataclass(frozen=True)
class Context:
    """What is known of a forward and backward pass beside the layers' own rows.

    Attributes:
        num_terms: the number of loss terms M.
        counted: [N, P], which of each sample's terms take part in the loss.
        padding: [N, T], which positions are real, where the model was told.
        any_coarser: whether several samples may be treated as one. With sampled labels they may:
            gradients of different terms are independent and have mean zero, so that a coarser grouping
            adds noise but no bias (docs/mathematics.md, section 6).
        probed_sample: whose outputs the probes come from.
        share: the factor on the gradients.
    """

    num_terms: int
    counted: Tensor
    padding: Tensor | None
    any_coarser: bool
    probed_sample: int
    share: Share

    @property
    def num_samples(self) -> int:
        """N, in the model's outputs."""
        return len(self.counted)


class InseparableError(ValueError):
    """Gradients of different samples arrive as one sum, but are needed one by one."""


def layer_batch(
    layer: Layer, applications: Sequence[Application], context: Context
) -> tuple[LayerBatch, str | None]:
    """All applications of one layer as one batch, each sample's positions one after the other.

    Args:
        layer: whose parameters were applied.
        applications: in the same forward pass, samples first.
        context: of the pass.

    Returns:
        The batch, and what is doubtful about it, in words.

    Raises:
        OutputShapeError: if rows cannot be told apart by sample but have to be.
        InseparableError: if there is one row for all samples, and they have to be told apart.
    """
    samples, doubt = _samples_of(layer, applications, context)
    masks = _Masks.of(context)

    def slice_rows(start: int, stop: int) -> Rows:
        parts = [_rows(layer, application, samples, start, stop, masks) for application in applications]
        return _finished(layer, parts, context.share)

    sizes = layer.shape
    positions = sum(a.form.positions(sizes, a.gradients[0], samples) for a in applications)
    columns = len(applications[0].gradients)
    shape = BatchShape(columns, sizes.groups, samples, positions, sizes.d_in, sizes.d_out)
    return LayerBatch(shape, context.num_terms, slice_rows), doubt


def _samples_of(layer: Layer, applications: Sequence[Application], context: Context) -> tuple[int, str | None]:
    """How many samples the rows of a layer are divided into, and what is doubtful about that, in words.

    As many as the model's outputs have. Where the lengths do not divide, both may be the same samples, folded
    in two ways. Where a probed sample's gradient does not stay with rows of its own, all rows are one sample.
    """
    num_outputs = context.num_samples
    lengths = [len(application.inputs) for application in applications]
    samples = num_outputs
    if any(length % num_outputs for length in lengths):
        samples = math.gcd(num_outputs, *lengths) if len(applications) == 1 else 1
    folded = samples != num_outputs
    stays = _share_of_probe(applications, context, samples) >= (0.99 if folded else 0.5)
    samples = samples if stays else 1
    if num_outputs > 1 and all(_has_no_samples(a, num_outputs, stays) for a in applications):
        if context.any_coarser:
            return samples, None
        raise InseparableError(
            f"layer {layer.name!r} is applied once for all samples, so that their gradients arrive as one sum, "
            "and only fisher='sampled' can do with that"
        )
    if not folded and stays:
        return samples, None
    doubt = (
        f"the rows of layer {layer.name!r} cannot be told apart by sample: the model's outputs have "
        f"{num_outputs} samples, the layer was called with first axes of {lengths}, and gradients of one "
        "sample's outputs do not stay with one sample's rows. If the samples are another axis of the "
        "outputs, say which: batch_dim=..."
    )
    if not context.any_coarser:
        raise OutputShapeError(
            f"{doubt[0].upper()}{doubt[1:]}. Otherwise leave the layer to first order "
            f"(first_order=[{layer.name!r}]), or use fisher='sampled'."
        )
    return samples, None if stays else doubt


# -- which axis holds the samples ----------------------------------------------------------------------


def arrangements(form: RowForm, inputs: Tensor, num_samples: int) -> list[Arrangement]:
    """The ways to bring samples to the front, as far as the shape of inputs tells, likely ones first.

    The first axis may hold the samples, or k rows of each sample one after the other, or k times all the
    samples (several views put together by `torch.cat`); in sequence-first models the second axis holds them.
    """
    if form.is_unbatched(inputs):
        return [lambda x: x[None]]
    length = len(inputs)
    found: list[Arrangement] = [lambda x: x]
    if length != num_samples and length % num_samples == 0:

        def views_together(x: Tensor) -> Tensor:
            views = x.reshape(length // num_samples, num_samples, *x.shape[1:])
            return views.transpose(0, 1).reshape(x.shape)

        found.append(views_together)
    positions_between = form.trailing is not None and form.trailing < 2 and inputs.ndim > form.trailing + 1
    if positions_between and inputs.shape[1] == num_samples:
        found.insert(1 if length == num_samples else 0, lambda x: x.transpose(0, 1))
    return found


def samples_first(application: Application, context: Context) -> Application:
    """The application with the samples as axis 0.

    Of several possible arrangements the one is taken that gives the probed sample most of the probe.
    """

    def arranged(arrange: Arrangement) -> Application:
        return replace(
            application,
            inputs=arrange(application.inputs),
            gradients=[arrange(gradient) for gradient in application.gradients],
            probe=None if application.probe is None else arrange(application.probe),
            real=None if application.real is None else arrange(application.real),
        )

    ways = arrangements(application.form, application.inputs, context.num_samples)
    candidates = [arranged(arrange) for arrange in ways]
    if len(candidates) == 1:
        return candidates[0]
    num_samples = context.num_samples
    best = max(candidates, key=lambda candidate: _share_of_probe([candidate], context, num_samples))
    is_shared = len(application.inputs) == 1 and _share_of_probe([best], context, num_samples) < 0.5
    return application if is_shared else best  # what is shared by all samples has no axis for them


def _has_no_samples(application: Application, num_samples: int, stays: bool) -> bool:
    """Whether rows are there once, for all samples: [1, ...], or look-ups [T] that no sample has for itself.

    `stays` is whether a sample's gradients stay with rows of its own.
    """
    inputs = application.inputs
    is_list = application.form.trailing == 0 and inputs.ndim == 1
    return len(inputs) == 1 or (is_list and (not stays or len(inputs) % num_samples != 0))


def _share_of_probe(applications: Sequence[Application], context: Context, samples: int) -> float:
    """How much of the probe's gradient is in the rows of the probed sample; 1 where nothing was probed.

    Args:
        applications: that were probed, or not.
        context: of the pass.
        samples: that the rows are divided into; each may stand for several of the outputs'.
    """
    probes = [application.probe for application in applications if application.probe is not None]
    total = sum(float(probe.square().sum()) for probe in probes)
    if total == 0:
        return 1.0
    inside, sample = 0.0, context.probed_sample * samples // context.num_samples
    for probe in probes:
        fold = max(1, len(probe) // samples)
        inside += float(probe[sample * fold : (sample + 1) * fold].square().sum())
    return inside / total


# -- rows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Masks:
    """What speaks against counting a position that no gradient reaches.

    Attributes:
        ignored: terms that take no part in the loss, [N, P], or None.
        padding: positions that are padding, [N, T], or None.
    """

    ignored: Tensor | None
    padding: Tensor | None

    @classmethod
    def of(cls, context: Context) -> _Masks:
        counted, real = context.counted, context.padding
        ignored = None if bool(counted.all()) else ~counted
        return cls(ignored, None if real is None or bool(real.all()) else ~real)

    def idle(self, samples: int, positions: int, part: slice) -> Tensor | None:
        """Positions that do not count if no gradient reaches them, [n, T or 1]; None if there are none."""
        found: list[Tensor] = []
        if self.ignored is not None and len(self.ignored) == samples:
            by_position = self.ignored.shape[1] == positions
            found.append(self.ignored if by_position else self.ignored.all(dim=1, keepdim=True))
        if self.padding is not None and self.padding.shape == (samples, positions):
            found.append(self.padding)
        if not found:
            return None
        idle = found[0] if len(found) == 1 else found[0] | found[1]
        return idle[part]


def _rows(
    layer: Layer, application: Application, samples: int, start: int, stop: int, masks: _Masks
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows a [K or 1, G, n, T, d_in] and u [K or 1, G, n, T, d_out] of some samples, and which of them count.

    A first axis of k * samples holds k positions per sample.
    """
    fold = len(application.inputs) // samples
    part = slice(start * fold, stop * fold)
    inputs = application.inputs[part]
    if inputs.is_floating_point():
        inputs = inputs.to(layer.dtype)
    gradients = torch.stack([gradient[part] for gradient in application.gradients]).to(layer.dtype)
    a, u = application.form.rows(layer.shape, inputs, gradients)
    a = a.reshape(*a.shape[:2], stop - start, -1, a.shape[-1])
    u = u.reshape(*u.shape[:2], stop - start, -1, u.shape[-1])
    counted = None
    if layer.shape.layout != "units":
        idle = masks.idle(samples, a.shape[3], slice(start, stop))
        if idle is not None:
            reached = _nonzero(u) & _nonzero(a) if layer.is_unlike else _nonzero(u)
            counted = (~idle | reached)[None]
    if application.real is not None:
        real = application.real[part].transpose(0, 1)
        real = real.reshape(len(real), stop - start, -1)
        counted = real if counted is None else counted & real
    return a, u, counted


def _nonzero(rows: Tensor) -> Tensor:
    """Which rows [K, G, n, T, d] are not 0 in every column and group, [n, T]."""
    return rows.ne(0).any(dim=-1).any(dim=0).any(dim=0)


def _finished(layer: Layer, parts: Sequence[tuple[Tensor, Tensor, Tensor | None]], share: Share) -> Rows:
    """Rows of several applications as further positions of the same samples, in the canonical layout."""
    a, u = _joined([a for a, _, _ in parts]), _joined([u for _, u, _ in parts])
    counted = None
    if any(own is not None for _, _, own in parts):
        groups = max(1 if own is None else len(own) for _, _, own in parts)
        masks = [
            a.new_ones(groups, *a.shape[2:4], dtype=torch.bool) if own is None else own.expand(groups, -1, -1)
            for a, _, own in parts
        ]
        counted = torch.cat(masks, dim=2)
    if layer.shape.layout == "units":
        a, u = a.sum(dim=3, keepdim=True), u[:, :, :, :1]
    factor = share.factor
    if len(a) > 1 or layer.is_unlike or layer.shape.layout == "units":
        # a has columns of its own: every column of a sample becomes a sample.
        columns = max(len(a), len(u))
        a, u = (x.expand(columns, *x.shape[1:]).transpose(0, 1).flatten(1, 2) for x in (a, u))
        counted = None if counted is None else counted.repeat(1, columns, 1)
        u = u[None] * factor
    else:
        a, u = a[0], u * factor if factor != 1 else u
    tokens = None
    if layer.is_table:
        columns_seen, inverse = torch.unique(a[0, ..., 0], return_inverse=True)
        tokens = Tokens(columns_seen, layer.shape.d_in)
        a = F.one_hot(inverse, len(columns_seen)).to(layer.dtype)[None]
    return Rows(a, u, counted, layer.shape.block_in, layer.shape.block_out, tokens, layer.is_unlike)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows [K or 1, G, n, T, d] one after the other along the positions."""
    if len(parts) == 1:
        return parts[0]
    columns = max(len(part) for part in parts)
    return torch.cat([part.expand(columns, *part.shape[1:]) for part in parts], dim=3)
