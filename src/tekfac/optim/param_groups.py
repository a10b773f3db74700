"""Which parameter belongs to which param group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from tekfac.layers.layer import Layer
from tekfac.layers.names import named_modules, named_parameters
from tekfac.layers.registry import is_norm

ALL_NORMS = "all norms"
"""Stands for all normalisation layers."""

Selected = str | nn.Module | nn.Parameter | type[nn.Module]
"""What may stand for parameters: a name of one or of a module, a module, a type of modules, a parameter."""


def parameters_of(model: nn.Module, selected: Selected | Iterable[Selected], what: str) -> list[nn.Parameter]:
    """The parameters that names, modules, types of modules and parameters stand for, each once, in order.

    Raises:
        ValueError: for a name that the model does not have, or a parameter that is not its own.
    """
    own = set(model.parameters())
    found = selected_parameters(model, selected, what)
    for parameter in found:
        if parameter not in own:
            raise ValueError(
                f"{what} has a parameter of shape {list(getattr(parameter, 'shape', ()))} that is not "
                "one of the model's. Pass the model that owns it."
            )
    return found


def selected_parameters(
    model: nn.Module, selected: Selected | Iterable[Selected], what: str
) -> list[nn.Parameter]:
    """The parameters that these stand for; parameters and modules need not be the model's."""
    items = [selected] if isinstance(selected, str | nn.Module | nn.Parameter | type) else selected
    found: dict[nn.Parameter, None] = {}
    for item in items:
        members = _members(model, item[1] if isinstance(item, tuple) else item, what)  # (name, parameter)
        found |= dict.fromkeys(members)
    return list(found)


def _members(model: nn.Module, item: Selected, what: str) -> list[nn.Parameter]:
    """The parameters that one item stands for."""
    if isinstance(item, str):
        parameters = {**dict(model.named_parameters(remove_duplicate=False)), **dict(named_parameters(model))}
        modules = {**dict(model.named_modules(remove_duplicate=False)), **dict(named_modules(model))}
        if item in parameters:
            return [parameters[item]]
        if item == ALL_NORMS and item not in modules:
            return [p for module in model.modules() if is_norm(module) for p in module.parameters()]
        if item not in modules:
            raise ValueError(
                f"{what} names {item!r}, which is neither a module nor a parameter of the model. "
                f"Its modules are {', '.join(repr(name) for name, _ in named_modules(model) if name)}."
            )
        return list(modules[item].parameters())
    if isinstance(item, type):
        return [p for module in model.modules() if isinstance(module, item) for p in module.parameters()]
    if isinstance(item, nn.Module):
        return list(item.parameters())
    return [item]


def resolved_groups(model: nn.Module, user_groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The user's groups, with lists of parameters for whatever stands for them.

    Raises:
        ValueError: for a group without 'params'.
    """
    groups = []
    for index, group in enumerate(user_groups):
        what = f"param_groups[{index}]"
        if "params" not in group:
            raise ValueError(f"{what} has no 'params'. It has {sorted(group)}.")
        groups.append({**group, "params": parameters_of(model, group["params"], what)})
    return groups


def left_to_first_order(
    model: nn.Module, selected: Selected | Iterable[Selected], groups: Iterable[Mapping[str, Any]]
) -> list[nn.Parameter]:
    """The parameters that the user wants not to be preconditioned: by name, or in a group that says so."""
    own = [p for group in groups if group.get("first_order", False) for p in group["params"]]
    return [*parameters_of(model, selected, "first_order"), *own]


def completed_groups(
    model: nn.Module, layers: Iterable[Layer], groups: list[dict[str, Any]], first_order_lr: float | None
) -> list[dict[str, Any]]:
    """The given groups, then one for what remains; or two, where what is in no layer has a rate of its own."""
    taken = {parameter for group in groups for parameter in group["params"]}
    in_layers = {parameter for layer in layers for parameter in layer.parameters}
    rest = [parameter for parameter in model.parameters() if parameter not in taken]
    if first_order_lr is None:
        return [*groups, {"params": rest}] if rest else groups
    preconditioned = [parameter for parameter in rest if parameter in in_layers]
    others = [parameter for parameter in rest if parameter not in in_layers]
    completed = [
        {"lr": first_order_lr, **group} if group.get("first_order", False) else group for group in groups
    ]
    if preconditioned:
        completed.append({"params": preconditioned})
    if others:
        completed.append({"params": others, "lr": first_order_lr, "first_order": True})
    return completed


def named(group: Mapping[str, Any], names: Mapping[Tensor, str], before: int) -> dict[str, Any]:
    """The group with parameters as torch wants them to save their names: (name, parameter).

    Args:
        group: with a list of parameters.
        names: of the model's parameters; others are numbered.
        before: how many parameters the groups before have.
    """
    pairs = [(names.get(p, f"unnamed.{before + i}"), p) for i, p in enumerate(group["params"])]
    return {**group, "params": pairs}
