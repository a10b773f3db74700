"""nn.RNN, nn.LSTM and nn.GRU: in every layer and direction a matrix for the inputs and one for the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from tekfac.layers.kinds.base import Call, Part, SequenceRows
from tekfac.layers.kinds.replay import PartUse, Probes, Replay, ReplayedKind


class RecurrentKind(ReplayedKind):
    """W_ih x_t + b_ih and W_hh h_t + b_hh, for every layer and direction; the gates of a cell stay together."""

    def parts(self, module: nn.Module) -> tuple[Part, ...]:
        """In the order of `nn.RNNBase`'s own parameters: ih, hh and, with a projection, hr."""
        assert isinstance(module, nn.RNNBase)
        found = []
        for suffix in _suffixes(module):
            for name in ("ih", "hh"):
                bias = f"bias_{name}_{suffix}" if module.bias else None
                found.append(Part(f"weight_{name}_{suffix}", bias, f"{name}_{suffix}"))
            if module.proj_size:
                found.append(Part(f"weight_hr_{suffix}", None, f"hr_{suffix}"))
        return tuple(found)

    def keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The sequences and the initial state."""
        arguments = dict(zip(("input", "hx"), args, strict=False)) | dict(kwargs)
        return {"input": arguments["input"], "hx": arguments.get("hx")}

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """Outputs and final states; of packed sequences the data."""
        sequences, state = returned
        data = sequences.data if isinstance(sequences, PackedSequence) else sequences
        return (data, *state) if isinstance(state, tuple) else (data, state)

    def num_samples(self, module: nn.Module, kept: Mapping[str, Any]) -> int | None:
        """By `batch_first`, or by the packing."""
        sequences = kept["input"]
        if isinstance(sequences, PackedSequence):
            return int(sequences.batch_sizes[0])
        return 1 if sequences.ndim == 2 else int(sequences.shape[0 if module.batch_first else 1])

    def is_random(self, module: nn.Module) -> bool:
        """With dropout between layers."""
        assert isinstance(module, nn.RNNBase)
        return module.dropout > 0 and module.num_layers > 1 and module.training

    def replay(self, module: nn.Module, call: Call, probes: Probes) -> Replay:
        """Step by step."""
        assert isinstance(module, nn.RNNBase)
        return _Unrolled(module, call, probes)


def _suffixes(module: nn.RNNBase) -> list[str]:
    """l0, l0_reverse, l1, ..."""
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return [f"l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]


class _Unrolled(Replay):
    """A call of a recurrent module, step by step; time is axis 0."""

    def __init__(self, module: nn.RNNBase, call: Call, probes: Probes) -> None:
        self._module, self._dtype, self._probes = module, call.dtype, probes
        self._inputs: list[Tensor] = []  # what each part's weight is multiplied with, [T, N, d]
        self._exists: Tensor | None = None  # which steps are there, [T, N], for packed sequences
        given = call.kept["input"].to(call.dtype)
        x, packed = given, isinstance(given, PackedSequence)
        if packed:
            x, lengths = pad_packed_sequence(given)
            self._exists = (torch.arange(len(x))[:, None] < lengths).to(x.device)
        unbatched = x.ndim == 2
        turned = module.batch_first and not unbatched and not packed
        if unbatched:
            x = x[:, None]
        elif turned:
            x = x.transpose(0, 1)
        states = self._initial(call.kept["hx"], x, unbatched)
        finals: list[tuple[Tensor, ...]] = []
        per_layer = 2 if module.bidirectional else 1
        for layer in range(module.num_layers):
            gone = []
            for direction in range(per_layer):
                index = layer * per_layer + direction
                outputs, final = self._run(x, _suffixes(module)[index], states[index], reverse=direction == 1)
                gone.append(outputs)
                finals.append(final)
            x = torch.cat(gone, dim=-1)
            if layer < module.num_layers - 1 and module.dropout:
                dropped = F.dropout(self._packed(x, given) if packed else x, module.dropout, module.training)
                x = pad_packed_sequence(given._replace(data=dropped))[0] if packed else dropped
        x = x.transpose(0, 1) if turned else x
        out = self._packed(x, given) if packed else x[:, 0] if unbatched else x
        last = [torch.stack(parts) for parts in zip(*finals, strict=True)]
        self.outputs = [out, *(part[:, 0] if unbatched else part for part in last)]

    def uses(self, vectors: Sequence[Sequence[Tensor]]) -> list[PartUse]:
        """Samples first."""
        real = None if self._exists is None else self._exists.mT[:, None]
        return [
            PartUse(SequenceRows(), rows.transpose(0, 1), [v[part].transpose(0, 1) for v in vectors], real)
            for part, rows in enumerate(self._inputs)
        ]

    def _packed(self, x: Tensor, like: PackedSequence) -> Tensor:
        """[T, N, d] in the layout of packed sequences, [entries, d]."""
        assert self._exists is not None
        order = slice(None) if like.sorted_indices is None else like.sorted_indices
        return x[:, order][self._exists[:, order]]

    def _initial(self, hx: Any, x: Tensor, unbatched: bool) -> list[tuple[Tensor, ...]]:
        """The state of every layer and direction: h, and c for an LSTM."""
        module = self._module
        sizes = [module.proj_size or module.hidden_size]
        if module.mode == "LSTM":
            sizes.append(module.hidden_size)
        count = module.num_layers * (2 if module.bidirectional else 1)
        if hx is None:
            parts = [x.new_zeros(count, x.shape[1], size) for size in sizes]
        else:
            parts = [part.to(self._dtype) for part in (hx if isinstance(hx, tuple | list) else (hx,))]
            parts = [part[:, None] if unbatched else part for part in parts]
        return list(zip(*parts, strict=True))

    def _parameter(self, name: str) -> Any:
        parameter = getattr(self._module, name, None)
        return None if parameter is None else parameter.detach().to(self._dtype)

    def _run(
        self, x: Tensor, suffix: str, state: tuple[Tensor, ...], reverse: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction: outputs [T, N, H] and the final state."""
        steps, samples = x.shape[:2]
        of_inputs, of_state, projection, input_bias, state_bias = (
            self._parameter(f"{name}_{suffix}")
            for name in ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh")
        )
        from_inputs = self._probes.added(F.linear(x, of_inputs, input_bias)).unbind(0)
        at_state = self._probes.like(steps, samples, len(of_state), example=x).unbind(0)
        at_output = None
        if projection is not None:
            at_output = self._probes.like(steps, samples, len(projection), example=x).unbind(0)
        seen: list[Tensor] = [x[0]] * steps
        unprojected: list[Tensor] = [x[0]] * steps
        outputs: list[Tensor] = [x[0]] * steps
        for t in reversed(range(steps)) if reverse else range(steps):
            seen[t] = state[0].detach()
            from_state = F.linear(state[0], of_state, state_bias) + at_state[t]
            new = _cell(self._module.mode, from_inputs[t], from_state, state)
            if projection is not None and at_output is not None:
                unprojected[t] = new[0].detach()
                new = (F.linear(new[0], projection) + at_output[t], *new[1:])
            outputs[t] = new[0]
            if self._exists is not None:
                here = self._exists[t][:, None]
                outputs[t] = new[0] * here
                new = tuple(torch.where(here, now, before) for now, before in zip(new, state, strict=True))
            state = new
        self._inputs += [x.detach(), torch.stack(seen)]
        if projection is not None:
            self._inputs.append(torch.stack(unprojected))
        return torch.stack(outputs), state


def _cell(mode: str, x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One step: from W_ih x + b_ih and W_hh h + b_hh to the new state."""
    if mode == "LSTM":
        enter, forget, value, leave = (x + h).chunk(4, dim=-1)
        memory = forget.sigmoid() * state[1] + enter.sigmoid() * value.tanh()
        return leave.sigmoid() * memory.tanh(), memory
    if mode == "GRU":
        (reset_x, update_x, new_x), (reset_h, update_h, new_h) = x.chunk(3, dim=-1), h.chunk(3, dim=-1)
        reset, update = (reset_x + reset_h).sigmoid(), (update_x + update_h).sigmoid()
        return ((1 - update) * (new_x + reset * new_h).tanh() + update * state[0],)
    total = x + h
    return (total.relu() if mode == "RNN_RELU" else total.tanh(),)
