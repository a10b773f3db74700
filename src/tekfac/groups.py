"""Which parameter belongs to which layer and param group, and why one is left to first order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from tekfac.layers import SUPPORTED, Layer, computes_like_its_base

ON_REQUEST = "left to first order on request"


@dataclass
class Inventory:
    """What was found in a model.

    Attributes:
        layers: the layers to precondition, by name.
        reasons: parameters of supported layers that are left to first order, with the reason.
    """

    layers: dict[str, Layer] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def take_inventory(model: nn.Module, left_to_first_order: Iterable[nn.Parameter]) -> Inventory:
    """Find the layers of a model.

    Modules that share weight and bias become one layer. A weight that is also used in another way (by a
    module of another kind, or with another bias) cannot be preconditioned rightly from what its modules
    see, and is left to first order.

    Raises:
        ValueError: for a lazy layer that has not seen data yet.
    """
    inventory = Inventory()
    requested = set(left_to_first_order)
    users = _users(model)
    done: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if not isinstance(module, SUPPORTED):
            continue
        weight = module._parameters.get("weight")
        if isinstance(weight, UninitializedParameter):
            raise ValueError(
                f"Layer {name!r} is a lazy {type(module).__name__} that has not seen data yet. Run one "
                "forward pass before making the optimizer."
            )
        if weight is None:
            for parameter_name, _ in module.named_parameters(name):
                inventory.reasons[parameter_name] = f"the weight of {name!r} is parametrized"
            continue
        if weight in done:
            continue
        done.add(weight)
        prefix = f"{name}." if name else ""
        reason = _reason(model, name, module, weight, users, requested)
        if reason is not None:
            inventory.reasons[f"{prefix}weight"] = reason
            continue
        modules = tuple(user for user, _ in users[weight])
        bias = module._parameters.get("bias")
        if bias is not None:
            reason = _bias_reason(bias, weight, users, requested)
            if reason is not None:
                inventory.reasons[f"{prefix}bias"] = reason
                bias = None
        inventory.layers[name] = Layer(name, modules, weight, bias)
    return inventory


def _bias_reason(
    bias: nn.Parameter,
    weight: nn.Parameter,
    users: Mapping[nn.Parameter, list[tuple[nn.Module, str]]],
    requested: set[nn.Parameter],
) -> str | None:
    """Why a bias is no part of its weight's block, or None."""
    if bias in requested:
        return ON_REQUEST
    if weight.requires_grad and not bias.requires_grad:
        return "it is frozen while its weight is not, which has a block of its own"
    if {user for user, _ in users[bias]} != {user for user, _ in users[weight]}:
        return "it is shared with another layer; its weight has a block of its own"
    return None


def _users(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules that hold each parameter, and under which name."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append((module, key))
    return users


def _reason(
    model: nn.Module,
    name: str,
    module: nn.Module,
    weight: nn.Parameter,
    users: Mapping[nn.Parameter, list[tuple[nn.Module, str]]],
    requested: set[nn.Parameter],
) -> str | None:
    """Why a supported module's weight cannot be preconditioned, or None."""
    if weight in requested:
        return ON_REQUEST
    if not computes_like_its_base(module):
        return f"{type(module).__name__} has a forward pass of its own"
    bias = module._parameters.get("bias")
    if not weight.requires_grad and bias is not None and bias.requires_grad:
        return "the weight is frozen, the bias is not"
    parent = model.get_submodule(name.rpartition(".")[0]) if name else None
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention applies this projection without calling its module"
    names = {id(user): user_name for user_name, user in model.named_modules()}
    for user, key in users[weight]:
        where = repr(names[id(user)])
        if key != "weight" or not isinstance(user, SUPPORTED):
            return f"the weight is shared with {type(user).__name__} {where}"
        if getattr(user, "groups", 1) != getattr(module, "groups", 1):
            return f"the weight is shared with {where}, which has another number of groups"
        if user._parameters.get("bias") is not module._parameters.get("bias"):
            return f"the weight is shared with {where}, which has another bias"
    return None


def parameters_of(
    model: nn.Module, selected: Iterable[str | nn.Module | nn.Parameter], what: str
) -> list[nn.Parameter]:
    """The parameters that names, modules and parameters stand for, each once, in order.

    Raises:
        ValueError: for a name that the model does not have, or a parameter that is not its own.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    own = set(parameters.values())
    found: dict[nn.Parameter, None] = {}
    for item in [selected] if isinstance(selected, str | nn.Module | nn.Parameter) else selected:
        if isinstance(item, tuple):  # (name, parameter), as named_parameters() gives
            item = item[1]
        if isinstance(item, str):
            if item not in parameters and item not in modules:
                raise ValueError(
                    f"{what} names {item!r}, which is neither a module nor a parameter of the model. "
                    f"Its modules are {', '.join(repr(name) for name in modules if name)}."
                )
            item = parameters[item] if item in parameters else modules[item]
        members = list(item.parameters()) if isinstance(item, nn.Module) else [item]
        for member in members:
            if member not in own:
                raise ValueError(
                    f"{what} has a parameter of shape {list(getattr(member, 'shape', ()))} that is not "
                    "one of the model's. Pass the model that owns it."
                )
            found[member] = None
    return list(found)


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


def completed_groups(
    model: nn.Module, layers: Iterable[Layer], groups: list[dict[str, Any]], first_order_lr: float
) -> list[dict[str, Any]]:
    """The given groups, then one for the remaining layers and one for whatever else remains."""
    taken = {parameter for group in groups for parameter in group["params"]}
    in_layers = {parameter for layer in layers for parameter in layer.parameters}
    rest = [parameter for parameter in model.parameters() if parameter not in taken]
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
