"""Whether a saved state can be gone on from: looked at as a whole, before anything of it is taken over.

A state is a file's, and may have been cut, edited or damaged. What is wrong is told by its place in the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tekfac.capture.likelihood_of_loss import LikelihoodsOfLosses
from tekfac.capture.probing import Probing
from tekfac.damping import from_plain
from tekfac.layers.layer import Layer
from tekfac.optim.divergence import Losses
from tekfac.optim.refresh_log import Refreshes
from tekfac.optim.settings import check_damping
from tekfac.ranks.shards import own_part

OF_AVERAGES = ("averaged", "exp_avg", "exp_avg_sq")
"""Of the gradients of a parameter without a block: all of them, or none."""

Check = Callable[[str, Any], None]
"""Raises ValueError for a value, by its place."""


def damaged(place: str, value: Any, expected: str) -> ValueError:
    """The error for a value that cannot be."""
    shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
    return ValueError(
        f"The saved state is damaged, or edited: {place} is {shown}. Expected {expected}. Nothing was loaded."
    )


def require_frame(state_dict: Any) -> None:
    """Raise ValueError for what has not the outer form of an optimizer's state."""
    _mapping("the state", state_dict)
    groups = state_dict.get("param_groups")
    if not isinstance(groups, Sequence) or not all(isinstance(group, Mapping) for group in groups):
        raise damaged("param_groups", groups, "a list of dicts")
    for place, group in enumerate(groups):
        if not isinstance(group.get("params"), Sequence):
            raise damaged(f"param_groups[{place}]['params']", group.get("params"), "a list")
    _mapping("state", state_dict.get("state"))
    known = {key for group in groups for key in group["params"]}
    for key, values in state_dict["state"].items():
        if key not in known:
            raise damaged(f"state[{key!r}]", values, "only parameters of param_groups")
        _mapping(f"state[{key!r}]", values)


def require_entries(whole: Any) -> None:
    """Raise ValueError for wrong entries of what belongs to the optimizer as a whole."""
    place = "param_groups[0]['tekfac']"
    _mapping(place, whole)
    for name, check in WHOLE.items():
        if name not in whole and name not in LATER:
            raise damaged(f"{place}[{name!r}]", None, "an entry that every state has")
        if name in whole:
            check(f"{place}[{name!r}]", whole[name])


def require_group(place: int, group: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of a param group that no optimizer could have had."""
    for name, check in GROUP.items():
        if name not in group:
            raise damaged(f"param_groups[{place}][{name!r}]", None, "an entry that every group has")
        check(f"param_groups[{place}][{name!r}]", group[name])
    if len(group["param_names"]) != len(group["params"]):
        raise damaged(
            f"param_groups[{place}]['param_names']", group["param_names"], "a name for each parameter"
        )


def require_parameter(name: str, parameter: Tensor, values: Mapping[str, Any]) -> None:
    """Raise ValueError for wrong numbers of a parameter by itself."""
    shape = tuple(parameter.shape)
    if not values and not parameter.requires_grad:  # of frozen ones torch.distributed.checkpoint saves nothing
        return
    _count(f"'step' of {name!r}", values.get("step"))
    if "momentum_buffer" in values:
        _tensor(f"'momentum_buffer' of {name!r}", values["momentum_buffer"], shape)
    if not values.keys().isdisjoint(OF_AVERAGES):
        _count(f"'averaged' of {name!r}", values.get("averaged"))
        _tensor(f"'exp_avg' of {name!r}", values.get("exp_avg"), shape)
        _tensor(f"'exp_avg_sq' of {name!r}", values.get("exp_avg_sq"), shape, least=0.0)


def require_layer(layer: Layer, values: Mapping[str, Any]) -> None:
    """Raise ValueError for wrong numbers of a layer's curvature, and of what was gathered in its basis."""
    shape, place = layer.shape, f"of layer {layer.name!r}"
    groups, entries = shape.groups, (shape.groups, shape.d_out, shape.d_in)
    outputs = (groups, shape.d_out, shape.block_out or shape.d_out)
    inputs: tuple[int, ...] = (groups, shape.d_in, shape.block_in or shape.d_in)
    if shape.kernel:
        inputs = (groups, *shape.kernel, shape.d_in // math.prod(shape.kernel), shape.block_in or shape.d_in)
    if "curvature" in values:
        found = values["curvature"]
        _mapping(f"curvature {place}", found)
        moments, basis = found.get("moments"), found.get("basis")
        _mapping(f"moments {place}", moments)
        _mapping(f"basis {place}", basis)
        for key, expected in (("input", inputs), ("output", outputs), ("scale", (groups,))):
            _tensor(f"moments.{key} {place}", moments.get(key), expected)
        for key, expected in (("vectors_in", inputs), ("vectors_out", outputs)):
            _tensor(f"basis.{key} {place}", basis.get(key), expected)
        for key, expected in (("values_in", inputs), ("values_out", outputs)):
            _tensor(f"basis.{key} {place}", basis.get(key), (groups, math.prod(expected[1:-1])))
        _tensor(f"basis.scale {place}", basis.get("scale"), (groups,))
        _average(f"moments {place}", moments)
        _count(f"failed_refreshes {place}", found.get("failed_refreshes"))
        theta = found.get("theta")
        if theta is not None:
            _mapping(f"theta {place}", theta)
            _tensor(f"theta {place}", theta.get("value"), entries, least=0.0)
            _average(f"theta {place}", theta)
    if "motion" in values:
        _mapping(f"motion {place}", values["motion"])
        for key, own in values["motion"].items():
            if key not in ("first", "second"):
                raise damaged(f"motion {place}", key, "'first' and 'second'")
            _mapping(f"motion.{key} {place}", own)
            whole = own.get("value")
            alone = key == "second" and isinstance(whole, Tensor) and whole.shape[1:] == (1, 1)
            least = 0.0 if key == "second" else None
            _tensor(f"motion.{key} {place}", whole, (groups, 1, 1) if alone else entries, least=least)
            _positive(f"motion.{key}.weight {place}", own.get("weight"))


@contextmanager
def read_of(place: str) -> Iterator[None]:
    """Errors of what reads a part of the state, as that it is damaged."""
    try:
        yield
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"The saved state is damaged, or edited: {place} cannot be read ({type(error).__name__}: {error}). "
            "Nothing was loaded."
        ) from error


# -- single values -----------------------------------------------------------------------------------------


def _mapping(place: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise damaged(place, value, "a dict")


def _count(place: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise damaged(place, value, "a whole number that is not negative")


def _positive(place: str, value: Any) -> None:
    if not _is_number(value) or not 0 < float(value) < math.inf:
        raise damaged(place, value, "a positive, finite number")


def _nonnegative(place: str, value: Any) -> None:
    if not _is_number(value) or not 0 <= float(value) < math.inf:
        raise damaged(place, value, "a finite number that is not negative")


def _finite(place: str, value: Any) -> None:
    if not _is_number(value) or not math.isfinite(float(value)):
        raise damaged(place, value, "a finite number")


def _share(place: str, value: Any) -> None:
    if not _is_number(value) or not 0 <= float(value) < 1:
        raise damaged(place, value, "a number in [0, 1)")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)


def _truth(place: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise damaged(place, value, "True or False")


def _words(place: str, value: Any) -> None:
    if not isinstance(value, str):
        raise damaged(place, value, "words")


def _names(place: str, value: Any) -> None:
    if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise damaged(place, value, "a list of names")


def _damping(place: str, value: Any) -> None:
    with read_of(place):
        check_damping(from_plain(value))


def _counts(place: str, value: Any) -> None:
    _mapping(place, value)
    for name, own in value.items():
        _count(f"{place}[{name!r}]", own)


def _refreshes(place: str, value: Any) -> None:
    _mapping(place, value)
    for name, own in value.items():
        if not isinstance(own, list | tuple) or len(own) != len(Refreshes._fields):
            raise damaged(f"{place}[{name!r}]", own, f"a list of {len(Refreshes._fields)} numbers")
        for entry, number in zip(Refreshes._fields, own, strict=True):
            if number is not None or Refreshes._field_defaults[entry] is not None:
                _count(f"{place}[{name!r}].{entry}", number)


def _guard(place: str, value: Any) -> None:
    _mapping(place, value)
    checks = dict.fromkeys(Losses.__annotations__, _finite) | {"seen": _count, "actions": _count}
    for name, check in {**checks, "distance": _nonnegative, "step": _positive, "damping": _positive}.items():
        check(f"{place}[{name!r}]", value.get(name))
    if value.keys() != checks.keys():
        raise damaged(place, sorted(value), f"only {sorted(checks)}")


def _generator(place: str, value: Any) -> None:
    _mapping(place, value)
    if value.keys() != {"seed", "device", "state"}:
        raise damaged(place, sorted(value), "'device', 'seed' and 'state'")
    _count(f"{place}['seed']", value["seed"])
    device, state = value["device"], value["state"]
    if device is None and state is None:
        return
    _words(f"{place}['device']", device)
    with read_of(f"{place}['device']"):
        torch.device(device)
    if not isinstance(state, Tensor) or state.dtype != torch.uint8:
        raise damaged(f"{place}['state']", state, "the bytes of a generator's state")
    if device == "cpu":  # of others only their own device tells
        with read_of(f"{place}['state']"):
            torch.Generator().set_state(state.cpu())


def _generator_of_host(place: str, value: Any) -> None:
    _generator(place, value)
    if value["device"] not in (None, "cpu"):
        raise damaged(f"{place}['device']", value["device"], "'cpu'")


def _likelihoods(place: str, value: Any) -> None:
    _words(place, value)
    with read_of(place):
        LikelihoodsOfLosses("auto").load(value)


def _probing(place: str, value: Any) -> None:
    _words(place, value)
    with read_of(place):
        Probing().load(value)


def _layers(place: str, value: Any) -> None:
    _mapping(place, value)
    for name, own in value.items():
        _mapping(f"{place}[{name!r}]", own)
        for key in ("shape", "form"):
            if not _is_plain(own.get(key)):
                raise damaged(f"{place}[{name!r}][{key!r}]", own.get(key), "a list of numbers and words")


def _is_plain(value: Any) -> bool:
    """Whether it is a list of whole numbers, words, nothing and such lists."""
    if not isinstance(value, list | tuple):
        return False
    return all(own is None or isinstance(own, int | str) or _is_plain(own) for own in value)


def _recipe(place: str, value: Any) -> None:
    _mapping(place, value)
    for name, own in value.items():
        _words(f"{place}[{name!r}]", own)


def _rates(place: str, value: Any) -> None:
    if not isinstance(value, Sequence):
        raise damaged(place, value, "a list of numbers")
    for own in value:
        _nonnegative(place, own)


def _maybe(check: Check) -> Check:
    def maybe(place: str, value: Any) -> None:
        if value is not None:
            check(place, value)

    return maybe


def _tensor(place: str, value: Any, shape: tuple[int, ...], least: float | None = None) -> None:
    expected = f"a tensor {list(shape)} of finite numbers" + (
        "" if least is None else ", none of them negative"
    )
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or not value.is_floating_point():
        raise damaged(place, value, expected)
    own = own_part(value)
    if not bool(torch.isfinite(own).all()) or (least is not None and own.numel() and float(own.min()) < least):
        raise damaged(place, value, f"{expected}; some are not")


def _average(place: str, value: Mapping[str, Any]) -> None:
    for key in ("weight", "squares"):
        _positive(f"{key} of {place}", value.get(key))


GROUP: Mapping[str, Check] = {
    "lr": _finite,
    "momentum": _share,
    "weight_decay": _nonnegative,
    "damping": _damping,
    "first_order": _truth,
    "param_names": _names,
}
"""Of a param group."""

WHOLE: Mapping[str, Check] = {
    "method": _words,
    "num_steps": _count,
    "skipped_steps": _count,
    "rejected_steps": _count,
    "attempts": _counts,
    "turns": _maybe(_truth),
    "first_interval": _maybe(_positive),
    "highest_lr": _rates,
    "recipe": _recipe,
    "sampling": _generator,
    "choosing": _generator_of_host,
    "likelihoods": _likelihoods,
    "probing": _probing,
    "refreshes": _refreshes,
    "guard": _maybe(_guard),
    "layers": _layers,
}
"""Of the optimizer as a whole."""

LATER = ("rejected_steps", "first_interval", "likelihoods", "probing", "refreshes", "guard")
"""Entries that states of the same format did not have at first."""
