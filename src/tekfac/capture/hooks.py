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
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from tekfac.capture import compiled
from tekfac.capture.autograd import (
    REENTRANT,
    accumulates,
    edge_below,
    made_by,
    records_gradients,
    running_node,
    send_down,
)
from tekfac.capture.batches import Context, InseparableError, Share, layer_batch, samples_first
from tekfac.capture.module_calls import Call, Watched, Window, is_unclear, snapshot, tensors
from tekfac.capture.outputs import OutputSelector, find_outputs
from tekfac.capture.padding import PaddingMask, real_positions
from tekfac.capture.sampling import Sampling
from tekfac.layers.kinds.base import Application, Observed, RepetitionError
from tekfac.layers.kinds.replay import random_state
from tekfac.layers.layer import Layer
from tekfac.layers.rows import LayerBatch
from tekfac.likelihoods import Likelihood, OutputShapeError, Prediction

logger = logging.getLogger("tekfac")

FisherKind = Literal["sampled", "empirical", "exact"]
FISHER_KINDS: tuple[FisherKind, ...] = ("sampled", "empirical", "exact")

NOT_CALLED, IN_EVAL_MODE, NO_GRADIENT, RECEIVED = range(4)
"""How far the passes of a step have come, on their way to statistics."""

WHY_NOTHING_CAME = {
    NOT_CALLED: "the model itself was not called (model(x), not its parts) with gradients enabled.",
    IN_EVAL_MODE: "the model was called in eval mode, not in training mode. Call model.train() first.",
    NO_GRADIENT: "the tensor that predictions are read from got no gradient from the loss. It must be one that "
    "the model returned and the loss was taken of: choose it by outputs=... .",
    RECEIVED: "its module was not called in model(x), or nothing that it gave led to the predictions.",
}

LossReduction = Literal["mean", "batchmean", "sum"]
LOSS_REDUCTIONS: tuple[LossReduction, ...] = ("mean", "batchmean", "sum")


class Capture:
    """Watches a model and delivers, for each layer, what its curvature is measured from.

    Attributes:
        layers: whose modules are watched.
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
        before_pass: called when a watched forward pass begins; may change what is watched.

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
        padding_mask: PaddingMask | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
        only_training: bool = True,
    ) -> None:
        self.layers = list(layers)
        self.batches: dict[str, list[LayerBatch]] = {}
        self.problems: list[str] = []
        self.sampling = Sampling(seed)
        self.counted: Tensor | None = None
        self.passes = self.terms = self.samples = 0
        self.outputs: Tensor | None = None
        self.seconds = 0.0
        self.before_pass: weakref.WeakMethod[Callable[[], None]] | None = None
        self._progress = NOT_CALLED
        self._model = weakref.ref(model)
        self._likelihood = likelihood
        self._fisher = fisher
        self._loss_reduction = loss_reduction
        self._batch_dim = batch_dim
        self._select = outputs or find_outputs
        self._padding_mask = padding_mask
        self._grad_scaler = grad_scaler
        self._only_training = only_training
        self._armed = False
        self._share = self._new_share()
        self._accumulated = True
        self._without_gradient: set[nn.Module] = set()
        self._window: Window | None = None
        self._depth = 0
        self._probed: set[str] = set()
        self._warned: set[str] = set()
        self._handles: list[RemovableHandle | compiled.Handle] = []
        weakref.finalize(self, _remove, self._handles)

    @property
    def armed(self) -> bool:
        """Whether forward passes are noted. Hooks are on the model only as long."""
        return self._armed

    @armed.setter
    def armed(self, armed: bool) -> None:
        compiled.settle()
        self._progress = NOT_CALLED
        if armed == self._armed:
            return
        self._armed = armed
        if armed:
            self._register_hooks()
        else:
            _remove(self._handles)

    def watch(self, layers: Iterable[Layer]) -> None:
        """Watch other layers from now on; what was captured of the ones before is dropped."""
        armed, self.armed = self.armed, False
        self.roll_back()
        self.layers = list(layers)
        self.armed = armed

    def _register_hooks(self) -> None:
        model = self._model()
        if model is None:
            return
        by_module: dict[nn.Module, Watched] = {}
        for layer in self.layers:
            for use in layer.uses:
                watched = by_module.setdefault(use.module, Watched(use.module, use.kind, {}))
                watched.layers[use.part] = layer
        for module, watched in by_module.items():
            note = _Hook(self, "_note_call", watched)
            self._handles.append(module.register_forward_hook(note, with_kwargs=True, prepend=True))
            if watched.kind.repeats(module):
                self._handles.append(
                    module.register_forward_pre_hook(_Hook(self, "_note_random_state", watched))
                )
        self._handles.append(model.register_forward_pre_hook(_Hook(self, "_open_window"), with_kwargs=True))
        self._handles.append(model.register_forward_hook(_Hook(self, "_close_window"), always_call=True))
        self._handles.append(compiled.run_eagerly())

    def _new_share(self) -> Share:
        """Gradients of a mean loss are shares of the whole step's; those that are drawn are whole ones."""
        is_mean = self._fisher == "empirical" and self._loss_reduction != "sum"
        return Share(0 if is_mean else None)

    def clear(self) -> None:
        """Let go of what was captured."""
        self.batches, self.problems = {}, []
        self.passes = self.terms = self.samples = 0
        self.outputs = None
        self._share = self._new_share()
        self._accumulated = True
        self.sampling.keep()

    def roll_back(self) -> None:
        """Let go of what was captured, as if its labels had never been drawn."""
        self.sampling.roll_back()
        self.clear()

    @property
    def why_nothing_came(self) -> str:
        """Why a layer has no statistics after a step that was to measure it, in words."""
        return WHY_NOTHING_CAME[self._progress]

    # -- the forward pass ------------------------------------------------------------------------------

    def _open_window(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._depth == 0:
            watched = (model.training or not self._only_training) and records_gradients()
            self._window = Window() if watched else None
            self._without_gradient.clear()
            if self._window is not None:
                self._window.padding = real_positions(model, self._padding_mask, args, kwargs)
                self.drop_what_was_zeroed()
                before_pass = None if self.before_pass is None else self.before_pass()
                if before_pass is not None:
                    before_pass()
            if not model.training:
                self._progress = max(self._progress, IN_EVAL_MODE)
        self._depth += 1

    def drop_what_was_zeroed(self) -> None:
        """Roll back passes whose gradients are gone: model.zero_grad() was called and no step was taken."""
        if not (self.batches or self.problems) or not self._only_training or not self._accumulated:
            return
        gradients = (parameter.grad for layer in self.layers for parameter in layer.parameters)
        if all(gradient is None or not bool(gradient.any()) for gradient in gradients):
            self.roll_back()

    def _note_random_state(self, watched: Watched, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._window is not None and watched.kind.is_random(module):
            watched.random_state = random_state(next(module.parameters()).device)

    def _note_call(
        self,
        watched: Watched,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returned: Any,
    ) -> None:
        window, state = self._window, watched.random_state
        watched.random_state = None
        is_in_backward = running_node() is not None
        if window is None and is_in_backward and module in self._without_gradient:
            raise RuntimeError(REENTRANT)  # it ran without gradients, and backward() runs it again
        if window is None:
            return
        if not records_gradients():
            self._without_gradient.add(module)
            return
        outputs = watched.kind.outputs(returned)
        if not any(output.requires_grad for output in outputs) or not watched.is_trained:
            return
        kept = snapshot(watched.kind.keep(module, args, kwargs))
        edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        values = tuple(o.detach().clone() for o in outputs) if watched.kind.repeats(module) else ()
        versions = [tensor._version for tensor in tensors(kept)]
        window.calls.append(Call(watched, kept, versions, list(edges), values, state))
        if window.padding is None and self._padding_mask is None:
            window.padding = watched.kind.real_positions(kept)

    def _close_window(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth > 0:  # the model called itself
            return
        window, self._window = self._window, None
        forward_raised = output is None and sys.exc_info()[0] is not None
        if window is None or forward_raised or (self._only_training and not window.calls):
            return
        outputs = self._select(output)
        if not isinstance(outputs, Tensor):
            raise OutputShapeError(
                f"The function outputs= gave a {type(outputs).__name__}. Expected a tensor of predictions, one "
                "of those that the model returned."
            )
        self._likelihood.check(outputs)
        self._progress = max(self._progress, NO_GRADIENT)
        if not self._only_training:
            self.outputs = outputs
        node, output_nr = made_by(outputs)
        if node is None or outputs.numel() == 0:
            return
        # What was called after the outputs were made gets nothing from them, and must not be owned here.
        for call in window.calls:
            call.edges = [edge_below(node, edge) for edge in call.edges]
        window.calls = [call for call in window.calls if any(edge is not None for edge in call.edges)]
        capture, values = weakref.ref(self), outputs.detach().clone()

        def at_outputs(gradient: Tensor | None) -> None:
            owner = capture()
            if owner is None or Capture._sending or window.used or gradient is None:
                return
            adds_up = accumulates(window.calls)
            if owner._only_training and adds_up is False:
                return
            owner._accumulated &= adds_up is not None
            owner._progress = RECEIVED
            node = running_node()
            calls, window.calls, window.used = window.calls, [], True
            start = time.perf_counter()
            outputs = values.to(gradient.dtype)
            with torch.autocast(gradient.device.type, enabled=False):  # backward() may be called inside of one
                owner._receive(GradientEdge(node, output_nr), outputs, gradient, calls, window.padding)
            owner.seconds += time.perf_counter() - start

        if node is outputs.grad_fn:
            outputs.register_hook(at_outputs)  # type: ignore[no-untyped-call]
        else:
            node.register_prehook(lambda gradients: at_outputs(gradients[output_nr]))

    # -- the backward pass -----------------------------------------------------------------------------

    def _receive(
        self,
        outputs_edge: GradientEdge,
        outputs: Tensor,
        gradient: Tensor,
        calls: list[Call],
        padding: Tensor | None,
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
        if self._share.terms is not None:
            self._share.terms += num_terms
        if self._fisher == "empirical" and self._grad_scaler is not None:
            self._share.loss_scale = self._grad_scaler.get_scale()
        if not calls and self._fisher == "sampled" and num_terms:
            prediction.sample(self.sampling.generator_on(outputs.device))  # later draws are as with more layers
        if not num_terms or not calls:
            return

        def send(vector: Tensor) -> list[list[Tensor | None]]:
            return send_down(outputs_edge, vector.movedim(0, self._batch_dim), calls)

        # The last sample, since in a causal model with samples and positions mixed up it reaches most rows.
        probed_sample = int(prediction.counted.any(dim=1).nonzero()[-1])
        Capture._sending = True
        try:
            for vector in self._vectors(prediction, gradient, outputs.device):
                for call, arrived in zip(calls, send(vector), strict=True):
                    if any(part is not None for part in arrived):
                        call.gradients.append(arrived)
            if self._samples_are_unclear(calls, outputs):
                probe = torch.zeros_like(gradient)
                probe[probed_sample] = gradient[probed_sample]
                for call, arrived in zip(calls, send(probe), strict=True):
                    call.probe = arrived
        finally:
            Capture._sending = False
        sampled = self._fisher == "sampled"
        self._keep(calls, Context(num_terms, prediction.counted, padding, sampled, probed_sample, self._share))

    def _keep(self, calls: Sequence[Call], context: Context) -> None:
        """Join the applications of each layer's parameters to a batch."""
        by_layer: dict[str, list[Application]] = {}
        layers: dict[str, Layer] = {}
        for call in calls:
            for application in self._applications(call):
                layer = call.watched.layers.get(application.part)
                if layer is None or not layer.weight.requires_grad:
                    continue
                if not application.gradients or not application.inputs.numel():  # an expert that got no token
                    continue
                layers[layer.name] = layer
                by_layer.setdefault(layer.name, []).append(samples_first(application, context))
        for name, applications in by_layer.items():
            try:
                batch, doubt = layer_batch(layers[name], applications, context)
            except InseparableError as error:
                self._warn_once(f"the statistics of a layer are left out: {error}")
                continue
            if doubt is not None:
                self._warn_once(doubt)
            self._probed.add(name)
            self.batches.setdefault(name, []).append(batch)

    def _applications(self, call: Call) -> list[Application]:
        """What a call did with the module's parameters; none, and a word in the log, if that cannot be told."""
        watched = call.watched
        if [tensor._version for tensor in tensors(call.kept)] != call.versions:
            self._warn_once(
                f"the input of layer {watched.name!r} was changed in place after the layer was called "
                "(inside a checkpointed segment?), so its statistics are left out"
            )
            return []
        if not call.gradients:
            return []
        dtype = next(iter(watched.layers.values())).dtype
        observed = Observed(call.kept, call.gradients, call.probe, call.outputs, dtype, call.random_state)
        try:
            return watched.kind.applications(watched.module, observed)
        except RepetitionError as error:
            self._warn_once(f"the statistics of layer {watched.name!r} are left out: {error}")
            return []

    def _samples_are_unclear(self, calls: Sequence[Call], outputs: Tensor) -> bool:
        """Whether shapes leave open which rows are whose.

        So they do where a layer was called more than once or its input can be arranged in several ways and,
        for a layer seen for the first time, where the outputs have more than one axis beside the classes.
        """
        names = [layer.name for call in calls for layer in call.watched.layers.values()]
        if len(set(names)) < len(names) or (outputs.ndim > 2 and not self._probed.issuperset(names)):
            return True
        return any(is_unclear(call, len(outputs)) for call in calls)

    def _num_terms(self, prediction: Prediction) -> int:
        """M, the number of summands that the Fisher is divided by."""
        if self._loss_reduction == "mean":
            return int(prediction.counted.sum())
        return int(prediction.counted.any(dim=1).sum())

    def _vectors(self, prediction: Prediction, gradient: Tensor, device: torch.device) -> Iterator[Tensor]:
        """The vectors, shaped like the outputs, that are back-propagated one by one."""
        if self._fisher == "sampled":
            yield prediction.sample(self.sampling.generator_on(device))
        elif self._fisher == "exact":
            yield from prediction.columns()
        else:
            yield gradient

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message[0].upper() + message[1:] + ("" if message.endswith("?") else "."))


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


def _remove(handles: list[RemovableHandle | compiled.Handle]) -> None:
    while handles:
        handles.pop().remove()
    compiled.settle()
