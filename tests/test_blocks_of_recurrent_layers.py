"""Promise: nn.RNN, nn.LSTM and nn.GRU are preconditioned weight by weight, over all time steps there are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from blocks_oracle import (
    DAMPING,
    EVERY,
    OWN,
    Case,
    Part,
    Tape,
    assert_blocks_and_step,
    assert_chunks_change_nothing,
    assert_ignored_samples_do_not_count,
    assert_rows_give_autograds_gradients,
    matrix_places,
    names_in_log,
    net_case,
    one_step,
)
from dense import every_method, normal
from tekfac import KFAC, TEKFAC, TKFAC
from tekfac.optim.natural_gradient import NaturalGradient

INPUTS, HIDDEN, LENGTH, SAMPLES = 3, 2, 4, 14
Recurrent = nn.RNN | nn.LSTM | nn.GRU


def written(
    layer: Recurrent, tape: Tape, x: Tensor, h0: Tensor | None = None, c0: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs [N, T, D * H], last states h [L * D, N, H] and c; x is [N, T, d], h0 and c0 [L * D, N, H]."""
    directions = 2 if layer.bidirectional else 1
    width = layer.proj_size or layer.hidden_size
    count = layer.num_layers * directions
    h0 = x.new_zeros(count, len(x), width) if h0 is None else h0
    c0 = x.new_zeros(count, len(x), layer.hidden_size) if c0 is None else c0
    last_h, last_c = [], []
    for depth in range(layer.num_layers):
        if depth:  # torch draws the mask over steps first
            x = F.dropout(x.transpose(0, 1).contiguous(), layer.dropout, layer.training).transpose(0, 1)
        sides = []
        for direction in range(directions):
            suffix = f"l{depth}" + ("_reverse" if direction else "")
            state = h0[depth * directions + direction], c0[depth * directions + direction]
            steps = list(range(x.shape[1]))
            outputs: list[Tensor] = [x] * len(steps)
            for t in reversed(steps) if direction else steps:
                state = cell(layer, tape, suffix, x[:, t], *state)
                outputs[t] = state[0]
            sides.append(torch.stack(outputs, 1))
            last_h.append(state[0])
            last_c.append(state[1])
        x = torch.cat(sides, -1)
    return x, torch.stack(last_h), torch.stack(last_c) if isinstance(layer, nn.LSTM) else None


def cell(layer: Recurrent, tape: Tape, suffix: str, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step: the new h and c."""

    def project(which: str, rows: Tensor) -> Tensor:
        weight, bias = (getattr(layer, f"{kind}_{which}_{suffix}", None) for kind in ("weight", "bias"))
        return tape.linear(f"{which}_{suffix}", rows, weight, bias)

    from_x, from_h = project("ih", x), project("hh", h)
    if isinstance(layer, nn.RNN):
        s = from_x + from_h
        return (s.tanh() if layer.nonlinearity == "tanh" else s.relu()), c
    if isinstance(layer, nn.GRU):
        (rx, zx, nx), (rh, zh, nh) = from_x.chunk(3, -1), from_h.chunk(3, -1)
        r, z = (rx + rh).sigmoid(), (zx + zh).sigmoid()
        n = (nx + r * nh).tanh()
        return (1 - z) * n + z * h, c
    i, f, g, o = (from_x + from_h).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (project("hr", h) if layer.proj_size else h), c


def recurrent_layers(layer: Recurrent, name: str = "layer") -> dict[str, tuple[list[str], list[Part]]]:
    """Every weight with its bias: ih_l0, hh_l0, hr_l0, ih_l0_reverse, ..."""
    result = {}
    for parameter, weight in layer.named_parameters():
        kind, which = parameter.split("_", 1)
        if kind == "bias":
            continue
        bias = hasattr(layer, f"bias_{which}")
        names = [f"{name}.weight_{which}"] + ([f"{name}.bias_{which}"] if bias else [])
        result[f"{name}.{which}"] = (names, [Part(which, matrix_places(tuple(weight.shape), bias))])
    return result


def read_out(outputs: Tensor, h: Tensor, c: Tensor | None, what: str) -> Tensor:
    """What the head sees, [N, features]."""
    parts = []
    if what in ("outputs", "both"):
        parts.append(outputs.flatten(1))
    if what in ("h", "both", "h and c"):
        parts.append(h.transpose(0, 1).flatten(1))
    if what == "h and c":
        assert c is not None
        parts.append(c.transpose(0, 1).flatten(1))
    return torch.cat(parts, 1)


Setup = dict[str, Any]
KINDS: dict[str, Setup] = {
    "RNN": {"of": nn.RNN},
    "RNN, relu": {"of": nn.RNN, "nonlinearity": "relu"},
    "RNN, two layers, both ways": {"of": nn.RNN, "num_layers": 2, "bidirectional": True},
    "LSTM": {"of": nn.LSTM},
    "LSTM, sequence first": {"of": nn.LSTM, "batch_first": False},
    "LSTM without bias": {"of": nn.LSTM, "bias": False},
    "LSTM, two layers": {"of": nn.LSTM, "num_layers": 2, "read": "h"},
    "LSTM, both ways, all it gives": {"of": nn.LSTM, "bidirectional": True, "read": "h and c"},
    "LSTM from a state": {"of": nn.LSTM, "state": True, "read": "both"},
    "LSTM projected": {"of": nn.LSTM, "proj_size": 1},
    "LSTM projected, two layers, both ways": {
        "of": nn.LSTM,
        "proj_size": 1,
        "num_layers": 2,
        "bidirectional": True,
        "read": "both",
    },
    "LSTM, dropout": {"of": nn.LSTM, "num_layers": 2, "dropout": 0.4, "seed": 12},
    "GRU": {"of": nn.GRU},
    "GRU, sequence first, last state": {"of": nn.GRU, "batch_first": False, "read": "h"},
    "GRU without bias": {"of": nn.GRU, "bias": False, "read": "both"},
    "GRU from a state": {"of": nn.GRU, "state": True},
    "GRU, two layers, both ways": {"of": nn.GRU, "num_layers": 2, "bidirectional": True, "read": "both"},
    "GRU, dropout, sequence first": {
        "of": nn.GRU,
        "num_layers": 2,
        "dropout": 0.4,
        "batch_first": False,
        "seed": 12,
    },
}
FULL = ("RNN", "LSTM", "GRU")
TOGETHER = (  # every setting occurs in one of them
    *FULL,
    "RNN, relu",
    "LSTM without bias",
    "LSTM from a state",
    "LSTM projected, two layers, both ways",
    "GRU, dropout, sequence first",
)


def parts_of(setup: Setup) -> tuple[Recurrent, str, bool, bool, int | None]:
    setup = dict(setup)
    of, read, state, seed = (
        setup.pop("of"),
        setup.pop("read", "outputs"),
        setup.pop("state", False),
        setup.pop("seed", None),
    )
    first = setup.setdefault("batch_first", True)
    return of(INPUTS, HIDDEN, **setup), read, state, first, seed


@cache
def case_of(kind: str) -> Case:
    layer, read, state, first, seed = parts_of(KINDS[kind])
    lstm = isinstance(layer, nn.LSTM)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    inputs: tuple[Tensor, ...] = (normal(SAMPLES, LENGTH, INPUTS),)
    if state:  # samples first, as every input of the model
        inputs += (normal(SAMPLES, count, HIDDEN, seed=1),)
    if state and lstm:
        inputs += (normal(SAMPLES, count, HIDDEN, seed=2),)

    def call(layer: nn.Module, x: Tensor, *states: Tensor) -> Tensor:
        turned = tuple(s.transpose(0, 1).contiguous() for s in states)
        given = () if not turned else ((turned,) if lstm else turned)
        outputs, last = layer(x if first else x.transpose(0, 1), *given)
        h, c = last if lstm else (last, None)
        return read_out(outputs if first else outputs.transpose(0, 1), h, c, read)

    def by_hand(layer: Recurrent, tape: Tape, x: Tensor, *states: Tensor) -> Tensor:
        return read_out(*written(layer, tape, x, *(s.transpose(0, 1) for s in states)), read)

    return net_case(
        layer,
        inputs,
        by_hand,
        recurrent_layers(layer),
        call=call,
        forward_seed=seed,
        together=seed is not None,
        scale=1.5,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_written_out_give_autograds_gradients(kind: str) -> None:
    assert_rows_give_autograds_gradients(case_of(kind))


@pytest.mark.parametrize(
    "kind", [kind if kind in TOGETHER else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_blocks_and_steps_are_those_of_the_definitions(kind: str) -> None:
    assert_blocks_and_step(case_of(kind), EVERY if kind in FULL else OWN)


# -- sequences of different lengths --------------------------------------------------------------------

UNSORTED = torch.tensor([3, 4, 1, 2, 4, 3, 3, 2, 4, 1, 4, 2, 3, 4])
PACKED: dict[str, Setup] = {
    "LSTM": {"of": nn.LSTM},
    "GRU, both ways": {"of": nn.GRU, "bidirectional": True, "read": "both"},
    "RNN, two layers, both ways": {"of": nn.RNN, "num_layers": 2, "bidirectional": True, "read": "h"},
    "LSTM, sequence first, two layers": {
        "of": nn.LSTM,
        "num_layers": 2,
        "batch_first": False,
        "read": "h and c",
    },
    "GRU from a state": {"of": nn.GRU, "state": True, "read": "both"},
}


@cache
def packed_case(kind: str, is_sorted: bool) -> Case:
    layer, read, state, first, _ = parts_of(PACKED[kind])
    lstm = isinstance(layer, nn.LSTM)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    lengths = UNSORTED.sort(descending=True).values if is_sorted else UNSORTED
    inputs: tuple[Tensor, ...] = (normal(SAMPLES, LENGTH, INPUTS), lengths)
    if state:
        inputs += (normal(SAMPLES, count, HIDDEN, seed=1),)

    def call(layer: nn.Module, x: Tensor, lengths: Tensor, *states: Tensor) -> Tensor:
        x = x if first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=is_sorted)
        given = [s.transpose(0, 1).contiguous() for s in states]
        outputs, last = layer(packed, *given)
        h, c = last if lstm else (last, None)
        padded, _ = pad_packed_sequence(outputs, batch_first=first, total_length=LENGTH)
        return read_out(padded if first else padded.transpose(0, 1), h, c, read)

    def by_hand(layer: Recurrent, tape: Tape, x: Tensor, lengths: Tensor, *states: Tensor) -> Tensor:
        (length,) = lengths.tolist()  # one sample, as long as it is
        turned = [s.transpose(0, 1) for s in states]
        outputs, h, c = written(layer, tape, x[:, :length], *turned)
        return read_out(F.pad(outputs, (0, 0, 0, LENGTH - length)), h, c, read)

    return net_case(layer, inputs, by_hand, recurrent_layers(layer), call=call, scale=1.5)


every_packing = pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "unsorted"])


@every_packing
@pytest.mark.parametrize("kind", PACKED)
def test_the_rows_of_packed_sequences_give_autograds_gradients(kind: str, is_sorted: bool) -> None:
    assert_rows_give_autograds_gradients(packed_case(kind, is_sorted))


@every_packing
@pytest.mark.parametrize("kind", PACKED)
def test_steps_beyond_the_end_of_a_packed_sequence_do_not_exist(kind: str, is_sorted: bool) -> None:
    assert_blocks_and_step(packed_case(kind, is_sorted), EVERY if kind == "LSTM" else OWN)


# -- one sequence without a batch axis -----------------------------------------------------------------


@pytest.mark.parametrize("of", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("state", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_one_sequence_without_a_batch_axis(of: type[Recurrent], state: bool, batch_first: bool) -> None:
    layer = of(INPUTS, HIDDEN, batch_first=batch_first)
    lstm = of is nn.LSTM
    inputs: tuple[Tensor, ...] = (normal(1, 9, INPUTS),)
    if state:
        inputs += (normal(1, 1, HIDDEN, seed=1),) * (2 if lstm else 1)

    def call(layer: nn.Module, x: Tensor, *states: Tensor) -> Tensor:
        given = [s[0] for s in states]
        outputs, _ = layer(x[0], *([tuple(given)] if given and lstm else given))
        return outputs[None]

    def by_hand(layer: Recurrent, tape: Tape, x: Tensor, *states: Tensor) -> Tensor:
        return written(layer, tape, x, *(s.transpose(0, 1) for s in states))[0]

    case = net_case(layer, inputs, by_hand, recurrent_layers(layer), call=call, scale=1.5)
    assert_rows_give_autograds_gradients(case)
    assert_blocks_and_step(case, ((KFAC, "expand"), (TKFAC, "exact"), (TKFAC, "expand")), ("exact",))


# -- a first state that is trained ---------------------------------------------------------------------


class FromTrainedState(nn.Module):
    def __init__(self, of: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.ones(1, 1, HIDDEN) / 2)
        self.rnn = of(INPUTS, HIDDEN, batch_first=True)
        self.head = nn.Linear(LENGTH * HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x, self.h0.expand(1, len(x), HIDDEN).contiguous())[0].flatten(1))


def written_from_state(model: FromTrainedState, tape: Tape, x: Tensor) -> Tensor:
    return model.head(written(model.rnn, tape, x, model.h0.expand(1, len(x), HIDDEN))[0].flatten(1))


@cache
def case_from_trained_state() -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        model = FromTrainedState(nn.GRU).double()
    labels = torch.arange(SAMPLES) % 3
    layers = recurrent_layers(model.rnn, "rnn")
    return Case(model, (normal(SAMPLES, LENGTH, INPUTS),), labels, written_from_state, layers)


def test_a_trained_first_state_is_named_and_keeps_its_gradient(caplog: pytest.LogCaptureFixture) -> None:
    case = case_from_trained_state()
    assert_rows_give_autograds_gradients(case)
    assert_blocks_and_step(case, OWN)
    _, said = names_in_log(caplog, lambda: TEKFAC.natural(copy.deepcopy(case.model), damping=DAMPING))
    assert "h0" in said
    assert "weight_hh" not in said
    _, grads, moved = one_step(case, TEKFAC, "exact", "empirical")
    assert bool(grads["h0"].any())
    assert torch.allclose(moved["h0"], grads["h0"], rtol=1e-12, atol=0)  # first order, lr 1


# -- while it is measured ------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("of", [nn.RNN, nn.LSTM, nn.GRU])
def test_outputs_gradients_and_random_numbers_are_those_of_the_bare_model(
    method: type[NaturalGradient], of: Callable[..., nn.Module]
) -> None:
    results = []
    for live in (False, True):
        torch.manual_seed(0)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rnn = of(INPUTS, HIDDEN, num_layers=2, dropout=0.3)
                self.head = nn.Linear(HIDDEN, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.rnn(x.transpose(0, 1))[0].mean(0))

        model = Model().double()
        if live:
            method.natural(model, damping=DAMPING)
        torch.manual_seed(1)
        logits = model(normal(SAMPLES, LENGTH, INPUTS))
        F.cross_entropy(logits, torch.arange(SAMPLES) % 3).backward()
        results.append([logits.detach(), torch.rand(3), *(p.grad for p in model.parameters())])
    for without, with_one in zip(*results, strict=True):
        assert float((without - with_one).abs().max()) < 1e-12


@pytest.mark.parametrize("kind", FULL)
def test_samples_with_ignored_targets_do_not_count(kind: str) -> None:
    assert_ignored_samples_do_not_count(case_of(kind), OWN)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_samples_may_be_measured_one_at_a_time(is_sorted: bool) -> None:
    assert_chunks_change_nothing(packed_case("GRU, both ways", is_sorted))


@pytest.mark.parametrize("of", [nn.LSTM, nn.GRU])
def test_a_label_for_every_step(of: type[Recurrent]) -> None:
    layer = of(INPUTS, HIDDEN, batch_first=True)
    case = net_case(
        layer,
        normal(SAMPLES, LENGTH, INPUTS),
        lambda layer, tape, x: written(layer, tape, x)[0],
        recurrent_layers(layer),
        call=lambda layer, x: layer(x)[0],
        scale=1.5,
        per_position=True,
    )
    assert_rows_give_autograds_gradients(case)
    assert_blocks_and_step(case, OWN)


def test_large_gates_are_cut_like_any_other_side() -> None:
    case = replace(case_of("LSTM"), settings={"max_dim": 3, "large_dims": "blocks"})
    assert_blocks_and_step(case, OWN, ("empirical",))


def test_a_layer_that_is_called_twice_has_the_steps_of_both_calls() -> None:
    def twice(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.cat([layer(x)[0], layer(x.flip(1).sin())[0]], 1)

    def by_hand(layer: Recurrent, tape: Tape, x: Tensor) -> Tensor:
        return torch.cat([written(layer, tape, x)[0], written(layer, tape, x.flip(1).sin())[0]], 1)

    layer = nn.GRU(INPUTS, HIDDEN, batch_first=True)
    layers = recurrent_layers(layer)
    case = net_case(layer, normal(SAMPLES, LENGTH, INPUTS), by_hand, layers, call=twice, scale=1.5)
    assert_rows_give_autograds_gradients(case)
    assert_blocks_and_step(case)


@pytest.mark.parametrize("batch_first", [True, False])
def test_sequences_as_long_as_there_are_samples(batch_first: bool) -> None:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)[0] if batch_first else layer(x.transpose(0, 1))[0].transpose(0, 1)

    layer = nn.GRU(INPUTS, HIDDEN, batch_first=batch_first)
    case = net_case(
        layer,
        normal(SAMPLES, SAMPLES, INPUTS),
        lambda layer, tape, x: written(layer, tape, x)[0],
        recurrent_layers(layer),
        call=call,
        scale=1.5,
    )
    assert_blocks_and_step(case, OWN, ("empirical",))
