"""Promise: positions that a mask calls padding, and no gradient reaches, are no part of the curvature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, every_method, normal, sharings
from layer_kinds import assert_diagonalises
from tekfac import EKFAC, KFAC, TKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical

N, T, D = 6, 5, 4
LENGTHS = torch.tensor([5, 2, 3, 1, 4, 3])
REAL = torch.arange(T) < LENGTHS[:, None]  # [N, T]
LABELS = torch.tensor([0, 1, 2, 1, 0, 2])


class Pooled(nn.Module):
    """A layer over all positions, the mean over the real ones, a head. Subclasses name the mask."""

    def __init__(self, weights: Tensor | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer, self.head = nn.Linear(D, 3), nn.Linear(3, 3)
        self.weights = torch.ones(T) if weights is None else weights  # of the positions in the mean
        self.double()

    def pooled(self, x: Tensor, real: Tensor | None) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        real = torch.ones(x.shape[:2]) if real is None else real
        weights = (real * self.weights[: x.shape[1]])[..., None].double()
        out: Tensor = self.head((hidden * weights).sum(1) / real.sum(1, keepdim=True))
        return out


class WithAttentionMask(Pooled):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.pooled(x, attention_mask)


class WithSourcePaddingMask(Pooled):
    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        return self.pooled(x, None if src_key_padding_mask is None else ~src_key_padding_mask)


class WithKeyPaddingMask(Pooled):
    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.pooled(x, None if key_padding_mask is None else ~key_padding_mask)


class WithLengthsMask(Pooled):
    def forward(self, x: Tensor, lengths_mask: Tensor | None = None, *, unrelated: int = 0) -> Tensor:
        return self.pooled(x, lengths_mask)


class WithoutMask(Pooled):
    def forward(self, x: Tensor) -> Tensor:
        return self.pooled(x, None)


class Batched(Pooled):
    """All in one dictionary."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.pooled(batch["x"], batch["real"])


def inputs(padding: float = 0.0) -> Tensor:
    """[N, T, D], with something in the padding."""
    return torch.where(REAL[..., None], normal(N, T, D, seed=1), torch.full((), padding, dtype=torch.float64))


def measured(
    method: type[NaturalGradient],
    model: nn.Module,
    *args: Any,
    settings: dict[str, Any] | None = None,
    **kwargs: Any,
) -> NaturalGradient:
    """An optimizer that has taken one step on model(*args, **kwargs)."""
    defaults = {"lr": 1e-30, "momentum": 0.0, "damping": 1e-3, "fisher": "exact"}
    optimizer = method.natural(model, **{**defaults, **(settings or {})})
    F.cross_entropy(model(*args, **kwargs), LABELS).backward()
    optimizer.step()
    return optimizer


def dense(optimizer: NaturalGradient) -> Tensor:
    """The layer's block, over row-major [weight | bias]."""
    return optimizer.curvature["layer"].to_dense()


def real_rows(weights: Tensor | None = None) -> list[oracle.Samples]:
    """What the layer sees of each sample when it is sent through the network alone, without its padding."""
    model = WithoutMask(weights)
    x = normal(N, T, D, seed=1)
    return [
        oracle.per_column(oracle.softmax_column, model, x[n : n + 1, : int(LENGTHS[n])], "layer")
        for n in range(N)
    ]


def expected(sharing: str, samples: list[oracle.Samples]) -> oracle.Factored:
    """Plain factors over real positions; every sample may have another number of them."""
    a, u = ([getattr(s, key)[:, 0] for s in samples] for key in ("a", "u"))  # [K, T_n, d] each
    columns = sum(len(rows) for rows in u)  # N * K; u has a factor of sqrt(K)
    if sharing == "expand":
        inputs = oracle.mean_outer(torch.cat([rows[0] for rows in a]))
        outputs = sum(torch.einsum("kto,ktp->op", rows, rows) for rows in u) / columns
    else:
        inputs = oracle.mean_outer(torch.stack([rows[0].mean(0) for rows in a]))
        outputs = sum(torch.einsum("ko,kp->op", rows.sum(1), rows.sum(1)) for rows in u) / columns
    assert isinstance(outputs, Tensor)
    return oracle.Factored(torch.ones((), dtype=torch.float64), inputs, outputs)


def exact_block(samples: list[oracle.Samples]) -> Tensor:
    return oracle.exact_fisher(torch.cat([s.gradients[:, 0] for s in samples]))


def assert_is_that_of(
    method: type[NaturalGradient], sharing: str, optimizer: NaturalGradient, samples: list[oracle.Samples]
) -> None:
    """The block is the oracle's over real positions; of EKFAC's, the basis is checked and then used."""
    factors = expected(sharing, samples)
    if method is KFAC:
        block = factors.dense()
    else:
        curvature = optimizer.curvature["layer"]
        q_out, q_in = (q[0].contiguous() for q in (curvature.basis.vectors_out, curvature.basis.vectors_in))
        assert_diagonalises(q_in, factors.inputs)
        assert_diagonalises(q_out, factors.outputs)
        block = oracle.eigen_corrected(exact_block(samples), q_out, q_in)
    assert_close(dense(optimizer), block)


plain_methods = pytest.mark.parametrize(
    ("method", "sharing"), [(method, sharing) for method in (KFAC, EKFAC) for sharing in ("expand", "reduce")]
)

CALLS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any], dict[str, Any]]]] = {
    "attention_mask": lambda: (WithAttentionMask(), (inputs(9.0),), {"attention_mask": REAL}, {}),
    "attention_mask of integers": lambda: (
        WithAttentionMask(),
        (inputs(9.0),),
        {"attention_mask": REAL.long()},
        {},
    ),
    "attention_mask of floats, by position": lambda: (
        WithAttentionMask(),
        (inputs(9.0), REAL.double()),
        {},
        {},
    ),
    "src_key_padding_mask": lambda: (
        WithSourcePaddingMask(),
        (inputs(9.0),),
        {"src_key_padding_mask": ~REAL},
        {},
    ),
    "key_padding_mask": lambda: (WithKeyPaddingMask(), (inputs(9.0),), {"key_padding_mask": ~REAL}, {}),
    "a name that is given": lambda: (
        WithLengthsMask(),
        (inputs(9.0),),
        {"lengths_mask": REAL},
        {"padding_mask": "lengths_mask"},
    ),
    "a name that is given, by position": lambda: (
        WithLengthsMask(),
        (inputs(9.0), REAL),
        {"unrelated": 1},
        {"padding_mask": "lengths_mask"},
    ),
    "a function of the arguments": lambda: (
        Batched(),
        ({"x": inputs(9.0), "real": REAL},),
        {},
        {"padding_mask": lambda batch: batch["real"]},
    ),
}


@pytest.mark.parametrize("call", CALLS)
@plain_methods
def test_the_curvature_is_that_over_real_positions(
    method: type[NaturalGradient], sharing: str, call: str
) -> None:
    model, args, kwargs, settings = CALLS[call]()
    optimizer = measured(method, model, *args, settings={"sharing": sharing, **settings}, **kwargs)
    assert_is_that_of(method, sharing, optimizer, real_rows())


@plain_methods
def test_samples_sent_alone_and_without_padding_have_that_curvature(
    method: type[NaturalGradient], sharing: str
) -> None:
    """What the oracle says of real positions, by the library itself, without any mask."""
    model = WithoutMask()
    optimizer = method.natural(model, lr=1e-30, damping=1e-3, fisher="exact", sharing=sharing)  # type: ignore[arg-type]
    for n in range(N):
        logits = model(inputs()[n : n + 1, : int(LENGTHS[n])])
        (F.cross_entropy(logits, LABELS[n : n + 1]) / N).backward()
    optimizer.step()
    assert_is_that_of(method, sharing, optimizer, real_rows())


def test_without_the_mask_padding_would_count() -> None:
    """The comparison above can fail."""
    optimizer = measured(KFAC, WithLengthsMask(), inputs(9.0), lengths_mask=REAL)
    block = expected("expand", real_rows()).dense()
    assert (dense(optimizer) - block).norm() > block.norm()


@pytest.mark.parametrize("fisher", ["exact", "empirical", "sampled"])
@pytest.mark.parametrize(
    ("method", "sharing"), [(method, sharing) for method in METHODS for sharing in sharings(method)]
)
def test_what_stands_in_the_padding_does_not_matter(
    method: type[NaturalGradient], sharing: str, fisher: Any
) -> None:
    settings = {"sharing": sharing, "fisher": fisher, "seed": 0}
    blocks = [
        dense(measured(method, WithAttentionMask(), inputs(padding), attention_mask=REAL, settings=settings))
        for padding in (0.0, 9.0, -1e3)
    ]
    assert_close(blocks[1], blocks[0])
    assert_close(blocks[2], blocks[0])


@every_method
def test_a_mask_without_padding_changes_nothing(method: type[NaturalGradient]) -> None:
    x, full = normal(N, T, D, seed=1), torch.ones(N, T, dtype=torch.bool)
    plain = dense(measured(method, WithoutMask(), x))
    assert_identical(dense(measured(method, WithAttentionMask(), x, attention_mask=full)), plain)
    assert_identical(dense(measured(method, WithAttentionMask(), x, attention_mask=None)), plain)
    assert_identical(dense(measured(method, WithAttentionMask(), x)), plain)
    assert_identical(dense(measured(method, WithSourcePaddingMask(), x, src_key_padding_mask=~full)), plain)


@plain_methods
def test_a_real_position_whose_gradient_happens_to_be_zero_counts(
    method: type[NaturalGradient], sharing: str
) -> None:
    """Position 1 has no weight in the mean, but the mask says that it is real."""
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5])
    model = WithAttentionMask(weights)
    optimizer = measured(method, model, inputs(9.0), attention_mask=REAL, settings={"sharing": sharing})
    assert_is_that_of(method, sharing, optimizer, real_rows(weights))


@plain_methods
def test_padding_that_a_gradient_reaches_counts(method: type[NaturalGradient], sharing: str) -> None:
    """A model that has the argument and pools over everything all the same."""

    class Careless(WithAttentionMask):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.pooled(x, None)

    x = normal(N, T, D, seed=1)
    careless = measured(method, Careless(), x, attention_mask=REAL, settings={"sharing": sharing})
    plain = measured(method, WithoutMask(), x, settings={"sharing": sharing})
    assert_close(dense(careless), dense(plain))


@plain_methods
def test_micro_batches_with_padding_of_their_own_are_the_whole_batch(
    method: type[NaturalGradient], sharing: str
) -> None:
    """Each is padded to its own longest sample only."""
    model = WithAttentionMask()
    settings = {"sharing": sharing, "lr": 1e-30, "momentum": 0.0, "damping": 1e-3, "fisher": "exact"}
    optimizer = method.natural(model, **settings)  # type: ignore[arg-type]
    for part in (slice(0, 3), slice(3, 4), slice(4, 6)):
        longest = int(LENGTHS[part].max())
        logits = model(inputs(9.0)[part, :longest], attention_mask=REAL[part, :longest])
        (F.cross_entropy(logits, LABELS[part], reduction="sum") / N).backward()
    optimizer.step()
    assert_is_that_of(method, sharing, optimizer, real_rows())


def test_layers_without_these_positions_are_measured_as_ever() -> None:
    """The head sees one row per sample; a mask over five positions says nothing of it."""
    masked = measured(KFAC, WithAttentionMask(), inputs(9.0), attention_mask=REAL)
    x = [normal(N, T, D, seed=1)[n : n + 1, : int(LENGTHS[n])] for n in range(N)]
    model = WithoutMask()
    optimizer = KFAC.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, fisher="exact")
    for n in range(N):
        (F.cross_entropy(model(x[n]), LABELS[n : n + 1]) / N).backward()
    optimizer.step()
    assert_close(masked.curvature["head"].to_dense(), optimizer.curvature["head"].to_dense())


class Tokenwise(nn.Module):
    """Per-token predictions; targets in the padding are ignored."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer, self.head = nn.Linear(D, 3), nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.layer(x)))
        return out


@pytest.mark.parametrize("method", [KFAC, EKFAC, TKFAC])
def test_mask_and_ignored_targets_that_say_the_same_go_together(method: type[NaturalGradient]) -> None:
    y = torch.randint(3, (N, T), generator=torch.Generator().manual_seed(0)).masked_fill(~REAL, -100)
    blocks = []
    for mask in (None, REAL):
        model = Tokenwise()
        optimizer = method.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, fisher="exact")
        F.cross_entropy(model(inputs(9.0), attention_mask=mask).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        blocks.append(optimizer.curvature.to_dense())
    assert_close(blocks[1], blocks[0])


def test_a_name_that_the_model_does_not_take_is_refused_with_those_it_takes() -> None:
    with pytest.raises(ValueError, match="padding_mask") as error:
        measured(KFAC, WithLengthsMask(), inputs(), settings={"padding_mask": "length_mask"})
    assert "'length_mask'" in str(error.value)
    assert "lengths_mask" in str(error.value)


@pytest.mark.parametrize("value", [3, True, ["attention_mask"]])
def test_what_is_neither_a_name_nor_a_function_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="padding_mask") as error:
        KFAC.natural(WithAttentionMask(), padding_mask=value)
    assert repr(value) in str(error.value)
