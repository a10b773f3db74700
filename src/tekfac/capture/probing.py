"""Which rows of a layer are whose sample: told by shapes, or by a probe, one sample's gradient sent down alone.

A probe costs a backward pass. Where it has shown that a pass of some shapes is as its shapes would have had it,
later passes of these shapes are taken so; now and then, ever more rarely, one of them is probed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from tekfac.capture.autograd import Descent, sending
from tekfac.capture.module_calls import ModuleCall, is_unclear, shapes_of
from tekfac.capture.output_layout import OutputLayout
from tekfac.capture.sample_axis import SampleAxis, is_elsewhere, share_of_sample
from tekfac.capture.taking import clear_layer

MOST_REMEMBERED = 256
"""Different shapes of passes."""


class Probing:
    """What probes have told of the passes through one model."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._passes: dict[Hashable, int] = {}

    def saw(self, layer: str) -> None:
        """Note that the samples of a layer were told apart."""
        self._seen.add(layer)

    def is_open(self, calls: Sequence[ModuleCall], outputs: Tensor) -> bool:
        """Whether shapes leave open which rows are whose.

        So they do where a layer was called more than once or its input can be arranged in several ways and,
        for a layer seen for the first time, where the outputs have more than one axis beside the classes.
        """
        names = _layers_of(calls)
        if len(set(names)) < len(names) or (outputs.ndim > 2 and not self._seen.issuperset(names)):
            return True
        return any(is_unclear(noted, len(outputs)) for noted in calls)

    def is_wanted(self, shapes: Hashable) -> bool:
        """Whether a pass whose shapes leave something open is to be probed.

        It is unless the same was probed before, and then at the second, fourth, eighth ... pass of its shapes.
        """
        if shapes not in self._passes:
            return True
        self._passes[shapes] += 1
        passes = self._passes[shapes]
        return passes & (passes - 1) == 0

    def note(self, shapes: Hashable, *, agreed: bool) -> None:
        """Note whether a probe has shown of a pass what its shapes would have had by themselves."""
        if not agreed:
            self._passes.pop(shapes, None)
            return
        if shapes not in self._passes and len(self._passes) >= MOST_REMEMBERED:
            self._passes.clear()
        self._passes.setdefault(shapes, 1)


def shapes_of_pass(calls: Iterable[ModuleCall], outputs: Tensor) -> Hashable:
    """What has to be the same for one pass to be like another."""
    of_calls = ((tuple(_layers_of([noted])), shapes_of(noted)) for noted in calls)
    return tuple(outputs.shape), tuple(of_calls)


def hopeful(calls: Sequence[ModuleCall], samples: int) -> list[ModuleCall]:
    """The calls whose first axis holds the samples, as far as shapes tell; of layers that were called once."""
    times_called = Counter(_layers_of(calls))
    return [
        noted
        for noted in calls
        if not is_unclear(noted, samples)
        and (layer := clear_layer(noted, samples)) is not None
        and times_called[layer.name] == 1
    ]


def probed_clear(
    descent: Descent, gradient: Tensor, calls: Sequence[ModuleCall], axis: SampleAxis, layout: OutputLayout
) -> list[ModuleCall]:
    """Send the gradient of one sample alone down to the calls; the hopeful ones that it shows to be clear.

    What arrives is kept where shapes leave several ways open, or tell otherwise than it does. Of the others
    only its share in the sample's own rows is looked at.

    Args:
        descent: from the outputs to the calls.
        gradient: at the outputs.
        calls: all that the gradient of the pass comes to.
        axis: of the samples.
        layout: of the outputs.
    """
    hoped = hopeful(calls, axis.num_samples)
    probe = torch.zeros_like(gradient)
    layout.samples_first(probe)[axis.probed] = layout.samples_first(gradient)[axis.probed]
    _send(descent, calls, probe, axis.probed, only_shares=hoped)
    clear = [noted for noted in hoped if not is_elsewhere(noted.call.probe or ())]
    if len(clear) < len(hoped):
        _send(descent, calls, probe, axis.probed, only_shares=clear)
    for noted in clear:
        noted.call.probe = None
    return clear


def _send(
    descent: Descent,
    calls: Sequence[ModuleCall],
    probe: Tensor,
    probed: int,
    only_shares: Sequence[ModuleCall],
) -> None:
    """Send a probe down to the calls; of some, take its share in the probed sample's own rows."""
    for noted in only_shares:
        noted.call.take = partial(share_of_sample, sample=probed)
    with sending():
        for noted, own in zip(calls, descent.send(probe), strict=True):
            noted.call.probe = own
    for noted in only_shares:
        noted.call.take = None


def _layers_of(calls: Iterable[ModuleCall]) -> list[str]:
    return [layer.name for noted in calls for layer in noted.watched.layers.values()]
