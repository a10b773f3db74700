"""nn.MultiheadAttention: the projections of queries, keys and values, and that of the output."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac.layers.kinds.base import Call, GroupedRows, Part, SequenceRows, own_bias
from tekfac.layers.kinds.replay import PartUse, Probes, Replay, ReplayedKind

SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


class AttentionKind(ReplayedKind):
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

    def is_random(self, module: nn.Module) -> bool:
        """With dropout."""
        assert isinstance(module, nn.MultiheadAttention)
        return module.dropout > 0 and module.training

    def replay(self, module: nn.Module, call: Call, probes: Probes) -> Replay:
        """In plain operations."""
        assert isinstance(module, nn.MultiheadAttention)
        return _Attention(module, call, probes)


class _Attention(Replay):
    """A call of nn.MultiheadAttention in plain operations; samples are axis 0."""

    def __init__(self, module: nn.MultiheadAttention, call: Call, probes: Probes) -> None:
        kept, dtype = call.kept, call.dtype
        unbatched = kept["query"].ndim == 2
        inputs = [kept[name].to(dtype) for name in ("query", "key", "value")]
        if unbatched:
            inputs = [tensor[None] for tensor in inputs]
        elif not module.batch_first:
            inputs = [tensor.transpose(0, 1) for tensor in inputs]
        *projections, output_projection = _projections(module, dtype)
        query, key, value = (
            probes.added(F.linear(tensor, *projection))
            for tensor, projection in zip(inputs, projections, strict=True)
        )
        key_mask = kept.get("key_padding_mask")
        if unbatched and key_mask is not None:
            key_mask = key_mask[None]
        mask = _additive(kept.get("attn_mask"), key_mask, query, key.shape[1], module.num_heads)
        key, value, mask = _with_extra_keys(module, key, value, mask, dtype)
        query, key, value = (_heads(x, module.num_heads) for x in (query, key, value))
        shows_weights = kept.get("need_weights", True)
        if shows_weights or (module.dropout and module.training):
            scores = query @ key.mT / math.sqrt(query.shape[-1])  # [N, H, T, S]
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, module.dropout, module.training)
            attended = weights @ value
        else:  # in one piece, which takes a part of the time
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        heads = attended.transpose(1, 2).flatten(-2)
        out = probes.added(F.linear(heads, *output_projection))
        if unbatched:
            out = out[0]
        elif not module.batch_first:
            out = out.transpose(0, 1)
        self.outputs = [out]
        if shows_weights:
            shown = weights.mean(1) if kept.get("average_attn_weights", True) else weights
            self.outputs.append(shown[0] if unbatched else shown)
        self._module, self._inputs, self._heads = module, inputs, heads.detach()
        self._masked_keys = None if key_mask is None else _is_masked(key_mask)

    def uses(self, vectors: Sequence[Sequence[Tensor]]) -> list[PartUse]:
        """Of the inputs, as groups of one part or as parts that may share a bias; then of the output."""
        module, inputs = self._module, self._inputs
        real = [torch.ones(tensor.shape[:2], dtype=torch.bool, device=tensor.device) for tensor in inputs]
        if self._masked_keys is not None:
            real[1:] = [~self._masked_keys] * 2
        of_all = _unless_all(_stacked([own[..., None] for own in real])[..., 0])
        gradients_of_all = [_stacked(vector[:3]) for vector in vectors]
        found = []
        if module.in_proj_weight is not None:
            found.append(PartUse(GroupedRows(), _stacked(inputs), gradients_of_all, of_all))
        else:
            for index, (tensor, own) in enumerate(zip(inputs, real, strict=True)):
                gradients = [vector[index] for vector in vectors]
                found.append(PartUse(SequenceRows(), tensor, gradients, _unless_all(own[:, None])))
            if module.in_proj_bias is not None:
                ones = _stacked([tensor.new_ones(*tensor.shape[:2], 1) for tensor in inputs])
                found.append(PartUse(GroupedRows(), ones, gradients_of_all, of_all))
        return [*found, PartUse(SequenceRows(), self._heads, [vector[3] for vector in vectors])]


def _projections(module: nn.MultiheadAttention, dtype: torch.dtype) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of queries, keys, values and the output."""
    if module.in_proj_weight is not None:
        weights: tuple[Tensor, ...] = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    bias = module.in_proj_bias
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    pairs = [*zip(weights, biases, strict=True), (module.out_proj.weight, module.out_proj.bias)]
    return [(weight.detach().to(dtype), None if b is None else b.detach().to(dtype)) for weight, b in pairs]


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


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """[N, T, d] each, with different T, as [N, 3, T, d] with the longest T, padded by zeros."""
    longest = max(tensor.shape[1] for tensor in tensors)
    return torch.stack([F.pad(tensor, (0, 0, 0, longest - tensor.shape[1])) for tensor in tensors], dim=1)


def _unless_all(real: Tensor) -> Tensor | None:
    return None if bool(real.all()) else real
