"""What is noted of a forward pass: calls of modules, their arguments and the graph edges of their outputs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tekfac.capture.sample_axis import arrangements
from tekfac.common.torch_internals import version_of
from tekfac.layers.kinds.base import Call, LayerKind, SimpleKind, attribute_at
from tekfac.layers.layer import Layer
from tekfac.ranks.shards import stands_for


@dataclass(eq=False)
class WatchedModule:
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

    def trained_weights(self) -> list[Tensor]:
        """Of its layers, as the module has them now; none where another tensor stands in the weight's place."""
        parts = self.kind.parts(self.module)
        present = [
            (layer, attribute_at(self.module, parts[index].weight)) for index, layer in self.layers.items()
        ]
        return [own for layer, own in present if layer.weight.requires_grad and stands_for(own, layer.weight)]


@dataclass(frozen=True)
class ModuleCall:
    """One call of a watched module.

    Attributes:
        watched: the module.
        call: what is kept of it.
        weights: those of its layers that are trained, as the module had them.
    """

    watched: WatchedModule
    call: Call
    weights: Sequence[Tensor] = field(compare=False)


@dataclass
class Window:
    """One forward pass of the model.

    Attributes:
        calls: of its layers' modules.
        real: which positions are real, [N, T], where the model was told.
    """

    calls: list[ModuleCall] = field(default_factory=list)
    real: Tensor | None = None


def watched_modules(layers: Iterable[Layer]) -> list[WatchedModule]:
    """The modules that use the layers' parameters, each once."""
    by_module: dict[nn.Module, WatchedModule] = {}
    for layer in layers:
        for use in layer.uses:
            watched = by_module.setdefault(use.module, WatchedModule(use.module, use.kind, {}))
            watched.layers[use.part] = layer
    return list(by_module.values())


def is_unclear(noted: ModuleCall, num_samples: int) -> bool:
    """Whether the shape of a call leaves open which axis holds the samples."""
    kind, module, kept = noted.watched.kind, noted.watched.module, noted.call.kept
    known = kind.num_samples(module, kept)
    if known is not None:
        return known != num_samples
    if not isinstance(kind, SimpleKind):
        return True
    form, inputs = kind.form(module), kept["input"]
    if form.is_unbatched(inputs):
        return False
    divides = len(inputs) == 1 or len(inputs) % num_samples == 0
    return not divides or len(arrangements(form, inputs, num_samples)) > 1


def shapes_of(noted: ModuleCall) -> Hashable:
    """Of all tensors that a call got and gave."""
    return tuple(tensor.shape for tensor in _tensors(noted.call.kept)), tuple(noted.call.shapes)


def multiplications_of(noted: ModuleCall) -> int:
    """Of the products with a module's weights in a call, roughly; tables are looked up."""
    shapes = noted.call.shapes
    outputs = math.prod(shapes[0]) if shapes else 0
    return sum(outputs * own.shape.d_in for own in noted.watched.layers.values() if not own.is_table)


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


def versions(kept: Any) -> list[int]:
    """How often each tensor in a snapshot was changed in place."""
    return [version_of(tensor) for tensor in _tensors(kept)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (tensor for part in value.values() for tensor in _tensors(part))
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, tuple | list):
        yield from (tensor for part in value for tensor in _tensors(part))
