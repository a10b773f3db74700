"""Which axis of a layer's input holds the samples, and how many of them its rows can be divided into.

Shapes do not always tell. A probe, one sample's gradient sent down alone, shows where that sample's rows are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tekfac.layers.kinds.base import Application, RowForm
from tekfac.likelihoods import OutputShapeError

Arrangement = Callable[[Tensor], Tensor]

STAYS = 0.5
"""Of a probe, at least, in the sample's own rows, where shapes tell which those are."""

STAYS_WHERE_FOLDED = 0.99
"""The same where they do not."""


@dataclass(frozen=True)
class SampleAxis:
    """What is known of the samples in a model's outputs.

    Attributes:
        num_samples: N.
        probed: whose outputs the probes come from.
        may_be_joined: whether several samples may be treated as one. With sampled labels they may: gradients of
            different terms are independent and have mean zero, so that a coarser grouping adds noise but no
            bias (docs/mathematics.md, section 6).
    """

    num_samples: int
    probed: int
    may_be_joined: bool


class InseparableError(ValueError):
    """Gradients of different samples arrive as one sum, but are needed one by one."""


def divided_into(layer: str, applications: Sequence[Application], axis: SampleAxis) -> tuple[int, str | None]:
    """How many samples the rows of a layer are divided into, and what is doubtful about that, in words.

    As many as the model's outputs have. Where the lengths do not divide, both may be the same samples, folded
    in two ways. Where a probed sample's gradient does not stay with rows of its own, all rows are one sample.

    Args:
        layer: its name, for messages.
        applications: of its parameters in the same forward pass, samples first.
        axis: of the model's outputs.

    Raises:
        OutputShapeError: if rows cannot be told apart by sample but have to be.
        InseparableError: if there is one row for all samples, and they have to be told apart.
    """
    num_outputs = axis.num_samples
    lengths = [len(application.inputs) for application in applications]
    samples = num_outputs
    if any(length % num_outputs for length in lengths):
        samples = math.gcd(num_outputs, *lengths) if len(applications) == 1 else 1
    folded = samples != num_outputs
    stays = _share_of_probe(applications, axis, samples) >= (STAYS_WHERE_FOLDED if folded else STAYS)
    samples = samples if stays else 1
    if num_outputs > 1 and all(_has_no_samples(a, num_outputs, stays) for a in applications):
        if axis.may_be_joined:
            return samples, None
        raise InseparableError(
            f"layer {layer!r} is applied once for all samples, so that their gradients arrive as one sum, "
            "and only fisher='sampled' can do with that"
        )
    if not folded and stays:
        return samples, None
    doubt = (
        f"the rows of layer {layer!r} cannot be told apart by sample: the model's outputs have "
        f"{num_outputs} samples, the layer was called with first axes of {lengths}, and gradients of one "
        "sample's outputs do not stay with one sample's rows. If the samples are another axis of the "
        "outputs, say which: batch_dim=..."
    )
    if not axis.may_be_joined:
        raise OutputShapeError(
            f"{doubt[0].upper()}{doubt[1:]}. Otherwise leave the layer to first order "
            f"(first_order=[{layer!r}]), or use fisher='sampled'."
        )
    return samples, None if stays else doubt


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


def samples_first(application: Application, axis: SampleAxis) -> Application:
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

    ways = arrangements(application.form, application.inputs, axis.num_samples)
    candidates = [arranged(arrange) for arrange in ways]
    if len(candidates) == 1:
        return candidates[0]
    num_samples = axis.num_samples
    best = max(candidates, key=lambda candidate: _share_of_probe([candidate], axis, num_samples))
    is_shared = len(application.inputs) == 1 and _share_of_probe([best], axis, num_samples) < STAYS
    return application if is_shared else best  # what is shared by all samples has no axis for them


def is_as_expected(application: Application, axis: SampleAxis) -> bool:
    """Whether a probe shows the samples where they are looked for without one: in the first arrangement."""
    if application.probe is None or len(application.inputs) % axis.num_samples:
        return False
    first = arrangements(application.form, application.inputs, axis.num_samples)[0]
    expected = replace(application, inputs=first(application.inputs), probe=first(application.probe))
    return bool(application.probe.any()) and _share_of_probe([expected], axis, axis.num_samples) >= STAYS


def _has_no_samples(application: Application, num_samples: int, stays: bool) -> bool:
    """Whether rows are there once, for all samples: [1, ...], or look-ups [T] that no sample has for itself.

    `stays` is whether a sample's gradients stay with rows of its own.
    """
    inputs = application.inputs
    is_list = application.form.trailing == 0 and inputs.ndim == 1
    return len(inputs) == 1 or (is_list and (not stays or len(inputs) % num_samples != 0))


def share_of_sample(probe: Tensor, sample: int) -> Tensor:
    """How much of a probe is in one sample's rows, where samples are the first axis; 1 of nothing."""
    inside, total = probe[sample].square().sum(), probe.square().sum()
    return torch.where(total == 0, torch.ones_like(total), inside / total)


def is_elsewhere(shares: Sequence[Tensor | None]) -> bool:
    """Whether the shares of a probe that came to a call's outputs tell that the sample's rows are others."""
    return any(share is not None and not bool(share >= STAYS) for share in shares)


def _share_of_probe(applications: Sequence[Application], axis: SampleAxis, samples: int) -> float:
    """How much of the probe's gradient is in the rows of the probed sample; 1 where nothing was probed.

    Args:
        applications: that were probed, or not.
        axis: of the model's outputs.
        samples: that the rows are divided into; each may stand for several of the outputs'.
    """
    probes = [application.probe for application in applications if application.probe is not None]
    total = sum(float(probe.square().sum()) for probe in probes)
    if total == 0:
        return 1.0
    inside, sample = 0.0, axis.probed * samples // axis.num_samples
    for probe in probes:
        fold = max(1, len(probe) // samples)
        inside += float(probe[sample * fold : (sample + 1) * fold].square().sum())
    return inside / total
