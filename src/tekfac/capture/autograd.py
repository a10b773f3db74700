"""What is asked of autograd's engine: gradients at the edges of calls, and which pass is running."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tekfac.capture.module_calls import ModuleCall
from tekfac.common.torch_internals import (
    is_change_of_precision,
    is_inside_torch_func,
    sequence_number,
    will_run,
)
from tekfac.layers.kinds.base import Call, Take

REENTRANT = (
    "Curvature cannot be measured through checkpoint(..., use_reentrant=True), which allows no second look at "
    "its graph. Use checkpoint(..., use_reentrant=False)."
)

_of_thread = threading.local()


class sending:  # noqa: N801 - used like a function
    """While vectors of our own are back-propagated: no capture may take them for training.

    A nested backward pass runs in the thread of the pass around it, so that two models trained in two threads
    know nothing of each other here. Who sends is noted by its code, which is among the callers while it does:
    what an interrupt leaves noted means nothing.
    """

    def __enter__(self) -> None:
        self._before = getattr(_of_thread, "sender", None)
        _of_thread.sender = sys._getframe(1).f_code

    def __exit__(self, *raised: object) -> None:
        _of_thread.sender = self._before


def is_sending() -> bool:
    """Whether the backward pass that runs in this thread is one of ours."""
    sender, frame = getattr(_of_thread, "sender", None), sys._getframe(1)
    while sender is not None and frame is not None:
        if frame.f_code is sender:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def records_gradients() -> bool:
    """Whether this is a plain forward pass that autograd records (not one inside torch.func)."""
    return torch.is_grad_enabled() and not is_inside_torch_func()


def made_by(outputs: Tensor) -> tuple[Any, int]:
    """The graph node that made the outputs, and which of its results they are.

    A mere change of precision is passed over: a wrapper for mixed precision may return a copy in float32 while
    the loss was taken of the original.
    """
    node, output_nr = outputs.grad_fn, outputs.output_nr
    while node is not None and is_change_of_precision(node):
        node, output_nr = node.next_functions[0]
    return node, output_nr


def accumulates(calls: Sequence[ModuleCall]) -> bool | None:
    """Whether the running backward pass adds to the gradient of some layer's weight.

    Adversarial examples and gradient penalties differentiate by inputs alone: nothing to measure there. None
    for autograd.grad(loss, parameters), which collects gradients in another way.
    """
    weights = (weight for noted in calls for weight in noted.weights)
    try:
        return any(will_run(get_gradient_edge(weight).node) for weight in weights if weight.requires_grad)
    except RuntimeError:
        return None


def will_come_by(call: Call) -> bool:
    """Whether the backward pass that is running comes to a call's outputs."""
    return any(isinstance(edge, int) or (edge and will_run(edge.node)) for edge in call.edges)


Arrived = list[Any]
"""What was taken of what has arrived at each of a call's outputs; None where nothing has."""


class Descent:
    """The way from a model's outputs down to the calls of its layers, for one vector after the other.

    Where a vector arrives at a call, what the call keeps of it is taken out at once: the gradients of a whole
    batch, of all layers at a time, would take as much memory as the forward pass does.
    """

    def __init__(self, outputs_edge: GradientEdge, calls: Sequence[Call]) -> None:
        self._from = outputs_edge
        self._calls = calls
        found = [(call, place, edge) for call in calls for place, edge in enumerate(call.edges)]
        self._at_outputs = [(call, place) for call, place, edge in found if edge == outputs_edge.output_nr]
        self._below = [(call, place, edge) for call, place, edge in found if isinstance(edge, GradientEdge)]

    def will_run(self) -> bool:
        """Whether the backward pass that is running comes to all the calls."""
        return all(will_run(edge.node) for _, _, edge in self._below)

    @cached_property
    def _ends(self) -> set[Any]:
        """Nodes that a pass has to go to, so that it comes by all the others."""
        return _deepest({edge.node for _, _, edge in self._below})

    def send(self, vector: Tensor) -> list[Arrived]:
        """Back-propagate a vector from the outputs; what arrives at each call's outputs."""
        arrived: dict[int, Arrived] = {id(call): [None] * len(call.edges) for call in self._calls}
        ends = [(call, place, edge) for call, place, edge in self._below if edge.node in self._ends]
        handles = [
            edge.node.register_prehook(_taker(arrived[id(call)], place, edge.output_nr, call.take, sent=True))
            for call, place, edge in self._below
            if edge.node not in self._ends
        ]
        try:
            gradients = _gradients(self._from, [edge for _, _, edge in ends], vector) if ends else ()
        finally:
            for handle in handles:
                handle.remove()
        for (call, place, _), gradient in zip(ends, gradients, strict=True):
            arrived[id(call)][place] = _taken(gradient, call.take)
        for call, place in self._at_outputs:
            arrived[id(call)][place] = _taken(vector, call.take)
        return [arrived[id(call)] for call in self._calls]

    def wait(self, gradient: Tensor) -> None:
        """Let the backward pass that is running leave its own gradients at the calls.

        Args:
            gradient: what has arrived at the outputs.
        """
        for call in self._calls:
            call.gradients = [[None] * len(call.edges)]
        for call, place, edge in self._below:
            arrived: Any = call.gradients[0]
            edge.node.register_prehook(_taker(arrived, place, edge.output_nr, call.take, sent=False))
        for call, place in self._at_outputs:
            call.gradients[0][place] = _taken(gradient, call.take)  # type: ignore[index]
        for call in self._calls:
            call.edges = ()  # a node must not be owned by what hangs on it


def _taker(
    into: Arrived, place: int, output_nr: int, take: Take | None, *, sent: bool
) -> Callable[[Any], None]:
    """A hook of a node that takes what is wanted of the first gradient which comes by.

    It is one that was sent, or else one of the user's own pass, inside of which another capture may send some.
    """

    def take_first(gradients: tuple[Tensor | None, ...]) -> None:
        if into[place] is None and is_sending() == sent:
            into[place] = _taken(gradients[output_nr], take)

    return take_first


def _taken(gradient: Tensor | None, take: Take | None) -> Any:
    if gradient is None:
        return None
    return gradient.detach() if take is None else take(gradient.detach())


def _gradients(outputs: GradientEdge, edges: Sequence[GradientEdge], vector: Tensor) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad([outputs], edges, [vector], retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise RuntimeError(REENTRANT) from error


def _deepest(nodes: set[Any]) -> set[Any]:
    """Those of the nodes from which no other of them can be reached: a pass to these comes by all."""
    oldest = min((sequence_number(node) for node in nodes), default=0)
    leads: dict[Any, bool] = {}  # whether one of the nodes is below
    for start in nodes:
        stack = [start]
        while stack:
            node = stack[-1]
            below = [n for n, _ in node.next_functions if n is not None and sequence_number(n) >= oldest]
            waiting = [n for n in below if n not in leads]
            if waiting:
                stack.extend(waiting)
            else:
                leads[node] = any(n in nodes or leads[n] for n in below)
                stack.pop()
    return {node for node in nodes if not leads[node]}


def edge_below(node: Any, edge: GradientEdge | int | None) -> GradientEdge | int | None:
    """The edge, if the model's outputs, which this node made, can reach it; only its number if it is theirs.

    What was called after the outputs were made gets nothing from them, and their own node must not be owned.
    """
    if edge is None or isinstance(edge, int) or sequence_number(edge.node) > sequence_number(node):
        return None
    return edge.output_nr if edge.node is node else edge
