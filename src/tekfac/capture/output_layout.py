"""Where a prediction has its samples: on its first axis, on another one, or it is that of a single sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tekfac.capture.module_calls import ModuleCall
from tekfac.layers.kinds.base import SimpleKind
from tekfac.layers.kinds.convolution import ConvolutionKind


@dataclass(frozen=True)
class OutputLayout:
    """How a prediction is turned so that its first axis holds the samples, and back.

    Attributes:
        axis: that holds them; None: none does, as the prediction is that of a single sample.
    """

    axis: int | None

    def samples_first(self, x: Tensor) -> Tensor:
        """What has the shape of the prediction, with the samples on the first axis."""
        return x[None] if self.axis is None else x.movedim(self.axis, 0)

    def as_it_was(self, x: Tensor) -> Tensor:
        """What has the samples on the first axis, in the shape of the prediction."""
        return x[0] if self.axis is None else x.movedim(0, self.axis)


def found_layout(calls: Sequence[ModuleCall], outputs: Tensor) -> OutputLayout:
    """What the calls of layers show of a prediction, [N, ...], [T, N, ...] or [C]."""
    if outputs.ndim == 1 and calls and all(map(_is_of_one_sample, calls)):
        return OutputLayout(None)
    return OutputLayout(1 if layer_with_samples_second(calls, outputs) is not None else 0)


def layer_with_samples_second(calls: Sequence[ModuleCall], outputs: Tensor) -> ModuleCall | None:
    """A call of a layer that knows its samples, if all that do have as many as the outputs' second axis.

    And not as many as the first one, which then holds the positions of sequences, [T, N, ...].
    """
    if outputs.ndim < 2 or outputs.shape[0] == outputs.shape[1]:
        return None
    known = {noted: count for noted in calls if (count := _known_samples(noted, outputs)) is not None}
    return next(iter(known)) if set(known.values()) == {outputs.shape[1]} else None


def _known_samples(noted: ModuleCall, outputs: Tensor) -> int | None:
    """The samples of a call, where the module knows them.

    A convolution has them first, whatever its outputs become. Frames of samples may be folded there, as many
    as there are classes by chance: of outputs [N, C] it says nothing.
    """
    kind, module, kept = noted.watched.kind, noted.watched.module, noted.call.kept
    if isinstance(kind, ConvolutionKind) and outputs.ndim > 2 and not _is_of_one_sample(noted):
        return len(kept["input"])
    return kind.num_samples(module, kept)


def _is_of_one_sample(noted: ModuleCall) -> bool:
    kind, module = noted.watched.kind, noted.watched.module
    return isinstance(kind, SimpleKind) and kind.form(module).is_unbatched(noted.call.kept["input"])
