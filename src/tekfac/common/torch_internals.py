"""The private names of torch that this library uses, all of them, each with the public one that was looked at.

Nothing else in the library touches a private name of torch. `tests/test_torch_internals.py` asks for each of
these by name, so that a version of torch that drops one says which.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


# -- autograd ------------------------------------------------------------------------------------------


def is_inside_torch_func() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is running.

    No public name tells. `torch.is_grad_enabled()` is True there as well.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def running_node() -> Any:
    """The graph node that a backward pass is at, in this thread; None outside of one.

    A public hook gets the gradient, not the node. A node that a hook keeps hold of would keep the graph alive
    that the hook hangs on.
    """
    return torch._C._current_autograd_node()


def will_run(node: Any) -> bool:
    """Whether the backward pass that is running will come to a node.

    `Tensor.retains_grad`, `requires_grad` and hooks on parameters tell too late, or nothing.

    Raises:
        RuntimeError: inside of torch.autograd.grad, which collects gradients in another way.
    """
    return bool(torch._C._will_engine_execute_node(node))


def running_pass() -> int:
    """A number of the backward pass that runs in this thread; -1 outside of one. No public name tells."""
    return int(torch._C._current_graph_task_id())


def sequence_number(node: Any) -> int:
    """When the forward pass made a node: later ones have larger numbers.

    To walk the graph by the public `next_functions` gives the order as well, at a cost that grows with the
    graph.
    """
    return int(node._sequence_nr())


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place.

    `torch.autograd.graph.saved_tensors_hooks` sees a change only when autograd itself has saved the tensor.
    """
    return tensor._version


def is_change_of_precision(node: Any) -> bool:
    """Whether a graph node copies a tensor to another precision or device.

    Nodes have no public types. This one's is taken from a copy, not from a name.
    """
    return type(node) is _COPY_NODE


with torch.enable_grad():
    _COPY_NODE = type(torch.zeros((), requires_grad=True).to(torch.float64).grad_fn)


def base_name(node: Any) -> str:
    """What a graph node differentiates: "MseLoss" or "View".

    `Node.name` is public; what it gives is not, and differs between versions in its number.
    """
    return re.sub(r"Backward\d*$", "", node.name())


def exponent_of(node: Any) -> float | None:
    """The fixed exponent of a node that differentiates a power; None of others.

    What a node has saved that is no tensor stays when tensors are let go of.
    """
    exponent = getattr(node, "_saved_exponent", None)
    return float(exponent) if isinstance(exponent, int | float) else None


def joins_rows(node: Any) -> bool:
    """Whether a node puts values together along the first axis."""
    return base_name(node) == "Cat" and getattr(node, "_saved_dim", None) == 0


def length_along(node: Any) -> int | None:
    """The length of the axis that a node works along, such as that of a softmax; None where it is not told.

    Of a node's results the public names tell neither shapes nor axes.
    """
    axis: Any = getattr(node, "_saved_dim", None)
    results: Any = getattr(node, "_input_metadata", ())
    if not isinstance(axis, int) or len(results) != 1:
        return None
    shape = results[0].shape
    axis = axis - 2**64 if axis >= 2**63 else axis  # a negative number, as torch saves it
    return int(shape[axis]) if -len(shape) <= axis < len(shape) else None


def roots_of_running_pass() -> list[tuple[Any, int]]:
    """The nodes that the backward pass which is running began at, and which of their results.

    A node knows those below it, and nobody those above. The engine is called by one function, for
    `Tensor.backward` and `torch.autograd.grad` alike, whose frame is further down this thread's stack, or,
    where an accelerator's thread runs the nodes, that of the thread which waits for it. Empty where that is
    not clear.
    """
    running = [frame for frame in _frames_below(sys._getframe()) if _calls_engine(frame)]
    if not running:
        others = (own for thread, own in sys._current_frames().items() if thread != threading.get_ident())
        running = [frame for other in others for frame in _frames_below(other) if _calls_engine(frame)]
        if len(running) != 1:
            return []
    outputs = running[0].f_locals.get("t_outputs", ())
    return [edge for output in outputs if (edge := _edge_of(output))[0] is not None]


def _frames_below(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _calls_engine(frame: FrameType) -> bool:
    return frame.f_code is _CALL_OF_ENGINE


_CALL_OF_ENGINE = torch.autograd.graph._engine_run_backward.__code__


def _edge_of(output: Any) -> tuple[Any, int]:
    """Of a tensor, or of an edge that a pass may begin at instead."""
    if isinstance(output, Tensor):
        return output.grad_fn, output.output_nr
    return output.node, output.output_nr


def calls_in_progress(module: torch.nn.Module) -> int:
    """How many callers of this function are calls of a module, each inside of the other.

    Hooks cannot count them: a call that KeyboardInterrupt leaves runs none, as `always_call` is for `Exception`
    alone.
    """
    frames = _frames_below(sys._getframe())
    return sum(frame.f_code is _CALL_OF_MODULE and frame.f_locals.get("self") is module for frame in frames)


_CALL_OF_MODULE = torch.nn.Module._wrapped_call_impl.__code__


# -- the compiler --------------------------------------------------------------------------------------


class StanceChange(NamedTuple):
    """A change of the compiler's stance, process-wide.

    Attributes:
        before: the stance until now.
        now: the new one.
        undo: puts `before` in place again.
    """

    before: Any
    now: Any
    undo: Callable[[], None]


def change_stance(stance: str) -> StanceChange:
    """Change the compiler's stance and tell which one it was.

    `torch.compiler.set_stance` is public; its attributes `prev` and `stance` are not, and without them nobody
    knows whether somebody else has changed the stance meanwhile. It imports the compiler, which takes seconds.
    """
    change = torch.compiler.set_stance(stance)
    return StanceChange(change.prev, change.stance, lambda: change.__exit__(None, None, None))


def never_compiled(function: Function) -> Function:
    """The function, which torch.compile breaks its graph at and runs as it is.

    `torch.compiler.disable` is public and sets the same attribute, but imports the compiler, which takes
    seconds.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


COMPILER = "torch._dynamo"
"""The module of the compiler: compiled code can only be there once it is imported."""

COMPILED_PREFIX = "_orig_mod."
"""What torch.compile puts before the names of a model's parameters; the attribute has no public name."""


def without_compiler(model: torch.nn.Module) -> torch.nn.Module:
    """The model that torch.compile was given, or the model itself."""
    inner = getattr(model, COMPILED_PREFIX.rstrip("."), model)
    return inner if isinstance(inner, torch.nn.Module) else model


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called, which leaves the module what it is and has no public trace."""
    return module._compiled_call_impl is not None


# -- fully_shard ---------------------------------------------------------------------------------------


def held_back(model: torch.nn.Module) -> bool:
    """Whether fully_shard keeps gradients that are still to be put together, by `set_requires_gradient_sync`.

    Until then `.grad` of the parameters is None, and there is no public name for where they are.
    """
    return any(
        own.unsharded_accumulated_grad is not None
        or getattr(getattr(own, "_unsharded_param", None), "grad", None) is not None
        for group in _sharded_groups(model)
        for own in group.fsdp_params
    )


@contextlib.contextmanager
def sharding_held_off(model: torch.nn.Module) -> Iterator[None]:
    """Let a backward pass inside of another one leave all that fully_shard does to the outer one.

    All parameters are whole meanwhile, so that the inner pass sends no messages; afterwards all is as it was.
    The public `set_requires_gradient_sync` and `set_reshard_after_backward` cannot be read, and nothing public
    puts back that a part of the model was not come by yet. All processes have to do this together.
    """
    groups, states = _sharded_groups(model), _sharded_states(model)
    contexts = list({id(state._state_ctx): state._state_ctx for state in states}.values())
    owners: list[Any] = [*groups, *states, *contexts]
    names = (
        *("reduce_grads", "reshard_after_backward", "_training_state", "_post_forward_indices"),
        "is_last_backward",
    )
    before = [{name: getattr(own, name) for name in names if hasattr(own, name)} for own in owners]
    were_cut = [group for group in groups if not group.is_unsharded]
    for group in groups:
        group.unshard()
        group.wait_for_unshard()
        group.reduce_grads = group.reshard_after_backward = False
        group._post_forward_indices = []  # what is fetched ahead of a pass
    for context in contexts:
        context.is_last_backward = False  # what is put in order behind one
    try:
        yield
    finally:
        for own, values in zip(owners, before, strict=True):
            for name, value in values.items():
                setattr(own, name, value)
        for group in were_cut:
            group.reshard()


def _sharded_states(model: torch.nn.Module) -> list[Any]:
    """What fully_shard knows of each module that it was called of."""
    modules: Iterator[Any] = (module for module in model.modules() if hasattr(module, "_get_fsdp_state"))
    return list(dict.fromkeys(module._get_fsdp_state() for module in modules))


def _sharded_groups(model: torch.nn.Module) -> list[Any]:
    """Its parameters that are put together at once; later versions of torch have several groups of a module."""
    states = _sharded_states(model)
    found = (getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states)
    return [group for groups in found for group in groups if group is not None]


# -- many tensors at a time ----------------------------------------------------------------------------
#
# torch.optim uses these for its own optimizers. The public way, a loop over tensors, takes several times as
# long where parameters are many and small.


def multiply_each(tensors: Sequence[Tensor], factor: float) -> None:
    """x <- factor x for every tensor, in place."""
    torch._foreach_mul_(list(tensors), factor)


def add_to_each(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: float = 1.0) -> None:
    """x <- x + factor y for every pair, in place."""
    torch._foreach_add_(list(tensors), list(others), alpha=factor)


def copy_each(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """x <- y for every pair, in place."""
    torch._foreach_copy_(list(tensors), list(others))


def norms_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The Frobenius norm of every tensor, scalars on their device."""
    return torch._foreach_norm(list(tensors))


def sums_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The sum of every tensor that is nowhere negative, scalars on their device."""
    return torch._foreach_norm(list(tensors), 1)


def products_of(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Sequence[Tensor]:
    """x y for every pair."""
    return torch._foreach_mul(list(tensors), list(others))


def move_each(tensors: Sequence[Tensor], others: Sequence[Tensor], share: float) -> None:
    """x <- x + share (y - x) for every pair, in place."""
    torch._foreach_lerp_(list(tensors), list(others), share)


def scale_each(tensors: Sequence[Tensor], factors: Sequence[float]) -> None:
    """x <- factor x for every tensor, with a factor of its own, in place."""
    torch._foreach_mul_(list(tensors), list(factors))


def raise_each(tensors: Sequence[Tensor], least: float) -> None:
    """x <- max(x, least) for every tensor, in place."""
    torch._foreach_clamp_min_(list(tensors), least)


def quotients_by_roots(
    tensors: Sequence[Tensor], squares: Sequence[Tensor], floors: Sequence[Tensor]
) -> Sequence[Tensor]:
    """x / sqrt(y + floor) for every tensor; floors are scalars on their device."""
    roots = torch._foreach_add(list(squares), list(floors))
    torch._foreach_sqrt_(roots)
    return torch._foreach_div(list(tensors), roots)
