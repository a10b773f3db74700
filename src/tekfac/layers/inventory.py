"""The layers of a model, and why some of its parameters belong to none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from tekfac.layers.kinds.base import LayerKind, Part, attribute_at
from tekfac.layers.kinds.embedding import TableKind
from tekfac.layers.kinds.linear import LinearKind
from tekfac.layers.layer import Layer, Use
from tekfac.layers.names import inside, named_modules
from tekfac.layers.registry import has_own_forward, is_norm, kind_of
from tekfac.layers.shapes import LayerShape
from tekfac.layers.side_forms import SideRule

ON_REQUEST = "left to first order on request"
A_NORM = "norms are, by default (precondition_norms=True gives them blocks)"
NO_FREQUENCY = "its convolution has a block by frequencies, all of one size, which leave no room for it"
AS_MEANT = (ON_REQUEST, A_NORM, NO_FREQUENCY)
"""Reasons that nobody has to be warned of."""

FROZEN_WEIGHT = "its weight is frozen"


@dataclass
class Inventory:
    """What was found in a model.

    Attributes:
        layers: the layers to precondition, by name.
        dormant: those that would be among them if their weight were not frozen.
        reasons: parameters of supported modules that are left to first order, with the reason.
    """

    layers: dict[str, Layer] = field(default_factory=dict)
    dormant: dict[str, Layer] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Claim:
    """A module that says it uses a parameter as the weight of one of its parts."""

    name: str  # of the module
    use: Use
    part: Part
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def weight_name(self) -> str:
        return inside(self.name, self.part.weight)

    @property
    def bias_name(self) -> str:
        return inside(self.name, self.part.bias or "")


def take_inventory(
    model: nn.Module,
    left_to_first_order: Iterable[Tensor],
    rule: SideRule | None = None,
    dtype: torch.dtype | None = None,
    *,
    norms: bool = True,
) -> Inventory:
    """Find the layers of a model.

    Modules that share weight and bias become one layer. A weight that is also used in another way (by a
    module of another kind, or with another bias) cannot be preconditioned rightly from what its modules
    see, and is left to first order; but for a table of embeddings that is also an output projection.

    Args:
        model: the model.
        left_to_first_order: parameters that are not to be preconditioned.
        rule: which form large sides get.
        dtype: of the curvature; None: float64 for float64 parameters, float32 otherwise.
        norms: whether norms are layers, too.

    Raises:
        ValueError: for a lazy layer that has not seen data yet.
    """
    inventory = Inventory()
    rule = rule or SideRule()
    requested = set(left_to_first_order)
    claims = _claims(model, inventory)
    holders = _holders(model)
    for weight, own in claims.items():
        first = own[0]
        reason = _reason(first, own, holders[weight], requested)
        if reason != ON_REQUEST and not norms and all(is_norm(claim.use.module) for claim in own):
            reason = A_NORM
        if reason is not None and reason != FROZEN_WEIGHT:
            inventory.reasons[first.weight_name] = reason
            if reason in AS_MEANT:
                biases = [claim for claim in own if claim.bias is not None]
                inventory.reasons |= {claim.bias_name: reason for claim in biases}
            continue
        with_bias = next((claim for claim in own if claim.bias is not None), first)
        bias = with_bias.bias
        bias_reason = None if bias is None else _bias_reason(bias, weight, holders, requested)
        channels = _channels_in_a_block(own, rule, bias=bias is not None and bias_reason is None)
        if bias is not None and channels is not None and bias_reason is None:
            bias_reason = NO_FREQUENCY
        if bias_reason is not None:
            inventory.reasons[with_bias.bias_name] = bias_reason
            bias = None
        layer = _layer(own, with_bias, weight, bias, rule, channels, dtype)
        if reason is None:
            inventory.layers[layer.name] = layer
        else:
            inventory.dormant[layer.name] = layer
            inventory.reasons |= dict.fromkeys(layer.shape.parameter_names[1:], reason)
    return inventory


def _claims(model: nn.Module, inventory: Inventory) -> dict[nn.Parameter, list[_Claim]]:
    """Who uses what as a weight; modules that cannot be understood are noted with the reason."""
    claims: dict[nn.Parameter, list[_Claim]] = {}
    inner: set[nn.Module] = set()
    for name, module in named_modules(model):
        kind = kind_of(module)
        if kind is None or module in inner:
            continue
        problem = _problem(name, module, kind)
        if problem is not None:
            names = (inside(name, own) for own, _ in module.named_parameters(recurse=False))
            inventory.reasons |= dict.fromkeys(names, problem)
            continue
        inner.update(kind.inner_modules(module))
        for index, part in enumerate(kind.parts(module)):
            weight = find_parameter(module, part.weight)
            if weight is None:
                if isinstance(attribute_at(module, part.weight), Tensor):
                    of_weight = [n for n, _ in module.named_parameters() if f".{part.weight}." in f".{n}"]
                    names = (inside(name, own) for own in (part.bias, *of_weight) if own is not None)
                    inventory.reasons |= dict.fromkeys(names, f"the weight of {name!r} is parametrized")
                continue
            bias = None if part.bias is None else find_parameter(module, part.bias)
            claims.setdefault(weight, []).append(_Claim(name, Use(module, kind, index), part, weight, bias))
    return claims


def _problem(name: str, module: nn.Module, kind: LayerKind) -> str | None:
    """Why nothing of a module can be preconditioned, or None."""
    for parameter in module.parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"Layer {name!r} is a lazy {type(module).__name__} that has not seen data yet. Run one "
                "forward pass before making the optimizer."
            )
    if any(not parameter.is_floating_point() for parameter in module.parameters()):
        return "its parameters are no real numbers"
    if any(not parameter.numel() for parameter in module.parameters()):
        return "it has a parameter without any number"
    if has_own_forward(module):
        return f"{type(module).__name__} has a forward pass of its own"
    return kind.problem(module)


def find_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter of the module, or of one of its submodules; None if something else stands there."""
    found = attribute_at(module, name)
    return found if isinstance(found, nn.Parameter) else None


def _holders(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """The modules that hold each parameter. One that is used by the module around it counts as that."""
    holders: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    around: dict[nn.Module, tuple[str, nn.Module]] = {}
    for name, module in named_modules(model):
        kind = kind_of(module)
        if kind is not None and not has_own_forward(module):
            around.update(dict.fromkeys(kind.inner_modules(module), (name, module)))
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(parameter, []).append(around.get(module, (name, module)))
    return holders


def _reason(
    first: _Claim, claims: list[_Claim], holders: list[tuple[str, nn.Module]], requested: set[Tensor]
) -> str | None:
    """Why a weight cannot be preconditioned, or None."""
    weight = first.weight
    biases = [claim.bias for claim in claims if claim.bias is not None]
    if weight in requested:
        return ON_REQUEST
    claimants = {claim.use.module for claim in claims}
    for name, module in holders:
        if module not in claimants:
            return f"the weight is shared with {type(module).__name__} {name!r}"
    if len({(claim.use.module, claim.part.weight) for claim in claims}) < len(holders):
        return f"the weight is used twice by {type(first.use.module).__name__} {first.name!r}"
    if _is_tied(claims):
        if len(set(biases)) > 1:
            return "the weight is shared by modules with different biases"
        claims = [first]
    for claim in claims[1:]:
        where = f"{type(claim.use.module).__name__} {claim.name!r}"
        if type(claim.use.kind) is not type(first.use.kind) or claim.part.layout != first.part.layout:
            return f"the weight is shared with {where}"
        if claim.part.groups != first.part.groups:
            return f"the weight is shared with {where}, which has another number of groups"
        if claim.bias is not first.bias:
            return f"the weight is shared with {where}, which has another bias"
    if not weight.requires_grad and any(bias.requires_grad for bias in biases):
        return FROZEN_WEIGHT
    return None


def _is_tied(claims: list[_Claim]) -> bool:
    """Whether a table of embeddings is also an output projection, and nothing else."""
    kinds = {type(claim.use.kind) for claim in claims}
    linear = [claim for claim in claims if isinstance(claim.use.kind, LinearKind)]
    return kinds == {TableKind, LinearKind} and all(claim.part.layout == "output first" for claim in linear)


def _bias_reason(
    bias: nn.Parameter,
    weight: nn.Parameter,
    holders: Mapping[nn.Parameter, list[tuple[str, nn.Module]]],
    requested: set[Tensor],
) -> str | None:
    """Why a bias is no part of its weight's block, or None."""
    if bias in requested:
        return ON_REQUEST
    if weight.requires_grad and not bias.requires_grad:
        return "it is frozen while its weight is not, which has a block of its own"
    if not {module for _, module in holders[bias]} <= {module for _, module in holders[weight]}:
        return "it is shared with another layer; its weight has a block of its own"
    return None


def _channels_in_a_block(claims: list[_Claim], rule: SideRule, *, bias: bool) -> int | None:
    """The size of blocks over the channels of a convolution that is kept by frequencies; None of all others."""
    part, weight = claims[0].part, claims[0].weight
    if not claims[0].use.kind.is_convolution or weight.ndim < 3 or part.layout == "units":
        return None
    channels = weight.shape[0] // part.groups if part.layout == "input first" else weight.shape[1]
    return rule.channels_in_a_block(channels, weight.shape[2:], bias=bias)


def _layer(
    claims: list[_Claim],
    with_bias: _Claim,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    rule: SideRule,
    channels: int | None,
    dtype: torch.dtype | None,
) -> Layer:
    """The layer of claims that go together; `channels` in a block where it is kept by frequencies."""
    first, part = claims[0], claims[0].part
    tied = len(claims) > 1 and _is_tied(claims)
    shape = LayerShape(
        inside(first.name, part.name),
        tuple(weight.shape),
        bias is not None,
        part.groups,
        "output first" if tied else part.layout,
        (first.weight_name,) if bias is None else (first.weight_name, with_bias.bias_name),
    )
    table = part.table and not tied
    of_convolution = first.use.kind.is_convolution
    block_in = 1 if table else channels or rule.block_size(shape.d_in, of_convolution=of_convolution)
    block_out = 1 if tied else rule.block_size(shape.d_out, of_convolution=of_convolution)
    kernel = () if channels is None else shape.weight[2:]
    shape = replace(shape, block_in=block_in, block_out=block_out, kernel=kernel)
    return Layer(
        shape.name,
        tuple(claim.use for claim in claims),
        weight,
        bias,
        shape,
        dtype or torch.promote_types(weight.dtype, torch.float32),
        is_table=table,
        is_tied=tied,
    )
