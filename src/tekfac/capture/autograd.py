"""What is asked of autograd's engine: gradients at the edges of calls, and which pass is running."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
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
from tekfac.layers.kinds.base import Call

REENTRANT = (
    "Curvature cannot be measured through checkpoint(..., use_reentrant=True), which allows no second look at "
    "its graph. Use checkpoint(..., use_reentrant=False)."
)

_of_thread = threading.local()


@contextlib.contextmanager
def sending() -> Iterator[None]:
    """While vectors of our own are back-propagated: no capture may take them for training.

    A nested backward pass runs in the thread of the pass around it, so that two models trained in two threads
    know nothing of each other here.
    """
    before = is_sending()
    _of_thread.is_sending = True
    try:
        yield
    finally:
        _of_thread.is_sending = before


def is_sending() -> bool:
    """Whether the backward pass that runs in this thread is one of ours."""
    return getattr(_of_thread, "is_sending", False)


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
    weights = (layer.weight for noted in calls for layer in noted.watched.layers.values())
    try:
        return any(will_run(get_gradient_edge(weight).node) for weight in weights if weight.requires_grad)
    except RuntimeError:
        return None


def send_down(outputs_edge: GradientEdge, vector: Tensor, calls: Sequence[Call]) -> list[list[Tensor | None]]:
    """Back-propagate one vector from the outputs; what arrives at each call's outputs."""
    edges = [
        GradientEdge(outputs_edge.node, edge) if isinstance(edge, int) else edge
        for call in calls
        for edge in call.edges
        if edge is not None
    ]
    try:
        arrived = torch.autograd.grad([outputs_edge], edges, [vector], retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise RuntimeError(REENTRANT) from error
    gradients = iter(arrived)

    def next_one(edge: GradientEdge | int | None) -> Tensor | None:
        gradient = None if edge is None else next(gradients)
        return None if gradient is None else gradient.detach()

    return [[next_one(edge) for edge in call.edges] for call in calls]


def edge_below(node: Any, edge: GradientEdge | int | None) -> GradientEdge | int | None:
    """The edge, if the model's outputs, which this node made, can reach it; only its number if it is theirs.

    What was called after the outputs were made gets nothing from them, and their own node must not be owned.
    """
    if edge is None or isinstance(edge, int) or sequence_number(edge.node) > sequence_number(node):
        return None
    return edge.output_nr if edge.node is node else edge
