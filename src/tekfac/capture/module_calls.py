"""What is noted of a forward pass: calls of modules, their arguments and the graph edges of their outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.utils.rnn import PackedSequence

from tekfac.capture.batches import arrangements
from tekfac.layers.kinds.base import LayerKind, SimpleKind, attribute_at
from tekfac.layers.layer import Layer


@dataclass(eq=False)
class Watched:
    """A module whose calls are noted.

    Attributes:
        module: the module.
        kind: how it uses its parameters.
        layers: those that its parts belong to, by the number of the part.
        random_state: of the generators before its running call, where that is needed to repeat it.
    """

    module: nn.Module
    kind: LayerKind
    layers: dict[int, Layer]
    random_state: Any = None

    @property
    def name(self) -> str:
        """Of its first layer."""
        return next(iter(self.layers.values())).name

    @property
    def is_trained(self) -> bool:
        """Whether some layer's weight is, and is that of the module now (not another tensor in its place)."""
        parts = self.kind.parts(self.module)
        return any(
            layer.weight.requires_grad and attribute_at(self.module, parts[index].weight) is layer.weight
            for index, layer in self.layers.items()
        )


@dataclass
class Call:
    """One call of a module in a forward pass.

    Attributes:
        watched: whose call it is.
        kept: what its kind wanted to keep of the arguments.
        versions: of the kept tensors, to notice a change in place.
        edges: where the gradients of its outputs pass; of an output that the model's own outputs come from at
            once the number only, and None for one without gradient.
        outputs: their values, where the call is to be repeated.
        random_state: of the generators before the call.
        gradients: of the outputs, for every back-propagated vector.
        probe: the gradients of the outputs that a single sample of the model's outputs causes; only taken where
            shapes alone do not tell which axis holds the samples.
    """

    watched: Watched
    kept: dict[str, Any]
    versions: list[int]
    edges: list[GradientEdge | int | None]
    outputs: tuple[Tensor, ...] = ()
    random_state: Any = None
    gradients: list[list[Tensor | None]] = field(default_factory=list)
    probe: list[Tensor | None] | None = None


@dataclass
class Window:
    """One forward pass of the model.

    Attributes:
        calls: of its layers' modules.
        padding: which positions are real, [N, T], where the model was told.
        used: whether a backward pass has come by.
    """

    calls: list[Call] = field(default_factory=list)
    padding: Tensor | None = None
    used: bool = False


def is_unclear(call: Call, num_samples: int) -> bool:
    """Whether the shape of a call leaves open which axis holds the samples."""
    kind, module = call.watched.kind, call.watched.module
    known = kind.num_samples(module, call.kept)
    if known is not None:
        return known != num_samples
    if not isinstance(kind, SimpleKind):
        return True
    form, inputs = kind.form(module), call.kept["input"]
    if form.is_unbatched(inputs):
        return False
    divides = len(inputs) == 1 or len(inputs) % num_samples == 0
    return not divides or len(arrangements(form, inputs, num_samples)) > 1


def snapshot(value: Any) -> Any:
    """Arguments of a call, safe from later changes.

    Data may be overwritten by the user before step(); what autograd has saved may not.
    """
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value.clone()
    if isinstance(value, PackedSequence):
        return value._replace(data=snapshot(value.data))
    if isinstance(value, tuple | list):
        return tuple(snapshot(part) for part in value)
    if isinstance(value, dict):
        return {key: snapshot(part) for key, part in value.items()}
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a snapshot."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for part in value.values() for tensor in tensors(part))
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, tuple | list):
        yield from (tensor for part in value for tensor in tensors(part))
