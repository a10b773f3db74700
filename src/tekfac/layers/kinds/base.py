"""What a kind of layer says of itself.

A kind turns what a module received, and what came back for its outputs, into applications of its parameters:
each says s = W a for rows a, with the gradients u at s. Nothing else in the library asks for a module's type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from tekfac.layers.shapes import LayerShape, Layout


@dataclass(frozen=True)
class Part:
    """One block of a module.

    Attributes:
        weight: name of the parameter in the module; may lie in a submodule ("out_proj.weight").
        bias: likewise, if there is one.
        name: what the layer's name has beside the module's; "" where the module is one layer.
        groups: independent blocks of the weight.
        layout: how the weight lies in memory.
        table: whether an input picks one row of the weight: then the input side is kept as a diagonal.
    """

    weight: str
    bias: str | None = None
    name: str = ""
    groups: int = 1
    layout: Layout = "output first"
    table: bool = False


class RowForm(ABC):
    """How inputs and gradients of an application become rows.

    Attributes:
        trailing: how many axes of the inputs one row has; None: all but that of the samples.
    """

    trailing: int | None = 1

    def is_unbatched(self, inputs: Tensor) -> bool:
        """Whether the inputs are those of a single sample, without an axis for samples."""
        return self.trailing is not None and inputs.ndim == self.trailing

    def positions(self, shape: LayerShape, gradient: Tensor, samples: int) -> int:
        """How many positions each sample has, given the gradients of one vector."""
        return gradient.numel() // (shape.groups * shape.d_out * samples)

    @abstractmethod
    def rows(self, shape: LayerShape, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Rows a [K or 1, G, N, T, d_in] and u [K or 1, G, N, T, d_out].

        Args:
            shape: of the layer.
            inputs: [N, ...].
            gradients: [K, N, ...].
        """

    def gradient(self, shape: LayerShape, inputs: Tensor, gradients: Tensor) -> Tensor:
        """The gradient of all these samples together, [K, G, d_out, d_in]; arguments as of `rows`."""
        a, u = self.rows(shape, inputs, gradients)
        return u.flatten(2, 3).mT @ a.flatten(2, 3)


class LinearRows(RowForm):
    """s = W a at every position: inputs [N, ..., d_in], gradients [K, N, ..., d_out]."""

    def rows(self, shape: LayerShape, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Every axis between the first and the last holds positions."""
        samples = len(inputs)
        a = inputs.reshape(1, 1, samples, -1, inputs.shape[-1])
        u = gradients.reshape(len(gradients), 1, samples, -1, gradients.shape[-1])
        return with_ones(a, shape), u


class SequenceRows(LinearRows):
    """Linear rows with samples as axis 0 for sure: inputs [N, T, d_in], gradients [K, N, T, d_out]."""

    trailing = None


class GroupedRows(RowForm):
    """Groups with inputs of their own: inputs [N, G, T, d_in], gradients [K, N, G, T, d_out]."""

    trailing = None

    def rows(self, shape: LayerShape, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The axes are there; they are put in order."""
        return with_ones(inputs.transpose(0, 1)[None], shape), gradients.transpose(1, 2)


def with_ones(a: Tensor, shape: LayerShape) -> Tensor:
    """Inputs with the last 1 that a bias is multiplied with, if there is one."""
    return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1) if shape.has_bias else a


@dataclass(frozen=True)
class Application:
    """One use of a part's parameters in a forward pass.

    Attributes:
        part: which of the module's parts.
        form: how rows are made.
        inputs: [L, ...].
        gradients: of what the parameters gave, [L, ...] each, one for every back-propagated vector.
        probe: the same for a vector that concerns a single sample, where that was sent.
        real: which positions exist, [L, G or 1, T], where not all of them do.
    """

    part: int
    form: RowForm
    inputs: Tensor
    gradients: Sequence[Tensor]
    probe: Tensor | None = None
    real: Tensor | None = None


Take = Callable[[Tensor], Any]
"""What is kept of a gradient, instead of all of it: a part of it, or what was computed of it."""


@dataclass(eq=False)
class Call:
    """One call of a module in a forward pass, and what came back for it in the backward pass.

    Attributes:
        kept: what the kind wanted to keep of the arguments.
        dtype: that curvature is computed in.
        outputs: their values, where the kind asked for them.
        shapes: of its outputs.
        random_state: of the generators before the call, where the kind asked for it.
        rows: the samples that are kept of it, where those are only some; kept has no others.
        take: what is taken of a gradient that arrives; None: all of it.
        is_formed: whether what is taken are gradients of the parameters, of samples or of sums of them, or what
            was made of these, and not the gradients of its outputs.
        versions: of the kept tensors, to notice a change in place.
        edges: where the gradients of its outputs pass in autograd's graph; of an output that the model's own
            outputs are, its number only; None for one without gradient.
        gradients: of each of its outputs, for every back-propagated vector; None where none came.
        probe: the same for a vector that concerns a single sample, where that was sent.
    """

    kept: Mapping[str, Any]
    dtype: torch.dtype
    outputs: Sequence[Tensor] = ()
    shapes: Sequence[torch.Size] = ()
    random_state: Any = None
    rows: Tensor | None = None
    take: Take | None = None
    is_formed: bool = False
    versions: Sequence[int] = ()
    edges: Sequence[GradientEdge | int | None] = ()
    gradients: list[Sequence[Any]] = field(default_factory=list)
    probe: Sequence[Tensor | None] | None = None

    @property
    def vectors(self) -> list[Sequence[Any]]:
        """The gradients of every vector, the probe last."""
        return [*self.gradients, *([] if self.probe is None else [self.probe])]


class RepetitionError(RuntimeError):
    """A module's call could not be repeated: its result was another one."""


class LayerKind(ABC):
    """How a type of module uses its parameters.

    Attributes:
        methods: what a derived class must not redefine, or it computes something else.
        is_convolution: whether the paper's rule for the damping of convolutions applies, and inputs may be kept
            by frequencies: a weight of three axes or more then has its channels on the second (the first with
            the layout "input first"), and the kernel on those behind.
    """

    methods: ClassVar[tuple[str, ...]] = ("forward",)
    is_convolution: bool = False

    @abstractmethod
    def parts(self, module: nn.Module) -> tuple[Part, ...]:
        """The blocks of the module."""

    @abstractmethod
    def applications(self, module: nn.Module, call: Call) -> list[Application]:
        """The uses of its parameters in a call."""

    @abstractmethod
    def keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What is needed of a call's arguments."""

    def problem(self, module: nn.Module) -> str | None:
        """Why a module with these settings has no block, in words, or None."""
        return None

    def inner_modules(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """Submodules whose parameters are used without calling them."""
        return ()

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """The tensors among what the module returned."""
        return (returned,)

    def num_samples(self, module: nn.Module, kept: Mapping[str, Any]) -> int | None:
        """The samples of a call, where the module knows which axis holds them."""
        return None

    def real_positions(self, kept: Mapping[str, Any]) -> Tensor | None:
        """Which positions of the sequences are real, [N, T], where a call tells."""
        return None

    def repeats(self, module: nn.Module) -> bool:
        """Whether calls are repeated to see what is inside: then their outputs are kept for comparison."""
        return False

    def is_random(self, module: nn.Module) -> bool:
        """Whether a repeated call needs the same random numbers."""
        return False


@dataclass(frozen=True)
class SimpleKind(LayerKind):
    """A module with one weight, perhaps a bias, one input that matters and one output.

    Attributes:
        weight: name of the parameter.
        bias: name of the parameter; a module may have none, or None, of that name.
        layout: how the weight lies in memory.
    """

    weight: str = "weight"
    bias: str | None = "bias"
    layout: Layout = "output first"

    def parts(self, module: nn.Module) -> tuple[Part, ...]:
        """The only one."""
        return (Part(self.weight, own_bias(module, self.bias), layout=self.layout),)

    def keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the weight is multiplied with: the first argument, by position or by name."""
        by_name = kwargs["input"] if "input" in kwargs else next(iter(kwargs.values()), None)
        return {"input": args[0] if args else by_name}

    def applications(self, module: nn.Module, call: Call) -> list[Application]:
        """The only one."""
        gradients = [arrived for (arrived,) in call.gradients if arrived is not None]
        probe = None if call.probe is None else call.probe[0]
        return [Application(0, self.form(module), call.kept["input"], gradients, probe)]

    def part(
        self, module: nn.Module, kept: Mapping[str, Any], rows: Tensor, dtype: torch.dtype
    ) -> dict[str, Any]:
        """What is kept of a call, for some samples only, in the order of their numbers `rows`."""
        return {"input": kept["input"][rows]}

    def settled(self, module: nn.Module, kept: Mapping[str, Any], dtype: torch.dtype) -> Mapping[str, Any]:
        """What is kept of a call, such that it means the same when the module has changed its mode."""
        return kept

    @abstractmethod
    def form(self, module: nn.Module) -> RowForm:
        """How rows are made."""


def own_bias(module: nn.Module, name: str | None) -> str | None:
    """The name, if the module has a parameter there."""
    return name if name is not None and isinstance(getattr(module, name, None), nn.Parameter) else None


def attribute_at(module: nn.Module, name: str) -> Any:
    """What stands under a name in the module or a submodule ("out_proj.weight"); None if nothing does."""
    path, _, own = name.rpartition(".")
    return getattr(module.get_submodule(path), own, None)
