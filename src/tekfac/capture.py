"""Capture: the only file that registers hooks.

During a forward pass of the model every call of a layer is noted: its input and the graph edge of its
output. When the user's backward pass reaches the model's outputs, while the graph below them is still
whole, the vectors that make the Fisher (drawn labels, exact columns, or the training gradient itself)
are sent from there down to the noted edges. So no second pass is needed in the user's loop, a forward
pass that is never followed by a backward pass leaves nothing behind, and the training gradient tells
which targets are ignored.

Three things here are worth knowing when changing them:

* Outputs of layers are kept as graph *edges*. An in-place activation after a layer changes the tensor,
  not the edge.
* The hook on the model's outputs must not own the graph node it hangs on, or a graph that is dropped
  without a backward pass would never be freed. It therefore asks autograd for the node it runs at.
* Which axis of a layer's input holds the samples is not always told by shapes. A probe, one sample's
  gradient sent down alone, shows where that sample's rows are.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from tekfac.calls import Call, arrangements, layer_batch, samples_first
from tekfac.layers import Layer
from tekfac.likelihoods import Likelihood, Prediction
from tekfac.outputs import OutputSelector, find_outputs
from tekfac.rows import LayerBatch
from tekfac.sampling import Sampling

logger = logging.getLogger("tekfac")

FisherKind = Literal["sampled", "empirical", "exact"]
FISHER_KINDS: tuple[FisherKind, ...] = ("sampled", "empirical", "exact")

LossReduction = Literal["mean", "batchmean", "sum"]
LOSS_REDUCTIONS: tuple[LossReduction, ...] = ("mean", "batchmean", "sum")


@dataclass
class Window:
    """One forward pass of the model.

    Attributes:
        calls: of its layers.
        used: whether a backward pass has come by.
    """

    calls: list[Call] = field(default_factory=list)
    used: bool = False


class Capture:
    """Watches a model and delivers, for each layer, what its curvature is measured from.

    Attributes:
        armed: whether forward passes are noted. Off, a hook costs one look at this flag.
        batches: what was captured since the last `clear`, by layer name, one entry per forward pass.
        problems: what kept a forward pass from being captured, in words.
        sampling: the generator of drawn labels.
        counted: which terms of the next backward pass count, [N, P], where that is known. Otherwise the
            gradient tells: a term without any does not count, unless its prediction is certain.
        passes: forward and backward passes received since the last `clear`.
        terms: their loss terms.
        samples: their samples, but for passes in which no term counts.
        outputs: the predictions of the last forward pass; kept only where not only training is watched.
        seconds: what measuring in backward passes has taken so far, by the clock of the host.

    An optimizer watches forward passes in training mode whose backward pass leads to parameters. With
    `only_training=False` the mode does not matter, and a backward pass that ends at the outputs will do.
    """

    _sending: ClassVar[bool] = False
    """Whether some capture is back-propagating vectors of its own: then no other may take them for training."""

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        *,
        likelihood: Likelihood,
        fisher: FisherKind,
        loss_reduction: LossReduction = "mean",
        batch_dim: int = 0,
        outputs: OutputSelector | None = None,
        seed: int = 0,
        only_training: bool = True,
    ) -> None:
        self.armed = False
        self.batches: dict[str, list[LayerBatch]] = {}
        self.problems: list[str] = []
        self.sampling = Sampling(seed)
        self.counted: Tensor | None = None
        self.passes = self.terms = self.samples = 0
        self.outputs: Tensor | None = None
        self.seconds = 0.0
        self._likelihood = likelihood
        self._fisher = fisher
        self._loss_reduction = loss_reduction
        self._batch_dim = batch_dim
        self._select = outputs or find_outputs
        self._only_training = only_training
        self._window: Window | None = None
        self._depth = 0
        self._probed: set[str] = set()
        self._warned: set[str] = set()
        handles = [
            module.register_forward_hook(_Hook(self, "_note_call", layer), with_kwargs=True, prepend=True)
            for layer in layers
            for module in layer.modules
        ]
        handles.append(model.register_forward_pre_hook(_Hook(self, "_open_window")))
        handles.append(model.register_forward_hook(_Hook(self, "_close_window"), always_call=True))
        self._remove_hooks = weakref.finalize(self, _remove, handles)

    def clear(self) -> None:
        """Let go of what was captured."""
        self.batches, self.problems = {}, []
        self.passes = self.terms = self.samples = 0
        self.outputs = None
        self.sampling.keep()

    def roll_back(self) -> None:
        """Let go of what was captured, as if its labels had never been drawn."""
        self.sampling.roll_back()
        self.clear()

    def remove_hooks(self) -> None:
        """Stop watching the model for good."""
        self._remove_hooks()

    # -- the forward pass ------------------------------------------------------------------------------

    def _open_window(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if self._depth == 0:
            watched = model.training or not self._only_training
            self._window = Window() if watched and _records_gradients() else None
        self._depth += 1

    def _note_call(
        self,
        layer: Layer,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        window = self._window
        if window is None or not _records_gradients():
            return
        if self._only_training and not module.training:
            return
        if not output.requires_grad or not layer.weight.requires_grad:
            return
        inputs = args[0] if args else kwargs["input"]
        # Data may be overwritten by the user before step(); what autograd has saved may not.
        kept = inputs.detach() if inputs.requires_grad else inputs.clone()
        window.calls.append(Call(layer, module, kept, get_gradient_edge(output), kept._version))

    def _close_window(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth > 0:  # the model called itself
            return
        window, self._window = self._window, None
        forward_raised = output is None and sys.exc_info()[0] is not None
        if window is None or forward_raised or (self._only_training and not window.calls):
            return
        outputs = self._select(output)
        self._likelihood.check(outputs)
        if not self._only_training:
            self.outputs = outputs
        node = outputs.grad_fn
        if node is None or outputs.numel() == 0:
            return
        # What was called after the outputs were made gets nothing from them, and must not be owned here.
        window.calls = [call for call in window.calls if _age(call) <= node._sequence_nr()]
        for call in window.calls:
            if call.edge is not None and call.edge.node is node:
                call.edge = None
        capture, output_nr, values = weakref.ref(self), outputs.output_nr, outputs.detach().clone()

        def at_outputs(gradient: Tensor) -> None:
            owner = capture()
            if owner is None or Capture._sending or window.used:
                return
            if owner._only_training and not _trains(window.calls):
                return
            node = torch._C._current_autograd_node()
            calls, window.calls, window.used = window.calls, [], True
            start = time.perf_counter()
            owner._receive(GradientEdge(node, output_nr), values, gradient, calls)
            owner.seconds += time.perf_counter() - start

        outputs.register_hook(at_outputs)  # type: ignore[no-untyped-call]

    # -- the backward pass -----------------------------------------------------------------------------

    def _receive(
        self, outputs_edge: GradientEdge, outputs: Tensor, gradient: Tensor, calls: list[Call]
    ) -> None:
        """Send the Fisher's vectors down from the outputs and keep what arrives at the layers."""
        unusable = outputs.isnan() | (outputs == torch.inf)  # a class masked by -inf is fine
        if bool(unusable.any()) or not bool(torch.isfinite(gradient).all()):
            self.problems.append("the model's outputs or their gradients are not finite")
            return
        outputs, gradient = outputs.movedim(self._batch_dim, 0), gradient.movedim(self._batch_dim, 0)
        prediction = self._likelihood.predict(outputs, gradient)
        if self.counted is not None:
            prediction = replace(prediction, counted=self.counted)
        if prediction.doubt is not None:
            self._warn_once(prediction.doubt)
        num_terms = self._num_terms(prediction)
        self.passes += 1
        self.terms += num_terms
        self.samples += len(outputs) if num_terms else 0
        if not calls and self._fisher == "sampled" and num_terms:
            prediction.sample(self.sampling.generator_on(outputs.device))  # later draws are as with more layers
        if not num_terms or not calls:
            return

        def send(vector: Tensor) -> list[Tensor | None]:
            return _send(outputs_edge, vector.movedim(0, self._batch_dim), calls)

        # The last sample, since in a causal model with samples and positions mixed up it reaches most rows.
        probed_sample = int(prediction.counted.any(dim=1).nonzero()[-1])
        Capture._sending = True
        try:
            for vector in self._vectors(prediction, gradient, num_terms, outputs.device):
                for call, arrived in zip(calls, send(vector), strict=True):
                    if arrived is not None:
                        call.gradients.append(arrived)
            if self._samples_are_unclear(calls, outputs):
                probe = torch.zeros_like(gradient)
                probe[probed_sample] = gradient[probed_sample]
                for call, arrived in zip(calls, send(probe), strict=True):
                    call.probe = arrived
        finally:
            Capture._sending = False
        self._keep(calls, prediction, num_terms, probed_sample)

    def _keep(self, calls: Sequence[Call], prediction: Prediction, num_terms: int, probed_sample: int) -> None:
        """Join the calls of each layer to a batch."""
        num_samples = len(prediction.counted)
        by_layer: dict[str, list[Call]] = {}
        for call in calls:
            if call.inputs._version != call.version:
                self._warn_once(
                    f"the input of layer {call.layer.name!r} was changed in place after the layer was called "
                    "(inside a checkpointed segment?), so its statistics are left out"
                )
            elif call.gradients:
                arranged = samples_first(call, num_samples, probed_sample)
                by_layer.setdefault(call.layer.name, []).append(arranged)
        for name, layer_calls in by_layer.items():
            batch, doubt = layer_batch(
                layer_calls,
                num_samples,
                num_terms,
                prediction.counted,
                any_coarser=self._fisher == "sampled",
                probed_sample=probed_sample,
            )
            if doubt is not None:
                self._warn_once(doubt)
            self._probed.add(name)
            self.batches.setdefault(name, []).append(batch)

    def _samples_are_unclear(self, calls: Sequence[Call], outputs: Tensor) -> bool:
        """Whether shapes leave open which rows are whose.

        So they do where a layer was called more than once or its input can be arranged in several ways and,
        for a layer seen for the first time, where the outputs have more than one axis beside the classes.
        """
        names = [call.layer.name for call in calls]
        if len(set(names)) < len(names) or (outputs.ndim > 2 and not self._probed.issuperset(names)):
            return True
        return any(len(arrangements(call, len(outputs))) > 1 for call in calls)

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
            yield prediction.sample(self.sampling.generator_on(device))
        elif self._fisher == "exact":
            yield from prediction.columns()
        else:
            yield gradient if self._loss_reduction == "sum" else gradient * num_terms

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message[0].upper() + message[1:] + ("" if message.endswith("?") else "."))


def _records_gradients() -> bool:
    """Whether this is a plain forward pass that autograd records (not one inside torch.func)."""
    return torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None


def _trains(calls: Sequence[Call]) -> bool:
    """Whether the running backward pass leads to a gradient of some layer's weight.

    Adversarial examples and gradient penalties differentiate by inputs alone: nothing to measure there.
    """
    try:
        return any(
            torch._C._will_engine_execute_node(get_gradient_edge(call.layer.weight).node) for call in calls
        )
    except RuntimeError:  # autograd.grad(loss, parameters) collects its gradients in another way
        return True


def _send(outputs_edge: GradientEdge, vector: Tensor, calls: Sequence[Call]) -> list[Tensor | None]:
    """Back-propagate one vector from the outputs; what arrives at each call's output."""
    edges = [outputs_edge if call.edge is None else call.edge for call in calls]
    try:
        arrived = torch.autograd.grad([outputs_edge], edges, [vector], retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise RuntimeError(
            "Curvature cannot be measured through checkpoint(..., use_reentrant=True), which allows no second "
            "look at its graph. Use checkpoint(..., use_reentrant=False)."
        ) from error
    return [None if gradient is None else gradient.detach() for gradient in arrived]


def _age(call: Call) -> int:
    """When, in the order of creation, the call's graph node was made."""
    assert call.edge is not None
    return call.edge.node._sequence_nr()


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


# torch.compile breaks its graph here and runs the hook as it is. The attribute is what torch.compiler.disable
# sets, without importing the compiler.
_Hook.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]


def _inert(*arguments: Any) -> None:
    """What a hook becomes in a copied or saved model."""


def _make_inert() -> Callable[..., None]:
    return _inert


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
