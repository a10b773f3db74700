"""nn.MultiheadAttention: the projections of queries, keys and values, and that of the output."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac.layers.kinds.base import (
    Application,
    Call,
    GroupedRows,
    LayerKind,
    Part,
    SequenceRows,
    own_bias,
    with_gradient_of,
)
from tekfac.layers.kinds.replay import Probes, require_same, with_random_state

SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


class AttentionKind(LayerKind):
    """Queries, keys and values are three maps, each with a block of its own; the output projection is a fourth.

    With packed projections the three are the groups of `in_proj_weight`. With `kdim` or `vdim` they are three
    weights, and the bias that they share is a layer of three groups by itself.
    """

    def parts(self, module: nn.Module) -> tuple[Part, ...]:
        """Of the inputs, then of the output."""
        assert isinstance(module, nn.MultiheadAttention)
        bias = own_bias(module, "in_proj_bias")
        out_bias = own_bias(module.out_proj, "bias")
        out = Part("out_proj.weight", None if out_bias is None else "out_proj.bias", "out_proj")
        if module.in_proj_weight is not None:
            return Part("in_proj_weight", bias, "in_proj", groups=3), out
        separate = tuple(Part(f"{name}_proj_weight", None, f"{name}_proj") for name in "qkv")
        shared = () if bias is None else (Part(bias, None, "in_proj_bias", groups=3),)
        return *separate, *shared, out

    def inner_modules(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """The output projection is used, not called."""
        assert isinstance(module, nn.MultiheadAttention)
        return (module.out_proj,)

    def keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments, by name, and whether the sequences look at themselves."""
        arguments = dict(SIGNATURE.bind(module, *args, **kwargs).arguments)
        del arguments["self"]
        return {**arguments, "looks_at_itself": arguments["query"] is arguments["key"]}

    def real_positions(self, kept: Mapping[str, Any]) -> Tensor | None:
        """By the mask of keys, where these are the queries, too."""
        mask: Tensor | None = kept.get("key_padding_mask")
        if mask is None or not kept["looks_at_itself"] or mask.ndim != 2:
            return None
        return ~_is_masked(mask)

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """What attention gave, and its weights if they were asked for."""
        return tuple(part for part in returned if part is not None)

    def num_samples(self, module: nn.Module, kept: Mapping[str, Any]) -> int | None:
        """By `batch_first`."""
        query = kept["query"]
        return 1 if query.ndim == 2 else int(query.shape[0 if module.batch_first else 1])

    def repeats(self, module: nn.Module) -> bool:
        """Always."""
        return True

    def is_random(self, module: nn.Module) -> bool:
        """With dropout."""
        assert isinstance(module, nn.MultiheadAttention)
        return module.dropout > 0 and module.training

    def applications(self, module: nn.Module, call: Call) -> list[Application]:
        """The call, repeated."""
        assert isinstance(module, nn.MultiheadAttention)
        probes = Probes()
        device = call.outputs[0].device
        with torch.enable_grad(), with_random_state(call.random_state, device):
            attention = _Attention(module, call, probes)
        require_same(module, attention.outputs, call)
        with torch.enable_grad():
            vectors = probes.gradients(attention.outputs, call.vectors)
        return with_gradient_of(*_by_part(module, attention, vectors), call.probe is not None)


class _Attention:
    """A call of nn.MultiheadAttention in plain operations; samples are axis 0.

    Attributes:
        inputs: queries, keys, values, [N, T, d] each.
        heads: what the output projection receives, [N, T, E].
        outputs: what the module returns.
        masked_keys: which keys no query looks at, [N, S], if there is such a mask.
    """

    def __init__(self, module: nn.MultiheadAttention, call: Call, probes: Probes) -> None:
        kept, dtype = call.kept, call.dtype
        unbatched = kept["query"].ndim == 2
        inputs = [kept[name].to(dtype) for name in ("query", "key", "value")]
        if unbatched:
            inputs = [tensor[None] for tensor in inputs]
        elif not module.batch_first:
            inputs = [tensor.transpose(0, 1) for tensor in inputs]
        self.inputs = inputs
        projected = [
            probes.added(F.linear(tensor, weight, bias))
            for tensor, (weight, bias) in zip(inputs, _projections(module, dtype), strict=True)
        ]
        query, key, value = projected
        key_mask = kept.get("key_padding_mask")
        if unbatched and key_mask is not None:
            key_mask = key_mask[None]
        self.masked_keys = None if key_mask is None else _is_masked(key_mask)
        mask = _additive(kept.get("attn_mask"), key_mask, query, key.shape[1], module.num_heads)
        key, value, mask = _with_extra_keys(module, key, value, mask, dtype)
        weights = self._weights(module, query, key, mask)
        heads = (weights @ _heads(value, module.num_heads)).transpose(1, 2).flatten(-2)
        self.heads = heads.detach()
        weight, bias = (None if p is None else p.detach().to(dtype) for p in _output_parameters(module))
        assert weight is not None
        out = probes.added(F.linear(heads, weight, bias))
        if unbatched:
            out = out[0]
        elif not module.batch_first:
            out = out.transpose(0, 1)
        self.outputs = [out]
        if kept.get("need_weights", True):
            shown = weights.mean(1) if kept.get("average_attn_weights", True) else weights
            self.outputs.append(shown[0] if unbatched else shown)

    @staticmethod
    def _weights(module: nn.MultiheadAttention, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """[N, H, T, S]."""
        query, key = _heads(query, module.num_heads), _heads(key, module.num_heads)
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return F.dropout(weights, module.dropout, module.training)


def _projections(module: nn.MultiheadAttention, dtype: torch.dtype) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of queries, keys and values."""
    if module.in_proj_weight is not None:
        weights: tuple[Tensor, ...] = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    bias = module.in_proj_bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [
        (weight.detach().to(dtype), None if b is None else b.detach().to(dtype))
        for weight, b in zip(weights, biases, strict=True)
    ]


def _output_parameters(module: nn.MultiheadAttention) -> tuple[Tensor, Tensor | None]:
    return module.out_proj.weight, module.out_proj.bias


def _heads(x: Tensor, count: int) -> Tensor:
    """[N, T, E] as [N, H, T, E / H]."""
    return x.reshape(*x.shape[:2], count, -1).transpose(1, 2)


def _additive(
    mask: Tensor | None, keys: Tensor | None, query: Tensor, num_keys: int, heads: int
) -> Tensor | None:
    """The two masks as one number to be added to each score, [N or 1, H or 1, T or 1, S]."""
    total: Tensor | None = None
    if mask is not None:
        total = _as_numbers(mask, query.dtype)
        total = total[None, None] if mask.ndim == 2 else total.reshape(-1, heads, *mask.shape[1:])
    if keys is not None:
        of_keys = _as_numbers(keys, query.dtype).reshape(-1, 1, 1, num_keys)
        total = of_keys if total is None else total + of_keys
    return total


def _is_masked(mask: Tensor) -> Tensor:
    """Where a mask, of truth values or of numbers to be added to scores, leaves nothing."""
    return mask if mask.dtype == torch.bool else mask == -math.inf


def _as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


def _with_extra_keys(
    module: nn.MultiheadAttention, key: Tensor, value: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with those that the module adds to every sequence."""
    samples = len(key)
    extra: list[tuple[Tensor, Tensor]] = []
    if module.bias_k is not None and module.bias_v is not None:
        extra.append((module.bias_k.detach().to(dtype), module.bias_v.detach().to(dtype)))
    if module.add_zero_attn:
        zero = key.new_zeros(1, 1, key.shape[-1])
        extra.append((zero, zero))
    for own_key, own_value in extra:
        key = torch.cat([key, own_key.expand(samples, 1, -1)], dim=1)
        value = torch.cat([value, own_value.expand(samples, 1, -1)], dim=1)
        mask = None if mask is None else F.pad(mask, (0, 1))
    return key, value, mask


def _by_part(
    module: nn.MultiheadAttention, attention: _Attention, vectors: list[list[Tensor]]
) -> tuple[list[Application], list[list[Tensor]]]:
    """Applications without gradients, and the gradients of each for every vector."""
    real = [None, attention.masked_keys, attention.masked_keys]
    masks = [
        torch.ones(tensor.shape[:2], dtype=torch.bool, device=tensor.device) if masked is None else ~masked
        for tensor, masked in zip(attention.inputs, real, strict=True)
    ]
    longest = max(tensor.shape[1] for tensor in attention.inputs)
    joint_mask = _stacked([mask[..., None] for mask in masks], longest)[..., 0]
    everything = bool(joint_mask.all())
    if module.in_proj_weight is not None:
        inputs = _stacked(attention.inputs, longest)
        joint = Application(0, GroupedRows(), inputs, [], real=None if everything else joint_mask)
        gradients = [[_stacked(vector[:3], longest), vector[3]] for vector in vectors]
        return [joint, Application(1, SequenceRows(), attention.heads, [])], gradients
    applications = [
        Application(index, SequenceRows(), tensor, [], real=None if bool(mask.all()) else mask[:, None])
        for index, (tensor, mask) in enumerate(zip(attention.inputs, masks, strict=True))
    ]
    gradients = [list(vector[:3]) for vector in vectors]
    if module.in_proj_bias is not None:
        ones = [tensor.new_ones(*tensor.shape[:2], 1) for tensor in attention.inputs]
        inputs = _stacked(ones, longest)
        applications.append(Application(3, GroupedRows(), inputs, [], real=None if everything else joint_mask))
        for own, vector in zip(gradients, vectors, strict=True):
            own.append(_stacked(vector[:3], longest))
    for own, vector in zip(gradients, vectors, strict=True):
        own.append(vector[3])
    applications.append(Application(len(applications), SequenceRows(), attention.heads, []))
    return applications, gradients


def _stacked(tensors: list[Tensor], longest: int) -> Tensor:
    """[N, T, d] each, with different T, as [N, 3, longest, d], padded by zeros."""
    return torch.stack([F.pad(tensor, (0, 0, 0, longest - tensor.shape[1])) for tensor in tensors], dim=1)
