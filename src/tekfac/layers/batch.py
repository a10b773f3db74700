"""What one forward and backward pass left for a layer: a value that unfolds into rows when they are needed.

A layer may be applied more than once in a forward pass (a module used twice, modules that share their
parameters). Its gradient is the sum over the applications, so they are simply further positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tekfac.common.phases import Phase
from tekfac.layers.kinds.base import Application, RowForm
from tekfac.layers.layer import Layer
from tekfac.layers.rows import Rows, Tokens


@dataclass(frozen=True)
class PassContext:
    """What is known of a forward and backward pass beside the layers' own rows.

    Attributes:
        num_terms: the number of loss terms M that the Fisher is divided by.
        ignored: [N, P], which of each sample's terms take no part in the loss; None where all do.
        padding: [N, T], which positions are padding, where the model was told; None where none is.
    """

    num_terms: float
    ignored: Tensor | None = None
    padding: Tensor | None = None

    @classmethod
    def of(cls, num_terms: int, counted: Tensor, real: Tensor | None) -> PassContext:
        """From which terms count, [N, P], and which positions are real, [N, T], if that is known."""
        ignored = None if bool(counted.all()) else ~counted
        padding = None if real is None or bool(real.all()) else ~real
        return cls(num_terms, ignored, padding)

    def of_part(self, chosen: Tensor, share: float, samples: int) -> PassContext:
        """What is known of some of so many samples, which stand for that share of the loss terms."""

        def part(mask: Tensor | None) -> Tensor | None:
            return None if mask is None or len(mask) != samples else mask[chosen]

        return PassContext(self.num_terms * share, part(self.ignored), part(self.padding))

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


class BatchShape(NamedTuple):
    """The six sizes of a batch in the canonical layout."""

    columns: int  # K
    groups: int  # G
    samples: int  # N
    positions: int  # T
    d_in: int
    d_out: int


@dataclass(frozen=True)
class LayerBatch:
    """What one forward and backward pass left for one layer.

    Attributes:
        layer: whose parameters were applied.
        applications: of them, in the same forward pass, samples first.
        samples: that the rows are divided into.
        context: of the pass.
        gradient_factor: what captured gradients are multiplied by, to be those of single loss terms.
    """

    layer: Layer
    applications: tuple[Application, ...]
    samples: int
    context: PassContext
    gradient_factor: float = 1.0
    has_rows: ClassVar[bool] = True

    @property
    def num_terms(self) -> float:
        """The number of loss terms M that the Fisher is divided by."""
        return self.context.num_terms

    @property
    def has_masks(self) -> bool:
        """Whether some positions may not count."""
        masks = (self.context.ignored, self.context.padding, *(own.real for own in self.applications))
        return any(mask is not None for mask in masks)

    @property
    def shape(self) -> BatchShape:
        """K, G, N, T, d_in and d_out of the whole batch."""
        sizes = self.layer.shape
        positions = sum(a.form.positions(sizes, a.gradients[0], self.samples) for a in self.applications)
        columns = len(self.applications[0].gradients)
        return BatchShape(columns, sizes.groups, self.samples, positions, sizes.d_in, sizes.d_out)

    def of_part(self, chosen: Tensor, share: float) -> LayerBatch:
        """The batch of some of its samples, which stand for that share of the loss terms."""

        def part(application: Application) -> Application:
            fold = len(application.inputs) // self.samples
            rows = (chosen[:, None] * fold + torch.arange(fold, device=chosen.device)).flatten()
            return replace(
                application,
                inputs=application.inputs[rows],
                gradients=[gradient[rows] for gradient in application.gradients],
                probe=None,
                real=None if application.real is None else application.real[rows],
            )

        applications = tuple(part(application) for application in self.applications)
        context = self.context.of_part(chosen, share, self.samples)
        return replace(self, applications=applications, samples=len(chosen), context=context)

    def fits(self, layer: Layer) -> bool:
        """Whether it has all that the layer, in a new form, needs."""
        return True

    def summed(self, sums: Sums) -> Tensor:
        """The gradients of sums of the samples, [K, G, n, d_out, d_in]."""

        def of(application: Application) -> Tensor:
            gradients = torch.stack(list(application.gradients))
            return sums.of(self.layer, application.form, application.inputs, gradients)

        first, *others = self.applications
        return sum(map(of, others), start=of(first))

    def chunks(self, samples_per_chunk: int) -> Iterator[Rows]:
        """The rows of all samples, at most `samples_per_chunk` at a time."""
        for start in range(0, self.samples, samples_per_chunk):
            yield self.rows(start, min(start + samples_per_chunk, self.samples))

    def rows(self, start: int, stop: int) -> Rows:
        """The rows of samples start..stop-1, in the canonical layout."""
        with Phase("unfold"):
            return self._unfolded(start, stop)

    def _unfolded(self, start: int, stop: int) -> Rows:
        layer = self.layer
        parts = (self._part(application, start, stop) for application in self.applications)
        inputs, gradients, masks = zip(*parts, strict=True)
        a, u, counted = _joined(inputs), _joined(gradients), _joined_masks(masks, inputs)
        if layer.shape.layout == "units":
            a, u = a.sum(dim=3, keepdim=True), u[:, :, :, :1]  # a is the gradient: a sample's is one sum
        if self.gradient_factor != 1:
            u = u * self.gradient_factor
        if len(a) > 1 or layer.is_tied or layer.shape.layout == "units":
            a, u, counted = _columns_as_samples(a, u, counted)
        else:
            a = a[0]
        tokens = None
        if layer.is_table:
            a, tokens = _one_hot(a, layer)
        return Rows(a, u, counted, layer.shape.forms, tokens, layer.is_tied)

    def _part(self, application: Application, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of one application: a [K or 1, G, n, T, d_in], u [K or 1, G, n, T, d_out], counted [1 or G, n, T].

        A first axis of k * samples holds k positions per sample.
        """
        layer = self.layer
        fold = len(application.inputs) // self.samples
        part = slice(start * fold, stop * fold)
        inputs = application.inputs[part]
        if inputs.is_floating_point():
            inputs = inputs.to(layer.dtype)
        own = [gradient[part] for gradient in application.gradients]
        gradients = (own[0][None] if len(own) == 1 else torch.stack(own)).to(layer.dtype)
        a, u = application.form.rows(layer.shape, inputs, gradients)
        a = a.reshape(*a.shape[:2], stop - start, -1, a.shape[-1])
        u = u.reshape(*u.shape[:2], stop - start, -1, u.shape[-1])
        counted = None
        if layer.shape.layout != "units":
            idle = self.context.idle(self.samples, a.shape[3], slice(start, stop))
            if idle is not None:
                reached = _nonzero(u) & _nonzero(a) if layer.is_tied else _nonzero(u)
                counted = (~idle | reached)[None]
        if application.real is not None:
            real = application.real[part].transpose(0, 1)
            real = real.reshape(len(real), stop - start, -1)
            counted = real if counted is None else counted & real
        return a, u, counted


@dataclass(frozen=True)
class Sums:
    """Samples put together to a few sums with random signs, each of samples that follow one another.

    The squares of such a sum are those of its samples, in expectation over the signs (docs/mathematics.md,
    section 6), so that many samples can be measured at the price of a few.

    Attributes:
        signs: 1 or -1 for every sample of the batch, [N].
        parts: the number of parts that the batch is cut into, as equal as they can be.
        chosen: which of them become sums, in ascending order.
        weight: of each sum, so that the squares of the chosen ones stand for those of all.
        start: the number of the first sample that is here, where others are elsewhere.
        samples: how many are here; None: all.
    """

    signs: Tensor
    parts: int
    chosen: Sequence[int]
    weight: float
    start: int = 0
    samples: int | None = None

    @classmethod
    def of_all(cls, signs: Tensor, count: int) -> Sums:
        """All samples in so many sums."""
        return cls(signs, count, range(count), 1.0)

    @classmethod
    def of_some(cls, signs: Tensor, parts: int, chosen: Sequence[int]) -> Sums:
        """The samples of some parts, a sum for each."""
        return cls(signs, parts, chosen, math.sqrt(parts / len(chosen)))

    def of_part(self, start: int, samples: int) -> Sums:
        """What some of the samples have in the sums; a sum of samples here and elsewhere becomes two."""
        part = replace(self, start=start, samples=samples)
        return replace(part, chosen=[number for number in self.chosen if part._rows(number)])

    def _rows(self, part: int) -> range:
        """Of a part of the batch the samples that are here, by their numbers here."""
        least, longer = divmod(len(self.signs), self.parts)  # as torch.tensor_split does
        first = part * least + min(part, longer) - self.start
        last = first + least + (part < longer)
        return range(max(0, first), last if self.samples is None else min(last, self.samples))

    def a_few_at_a_time(self, most: int) -> Iterator[Sums]:
        """The same sums, so many of them at a time; once, if there is none."""
        for start in range(0, max(1, len(self.chosen)), most):
            yield replace(self, chosen=self.chosen[start : start + most])

    def of(self, layer: Layer, form: RowForm, inputs: Tensor, gradients: Tensor) -> Tensor:
        """The gradients of the sums, [K, G, n, d_out, d_in].

        Args:
            layer: whose parameters were applied.
            form: of the rows.
            inputs: [N, ...], or k times as many.
            gradients: [K, N, ...], likewise.
        """
        samples = len(self.signs) if self.samples is None else self.samples
        fold = len(inputs) // samples
        weights = self.signs[self.start : self.start + samples].to(layer.dtype) * self.weight
        weights = weights.repeat_interleave(fold) if fold > 1 else weights
        weights = weights.reshape(1, -1, *[1] * (gradients.ndim - 2))
        shape = layer.shape
        sizes = (len(gradients), shape.groups, shape.d_out, len(self.chosen), shape.d_in)
        found = weights.new_empty(sizes).transpose(2, 3)  # so that rows of both sides lie flat in memory
        for place, part in enumerate(self.chosen):
            own = self._rows(part)
            rows = slice(fold * own.start, fold * own.stop)
            weighted = gradients[:, rows].to(layer.dtype) * weights[:, rows]
            found[:, :, place] = form.gradient(shape, inputs[rows].to(layer.dtype), weighted)
        return found


@dataclass(frozen=True)
class FormedBatch:
    """What one forward and backward pass left for one layer, where gradients were formed in it.

    Attributes:
        layer: whose parameters were applied.
        gradients: of samples, or of sums of them, [K, G, n, d_out, d_in].
        num_terms: the number of loss terms M that the Fisher is divided by.
        gradient_factor: what captured gradients are multiplied by, to be those of single loss terms.
    """

    layer: Layer
    gradients: Tensor
    num_terms: float
    gradient_factor: float = 1.0
    has_masks: ClassVar[bool] = False
    has_rows: ClassVar[bool] = True

    @property
    def shape(self) -> BatchShape:
        """K, G, N, T, d_in and d_out: every column is a sample, a row of its gradient a position."""
        columns, groups, count, d_out, _ = self.gradients.shape
        return BatchShape(1, groups, columns * count, d_out, self.layer.shape.d_in, d_out)

    def fits(self, layer: Layer) -> bool:
        """Whether it has all that the layer, in a new form, needs: a bias that was frozen was left out."""
        return layer.shape.d_in <= self.gradients.shape[-1]

    def chunks(self, samples_per_chunk: int) -> Iterator[Rows]:
        """The gradients as rows, at most `samples_per_chunk` at a time."""
        shape = self.layer.shape
        gradients = self.gradients[..., : shape.d_in].transpose(0, 1).flatten(1, 2)  # [G, K n, d_out, d_in]
        scale = self.gradient_factor**2
        if shape.layout == "units":  # small, and measured by any rule
            gradients, scale = gradients * self.gradient_factor, 1.0
        for a in torch.split(gradients, samples_per_chunk, dim=1):
            u = torch.eye(shape.d_out, dtype=a.dtype, device=a.device).expand(1, *a.shape[:3], -1)
            yield Rows(a, u, None, shape.forms, formed=True, scale=scale)


@dataclass(frozen=True)
class MomentBatch:
    """What one forward and backward pass left for one layer, where gradients were formed and squared in it.

    Attributes:
        layer: whose parameters were applied.
        input: the sum of G^T G over samples, or sums of them, in the form of the input side.
        output: the sum of G G^T, in the form of the output side.
        num_terms: the number of loss terms M that the Fisher is divided by.
        gradient_factor: what captured gradients are multiplied by, to be those of single loss terms.
    """

    layer: Layer
    input: Tensor
    output: Tensor
    num_terms: float
    gradient_factor: float = 1.0
    has_masks: ClassVar[bool] = False
    has_rows: ClassVar[bool] = False

    @property
    def shape(self) -> BatchShape:
        """K, G, N, T, d_in and d_out: of one sample that stands for all."""
        sizes = self.layer.shape
        return BatchShape(1, sizes.groups, 1, sizes.d_out, sizes.d_in, sizes.d_out)

    def fits(self, layer: Layer) -> bool:
        """Whether the layer is as it was: a bias that is frozen now cannot be taken out of the moments."""
        return layer.shape == self.layer.shape

    def chunks(self, samples_per_chunk: int) -> Iterator[Rows]:
        """The moments alone."""
        nothing = self.input.new_empty(0)
        moments, scale = (self.input, self.output), self.gradient_factor**2
        yield Rows(nothing, nothing, None, self.layer.shape.forms, formed=True, scale=scale, moments=moments)


CapturedBatch = LayerBatch | FormedBatch | MomentBatch
"""What a pass may leave for a layer."""


class RowSource(Protocol):
    """What the curvature is measured from: rows, a few samples at a time."""

    @property
    def num_terms(self) -> float:
        """The number of loss terms M that the Fisher is divided by."""
        ...

    @property
    def shape(self) -> BatchShape:
        """K, G, N, T, d_in and d_out of the whole batch."""
        ...

    def chunks(self, samples_per_chunk: int) -> Iterable[Rows]:
        """The rows of all samples, at most `samples_per_chunk` at a time."""
        ...


class KeptRows:
    """A batch whose rows are unfolded once where one chunk holds them all: moments and Theta share them."""

    def __init__(self, batch: RowSource) -> None:
        self._batch = batch
        self._rows: Rows | None = None
        self.num_terms = batch.num_terms
        self.shape = batch.shape

    def chunks(self, samples_per_chunk: int) -> Iterable[Rows]:
        """The rows of all samples, at most `samples_per_chunk` at a time."""
        if samples_per_chunk < self.shape.samples:
            return self._batch.chunks(samples_per_chunk)
        if self._rows is None:
            (self._rows,) = self._batch.chunks(self.shape.samples)
        return (self._rows,)


def _nonzero(rows: Tensor) -> Tensor:
    """Which rows [K, G, n, T, d] are not 0 in every column and group, [n, T]."""
    return rows.ne(0).any(dim=-1).any(dim=0).any(dim=0)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows [K or 1, G, n, T, d] one after the other along the positions."""
    if len(parts) == 1:
        return parts[0]
    columns = max(len(part) for part in parts)
    return torch.cat([part.expand(columns, *part.shape[1:]) for part in parts], dim=3)


def _joined_masks(masks: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Tensor | None:
    """Which positions count, [1 or G, n, T], one application after the other; None where all do."""
    if all(own is None for own in masks):
        return None
    groups = max(1 if own is None else len(own) for own in masks)
    parts = [
        a.new_ones(groups, *a.shape[2:4], dtype=torch.bool) if own is None else own.expand(groups, -1, -1)
        for a, own in zip(inputs, masks, strict=True)
    ]
    return torch.cat(parts, dim=2)


def _columns_as_samples(a: Tensor, u: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Every column of a sample as a sample, where a has columns, too: [K, G, n, T, d] -> [G, K n, T, d]."""
    columns = max(len(a), len(u))
    a, u = (x.expand(columns, *x.shape[1:]).transpose(0, 1).flatten(1, 2) for x in (a, u))
    return a, u[None], None if counted is None else counted.repeat(1, columns, 1)


def _one_hot(a: Tensor, layer: Layer) -> tuple[Tensor, Tokens]:
    """Numbers of a table's rows, [1, n, T, 1], as one-hot inputs over those that occur."""
    columns, inverse = torch.unique(a[0, ..., 0], return_inverse=True)
    return F.one_hot(inverse, len(columns)).to(layer.dtype)[None], Tokens(columns, layer.shape.d_in)
