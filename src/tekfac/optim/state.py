"""Optimizer state as plain values keyed by name, and back.

Plain means dicts, lists, numbers, strings and tensors, so that torch.load(weights_only=True) reads a
saved state. Nothing here is cast: a factor comes back in the precision it was saved in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tekfac.curvature.averages import Average
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.curvature.factors import Moments
from tekfac.curvature.layer_curvature import LayerCurvature
from tekfac.damping import from_plain, to_plain
from tekfac.layers.layer import Layer

NamedGroups = Sequence[Mapping[str, Any]]


def layer_to_plain(layer: Layer, curvature: LayerCurvature | None) -> dict[str, Any]:
    """One layer's shape, and its curvature (if there is any yet) as tensors and numbers."""
    plain = None if curvature is None else _curvature_to_plain(curvature)
    return {"shape": _sizes(layer), "form": _form(layer), "curvature": plain}


def _sizes(layer: Layer) -> list[int]:
    return [layer.shape.groups, layer.shape.d_out, layer.shape.d_in]


def _form(layer: Layer) -> list[Any]:
    """In blocks of which size, and in which precision, the sides of a block are kept."""
    return [layer.shape.block_out, layer.shape.block_in, str(layer.dtype)]


def _curvature_to_plain(curvature: LayerCurvature) -> dict[str, Any]:
    theta = curvature.theta
    return {
        "moments": {**curvature.moments.values._asdict(), "weight": curvature.moments.weight},
        "basis": curvature.basis._asdict(),
        "theta": None if theta is None else {"value": theta.values[0], "weight": theta.weight},
        "failed_refreshes": curvature.failed_refreshes,
    }


def curvature_from_plain(plain: Mapping[str, Any], device: torch.device) -> LayerCurvature:
    """The curvature that was saved, with copies of the tensors on the given device."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.to(device, copy=True)

    moments, basis, theta = dict(plain["moments"]), plain["basis"], plain["theta"]
    weight = moments.pop("weight")
    return LayerCurvature(
        Average(Moments(**{key: copy(value) for key, value in moments.items()}), weight),
        Eigenbasis(**{key: copy(value) for key, value in basis.items()}),
        None if theta is None else Average((copy(theta["value"]),), theta["weight"]),
        plain["failed_refreshes"],
    )


def named_state(indexed: Mapping[str, Any], groups: NamedGroups, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """torch's own optimizer state, which counts parameters, keyed by their names instead."""
    order = _names_in_order(groups, names)
    return {
        "state": {order[index]: dict(values) for index, values in indexed["state"].items()},
        "param_groups": [
            {
                **group,
                "params": [order[index] for index in group["params"]],
                "damping": to_plain(group["damping"]),
            }
            for group in indexed["param_groups"]
        ],
    }


def indexed_state(named: Mapping[str, Any], groups: NamedGroups, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """The inverse of `named_state`, for the present groups."""
    index = {name: position for position, name in enumerate(_names_in_order(groups, names))}
    return {
        "state": {
            index[name]: {key: value.clone() for key, value in values.items()}
            for name, values in named["state"].items()
        },
        "param_groups": [
            {
                **group,
                "params": [index[name] for name in group["params"]],
                "damping": from_plain(group["damping"]),
            }
            for group in named["param_groups"]
        ],
    }


def require_same_method(saved: Mapping[str, Any], method: str, recipe: Mapping[str, str]) -> None:
    """Raise ValueError for a state that is not one of ours, of another method, or measured in another way."""
    if "layers" not in saved or "method" not in saved:
        raise ValueError(
            f"This is not the state of a tekfac optimizer: it has the entries {sorted(saved)}, none "
            "named 'layers' and 'method'."
        )
    if saved["method"] != method:
        raise ValueError(
            f"The saved state is that of {saved['method']}, this optimizer is {method}. Load it into "
            f"tekfac.{saved['method']}, or start {method} anew."
        )
    for key, value in recipe.items():
        if saved["recipe"][key] != value:
            raise ValueError(
                f"The saved statistics were taken with {key}={saved['recipe'][key]!r}, this optimizer has "
                f"{key}={value!r}; they cannot be averaged. Make the optimizer with the saved setting."
            )


def require_same_architecture(
    saved: Mapping[str, Any],
    layers: Mapping[str, Layer],
    names: Mapping[Tensor, str],
    groups: NamedGroups,
) -> None:
    """Raise ValueError that names every layer and parameter in which the saved state differs."""
    theirs, ours = saved["layers"], layers
    differences = _only_in(ours, theirs, "layer")
    for name in ours.keys() & theirs.keys():
        expected, found = _sizes(ours[name]), theirs[name]["shape"]
        if found != expected:
            differences.append(f"layer {name!r} has blocks {expected} (groups, out, in), saved {found}")
        elif theirs[name].get("form", _form(ours[name])) != _form(ours[name]):
            differences.append(
                f"layer {name!r} keeps its sides as {_form(ours[name])} (blocks of outputs, blocks of inputs, "
                f"precision), saved {theirs[name]['form']}: give the same max_dim, large_dims, curvature_dtype"
            )
    order = iter(_names_in_order(groups, names))
    our_groups = [[next(order) for _ in group["params"]] for group in groups]
    their_groups = [list(group["params"]) for group in saved["param_groups"]]
    our_names = {name for group in our_groups for name in group}
    their_names = {name for group in their_groups for name in group}
    differences += _only_in(our_names, their_names, "parameter")
    if our_names == their_names and our_groups != their_groups:
        differences.append(
            f"the param groups hold other parameters: {our_groups} here, {their_groups} in the saved state"
        )
    by_name = {name: parameter for parameter, name in names.items()}
    for name, values in saved["state"].items():
        velocity = values.get("momentum_buffer")
        if name in by_name and velocity is not None and velocity.shape != by_name[name].shape:
            differences.append(
                f"parameter {name!r} has shape {list(by_name[name].shape)}, saved {list(velocity.shape)}"
            )
    if differences:
        raise ValueError("The saved state is that of another architecture: " + "; ".join(differences) + ".")


def _only_in(ours: Iterable[str], theirs: Iterable[str], what: str) -> list[str]:
    """What only one of the two sides has, in words."""
    only_theirs, only_ours = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
    return [f"{what} {name!r} is in the saved state only" for name in only_theirs] + [
        f"{what} {name!r} is not in the saved state" for name in only_ours
    ]


def _names_in_order(groups: NamedGroups, names: Mapping[Tensor, str]) -> list[str]:
    """Parameter names in the order in which torch counts parameters."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return [names.get(parameter, f"unnamed.{index}") for index, parameter in enumerate(parameters)]
