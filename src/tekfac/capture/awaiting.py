"""The predictions whose gradients are waited for, and how several of one forward pass hang together.

A graph node must not be owned by what hangs on it, or a graph that is dropped without a backward pass would
never be freed. So what waits at a prediction owns calls of layers and other predictions that were made before
it, and nothing that was made after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from tekfac.capture.autograd import edge_below, made_by
from tekfac.capture.module_calls import ModuleCall, Window
from tekfac.common.torch_internals import sequence_number, will_run


@dataclass(eq=False)
class Siblings:
    """What the predictions of a forward pass know of each other while a backward pass runs.

    Attributes:
        count: how many they are.
        running: which pass that is.
        inner: names of predictions that an arrived one was made of: their gradients are its affair.
        joined: by the name of a prediction that is still to arrive, what takes its gradients already.
        samples: the most of them that one of the predictions which have arrived had.
    """

    count: int
    running: int = -1
    inner: set[str] = field(default_factory=set)
    joined: dict[str, Any] = field(default_factory=dict)
    samples: int = 0

    def begin(self, running: int) -> None:
        """A prediction has arrived in a pass: what was known of another one is forgotten."""
        if running != self.running:
            self.running, self.inner, self.joined = running, set(), {}


@dataclass(eq=False)
class Awaited:
    """A prediction whose gradient is waited for.

    Attributes:
        name: of the prediction.
        output_nr: which result of its node it is.
        values: a copy of it.
        calls: of layers, made before it.
        real: which positions are real, [N, T], where the model was told.
        made_of: names of other predictions that it depends on.
        earlier: nodes of predictions that were made before it and that it does not depend on, by name; None for
            one that the same node made.
        siblings: of the forward pass.
        used: whether a backward pass has come by.
    """

    name: str
    output_nr: int
    values: Tensor
    calls: list[ModuleCall]
    real: Tensor | None
    made_of: frozenset[str]
    earlier: Mapping[str, Any]
    siblings: Siblings
    used: bool = False

    def to_come(self) -> list[str]:
        """Names of the other predictions that the running backward pass will bring a gradient to, perhaps."""
        return [name for name, node in self.earlier.items() if node is None or will_run(node)]


class _Made(NamedTuple):
    """A prediction, and where its gradient passes in autograd's graph."""

    name: str
    tensor: Tensor
    node: Any
    output_nr: int


def awaited(window: Window, predictions: Mapping[str, Tensor]) -> list[tuple[Awaited, Tensor, Any]]:
    """What waits at each prediction that has a gradient, with the prediction and its node."""
    found: dict[tuple[Any, int], _Made] = {}
    for name, tensor in predictions.items():
        node, output_nr = made_by(tensor)
        if node is not None and tensor.numel():
            found.setdefault((node, output_nr), _Made(name, tensor, node, output_nr))
    made, siblings = list(found.values()), Siblings(len(found))
    return [(_waiting_at(here, made, window, siblings), here.tensor, here.node) for here in made]


def outermost(predictions: Sequence[Tensor]) -> list[Tensor]:
    """Those predictions that no other one is made of."""
    made = [_Made(str(place), own, own.grad_fn, own.output_nr) for place, own in enumerate(predictions)]
    inner = {name for here in made for name in _made_of(here, [other for other in made if other is not here])}
    return [own.tensor for own in made if own.name not in inner]


def _waiting_at(here: _Made, made: Sequence[_Made], window: Window, siblings: Siblings) -> Awaited:
    others = [other for other in made if other is not here]
    made_of = _made_of(here, others)
    number = sequence_number(here.node)
    earlier = {
        other.name: None if other.node is here.node else other.node
        for other in others
        if other.name not in made_of and sequence_number(other.node) <= number
    }
    values, calls = here.tensor.detach().clone(), _calls_below(here.node, window.calls)
    return Awaited(here.name, here.output_nr, values, calls, window.real, made_of, earlier, siblings)


def _calls_below(node: Any, calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The calls that were made before a node, each with a record of its own for what comes to it from there."""
    found = []
    for noted in calls:
        edges = [edge_below(node, edge) for edge in noted.call.edges]
        if any(edge is not None for edge in edges):
            found.append(replace(noted, call=replace(noted.call, edges=edges, gradients=[])))
    return found


def _made_of(here: _Made, others: Sequence[_Made]) -> frozenset[str]:
    """Which of the others a prediction depends on; the graph between them is walked through."""
    sought = {(other.node, other.output_nr): other.name for other in others if other.node is not here.node}
    if not sought:
        return frozenset()
    oldest = min(sequence_number(node) for node, _ in sought)
    found, seen, waiting = set(), {here.node}, [here.node]
    while waiting:
        for edge in waiting.pop().next_functions:
            node = edge[0]
            if edge in sought:
                found.add(sought[edge])
            if node is not None and node not in seen and sequence_number(node) >= oldest:
                seen.add(node)
                waiting.append(node)
    return frozenset(found)
