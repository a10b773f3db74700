"""What is asked of autograd's engine: gradients at the edges of calls, and which pass is running.

torch has no public names for some of it; autograd's private ones are used here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tekfac.capture.module_calls import Call

REENTRANT = (
    "Curvature cannot be measured through checkpoint(..., use_reentrant=True), which allows no second look at "
    "its graph. Use checkpoint(..., use_reentrant=False)."
)


def records_gradients() -> bool:
    """Whether this is a plain forward pass that autograd records (not one inside torch.func)."""
    return torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None


def running_node() -> Any:
    """The graph node that a backward pass is at; None outside of one."""
    return torch._C._current_autograd_node()


def made_by(outputs: Tensor) -> tuple[Any, int]:
    """The graph node that made the outputs, and which of its results they are.

    A mere change of precision is passed over: a wrapper for mixed precision may return a copy in float32 while
    the loss was taken of the original.
    """
    node, output_nr = outputs.grad_fn, outputs.output_nr
    while node is not None and node.name() == "ToCopyBackward0":
        node, output_nr = node.next_functions[0]
    return node, output_nr


def accumulates(calls: Sequence[Call]) -> bool | None:
    """Whether the running backward pass adds to the gradient of some layer's weight.

    Adversarial examples and gradient penalties differentiate by inputs alone: nothing to measure there. None
    for autograd.grad(loss, parameters), which collects gradients in another way.
    """
    weights = (layer.weight for call in calls for layer in call.watched.layers.values())
    try:
        return any(
            torch._C._will_engine_execute_node(get_gradient_edge(weight).node)
            for weight in weights
            if weight.requires_grad
        )
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
    if edge is None or isinstance(edge, int) or edge.node._sequence_nr() > node._sequence_nr():
        return None
    return edge.output_nr if edge.node is node else edge
