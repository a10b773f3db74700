"""A closure, called so that its loss can be differentiated once more, or had again at other parameters.

A closure for `step(closure)` calls `backward()` itself, and what a backward pass has come by cannot be
differentiated again. So the pass is asked to keep its graph; and where only the loss is wanted, there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tekfac.capture.autograd import sending
from tekfac.capture.awaiting import outermost
from tekfac.capture.compiled import run_eagerly
from tekfac.capture.hooks import predictions_noted
from tekfac.capture.outputs import OutputSelector
from tekfac.layers.kinds.replay import random_state, with_random_state

Closure = Callable[[], Any]


class _Backward(TorchFunctionMode):
    """While it is on, backward passes keep their graphs, or are left out; the losses are noted.

    Attributes:
        losses: that `backward()` was called of.
        differentiates: whether the losses are made of derivatives themselves, as of `torch.autograd.grad`.
    """

    def __init__(self, *, runs: bool) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.differentiates = False
        self._runs = runs

    def total(self) -> Tensor:
        """The sum of the losses, a scalar."""
        return torch.stack([loss.reshape(()) for loss in self.losses]).sum()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, is_backward = kwargs or {}, func is torch.Tensor.backward
        self.differentiates |= func is torch.autograd.grad
        if not is_backward:
            return func(*args, **kwargs)
        loss, weights = args[0], kwargs.get("gradient")
        self.losses.append(loss if weights is None else (loss * weights).sum())
        return func(*args, **{**kwargs, "retain_graph": True}) if self._runs else None


@dataclass(frozen=True)
class Evaluation:
    """What a closure has computed, with the graph of it still whole.

    Attributes:
        returned: by the closure.
        loss: the sum of all that `backward()` was called of, a scalar.
        predictions: of the model, in all its forward passes.
        gradients: that were left at the parameters.
    """

    returned: Any
    loss: Tensor
    predictions: Sequence[Tensor]
    gradients: Mapping[Tensor, Tensor]
    _closure: Closure
    _differentiates: bool
    _model: nn.Module
    _random_state: Any

    @classmethod
    def of(cls, closure: Closure, model: nn.Module, select: OutputSelector | None) -> Evaluation:
        """Call a closure.

        Args:
            closure: with forward and backward passes, that gives the loss.
            model: whose predictions it makes.
            select: the predictions in what the model returns; None: those that are found.

        Raises:
            RuntimeError: if there was no backward pass.
        """
        state = random_state(_device_of(model))
        noting = predictions_noted(model, select)
        with _twice_differentiable(), torch.enable_grad(), noting as noted, _Backward(runs=True) as mode:
            returned = closure()
        if not mode.losses:
            raise RuntimeError(
                "The closure given to step() did not call loss.backward(), or did so by another name "
                "(torch.autograd.backward). Expected a function that zeroes the gradients, computes the loss, "
                "calls its backward() and returns it."
            )
        gradients: dict[Tensor, Tensor] = {p: p.grad for p in model.parameters() if p.grad is not None}
        with torch.enable_grad():
            loss = mode.total()
        found = outermost(noted)
        reached = _gradients(loss, found) if found else ()
        predictions = [own for own, gradient in zip(found, reached, strict=True) if gradient is not None]
        if not predictions:
            raise RuntimeError(
                "The loss of the closure given to step() is no function of the predictions that the model "
                "returned. Expected one that calls the model itself, model(x), and takes the loss of what it "
                "returns; outputs=... says where the predictions are."
            )
        return cls(returned, loss, predictions, gradients, closure, mode.differentiates, model, state)

    def loss_after(self, move: Mapping[Tensor, Tensor]) -> float:
        """The loss where a move leads to, of the same random numbers. Afterwards all is as it was."""
        random = with_random_state(self._random_state, _device_of(self._model))
        there, kept = _moved(move), _kept(self._model)
        graph = torch.set_grad_enabled(self._differentiates)
        with _twice_differentiable(), graph, there, kept, random, _Backward(runs=False) as mode:
            self._closure()
        return float(mode.total())


def _gradients(loss: Tensor, predictions: Sequence[Tensor]) -> Sequence[Tensor | None]:
    with sending():
        return torch.autograd.grad(loss, predictions, retain_graph=True, allow_unused=True)


@contextlib.contextmanager
def _twice_differentiable() -> Iterator[None]:
    """Let models run as they are written, and attention in plain operations: fused ones differentiate once."""
    with run_eagerly(), sdpa_kernel(SDPBackend.MATH):
        yield


@contextlib.contextmanager
def _moved(move: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Parameters elsewhere, and back; behind autograd's back, or their graph could not be used any more."""
    before = {parameter: parameter.clone() for parameter in move}
    try:
        for parameter, own in move.items():
            parameter.data.add_(own)
        yield
    finally:
        for parameter, old in before.items():
            parameter.data.copy_(old)


@contextlib.contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Put gradients and buffers (a norm's statistics, say) aside, and back as they were, likewise."""
    gradients = {p: p.grad for p in model.parameters()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for buffer, before in buffers:
            buffer.data.copy_(before)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
