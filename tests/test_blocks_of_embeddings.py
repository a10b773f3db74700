"""Promise: embeddings are preconditioned token by token, also where the output layer shares their weight."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocks_oracle import (
    DAMPING,
    EVERY,
    OWN,
    Case,
    Part,
    Rows,
    Tape,
    assert_blocks_and_step,
    assert_chunks_change_nothing,
    assert_ignored_samples_do_not_count,
    assert_rows_give_autograds_gradients,
    names_in_log,
    net_case,
    numbers,
    one_step,
    places,
    with_one,
)
from dense import assert_close, every_method
from tekfac import TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient

TOKENS, WIDTH, SAMPLES = 6, 3, 14
UNUSED = 4


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """All tokens but one, some of them several times in the same sample."""
    drawn = torch.randint(TOKENS - 1, shape, generator=torch.Generator().manual_seed(seed))
    return drawn + (drawn >= UNUSED)


# -- an embedding by itself ----------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {
    "[N]": (SAMPLES,),
    "[N, T]": (SAMPLES, 5),
    "[N, T, S]": (SAMPLES, 2, 3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 2},
    "sparse": {"sparse": True},
    "sparse padding": {"sparse": True, "padding_idx": 0},
}


def looked_up(layer: nn.Embedding, tape: Tape, x: Tensor) -> Tensor:
    """one_hot(x) W; padding is what autograd takes it for, a constant."""
    one_hot = F.one_hot(x, layer.num_embeddings).double()
    s = one_hot @ layer.weight
    if layer.padding_idx is None:
        return tape.keep("embedding", one_hot, s)
    real = (x != layer.padding_idx)[..., None].double()
    return s + real * tape.keep("embedding", one_hot, torch.zeros_like(s))


def embedding_part(tokens: int = TOKENS, width: int = WIDTH) -> Part:
    """s = W a with a one-hot: the matrix is the transposed weight."""
    index = places({"weight": (tokens, width)})["weight"]
    return Part("embedding", index.T, diagonal_in=True)


@cache
def case_of(shape: str, option: str = "plain", width: int = WIDTH, **settings: Any) -> Case:
    return net_case(
        nn.Embedding(TOKENS, width, **OPTIONS[option]),
        tokens(*SHAPES[shape]),
        looked_up,
        {"layer": (["layer.weight"], [embedding_part(width=width)])},
        settings=settings,
    )


EMBEDDINGS = [(shape, "plain") for shape in SHAPES] + [
    ("[N, T]", option) for option in OPTIONS if option != "plain"
]


@pytest.mark.parametrize(("shape", "option"), EMBEDDINGS)
def test_the_rows_written_out_give_autograds_gradients(shape: str, option: str) -> None:
    assert_rows_give_autograds_gradients(case_of(shape, option))


@pytest.mark.parametrize(("shape", "option"), EMBEDDINGS)
def test_blocks_and_steps_are_those_of_the_definitions(shape: str, option: str) -> None:
    assert_blocks_and_step(case_of(shape, option), EVERY if option in ("plain", "padding") else OWN)


@pytest.mark.parametrize("large_dims", ["blocks", "diagonal"])
def test_the_width_may_be_cut_like_any_other_side(large_dims: str) -> None:
    case = case_of("[N, T]", "plain", 5, max_dim=2, large_dims=large_dims)
    assert_blocks_and_step(case, OWN, ("empirical",))


@every_method
@pytest.mark.parametrize("option", ["plain", "sparse"])
def test_a_token_that_does_not_occur_does_not_move(method: type[NaturalGradient], option: str) -> None:
    _, grads, moved = one_step(case_of("[N, T]", option), method, "expand", "empirical")
    assert not grads["layer.weight"][UNUSED].any()
    assert not moved["layer.weight"][UNUSED].any()
    assert moved["layer.weight"].abs().sum(1).count_nonzero() == TOKENS - 1


@every_method
def test_padding_does_not_move(method: type[NaturalGradient]) -> None:
    _, _, moved = one_step(case_of("[N, T]", "padding"), method, "expand", "exact")
    assert not moved["layer.weight"][2].any()
    assert moved["layer.weight"].abs().sum(1).count_nonzero() == TOKENS - 2


@every_method
def test_sparse_gradients_give_the_same_step_as_dense_ones(method: type[NaturalGradient]) -> None:
    steps = [
        one_step(case_of("[N, T]", option), method, "expand", "empirical")[2] for option in ("plain", "sparse")
    ]
    assert_close(steps[1]["layer.weight"], steps[0]["layer.weight"])


@pytest.mark.parametrize(
    "option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=["max_norm", "by freq"]
)
def test_embeddings_that_are_no_plain_table_are_left_to_first_order_by_name(
    option: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH, **option), nn.Flatten(), nn.Linear(5 * WIDTH, 3)).double()
    optimizer, said = names_in_log(
        caplog, lambda: TEKFAC.natural(model, lr=0.1, momentum=0.0, first_order_lr=0.25, damping=DAMPING)
    )
    assert "'0.weight'" in said
    F.cross_entropy(model(tokens(SAMPLES, 5)), torch.arange(SAMPLES) % 3).backward()
    start = model[0].weight.detach().clone()  # after the forward pass, which renormalises rows
    optimizer.step()
    assert set(optimizer.curvature) == {"2"}
    assert torch.equal(model[0].weight, start - 0.25 * model[0].weight.grad)


# -- tied to the output layer --------------------------------------------------------------------------


class Tied(nn.Module):
    """Tokens [N, T] to logits over the tokens, at every position or after pooling."""

    def __init__(self, bias: bool, pooled: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(TOKENS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=bias)
        self.head.weight = self.emb.weight
        self.pooled = pooled

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.emb(x)).tanh()
        return self.head(h.mean(1) if self.pooled else h)


def written_tied(model: Tied, tape: Tape, x: Tensor) -> Tensor:
    """Both uses are positions of one matrix [V, E (+ 1)]: u a^T is v e^T of the table, transposed."""
    looked = tape.keep(
        "looked up", F.one_hot(x, TOKENS).double(), F.one_hot(x, TOKENS).double() @ model.emb.weight
    )
    h = model.mix(looked).tanh()
    h = h.mean(1) if model.pooled else h
    return tape.linear("head", h, model.head.weight, model.head.bias)


def joined(rows: Rows) -> Rows:
    """A position of the head has u = p and a = (h, 1); one of the table u = e_i and a = (v, 0)."""
    tied = []
    for (one_hot, v), (a, p) in zip(rows["looked up"], rows["head"], strict=True):
        v = v if a.shape[-1] == WIDTH else with_one(v, 0.0)
        tied.append((torch.cat([a, v], 1), torch.cat([p, one_hot], 1)))
    return {"tied": tied}


@cache
def tied_case(bias: bool, pooled: bool) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Tied(bias, pooled).double()
        labels = torch.randint(TOKENS, (SAMPLES,) if pooled else (SAMPLES, 4))
    names = ["emb.weight", "head.bias"] if bias else ["emb.weight"]
    index = places({"weight": (TOKENS, WIDTH), "bias": (TOKENS,)})
    matrix = torch.cat([index["weight"], index["bias"][:, None]], 1) if bias else index["weight"]
    part = Part("tied", matrix, diagonal_out=True, as_expanded=True)
    return Case(model, (tokens(SAMPLES, 4),), labels, written_tied, {"emb": (names, [part])}, join=joined)


every_tie = pytest.mark.parametrize(
    ("bias", "pooled"), [(True, True), (False, True), (True, False), (False, False)]
)


@every_tie
def test_the_rows_of_tied_layers_give_autograds_gradients(bias: bool, pooled: bool) -> None:
    assert_rows_give_autograds_gradients(tied_case(bias, pooled))


@every_tie
def test_tied_layers_have_one_block_of_both_uses(bias: bool, pooled: bool) -> None:
    case = tied_case(bias, pooled)
    assert_blocks_and_step(case, EVERY if pooled else OWN)
    optimizer, _, _ = one_step(case, TEKFAC, "exact", "empirical")
    assert set(optimizer.curvature) == {"emb", "mix"}


# -- many tokens ---------------------------------------------------------------------------------------


class ManyTokens(nn.Module):
    """50,000 tokens of width 4, and a small head or one of as many classes that shares the table."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(50_000, 4)
        self.head = nn.Linear(4, 50_000 if tied else 3)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.emb(x).mean(1))


@every_method
@pytest.mark.parametrize("tied", [False, True], ids=["alone", "tied"])
def test_fifty_thousand_tokens_take_no_matrix_of_tokens_by_tokens(
    method: type[NaturalGradient], tied: bool
) -> None:
    torch.manual_seed(0)
    model = ManyTokens(tied)
    optimizer = method.natural(model, lr=0.1, damping=DAMPING)
    x = torch.randint(50_000, (4, 3))
    before = model.emb.weight.detach().clone()
    F.cross_entropy(model(x), torch.tensor([0, 1, 2, 1])).backward()
    optimizer.step()
    assert max(numbers(optimizer.state_dict())) <= 2 * 50_000 * 5
    moved = (model.emb.weight.detach() - before).abs().sum(1)
    assert bool(moved[x.unique()].all())
    assert model.emb.weight.isfinite().all()
    assert "emb" in optimizer.curvature


@pytest.mark.parametrize("shape", SHAPES)
def test_samples_with_ignored_targets_do_not_count(shape: str) -> None:
    assert_ignored_samples_do_not_count(case_of(shape), OWN)


@pytest.mark.parametrize("option", ["plain", "padding"])
def test_samples_may_be_measured_one_at_a_time(option: str) -> None:
    assert_chunks_change_nothing(case_of("[N, T]", option))


@pytest.mark.parametrize("bias", [True, False])
def test_samples_of_tied_layers_may_be_measured_one_at_a_time(bias: bool) -> None:
    assert_chunks_change_nothing(tied_case(bias, True))


@pytest.mark.parametrize("option", ["plain", "padding"])
def test_a_label_for_every_position(option: str) -> None:
    layers = {"layer": (["layer.weight"], [embedding_part()])}
    layer = nn.Embedding(TOKENS, WIDTH, **OPTIONS[option])
    case = net_case(layer, tokens(SAMPLES, 4), looked_up, layers, per_position=True)
    assert case.labels.shape == (SAMPLES, 4)
    assert_rows_give_autograds_gradients(case)
    assert_blocks_and_step(case)


@pytest.mark.parametrize("length", [4, SAMPLES])
def test_sequences_first(length: int) -> None:
    """[T, N] inside the model, also where the two axes are of the same length."""
    case = net_case(
        nn.Embedding(TOKENS, WIDTH),
        tokens(SAMPLES, length),
        looked_up,
        {"layer": (["layer.weight"], [embedding_part()])},
        call=lambda layer, x: layer(x.T).transpose(0, 1),
    )
    assert_blocks_and_step(case, OWN, ("empirical",))
