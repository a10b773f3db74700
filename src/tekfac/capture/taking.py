"""What is taken of a call where its gradients arrive: all, those of some samples, or those of sums of samples.

What is not measured is never kept. That takes a call whose first axis holds the samples for sure; other calls
are kept whole, and what is measured is picked out when all is known (capture.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tekfac.capture.module_calls import ModuleCall, versions
from tekfac.common.phases import Phase
from tekfac.common.precision import without_autocast
from tekfac.layers.batch import Sums
from tekfac.layers.kinds.base import SimpleKind
from tekfac.layers.kinds.norm import UnitKind
from tekfac.layers.layer import Layer


def clear_layer(noted: ModuleCall, samples: int) -> Layer | None:
    """The layer that a call belongs to, if so many samples are the first axis of what is kept of the call."""
    watched, call, kind = noted.watched, noted.call, noted.watched.kind
    if not isinstance(kind, SimpleKind) or versions(call.kept) != call.versions:
        return None
    if call.kept.keys() != {"input"}:  # of a kind of the user's own, which keeps what we do not know
        return None
    inputs = call.kept["input"]
    if len(inputs) != samples or kind.form(watched.module).is_unbatched(inputs):
        return None
    (layer,) = watched.layers.values()
    return None if layer.is_tied else layer


def take_samples(noted: ModuleCall, chosen: Tensor) -> None:
    """Keep some samples of a call alone, by their numbers."""
    call, kind = noted.call, noted.watched.kind
    assert isinstance(kind, SimpleKind)
    call.kept = kind.part(noted.watched.module, call.kept, chosen, call.dtype)
    call.rows, call.versions = chosen, versions(call.kept)
    call.take = partial(torch.index_select, dim=0, index=chosen)


def take_gradients_of_units(noted: ModuleCall, layer: Layer, *, once: bool) -> None:
    """Form the gradient of every sample that is kept of a norm's call where it arrives, and keep nothing else.

    Args:
        noted: the call, perhaps of some samples alone.
        layer: that it belongs to.
        once: whether there is one vector only, so that inputs can be let go of when it has arrived.
    """
    call, kind, module = noted.call, noted.watched.kind, noted.watched.module
    assert isinstance(kind, UnitKind)
    some, form = call.take, kind.form(module)

    def take(gradient: Tensor) -> Tensor:
        kept = call.kept
        if once:
            call.kept = {}
        gradient = gradient if some is None else some(gradient)
        with Phase("unfold"), torch.no_grad(), without_autocast(gradient.device):
            inputs = kind.normalised(module, kept, layer.dtype)
            return form.rows(layer.shape, inputs, gradient.to(layer.dtype)[None])[0]

    call.take, call.is_formed = take, True


Squares = tuple[Tensor, Tensor]
"""The sums of G^T G and G G^T, in the forms of a layer's sides."""

Squaring = Callable[[Layer, Tensor], Squares]
"""Makes them of gradients [K, G, n, d_out, d_in]; the results are new tensors."""

AT_A_TIME = 2**20
"""Numbers in the gradients of sums that are formed before they are squared: 4 MB."""


def squared(layer: Layer, sums: Sums, squaring: Squaring, form: Callable[[Sums], Tensor]) -> Squares:
    """The squares of all sums, whose gradients are formed, by the function, a few at a time."""
    pieces = sums.a_few_at_a_time(max(1, AT_A_TIME // layer.shape.size))
    total_in, total_out = squaring(layer, form(next(pieces)))
    for piece in pieces:
        inputs, outputs = squaring(layer, form(piece))
        total_in += inputs
        total_out += outputs
    return total_in, total_out


def take_sums(noted: ModuleCall, layer: Layer, sums: Sums, squaring: Squaring | None, *, once: bool) -> None:
    """Form the gradients of sums of samples where a gradient arrives, and keep nothing else.

    Args:
        noted: the call.
        layer: that it belongs to.
        sums: of its samples.
        squaring: what is kept of them, if that is less.
        once: whether there is one vector only, so that inputs can be let go of when it has arrived.
    """
    call, kind = noted.call, noted.watched.kind
    assert isinstance(kind, SimpleKind)
    form = kind.form(noted.watched.module)

    def take(gradient: Tensor) -> Tensor | Squares:
        inputs = call.kept["input"]
        if once:
            call.kept = {}
        with Phase("factors"), torch.no_grad(), without_autocast(gradient.device):

            def of(some: Sums) -> Tensor:
                return some.of(layer, form, inputs, gradient[None])

            return of(sums) if squaring is None else squared(layer, sums, squaring, of)

    call.take, call.is_formed = take, True


def settle(noted: ModuleCall) -> None:
    """Make what is kept of a call independent of the mode that its module will have at the next step."""
    watched, call, kind = noted.watched, noted.call, noted.watched.kind
    if call.is_formed or call.rows is not None:
        return
    if isinstance(kind, SimpleKind) and versions(call.kept) == call.versions:
        call.kept = kind.settled(watched.module, call.kept, call.dtype)
        call.versions = versions(call.kept)
