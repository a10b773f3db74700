"""Capture: the only file that registers hooks.

During a forward pass of the model every call of a layer is noted: its input and the graph edge of its
output. When the user's backward pass reaches the model's outputs, while the graph below them is still
whole, the vectors that make the Fisher (drawn labels, exact columns, or the training gradient itself)
are sent from there down to the noted edges. So no second pass is needed in the user's loop, a forward
pass that is never followed by a backward pass leaves nothing behind, and the training gradient tells
which targets are ignored.

Two things here are worth knowing when changing them:

* Outputs of layers are kept as graph *edges*. An in-place activation after a layer changes the tensor,
  not the edge.
* The hook on the model's outputs must not own the graph node it hangs on, or a graph that is dropped
  without a backward pass would never be freed. It therefore asks autograd for the node it runs at.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from tekfac.calls import Call, arrangements, layer_batch, samples_first
from tekfac.layers import Layer
from tekfac.likelihoods import Likelihood, OutputShapeError, Prediction
from tekfac.rows import LayerBatch

logger = logging.getLogger("tekfac")

FisherKind = Literal["sampled", "empirical", "exact"]
FISHER_KINDS: tuple[FisherKind, ...] = ("sampled", "empirical", "exact")

LossReduction = Literal["mean", "batchmean", "sum"]
LOSS_REDUCTIONS: tuple[LossReduction, ...] = ("mean", "batchmean", "sum")

OutputSelector = Callable[[Any], Tensor]


@dataclass
class Window:
    """The calls of one forward pass of the model."""

    calls: list[Call] = field(default_factory=list)


class Capture:
    """Watches a model and delivers, for each layer, what its curvature is measured from.

    Attributes:
        armed: whether forward passes are noted. Off, a hook costs one look at this flag.
        batches: what was captured since the last `clear`, by layer name, one entry per forward pass.
        problems: what kept a forward pass from being captured, in words.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        *,
        likelihood: Likelihood,
        fisher: FisherKind,
        loss_reduction: LossReduction,
        outputs: OutputSelector | None,
        seed: int,
    ) -> None:
        self.armed = False
        self._likelihood = likelihood
        self._fisher = fisher
        self._loss_reduction = loss_reduction
        self._select = outputs or find_outputs
        self._seed = seed
        self._generator: torch.Generator | None = None
        self._state_before_draw: Tensor | None = None
        self._window: Window | None = None
        self._sending = False
        self.batches: dict[str, list[LayerBatch]] = {}
        self.problems: list[str] = []
        handles = [
            module.register_forward_hook(_Hook(self, "_note_call", layer), with_kwargs=True)
            for layer in layers
            for module in layer.modules
        ]
        handles.append(model.register_forward_pre_hook(_Hook(self, "_open_window")))
        handles.append(model.register_forward_hook(_Hook(self, "_close_window")))
        self._remove_hooks = weakref.finalize(self, _remove, handles)

    def clear(self) -> None:
        """Let go of what was captured."""
        self.batches, self.problems = {}, []
        self._state_before_draw = None

    def roll_back(self) -> None:
        """Let go of what was captured, as if its labels had never been drawn."""
        if self._state_before_draw is not None and self._generator is not None:
            self._generator.set_state(self._state_before_draw)
        self.clear()

    def remove_hooks(self) -> None:
        """Stop watching the model for good."""
        self._remove_hooks()

    # -- the sampling generator ------------------------------------------------------------------------

    def sampling_state(self) -> dict[str, Any]:
        """The sampling generator as plain values."""
        state = None if self._generator is None else self._generator.get_state()
        device = None if self._generator is None else str(self._generator.device)
        return {"seed": self._seed, "device": device, "state": state}

    def load_sampling_state(self, saved: Mapping[str, Any]) -> None:
        """Go on drawing where the saved generator stopped."""
        self._seed = saved["seed"]
        self._generator = None
        if saved["state"] is not None:
            self._generator = torch.Generator(device=saved["device"])
            self._generator.set_state(saved["state"].cpu())

    def _generator_on(self, device: torch.device) -> torch.Generator:
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device=device).manual_seed(self._seed)
        if self._state_before_draw is None:
            self._state_before_draw = self._generator.get_state()
        return self._generator

    # -- hooks -----------------------------------------------------------------------------------------

    def _open_window(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self._window = Window() if model.training and _records_gradients() else None

    def _note_call(
        self,
        layer: Layer,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        window = self._window
        if window is None or not module.training or not _records_gradients():
            return
        if not output.requires_grad or not layer.weight.requires_grad:
            return
        inputs = args[0] if args else kwargs["input"]
        # Data may be overwritten by the user before step(); what autograd has saved may not.
        kept = inputs.detach() if inputs.requires_grad else inputs.clone()
        window.calls.append(Call(layer, module, kept, get_gradient_edge(output)))

    def _close_window(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        window, self._window = self._window, None
        if window is None or not window.calls:
            return
        outputs = self._select(output)
        self._likelihood.check(outputs)
        node = outputs.grad_fn
        if node is None:
            return
        # What was called after the outputs were made gets nothing from them, and must not be owned here.
        window.calls = [call for call in window.calls if _age(call) <= node._sequence_nr()]
        for call in window.calls:
            if call.edge is not None and call.edge.node is node:
                call.edge = None
        capture, output_nr, values = weakref.ref(self), outputs.output_nr, outputs.detach().clone()

        def at_outputs(gradient: Tensor) -> None:
            owner = capture()
            if owner is None or owner._sending or not window.calls:
                return
            node = torch._C._current_autograd_node()
            calls, window.calls = window.calls, []
            owner._receive(GradientEdge(node, output_nr), values, gradient, calls)

        outputs.register_hook(at_outputs)  # type: ignore[no-untyped-call]

    def _receive(
        self, outputs_edge: GradientEdge, outputs: Tensor, gradient: Tensor, calls: list[Call]
    ) -> None:
        """Send the Fisher's vectors down from the outputs and keep what arrives at the layers."""
        unusable = outputs.isnan() | (outputs == torch.inf)  # a class masked by -inf is fine
        if bool(unusable.any()) or not bool(torch.isfinite(gradient).all()):
            self.problems.append("the model's outputs or their gradients are not finite")
            return
        prediction = self._likelihood.predict(outputs, gradient)
        num_terms = self._num_terms(prediction)
        if not num_terms:
            return
        probed_sample = int(prediction.counted.any(dim=1).nonzero()[0])
        self._sending = True
        try:
            for vector in self._vectors(prediction, gradient, num_terms, outputs.device):
                for call, arrived in zip(calls, _send(outputs_edge, vector, calls), strict=True):
                    if arrived is not None:
                        call.gradients.append(arrived)
            if _samples_are_unclear(calls, len(outputs)):
                probe = torch.zeros_like(gradient)
                probe[probed_sample] = gradient[probed_sample]
                for call, arrived in zip(calls, _send(outputs_edge, probe, calls), strict=True):
                    call.probe = arrived
        finally:
            self._sending = False
        by_layer: dict[str, list[Call]] = {}
        for call in calls:
            if call.gradients:
                arranged = samples_first(call, len(outputs), probed_sample)
                by_layer.setdefault(call.layer.name, []).append(arranged)
        any_coarser = self._fisher == "sampled"
        for name, layer_calls in by_layer.items():
            batch = layer_batch(
                layer_calls,
                len(outputs),
                num_terms,
                prediction.counted,
                any_coarser=any_coarser,
                probed_sample=probed_sample,
            )
            self.batches.setdefault(name, []).append(batch)

    def _num_terms(self, prediction: Prediction) -> int:
        """M, the number of summands that the Fisher is divided by."""
        if self._loss_reduction == "mean":
            return int(prediction.counted.sum())
        return int(prediction.counted.any(dim=1).sum())

    def _vectors(
        self, prediction: Prediction, gradient: Tensor, num_terms: int, device: torch.device
    ) -> Iterator[Tensor]:
        """The vectors, shaped like the outputs, that are back-propagated one by one."""
        if self._fisher == "sampled":
            yield prediction.sample(self._generator_on(device))
        elif self._fisher == "exact":
            yield from prediction.columns()
        else:
            yield gradient if self._loss_reduction == "sum" else gradient * num_terms


def find_outputs(returned: Any) -> Tensor:
    """The tensor to read predictions from, in whatever the model returned.

    A tensor is itself; then `.logits`, the key "logits", and the first tensor of a tuple, list or
    one-entry dict.

    Raises:
        OutputShapeError: if none of these fits.
    """
    if isinstance(returned, Tensor):
        return returned
    logits = getattr(returned, "logits", None)
    if logits is None and isinstance(returned, Mapping):
        logits = returned.get("logits")
        if logits is None and len(returned) == 1:
            logits = next(iter(returned.values()))
    if logits is None and isinstance(returned, tuple | list):
        logits = next((part for part in returned if isinstance(part, Tensor)), None)
    if isinstance(logits, Tensor):
        return logits
    keys = f" with keys {list(returned)}" if isinstance(returned, Mapping) else ""
    raise OutputShapeError(
        f"Cannot find the predictions in what the model returned: a {type(returned).__name__}{keys}. "
        "Expected a tensor, something with `.logits` or a 'logits' entry, or a tuple that starts with "
        "them. Otherwise say where they are: outputs=lambda returned: ..."
    )


def _records_gradients() -> bool:
    """Whether this is a plain forward pass that autograd records (not one inside torch.func)."""
    return torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None


def _samples_are_unclear(calls: Sequence[Call], num_samples: int) -> bool:
    """Whether shapes do not tell where the samples are, or a layer was called more than once."""
    if len({call.layer.name for call in calls}) < len(calls):
        return True
    return any(len(arrangements(call, num_samples)) > 1 for call in calls)


def _send(outputs_edge: GradientEdge, vector: Tensor, calls: Sequence[Call]) -> list[Tensor | None]:
    """Back-propagate one vector from the outputs; what arrives at each call's output."""
    edges = [outputs_edge if call.edge is None else call.edge for call in calls]
    arrived = torch.autograd.grad([outputs_edge], edges, [vector], retain_graph=True, allow_unused=True)
    return [None if gradient is None else gradient.detach() for gradient in arrived]


class _Hook:
    """A hook that does not keep the capture alive and stays behind when a model is copied or saved."""

    def __init__(self, capture: Capture, method: str, *arguments: Any) -> None:
        self._capture = weakref.ref(capture)
        self._method = method
        self._arguments = arguments

    def __call__(self, *arguments: Any) -> None:
        capture = self._capture()
        if capture is not None and capture.armed:
            getattr(capture, self._method)(*self._arguments, *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _inert

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_inert, ()


def _inert(*arguments: Any) -> None:
    """What a hook becomes in a copied or saved model."""


def _make_inert() -> Callable[..., None]:
    return _inert


def _age(call: Call) -> int:
    """When, in the order of creation, the call's graph node was made."""
    assert call.edge is not None
    return call.edge.node._sequence_nr()


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
