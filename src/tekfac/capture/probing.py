"""Which rows of a layer are whose sample: told by shapes, or by a probe, one sample's gradient sent down alone.

A probe costs a backward pass. Where it has shown that a pass of some shapes is as its shapes would have had it,
later passes of these shapes are taken so; now and then, ever more rarely, one of them is probed again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
        self._seen: frozenset[str] = frozenset()
        self._passes: Mapping[str, int] = {}
        self._before: tuple[frozenset[str], Mapping[str, int]] = self._seen, self._passes

    def saw(self, layer: str) -> None:
        """Note that the samples of a layer were told apart."""
        self._seen |= {layer}

    def is_open(self, calls: Sequence[ModuleCall], outputs: Tensor) -> bool:
        """Whether shapes leave open which rows are whose.

        So they do where a layer was called more than once or its input can be arranged in several ways and,
        for a layer seen for the first time, where the outputs have more than one axis beside the classes.
        """
        names = _layers_of(calls)
        if len(set(names)) < len(names) or (outputs.ndim > 2 and not self._seen.issuperset(names)):
            return True
        return any(is_unclear(noted, len(outputs)) for noted in calls)

    def is_wanted(self, shapes: str) -> bool:
        """Whether a pass whose shapes leave something open is to be probed.

        It is unless the same was probed before, and then at the second, fourth, eighth ... pass of its shapes.
        """
        if shapes not in self._passes:
            return True
        passes = self._passes[shapes] + 1
        self._passes = {**self._passes, shapes: passes}
        return passes & (passes - 1) == 0

    def note(self, shapes: str, *, agreed: bool) -> None:
        """Note whether a probe has shown of a pass what its shapes would have had by themselves."""
        if not agreed:
            self._passes = {own: passes for own, passes in self._passes.items() if own != shapes}
        elif shapes not in self._passes:
            kept = self._passes if len(self._passes) < MOST_REMEMBERED else {}
            self._passes = {**kept, shapes: 1}

    def keep(self) -> None:
        """What was told so far stays told."""
        self._before = self._seen, self._passes

    def roll_back(self) -> None:
        """As if nothing had been told since the last `keep`."""
        self._seen, self._passes = self._before

    def state(self) -> str:
        """What was told up to the last `keep`, to go on from."""
        seen, passes = self._before
        return json.dumps({"seen": sorted(seen), "passes": dict(passes)})

    def load(self, state: str) -> None:
        """Go on from a saved state."""
        saved = json.loads(state)
        self._seen = frozenset(map(str, saved.get("seen", ())))
        self._passes = {str(shapes): int(passes) for shapes, passes in saved.get("passes", {}).items()}
        self.keep()


def shapes_of_pass(calls: Iterable[ModuleCall], outputs: Tensor) -> str:
    """What has to be the same for one pass to be like another, in a few characters."""
    of_calls = [(_layers_of([noted]), shapes_of(noted)) for noted in calls]
    return hashlib.sha1(repr((tuple(outputs.shape), of_calls)).encode(), usedforsecurity=False).hexdigest()


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
