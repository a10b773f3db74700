"""Promise: nn.MultiheadAttention is preconditioned projection by projection, in all of its forms."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocks_oracle import (
    DAMPING,
    EVERY,
    NO_REDUCE,
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
    places,
)
from dense import normal
from tekfac import KFAC, TEKFAC, TKFAC

WIDTH, HEADS, LENGTH, SAMPLES = 4, 2, 5, 12


def attention(
    layer: nn.MultiheadAttention,
    tape: Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores_shift: Tensor | None = None,
    prefix: str = "",
) -> Tensor:
    """Projections, softmax of scaled products, weighted means, output projection; [N, L, E] throughout.

    scores_shift [N, 1, L, S] or smaller is added to the scores.
    """
    if layer.in_proj_weight is not None:
        weights = layer.in_proj_weight.chunk(3)
    else:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    rows = (query, key, value)
    projected = [
        tape.linear(prefix + name, x, w, b) for name, x, w, b in zip("qkv", rows, weights, biases, strict=True)
    ]
    if layer.bias_k is not None:
        for i, extra in ((1, layer.bias_k), (2, layer.bias_v)):
            projected[i] = torch.cat([projected[i], extra.expand(len(query), 1, -1)], 1)
    if layer.add_zero_attn:
        for i in (1, 2):
            projected[i] = torch.cat([projected[i], torch.zeros_like(projected[i][:, :1])], 1)
    q, k, v = (x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for x in projected)  # [N, H, L, E / H]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if scores_shift is not None:
        missing = scores.shape[-1] - scores_shift.shape[-1]
        scores = scores + F.pad(scores_shift, (0, missing))
    weights_of = F.dropout(scores.softmax(-1), layer.dropout, layer.training)
    joined = (weights_of @ v).transpose(1, 2).flatten(2)
    return tape.linear(prefix + "out", joined, layer.out_proj.weight, layer.out_proj.bias)


def attention_layers(
    layer: nn.MultiheadAttention,
    name: str = "layer",
    prefix: str = "",
    counted: dict[str, Tensor] | None = None,
) -> dict[str, tuple[list[str], list[Part]]]:
    """The layers that an attention consists of, by the names of the promise."""
    counted = counted or {}
    bias = layer.in_proj_bias is not None
    width = layer.embed_dim
    result: dict[str, tuple[list[str], list[Part]]] = {}
    if layer.in_proj_weight is not None:
        index = places({"weight": (3, width, width), "bias": (3, width)})
        parts = []
        for i, projection in enumerate("qkv"):
            matrix = index["weight"][i]
            matrix = torch.cat([matrix, index["bias"][i][:, None]], 1) if bias else matrix
            parts.append(Part(prefix + projection, matrix, counted=counted.get(projection)))
        names = ["in_proj_weight", "in_proj_bias"] if bias else ["in_proj_weight"]
        result[f"{name}.in_proj"] = ([f"{name}.{n}" for n in names], parts)
    else:
        for projection, size in (("q", width), ("k", layer.kdim), ("v", layer.vdim)):
            part = Part(f"{prefix}{projection} weight", matrix_places((width, size), False))
            result[f"{name}.{projection}_proj"] = ([f"{name}.{projection}_proj_weight"], [part])
        if bias:
            index = torch.arange(3 * width).reshape(3, width, 1)
            parts = [Part(f"{prefix}{p} bias", index[i]) for i, p in enumerate("qkv")]
            result[f"{name}.in_proj_bias"] = ([f"{name}.in_proj_bias"], parts)
    names = ["out_proj.weight", "out_proj.bias"] if layer.out_proj.bias is not None else ["out_proj.weight"]
    parts = [
        Part(prefix + "out", matrix_places((width, width), len(names) == 2), counted=counted.get("out")),
    ]
    result[f"{name}.out_proj"] = ([f"{name}.{n}" for n in names], parts)
    return result


def separated(rows: Any) -> Any:
    """Weights and biases of separate projections are layers of their own: the same u, other a."""
    result = {}
    for projection in "qkv":
        found = rows[projection]
        bias = bool((found[0][0][..., -1] == 1).all())
        result[f"{projection} weight"] = [(a[..., :-1] if bias else a, u) for a, u in found]
        result[f"{projection} bias"] = [(torch.ones_like(a[..., :1]), u) for a, u in found]
    return result


CAUSAL = torch.triu(torch.full((LENGTH, LENGTH), -math.inf), 1).double()
ADDED = normal(LENGTH, LENGTH, seed=8)
PER_HEAD = normal(SAMPLES * HEADS, LENGTH, LENGTH, seed=9)
LENGTHS = torch.tensor([5, 3, 4, 5, 2, 5, 4, 3, 5, 5, 2, 4])
PADDING = torch.arange(LENGTH) >= LENGTHS[:, None]  # True: not there

Setup = dict[str, Any]
KINDS: dict[str, Setup] = {
    "self": {},
    "without bias": {"make": {"bias": False}},
    "sequence first": {"make": {"batch_first": False}},
    "one head": {"make": {"num_heads": 1}},
    "without weights": {"call": {"need_weights": False}},
    "weights of each head": {"call": {"need_weights": True, "average_attn_weights": False}},
    "cross": {"inputs": "cross"},
    "cross, sequence first": {"inputs": "cross", "make": {"batch_first": False}},
    "all different": {"inputs": "different"},
    "other widths": {"inputs": "widths", "make": {"kdim": 3, "vdim": 2}},
    "other widths without bias": {"inputs": "widths", "make": {"kdim": 3, "vdim": 2, "bias": False}},
    "causal": {"call": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}, "shift": CAUSAL},
    "boolean mask": {"call": {"attn_mask": CAUSAL.isinf()}, "shift": CAUSAL},
    "added scores": {"call": {"attn_mask": ADDED}, "shift": ADDED},
    "added scores without weights": {"call": {"attn_mask": ADDED, "need_weights": False}, "shift": ADDED},
    "scores of every head": {
        "call": {"attn_mask": PER_HEAD},
        "shift": PER_HEAD.unflatten(0, (-1, HEADS)),
        "together": True,
    },
    "a zero to attend to": {"make": {"add_zero_attn": True}},
    "padding inside": {"inputs": "padding"},
    "dropout": {"make": {"dropout": 0.4}, "seed": 11},
    "dropout without weights": {"make": {"dropout": 0.4}, "call": {"need_weights": False}, "seed": 11},
}
FULL = ("self", "cross", "other widths", "padding inside")


@cache
def case_of(kind: str) -> Case:
    setup = KINDS[kind]
    make = {"num_heads": HEADS, "batch_first": True, **setup.get("make", {})}
    layer = nn.MultiheadAttention(WIDTH, **make)
    options, first = setup.get("call", {}), make["batch_first"]
    which = setup.get("inputs", "self")
    x = normal(SAMPLES, LENGTH, WIDTH)
    inputs: tuple[Tensor, ...] = {
        "self": (x,),
        "cross": (x, normal(SAMPLES, 6, WIDTH, seed=1)),
        "different": (x, normal(SAMPLES, 6, WIDTH, seed=1), normal(SAMPLES, 6, WIDTH, seed=2)),
        "widths": (x, normal(SAMPLES, 6, 3, seed=1), normal(SAMPLES, 6, 2, seed=2)),
        "padding": (x, PADDING),
    }[which]

    def triple(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        if which == "padding":
            inputs = inputs[:1]
        return (inputs * 3 if len(inputs) == 1 else (*inputs, inputs[-1]))[:3]

    def call(layer: nn.Module, *inputs: Tensor) -> Tensor:
        masks = {"key_padding_mask": inputs[1]} if which == "padding" else {}
        if first:
            return layer(*triple(inputs), **options, **masks)[0]
        return layer(*triple(tuple(x.transpose(0, 1) for x in inputs)), **options)[0].transpose(0, 1)

    def written(layer: nn.MultiheadAttention, tape: Tape, *inputs: Tensor) -> Tensor:
        shift = setup.get("shift")
        if which == "padding":
            shift = torch.where(inputs[1], -math.inf, 0.0).double()[:, None, None, :]
        return attention(layer, tape, *triple(inputs), shift)

    seed = setup.get("seed")
    join = separated if which == "widths" else None
    counted = dict.fromkeys("kv", ~PADDING) if which == "padding" else None  # masked keys do not exist
    layers = attention_layers(layer, counted=counted)
    return net_case(
        layer,
        inputs,
        written,
        layers,
        call=call,
        forward_seed=seed,
        together=seed is not None or "together" in setup,
        join=join,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_written_out_give_autograds_gradients(kind: str) -> None:
    assert_rows_give_autograds_gradients(case_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_steps_are_those_of_the_definitions(kind: str) -> None:
    assert_blocks_and_step(case_of(kind), EVERY if kind in FULL else OWN)


# -- padding that the model is told of -----------------------------------------------------------------


class Masked(nn.Module):
    """Self-attention over real positions only, and a mean over them."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, key_padding_mask: Tensor) -> Tensor:
        y, _ = self.attn(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)
        real = (~key_padding_mask)[..., None].double()
        return self.head(((y * real).sum(1) / real.sum(1)).tanh())


def written_masked(model: Masked, tape: Tape, x: Tensor, padding: Tensor) -> Tensor:
    shift = torch.where(padding, -math.inf, 0.0).double()[:, None, None, :]
    y = attention(model.attn, tape, x, x, x, shift)
    real = (~padding)[..., None].double()
    return model.head(((y * real).sum(1) / real.sum(1)).tanh())


@cache
def masked_case() -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = Masked().double()
        model.attn.in_proj_bias.data.uniform_(-1, 1)
    counted = dict.fromkeys(("q", "k", "v", "out"), ~PADDING)
    layers = attention_layers(model.attn, "attn", counted=counted)
    return Case(
        model, (normal(SAMPLES, LENGTH, WIDTH), PADDING), torch.arange(SAMPLES) % 3, written_masked, layers
    )


def test_positions_that_the_mask_calls_padding_do_not_count() -> None:
    assert_rows_give_autograds_gradients(masked_case())
    assert_blocks_and_step(masked_case())


# -- one sequence without a batch axis -----------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
def test_one_sequence_without_a_batch_axis(batch_first: bool) -> None:
    """More positions than widths, so that one sample is enough for the factors."""

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x[0], x[0], x[0])[0][None]

    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
    layers = attention_layers(layer)
    x = normal(1, 9, WIDTH)
    case = net_case(layer, x, lambda layer, tape, x: attention(layer, tape, x, x, x), layers, call=call)
    assert_rows_give_autograds_gradients(case)
    assert_blocks_and_step(case, ((KFAC, "expand"), (TKFAC, "exact"), (TKFAC, "expand")))


# -- inside a transformer ------------------------------------------------------------------------------


def written_encoder(
    layer: nn.TransformerEncoderLayer, tape: Tape, x: Tensor, shift: Tensor | None = None
) -> Tensor:
    """A post-norm encoder layer, its parts one by one."""

    def norm(name: str, x: Tensor) -> Tensor:
        module = getattr(layer, name)
        mean = x.mean(-1, keepdim=True)
        x = (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + module.eps).sqrt()
        return tape.scaled(name, x, module.weight, module.bias)

    x = norm("norm1", x + attention(layer.self_attn, tape, x, x, x, shift))
    h = tape.linear("linear1", x, layer.linear1.weight, layer.linear1.bias).relu()
    return norm("norm2", x + tape.linear("linear2", h, layer.linear2.weight, layer.linear2.bias))


def encoder_layers(
    layer: nn.TransformerEncoderLayer, counted: Tensor | None = None
) -> dict[str, tuple[list[str], list[Part]]]:
    """Everything in an encoder layer that is called "layer"."""
    masks = None if counted is None else dict.fromkeys(("q", "k", "v", "out"), counted)
    layers = attention_layers(layer.self_attn, "layer.self_attn", counted=masks)
    for name, shape in (("linear1", (6, WIDTH)), ("linear2", (WIDTH, 6))):
        names = [f"layer.{name}.weight", f"layer.{name}.bias"]
        layers[f"layer.{name}"] = (names, [Part(name, matrix_places(shape, True), counted=counted)])
    for name in ("norm1", "norm2"):
        index = torch.arange(2 * WIDTH).reshape(2, WIDTH).T
        names = [f"layer.{name}.weight", f"layer.{name}.bias"]
        layers[f"layer.{name}"] = (names, [Part(name, index, units=True)])

    return layers


@cache
def encoder_case() -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 6, dropout=0.0, batch_first=True)
    return net_case(layer, normal(SAMPLES, LENGTH, WIDTH), written_encoder, encoder_layers(layer))


class PaddedEncoder(nn.Module):
    """An encoder layer and a mean over the real positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        return self.read(self.layer(x, src_key_padding_mask=src_key_padding_mask), src_key_padding_mask)

    def read(self, y: Tensor, padding: Tensor) -> Tensor:
        real = (~padding)[..., None].double()
        return self.head(((y * real).sum(1) / real.sum(1)).tanh())


def written_padded(model: PaddedEncoder, tape: Tape, x: Tensor, padding: Tensor) -> Tensor:
    shift = torch.where(padding, -math.inf, 0.0).double()[:, None, None, :]
    return model.read(written_encoder(model.layer, tape, x, shift), padding)


def padded_encoder_case(model: nn.Module) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = model.double()
        for parameter in model.parameters():
            parameter.data.uniform_(-0.7, 0.7)
    inputs = (normal(SAMPLES, LENGTH, WIDTH), PADDING)
    return Case(model, inputs, torch.arange(SAMPLES) % 3, written_padded, encoder_layers(model.layer, ~PADDING))


def test_padding_does_not_count_in_any_layer_of_an_encoder_layer() -> None:
    case = padded_encoder_case(PaddedEncoder())
    assert_rows_give_autograds_gradients(case)
    assert_blocks_and_step(case, NO_REDUCE)


def test_all_layers_of_a_transformer_encoder_layer() -> None:
    assert_rows_give_autograds_gradients(encoder_case())
    assert_blocks_and_step(encoder_case(), NO_REDUCE)


def test_a_live_optimizer_changes_nothing_in_eval_mode() -> None:
    """Transformer layers have a fast path there, which hooks would switch off or break."""
    (x,) = encoder_case().inputs
    model = copy.deepcopy(encoder_case().model).eval()
    bare = copy.deepcopy(model)
    with torch.no_grad():
        before = bare(x)
    optimizer = TEKFAC.natural(model, lr=1e-30, damping=DAMPING)
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            assert float((model(x) - before).abs().max()) < 1e-12
        assert float((model(x).detach() - before).abs().max()) < 1e-12
        model.train()
        F.cross_entropy(model(x), torch.arange(SAMPLES) % 3).backward()
        optimizer.step()
    assert "layer.self_attn.in_proj" in optimizer.curvature


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_gives_the_same_outputs_weights_and_gradients_while_it_is_measured(
    need_weights: bool,
) -> None:
    """With dropout: the same mask, and the random state afterwards is the same."""
    results = []
    for live in (False, True):
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.3, batch_first=True).double()
        model = nn.ModuleDict({"attn": layer, "head": nn.Linear(WIDTH, 3).double()})

        class Wrapped(nn.Module):
            def __init__(self, inner: nn.ModuleDict) -> None:
                super().__init__()
                self.inner = inner
                self.weights: Tensor | None = None

            def forward(self, x: Tensor) -> Tensor:
                y, self.weights = self.inner["attn"](x, x, x, need_weights=need_weights)
                return self.inner["head"](y.mean(1))

        wrapped = Wrapped(model)
        if live:
            TEKFAC.natural(wrapped, damping=DAMPING)
        torch.manual_seed(1)
        logits = wrapped(normal(SAMPLES, LENGTH, WIDTH))
        F.cross_entropy(logits, torch.arange(SAMPLES) % 3).backward()
        gradients = [parameter.grad for parameter in wrapped.parameters()]
        weights = torch.zeros(()) if wrapped.weights is None else wrapped.weights.detach()
        results.append([logits.detach(), weights, torch.rand(3), *gradients])
    assert (results[0][1].ndim == 3) == need_weights
    for without, with_one in zip(*results, strict=True):
        assert without.shape == with_one.shape
        assert float((without - with_one).abs().max()) < 1e-12


# -- what is left to first order -----------------------------------------------------------------------


def test_extra_keys_and_values_are_left_to_first_order_by_name(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True)
    case = net_case(
        layer,
        normal(SAMPLES, LENGTH, WIDTH),
        lambda layer, tape, x: attention(layer, tape, x, x, x),
        attention_layers(layer),
        call=lambda layer, x: layer(x, x, x)[0],
    )
    _, said = names_in_log(caplog, lambda: TEKFAC.natural(copy.deepcopy(case.model), damping=DAMPING))
    assert "layer.bias_k" in said
    assert "layer.bias_v" in said
    assert "in_proj" not in said
    assert_rows_give_autograds_gradients(case)
    assert_blocks_and_step(case, OWN)


@pytest.mark.parametrize("kind", ["self", "cross", "other widths"])
def test_samples_with_ignored_targets_do_not_count(kind: str) -> None:
    assert_ignored_samples_do_not_count(case_of(kind), OWN)


@pytest.mark.parametrize("kind", ["cross", "other widths", "padding inside"])
def test_samples_may_be_measured_one_at_a_time(kind: str) -> None:
    assert_chunks_change_nothing(case_of(kind))


def test_a_label_for_every_position() -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    case = net_case(
        layer,
        normal(SAMPLES, LENGTH, WIDTH),
        lambda layer, tape, x: attention(layer, tape, x, x, x),
        attention_layers(layer),
        call=lambda layer, x: layer(x, x, x, need_weights=False)[0],
        per_position=True,
    )
    assert_rows_give_autograds_gradients(case)
    assert_blocks_and_step(case, OWN)


@pytest.mark.parametrize("large_dims", ["blocks", "diagonal"])
def test_large_projections_are_cut_like_any_other_side(large_dims: str) -> None:
    case = replace(case_of("cross"), settings={"max_dim": 3, "large_dims": large_dims})
    assert_blocks_and_step(case, OWN, ("empirical",))


@pytest.mark.parametrize("batch_first", [True, False])
def test_sequences_as_long_as_there_are_samples(batch_first: bool) -> None:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        y = x if batch_first else x.transpose(0, 1)
        y = layer(y, y, y)[0]
        return y if batch_first else y.transpose(0, 1)

    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
    layers = attention_layers(layer)
    x = normal(SAMPLES, SAMPLES, WIDTH)
    case = net_case(layer, x, lambda layer, tape, x: attention(layer, tape, x, x, x), layers, call=call)
    assert_blocks_and_step(case, OWN, ("empirical",))
