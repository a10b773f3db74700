"""Calls of modules that hide what is inside, repeated in the open.

`nn.MultiheadAttention` and the recurrent layers compute everything in one piece; the rows that their matrices
are multiplied with, and the gradients there, are not to be seen from outside. So a call is computed once more,
from the same inputs (and the same random numbers), in plain operations with a zero added wherever a gradient is
wanted, and what came back for the module's outputs is sent through it. It must give what the module gave.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tekfac.layers.kinds.base import Application, Call, LayerKind, RepetitionError, RowForm

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far, relative to its norm, a repeated output may be off; other precisions: 0.1."""


class PartUse(NamedTuple):
    """What a repeated call shows of one part: an application, with the gradients of all vectors."""

    form: RowForm
    inputs: Tensor
    gradients: list[Tensor]
    real: Tensor | None = None


class Replay(ABC):
    """A call, repeated.

    Attributes:
        outputs: what the module returns, as `LayerKind.outputs` has it.
    """

    outputs: Sequence[Tensor]

    @abstractmethod
    def uses(self, vectors: Sequence[Sequence[Tensor]]) -> list[PartUse]:
        """Of every part, in their order, given the gradients at all probes for every vector."""


class ReplayedKind(LayerKind):
    """A kind of module whose calls are repeated."""

    @abstractmethod
    def replay(self, module: nn.Module, call: Call, probes: Probes) -> Replay:
        """Compute a call once more."""

    def repeats(self, module: nn.Module) -> bool:
        """Always."""
        return True

    def applications(self, module: nn.Module, call: Call) -> list[Application]:
        """Those of the repeated call."""
        probes = Probes()
        with torch.enable_grad(), with_random_state(call.random_state, call.outputs[0].device):
            replay = self.replay(module, call, probes)
        require_same(module, replay.outputs, call)
        with torch.enable_grad():
            vectors = probes.gradients(replay.outputs, call.vectors)
        found = []
        for part, (form, inputs, gradients, real) in enumerate(replay.uses(vectors)):
            probe = None if call.probe is None else gradients.pop()
            found.append(Application(part, form, inputs, gradients, probe, real))
        return found


def random_state(device: torch.device) -> Any:
    """The generators that a forward pass on this device draws from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def with_random_state(state: Any, device: torch.device) -> Iterator[None]:
    """Draw the numbers that were drawn then; afterwards the generators are as they were before."""
    if state is None:
        yield
        return
    on_host, on_device = state
    with torch.random.fork_rng(devices=[device] if on_device is not None else []):
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        yield


class Probes:
    """Zeros that are added where a gradient is wanted."""

    def __init__(self) -> None:
        self.zeros: list[Tensor] = []

    def added(self, value: Tensor) -> Tensor:
        """The value, with the next probe added to it."""
        self.zeros.append(torch.zeros_like(value, requires_grad=True))
        return value + self.zeros[-1]

    def like(self, *shape: int, example: Tensor) -> Tensor:
        """The next probe itself, to be added piece by piece."""
        self.zeros.append(example.new_zeros(shape).requires_grad_())
        return self.zeros[-1]

    def gradients(
        self, outputs: Sequence[Tensor], vectors: Sequence[Sequence[Tensor | None]]
    ) -> list[list[Tensor]]:
        """For every vector (a gradient of each output) the gradients at all probes."""
        found = []
        for vector in vectors:
            pairs = [
                (output, gradient.to(output.dtype))
                for output, gradient in zip(outputs, vector, strict=False)
                if gradient is not None and output.requires_grad
            ]
            if not pairs:
                found.append([torch.zeros_like(zero) for zero in self.zeros])
                continue
            reached, sent = zip(*pairs, strict=True)
            grad = torch.autograd.grad
            found.append([*grad(reached, self.zeros, sent, retain_graph=True, materialize_grads=True)])
        return found


def require_same(module: nn.Module, repeated: Sequence[Tensor], call: Call) -> None:
    """Raise RepetitionError if a repeated call gave something else than the module had given."""
    for ours, theirs in zip(repeated, call.outputs, strict=False):
        theirs = theirs.to(ours.dtype)
        allowed = TOLERANCE.get(call.outputs[0].dtype, 0.1)
        if float((ours.detach() - theirs).norm()) > allowed * float(theirs.norm()) + 1e-12:
            raise RepetitionError(
                f"a call of {type(module).__name__} could not be repeated (its dropout draws from a generator "
                "that cannot be set back, or its parameters were changed in between)"
            )
