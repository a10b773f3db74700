"""Hooks on a model: the only file that registers any but on nodes of the graph (autograd.py does).

During a forward pass of the model every call of a layer's module is noted: its input and the graph edges of its
outputs. When the user's backward pass reaches the model's outputs, while the graph below them is still whole,
what was noted is handed over (capture.py sends the Fisher's vectors down from there). So no second pass is
needed in the user's loop, and a forward pass that is never followed by a backward pass leaves nothing behind.

Two things here are worth knowing when changing them:

* Outputs of layers are kept as graph *edges*. An in-place activation after a layer changes the tensor,
  not the edge.
* The hook on the model's outputs must not own the graph node it hangs on, or a graph that is dropped
  without a backward pass would never be freed. It therefore asks autograd for the node it runs at.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from tekfac.capture.autograd import (
    REENTRANT,
    accumulates,
    is_sending,
    records_gradients,
)
from tekfac.capture.awaiting import Awaited, awaited
from tekfac.capture.compiled import EagerForward
from tekfac.capture.likelihood_of_loss import LikelihoodsOfLosses
from tekfac.capture.loss_graph import LossSort, sort_of_loss
from tekfac.capture.measurement import Measurement
from tekfac.capture.module_calls import (
    ModuleCall,
    WatchedModule,
    Window,
    snapshot,
    versions,
    watched_modules,
)
from tekfac.capture.outputs import OutputSelector, selected_outputs
from tekfac.capture.padding import real_positions
from tekfac.common.phases import Phase
from tekfac.common.precision import without_autocast
from tekfac.common.torch_internals import (
    calls_in_progress,
    held_back,
    never_compiled,
    roots_of_running_pass,
    running_node,
    running_pass,
    sharding_held_off,
)
from tekfac.layers.kinds.base import Call
from tekfac.layers.kinds.replay import random_state
from tekfac.layers.layer import Layer
from tekfac.likelihoods import OutputShapeError
from tekfac.ranks.group import Ranks
from tekfac.ranks.shards import is_sharded

NOT_CALLED, IN_EVAL_MODE, CALLED, UNREADABLE, NO_GRADIENT, RECEIVED = range(6)
"""How far the passes of a step have come, on their way to statistics."""

NOT_THERE = "its module was not called in model(x), or nothing that it gave led to the predictions."
WHY_NOTHING_CAME = {
    NOT_CALLED: "the model itself was not called (model(x), not its parts) with gradients enabled.",
    IN_EVAL_MODE: "the model was called in eval mode, not in training mode. Call model.train() first.",
    CALLED: NOT_THERE,
    UNREADABLE: "there are no tensors of predictions in what the model returned, as far as could be seen. Let "
    "it return them, or say where they are: outputs=lambda returned: ... .",
    NO_GRADIENT: "the tensor that predictions are read from got no gradient from the loss. It must be one that "
    "the model returned and the loss was taken of: choose it by outputs=... .",
    RECEIVED: NOT_THERE,
}


@dataclass(frozen=True)
class Arrival:
    """A backward pass that has come to a prediction, with the graph below still whole.

    Attributes:
        awaited: the prediction, and what was noted of it in the forward pass.
        edge: of the prediction, from which vectors can be sent down.
        outputs: the prediction.
        gradient: of the loss, of the same shape.
        calls: of the layers' modules in the forward pass, made before.
        adds_up: whether the pass adds to gradients of parameters; None for one that collects them otherwise.
    """

    awaited: Awaited
    edge: GradientEdge
    outputs: Tensor
    gradient: Tensor
    calls: list[ModuleCall]
    adds_up: bool | None

    def sort_of_loss(self) -> LossSort | None:
        """What the loss is of the prediction, as the graph between them shows; None where it cannot be seen."""
        roots = roots_of_running_pass()
        return sort_of_loss(roots, self.edge.node, self.edge.output_nr) if roots else None

    def to_come(self) -> list[str]:
        """Names of the other predictions that this pass will come to on its way to parameters."""
        return [] if self.adds_up is False else self.awaited.to_come()

    def more_samples(self, samples: int) -> int:
        """How many of this one's samples are more than the predictions had that arrived before."""
        siblings = self.awaited.siblings
        more = max(0, samples - siblings.samples)
        siblings.samples += more
        return more

    def join(self, names: Iterable[str], taken_by: Any) -> None:
        """Note that something takes what comes by other predictions, too."""
        self.awaited.siblings.joined.update(dict.fromkeys(names, taken_by))

    def taken_by(self) -> Any:
        """What takes this one's gradients since an earlier arrival of the same pass; None if nothing does."""
        return self.awaited.siblings.joined.pop(self.awaited.name, None)


class Listener(Protocol):
    """Who is told of passes."""

    def pass_begins(self) -> None:
        """A forward pass that is watched begins."""
        ...

    def pass_arrived(self, arrival: Arrival) -> None:
        """Its backward pass has come to the outputs."""
        ...


_in_training: weakref.WeakSet[ModelHooks] = weakref.WeakSet()
"""Those that watch a model in training, of all models and threads."""

_one_at_a_time = threading.Lock()


class ModelHooks:
    """Hooks on a model and on the modules of its layers, there only while they are armed.

    Attributes:
        progress: how far the passes since the last call of `arm` have come.
        predictions: of the last forward pass; kept only where not only training is watched.
        is_sharded: whether fully_shard has cut the model's parameters.
        asleep: whether the hooks were taken off since others came to the model; `arm` puts them on again.
        number: in the order in which they came to it; 0: of those that watch not only training.

    An optimizer watches forward passes in training mode whose backward pass leads to parameters. With
    `only_training=False` the mode does not matter, and a backward pass that ends at the outputs will do.
    """

    def __init__(
        self,
        model: nn.Module,
        measurement: Measurement,
        likelihoods: LikelihoodsOfLosses,
        listener: Listener,
        *,
        only_training: bool,
    ) -> None:
        self.progress = NOT_CALLED
        self.asleep, self.number = False, 0
        self.predictions: Mapping[str, Tensor] = {}
        self.is_sharded = any(map(is_sharded, model.parameters()))
        self._model = weakref.ref(model)
        self._listener = weakref.ref(listener)
        self._likelihoods = likelihoods
        self._select = measurement.outputs
        self._may_be_unreadable = measurement.fisher == "auto" and measurement.outputs is None
        self._padding_mask = measurement.padding_mask
        self._only_training = only_training
        self._eager = EagerForward()
        self._without_gradient: set[nn.Module] = set()
        self._window: Window | None = None
        self._depth = 0
        self._armed_for: tuple[Layer, ...] = ()
        self._handles: list[RemovableHandle] = []
        if only_training:
            self._put_others_to_sleep()
        weakref.finalize(self, _remove, self._handles, self._eager)

    def _put_others_to_sleep(self) -> None:
        """Take the hooks of older ones off the model: a stored traceback may keep some alive for ever."""
        others = self._of_same_model()
        for other in others:
            other.asleep |= other.armed
            other.disarm()
        self.number = 1 + max((other.number for other in others), default=0)
        with _one_at_a_time:
            _in_training.add(self)

    def _of_same_model(self) -> list[ModelHooks]:
        model = self._model()
        with _one_at_a_time:
            return [other for other in _in_training if other is not self and other._model() is model]

    @property
    def is_alone(self) -> bool:
        """Whether nothing else watches the model in training that has not been let go of."""
        return not self._of_same_model()

    @property
    def armed(self) -> bool:
        """Whether forward passes are noted. Hooks are on the model only as long."""
        return bool(self._handles)

    @property
    def is_compiled(self) -> bool:
        """Whether the model, one of its modules or what it was last called by is compiled."""
        model = self._model()
        return model is not None and self._eager.is_compiled(model)

    def arm(self, layers: Iterable[Layer]) -> None:
        """Note the calls of these layers' modules, and of no others, from the next forward pass on."""
        model = self._model()
        if model is None:
            return
        self.progress, self.asleep = NOT_CALLED, False
        self._eager.arm(model)
        layers = tuple(layers)
        if self.armed and len(layers) == len(self._armed_for) and all(map(is_, layers, self._armed_for)):
            return
        self._armed_for = layers
        _remove_all(self._handles)
        for watched in watched_modules(layers):
            module = watched.module
            note = _Hook(self._note_call, watched)
            self._handles.append(module.register_forward_hook(note, with_kwargs=True, prepend=True))
            if watched.kind.repeats(module):
                note = _Hook(self._note_random_state, watched)
                self._handles.append(module.register_forward_pre_hook(note))
        self._handles.append(model.register_forward_pre_hook(_Hook(self._open_window), with_kwargs=True))
        self._handles.append(model.register_forward_hook(_Hook(self._close_window), always_call=True))

    def rearm(self, layers: Iterable[Layer]) -> None:
        """Note the calls of other layers' modules instead; what was seen so far stays seen."""
        progress = self.progress
        self.disarm()
        self.arm(layers)
        self.progress = progress

    def disarm(self) -> None:
        """Take the hooks off."""
        _remove(self._handles, self._eager, was_called=self.progress != NOT_CALLED)

    # -- parameters in shards --------------------------------------------------------------------------

    def gradients_are_held_back(self) -> bool:
        """Whether fully_shard keeps gradients of earlier passes to itself."""
        model = self._model()
        return model is not None and held_back(model)

    def sharding_held_off(self, ranks: Ranks, *, needed: bool) -> contextlib.AbstractContextManager[None]:
        """For passes of our own inside of the user's; all processes have to ask, needed here or not."""
        model = self._model()
        if model is None or not self.is_sharded or not any(ranks.gather(needed)):
            return contextlib.nullcontext()
        return sharding_held_off(model)

    # -- the forward pass ------------------------------------------------------------------------------

    def _open_window(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._depth and calls_in_progress(model) == 1:  # the pass before this one was interrupted
            self._depth, self._window = 0, None
            self._eager.end_forward()
        if self._depth == 0:
            watched = (model.training or not self._only_training) and records_gradients()
            self._window = Window() if watched else None
            self._without_gradient.clear()
            if self._window is not None:
                self._eager.begin_forward()
                self._window.real = real_positions(model, self._padding_mask, args, kwargs)
                listener = self._listener()
                if listener is not None:
                    listener.pass_begins()
            if not model.training:
                self.progress = max(self.progress, IN_EVAL_MODE)
        self._depth += 1

    def _note_random_state(self, watched: WatchedModule, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._window is not None and watched.kind.is_random(module):
            watched.random_state = random_state(next(module.parameters()).device)

    def _note_call(
        self,
        watched: WatchedModule,
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
        outputs, weights = watched.kind.outputs(returned), watched.trained_weights()
        if not weights or not any(output.requires_grad for output in outputs):
            return
        kept = snapshot(watched.kind.keep(module, args, kwargs))
        call = Call(
            kept,
            next(iter(watched.layers.values())).dtype,
            outputs=[o.detach().clone() for o in outputs] if watched.kind.repeats(module) else (),
            shapes=[output.shape for output in outputs],
            random_state=state,
            versions=versions(kept),
            edges=[get_gradient_edge(output) if output.requires_grad else None for output in outputs],
        )
        window.calls.append(ModuleCall(watched, call, weights))
        if window.real is None and self._padding_mask is None:
            window.real = watched.kind.real_positions(kept)

    def _close_window(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth > 0:  # the model called itself
            return
        self._eager.end_forward()
        window, self._window = self._window, None
        forward_raised = output is None and sys.exc_info()[0] is not None
        if window is None or forward_raised:
            return
        self.progress = max(self.progress, CALLED)
        if self._only_training and not window.calls:
            return
        try:
            predictions = selected_outputs(output, self._select)
        except OutputShapeError:
            if not self._may_be_unreadable:
                raise
            self.progress = max(self.progress, UNREADABLE)
            return
        self._likelihoods.check(predictions)
        self.progress = max(self.progress, NO_GRADIENT)
        if not self._only_training:
            self.predictions = predictions
        for waiting, prediction, node in awaited(window, predictions):
            self._wait(waiting, prediction, node)

    # -- the backward pass -----------------------------------------------------------------------------

    def _wait(self, waiting: Awaited, prediction: Tensor, node: Any) -> None:
        """Hang a hook on a prediction that hands over what was noted when its gradient arrives."""
        hooks, output_nr = weakref.ref(self), waiting.output_nr

        def at_prediction(gradient: Tensor | None) -> None:
            owner = hooks()
            if owner is not None and gradient is not None:
                owner._arrived(waiting, gradient.detach())  # which has a graph where it is differentiated again

        if node is prediction.grad_fn:
            prediction.register_hook(at_prediction)  # type: ignore[no-untyped-call]
        else:
            node.register_prehook(lambda gradients: at_prediction(gradients[output_nr]))

    def _arrived(self, waiting: Awaited, gradient: Tensor) -> None:
        """The gradient of a prediction is here; runs inside of the user's backward pass."""
        listener, siblings = self._listener(), waiting.siblings
        if listener is None or is_sending() or waiting.used:
            return
        adds_up = accumulates(waiting.calls)
        if self._only_training and adds_up is False:
            return
        siblings.begin(running_pass())
        if waiting.name in siblings.inner:
            return
        siblings.inner |= waiting.made_of
        self.progress = RECEIVED
        calls, waiting.calls, waiting.used = waiting.calls, [], True
        edge = GradientEdge(running_node(), waiting.output_nr)
        outputs = waiting.values.to(gradient.dtype)
        with without_autocast(gradient.device):  # backward() may be called inside of one
            listener.pass_arrived(Arrival(waiting, edge, outputs, gradient, calls, adds_up))


@contextlib.contextmanager
def predictions_noted(model: nn.Module, select: OutputSelector | None) -> Iterator[list[Tensor]]:
    """The predictions of all forward passes of a model meanwhile, with their graphs."""
    noted: list[Tensor] = []

    def note(model: nn.Module, args: tuple[Any, ...], returned: Any) -> None:
        noted.extend(own for own in selected_outputs(returned, select).values() if own.requires_grad)

    handle = model.register_forward_hook(note)
    try:
        yield noted
    finally:
        handle.remove()


class _Hook:
    """A method as a hook that keeps nothing alive, and stays behind when a model is copied or saved."""

    def __init__(self, method: Callable[..., None], *arguments: Any) -> None:
        self._method = weakref.WeakMethod(method)
        self._arguments = arguments

    @never_compiled
    def __call__(self, *arguments: Any) -> None:
        method = self._method()
        if method is not None and method.__self__.armed:  # type: ignore[attr-defined]
            with Phase("capture"):
                method(*self._arguments, *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _inert

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_inert, ()


def _inert(*arguments: Any) -> None:
    """What a hook becomes in a copied or saved model."""


def _make_inert() -> Callable[..., None]:
    return _inert


def _remove(handles: list[RemovableHandle], eager: EagerForward, *, was_called: bool = True) -> None:
    _remove_all(handles)
    eager.disarm(was_called=was_called)


def _remove_all(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
