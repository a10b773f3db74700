"""Samples can be measured in a few sums with random signs: without bias, in every kind of layer."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import assert_close, normal, seeded
from layer_kinds import BIASES, KINDS
from tekfac import TEKFAC
from tekfac.capture import selection, taking
from tekfac.capture.capture import Capture
from tekfac.capture.measurement import Measurement
from tekfac.capture.sampling import Sampling
from tekfac.capture.selection import (
    FEWEST,
    FEWEST_SUMS,
    IN_A_SUM,
    ROOM,
    SUMS,
    Selection,
    can_be_summed,
    wanted_sums,
)
from tekfac.curvature.eigenbasis import decompose
from tekfac.curvature.factors import TRACE_RESTRICTED
from tekfac.curvature.rescaling import second_moments
from tekfac.layers.batch import FormedBatch, LayerBatch, MomentBatch, Sums
from tekfac.layers.inventory import take_inventory
from tekfac.layers.layer import Layer
from tekfac.layers.shapes import LayerShape
from tekfac.ranks.group import ALONE
from tekfac.ranks.whole_batch import WholeBatch
from training import assert_identical, resumed, train

SAMPLES, COUNT = 7, 3
SIGNS = torch.tensor([1, -1, -1, 1, 1, -1, 1])
BUDGET = 2**20
ALL_FISHERS = pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])


class Net(nn.Module):
    """A convolution, attention and a linear layer on sequences, and one that every sample uses once."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 2)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.tokens, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.convolution(x)).flatten(2).mT
        x = self.tokens(self.attention(x, x, x, need_weights=False)[0])
        out: Tensor = self.head(torch.tanh(x).mean(1))
        return out


def batch(seed: int = 0, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    return normal(samples, 1, 4, 4, seed=seed), torch.arange(samples) % 3


def squares(layer: Layer, gradients: Tensor) -> tuple[Tensor, Tensor]:
    found = TRACE_RESTRICTED.sums([FormedBatch(layer, gradients, 1.0)], "exact", BUDGET)
    return found.input, found.output


def captures(model: nn.Module, fisher: Any = "empirical", squaring: Any = None) -> tuple[Capture, Capture]:
    """Of each sample, and of sums."""
    layers, measurement = take_inventory(model, []).layers, Measurement(fisher=fisher, seed=0)
    summed = {"may_be_summed": True, "squaring": squaring}
    found = (
        Capture(model, layers.values(), measurement, statistics_samples=None),
        Capture(model, layers.values(), measurement, statistics_samples="auto", **summed),
    )
    for capture in found:
        capture.arm()
    return found


@pytest.fixture
def always_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sizes, and with signs that the tests know."""
    monkeypatch.setattr(Selection, "in_sums", lambda *_, **__: Sums.of_all(SIGNS, COUNT))


def gradients_of(captured: LayerBatch | FormedBatch) -> Tensor:
    """G_n, [K, G, N, d_out, d_in], or those of sums, [1, G, K n, d_out, d_in]."""
    (rows,) = captured.chunks(10**6)
    return rows.per_sample_gradients()


def in_sums(gradients: Tensor) -> Tensor:
    """[K, G, N, ...] -> [1, G, K n, ...]."""
    signed = gradients * SIGNS[:, None, None]
    parts = [part.sum(dim=2) for part in torch.tensor_split(signed, COUNT, dim=2)]
    return torch.stack(parts, dim=2).transpose(0, 1).flatten(1, 2)[None]


# -- what a sum is -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("always_summed")
@ALL_FISHERS
def test_a_sum_is_that_of_its_samples_with_their_signs(fisher: str) -> None:
    """In every layer, whether it is formed in the backward pass or afterwards (attention)."""
    model, (x, y) = seeded(Net), batch()
    each, sums = captures(model, fisher)
    F.cross_entropy(model(x), y).backward()
    of_each, of_sums = each.batches(), sums.batches()
    assert of_sums.keys() == of_each.keys()
    for name, (own,) in of_sums.items():
        assert isinstance(own, FormedBatch)
        assert own.num_terms == SAMPLES
        assert_close(gradients_of(own), in_sums(gradients_of(of_each[name][0])))


@pytest.mark.usefixtures("always_summed")
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("kind", [*KINDS, "transposed"])
def test_of_every_kind_of_layer(kind: str, bias: bool) -> None:
    def network() -> nn.Sequential:
        transposed = nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2, bias=bias)
        layer = transposed if kind == "transposed" else KINDS[kind](bias)[0]
        with torch.no_grad():
            size = layer(torch.zeros(1, *shape)).numel()
        return nn.Sequential(layer, nn.Flatten(), nn.Tanh(), nn.Linear(size, 3))

    shape = (2, 3, 3) if kind == "transposed" else KINDS[kind](bias)[1]
    model = seeded(network)
    each, sums = captures(model)
    F.cross_entropy(model(normal(SAMPLES, *shape)), torch.arange(SAMPLES) % 3).backward()
    (of_sums,), (of_each,) = sums.batches()["0"], each.batches()["0"]
    assert isinstance(of_sums, FormedBatch)
    assert_close(gradients_of(of_sums), in_sums(gradients_of(of_each)))


@pytest.mark.usefixtures("always_summed")
def test_a_layer_that_is_used_twice_adds_up_its_uses() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.layer(torch.tanh(self.layer(x))).mean(1))
            return out

    model = seeded(Twice)
    each, sums = captures(model)
    F.cross_entropy(model(normal(SAMPLES, 5, 4)), torch.arange(SAMPLES) % 3).backward()
    (of_sums,), (of_each,) = sums.batches()["layer"], each.batches()["layer"]
    assert_close(gradients_of(of_sums), in_sums(gradients_of(of_each)))


def test_the_mean_over_all_signs_is_what_each_sample_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs add noise but no bias, to the moments and to Theta, for the empirical Fisher, too."""
    samples = 5
    model, (x, y) = seeded(Net), batch(samples=samples)
    moments: dict[str, Any] = {}
    thetas: dict[str, Any] = {}
    all_signs = list(itertools.product([1, -1], repeat=samples))
    for signs in all_signs:
        monkeypatch.setattr(Selection, "in_sums", lambda *_, s=signs, **__: Sums.of_all(torch.tensor(s), 2))
        each, sums = captures(model)
        F.cross_entropy(model(x), y).backward()
        of_each, of_sums = each.batches(), sums.batches()
        for name, own in of_sums.items():
            basis = _some_basis(of_each[name])
            measured = TRACE_RESTRICTED.measure(own, "exact", BUDGET)
            moments.setdefault(name, []).append(measured)
            thetas.setdefault(name, []).append(second_moments(own, basis, BUDGET))
        for capture in (each, sums):
            capture.disarm()
    for name, own in of_each.items():
        expected = TRACE_RESTRICTED.measure(own, "exact", BUDGET)
        for place, value in enumerate(expected):
            assert_close(torch.stack([found[place] for found in moments[name]]).mean(0), value)
        assert_close(torch.stack(thetas[name]).mean(0), second_moments(own, _some_basis(own), BUDGET))


def test_parts_that_are_chosen_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over all choices is what all of them give, whatever the signs; parts need not be equal."""
    model, (x, y) = seeded(Net), batch()
    parts, count = 4, 2
    found: dict[str, Any] = {}

    def measured(sums: Sums) -> dict[str, Any]:
        monkeypatch.setattr(Selection, "in_sums", lambda *_, **__: sums)
        capture = captures(model)[1]
        F.cross_entropy(model(x), y).backward()
        capture.disarm()
        return {name: TRACE_RESTRICTED.measure(own, "exact", BUDGET) for name, own in capture.batches().items()}

    for chosen in itertools.combinations(range(parts), count):
        for name, moments in measured(Sums.of_some(SIGNS, parts, chosen)).items():
            found.setdefault(name, []).append(moments)
    for name, expected in measured(Sums.of_all(SIGNS, parts)).items():
        for place, value in enumerate(expected):
            assert_close(torch.stack([moments[place] for moments in found[name]]).mean(0), value)


@pytest.mark.usefixtures("always_summed")
@ALL_FISHERS
@pytest.mark.parametrize("at_a_time", [1, 2**20])
def test_moments_that_are_formed_in_the_pass_are_those_of_the_gradients(
    at_a_time: int, fisher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two micro-batches, whose factor on gradients is known only afterwards."""
    monkeypatch.setattr(taking, "AT_A_TIME", at_a_time)
    model = seeded(Net)
    _, of_gradients = captures(model, fisher)
    _, of_moments = captures(model, fisher, squares)
    of_gradients.arm()  # whose hooks a newer one has taken off
    for seed in range(2):
        x, y = batch(seed)
        F.cross_entropy(model(x), y).div(2).backward()
    expected, found = of_gradients.batches(), of_moments.batches()
    assert found.keys() == expected.keys()
    for name, own in found.items():
        assert all(isinstance(part, MomentBatch) for part in own)
        for _ in range(2):  # reading changes nothing
            read = TRACE_RESTRICTED.measure(own, "exact", BUDGET)
            for value, wanted in zip(
                read, TRACE_RESTRICTED.measure(expected[name], "exact", BUDGET), strict=True
            ):
                assert_close(value, wanted)


def _some_basis(batches: Any) -> Any:
    return decompose(TRACE_RESTRICTED.read(TRACE_RESTRICTED.measure(batches, "exact", BUDGET)))


# -- when, and how many --------------------------------------------------------------------------------


def test_samples_are_summed_where_that_saves_something() -> None:
    wide = LayerShape("layer", (64, 64, 3, 3), has_bias=False)  # 64 x 576
    assert wanted_sums(128, 64, wide, 0) == SUMS
    assert wanted_sums(128, 64, wide, 1.5) == math.ceil(SUMS / 1.5)
    assert wanted_sums(128, 64, wide, 39.0) == FEWEST_SUMS
    assert wanted_sums(SUMS, 64, wide, 0) is None  # each is a sum
    assert wanted_sums(SUMS + 1, 65, wide, 0) == SUMS
    assert wanted_sums(FEWEST_SUMS * 64, 1, wide, 39.0) is None  # rows are no more than those of the sums
    assert wanted_sums(FEWEST_SUMS * 64 + 1, 1, wide, 39.0) is None  # single rows
    assert wanted_sums(FEWEST_SUMS * 64 + 1, 4, wide, 39.0) == FEWEST_SUMS
    narrow = LayerShape("layer", (8, 8, 3, 3), has_bias=False)
    assert wanted_sums(128, 64, narrow, 39.0) is None  # calls would take longer
    square = LayerShape("layer", (64, 64), has_bias=False)  # whose ranks cover both sides
    assert wanted_sums(128, 512, square, 0) == SUMS // 2


def drawn_from(counted: Tensor, seed: int) -> Selection:
    return Selection("auto", WholeBatch.of(counted, ALONE), Sampling(seed))


def test_a_sum_has_few_samples() -> None:
    """Of a large batch some parts are chosen, the same ones for all layers that need as many."""
    shape, samples = LayerShape("layer", (64, 64, 3, 3), has_bias=False), IN_A_SUM * 60 - 1
    counts = torch.zeros(60)
    for seed in range(200):
        chosen = drawn_from(torch.ones(samples, 1, dtype=torch.bool), seed)
        few, again, many = (chosen.in_sums(64, shape, measurements) for measurements in (4.0, 4.0, 1.0))
        assert isinstance(few, Sums)
        assert few == again
        assert few.parts == 60
        assert len(few.chosen) == len(set(few.chosen)) == SUMS // 4
        assert isinstance(many, Sums)
        assert many.parts == len(many.chosen) == SUMS  # of two samples or one
        counts[list(few.chosen)] += 1
    mean = 200 * SUMS // 4 / 60
    assert (counts - mean).abs().max() < 5 * mean**0.5


def test_sums_are_no_more_than_there_is_room_for() -> None:
    some = LayerShape("layer", (192, 192, 3, 3), has_bias=False)
    assert FEWEST_SUMS < ROOM // (192 * 192 * 9) < SUMS
    assert wanted_sums(128, 256, some, 0) == ROOM // (192 * 192 * 9)
    assert can_be_summed(some)
    assert not can_be_summed(LayerShape("layer", (512, 512, 3, 3), has_bias=False))
    assert not can_be_summed(LayerShape("norm", (8,), True, layout="units"))


def test_what_is_not_summed_is_chosen_from() -> None:
    """Where every sample would be a sum, some of them will do if they have labels enough."""
    shape, terms = LayerShape("layer", (256, 256), has_bias=False), 1000
    chosen = drawn_from(torch.ones(FEWEST_SUMS, terms, dtype=torch.bool), 0)
    assert chosen.in_sums(terms, shape, 0) is None
    rows = chosen.in_sums(terms, shape, 30.0)
    assert isinstance(rows, Tensor)
    assert len(rows) == FEWEST
    more = drawn_from(torch.ones(FEWEST_SUMS + 1, terms, dtype=torch.bool), 0)
    assert isinstance(more.in_sums(terms, shape, 30.0), Sums)
    assert more.in_sums(1, shape, 30.0) is None


def test_single_samples_are_formed_where_that_saves_something() -> None:
    """Those that are chosen, with a weight that stands for the others; ignored ones are none of them."""
    shape, counted = LayerShape("layer", (128, 128), has_bias=False), torch.ones(FEWEST_SUMS, 1000).bool()
    counted[3] = False
    chosen = drawn_from(counted, 0)
    every = chosen.in_sums(128, shape, 0, singly=True)
    assert isinstance(every, Sums)
    assert (every.parts, list(every.chosen), every.weight) == (FEWEST_SUMS, list(range(FEWEST_SUMS)), 1)
    few = chosen.in_sums(128, shape, 30.0, singly=True)
    assert isinstance(few, Sums)
    assert len(few.chosen) == FEWEST
    assert 3 not in few.chosen
    assert few.weight**2 == pytest.approx((FEWEST_SUMS - 1) / FEWEST)
    assert set(few.signs.tolist()) == {1}
    with_bias = LayerShape("layer", (128, 128), has_bias=True)  # a column more than there are positions
    assert isinstance(chosen.in_sums(128, with_bias, 0, singly=True), Sums)
    wide = LayerShape("layer", (512, 512), has_bias=False)
    assert chosen.in_sums(100, wide, 0, singly=True) is None  # Gram matrices take less
    assert chosen.in_sums(500, LayerShape("layer", (60, 60), False), 0, singly=True) is None  # little to do
    assert chosen.in_sums(128, shape, 0) is None


def test_signs_are_the_same_for_all_layers_and_fair() -> None:
    shape = LayerShape("layer", (100, 100), has_bias=False)
    total = torch.zeros(200)
    for seed in range(50):
        chosen = drawn_from(torch.ones(200, 1, dtype=torch.bool), seed)
        first, second = chosen.in_sums(50, shape, 1.5), chosen.in_sums(40, shape, 9.0)
        assert isinstance(first, Sums)
        assert isinstance(second, Sums)
        assert first.signs is second.signs
        assert set(first.signs.tolist()) == {1, -1}
        total += first.signs
    assert total.abs().max() < 5 * 50**0.5
    assert total.mean().abs() < 5 * (50 * 200) ** 0.5 / 200


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_other_sharings_and_tables_are_not_summed(sharing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a table, or a layer that needs rows, was summed")

    monkeypatch.setattr(Selection, "in_sums", refuse)
    model = seeded(Net)
    train(model, TEKFAC.natural(model, sharing=sharing, factors_every=1, basis_every=1), [batch(), batch(1)])
    table = seeded(lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Tanh()))
    capture = captures(table)[1]
    table(torch.arange(21).reshape(7, 3) % 9).square().mean().backward()
    assert isinstance(capture.batches()["0"][0], LayerBatch)


# -- in an optimizer -----------------------------------------------------------------------------------


def run(stop: int | None, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """Six steps with sums; from `stop` on by another optimizer, which is given the state."""
    monkeypatch.setattr(selection, "SUMS", 4)
    monkeypatch.setattr(selection, "FEWEST_SUMS", 2)
    monkeypatch.setattr(selection, "WORTH_SUMS", 0)
    every = {"factors_every": 2, "basis_every": 2, "rescaling_every": 1}
    batches = (batch(step, samples=9) for step in range(6))
    return resumed(lambda: seeded(Net), batches, stop, **{"lr": 0.01, "seed": 3, **every, **settings})


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_resumed_run_draws_the_same_signs(stop: int, fisher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(None, monkeypatch, fisher=fisher)
    choosing = whole["optimizer"]["param_groups"][0]["tekfac"]["choosing"]["state"]
    assert not torch.equal(choosing, torch.Generator().manual_seed(4).get_state())  # some were drawn
    assert_identical(run(stop, monkeypatch, fisher=fisher), whole)


@pytest.mark.usefixtures("always_summed")
def test_micro_batches_are_sums_of_their_own() -> None:
    model = seeded(Net)
    each, sums = captures(model)
    for seed in range(2):
        x, y = batch(seed)
        F.cross_entropy(model(x), y).div(2).backward()
    for name, own in sums.batches().items():
        assert len(own) == 2
        for of_sums, of_each in zip(own, each.batches()[name], strict=True):
            assert_close(gradients_of(of_sums), in_sums(gradients_of(of_each)))


@pytest.mark.usefixtures("always_summed")
@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("make", [TEKFAC, TEKFAC.natural], ids=["default", "natural"])
def test_a_bias_that_is_frozen_or_unfrozen_before_the_step(make: Any, freeze: bool) -> None:
    """Its column is left out; where that cannot be done, the layer waits for the next measurement."""
    model = seeded(Net)
    bias = model.convolution.bias
    assert bias is not None
    bias.requires_grad_(freeze)
    optimizer = make(model, lr=0.01, factors_every=1, basis_every=1, fisher="empirical")
    for seed in range(2):
        x, y = batch(seed)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if seed == 0:
            bias.requires_grad_(not freeze)
        optimizer.step()
    assert optimizer.curvature["convolution"].basis.vectors_in.shape[-1] == (4 if freeze else 5)


@pytest.mark.usefixtures("always_summed")
def test_the_default_step_keeps_moments_and_the_natural_one_gradients() -> None:
    """Whose squares in the basis are measured, too."""
    for make, kind in ((TEKFAC, MomentBatch), (TEKFAC.natural, FormedBatch)):
        model, (x, y) = seeded(Net), batch()
        optimizer = make(model)
        F.cross_entropy(model(x), y).backward()
        for own in optimizer._capture.batches().values():
            assert all(isinstance(part, kind) for part in own)


@pytest.mark.usefixtures("always_summed")
def test_under_autocast_sums_are_formed_in_full_precision() -> None:
    model = seeded(Net).float()
    each, sums = captures(model)
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x.float()), y)
        loss.backward()
    for name, (own,) in sums.batches().items():
        found, expected = gradients_of(own), in_sums(gradients_of(each.batches()[name][0]))
        assert found.dtype == torch.float32
        assert_close(found.double(), expected.double(), rtol=1e-4)


@pytest.mark.usefixtures("always_summed")
def test_the_empirical_fisher_keeps_no_input_when_its_sum_is_formed() -> None:
    model, (x, y) = seeded(Net), batch()
    _, sums = captures(model)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    (passed,) = sums._unfinished
    kept = {noted.watched.name: bool(noted.call.kept) for noted in passed.calls}
    assert not kept["convolution"]
    assert not kept["tokens"]


class Sequences(nn.Module):
    """One output per position: a first pass is probed. The last layer sees samples in another order."""

    def __init__(self, order: slice | list[int]) -> None:
        super().__init__()
        self.order = order
        self.tokens, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.tokens(x))[self.order])
        return out[self.order]


IN_ORDER, TURNED_ROUND = slice(None), list(range(SAMPLES))[::-1]


@pytest.mark.usefixtures("always_summed")
def test_a_pass_that_is_probed_keeps_no_input_where_the_probe_stays_with_its_sample() -> None:
    model, x = seeded(lambda: Sequences(IN_ORDER)), normal(SAMPLES, 2, 4)
    each, sums = captures(model, squaring=squares)
    F.cross_entropy(model(x).flatten(0, 1), torch.arange(2 * SAMPLES) % 3).backward()
    (passed,) = sums._unfinished
    assert not any(noted.call.kept or noted.call.probe for noted in passed.calls)
    for name, (own,) in sums.batches().items():
        assert isinstance(own, MomentBatch)
        expected = squares(own.layer, in_sums(gradients_of(each.batches()[name][0])))
        for square, other in zip((own.input, own.output), expected, strict=True):
            assert_close(square * own.gradient_factor**2, other)


@pytest.mark.usefixtures("always_summed")
@ALL_FISHERS
def test_what_a_probe_leaves_unclear_does_not_keep_the_others_from_it(fisher: str) -> None:
    """A layer that is called twice, beside one whose inputs are let go of at once."""

    class Twice(Sequences):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.tokens(x))
            out: Tensor = self.head(hidden) + self.head(hidden.flip(1))
            return out

    model, x = seeded(lambda: Twice(IN_ORDER)), normal(SAMPLES, 2, 4)
    each, sums = captures(model, fisher)
    F.cross_entropy(model(x).flatten(0, 1), torch.arange(2 * SAMPLES) % 3).backward()
    if fisher == "empirical":
        (passed,) = sums._unfinished
        kept = {noted.watched.name: bool(noted.call.kept) for noted in passed.calls}
        assert kept == {"tokens": False, "head": True}
    for name, (own,) in sums.batches().items():
        if fisher != "sampled":  # whose labels the two captures draw for themselves
            assert_close(gradients_of(own), in_sums(gradients_of(each.batches()[name][0])))


def test_one_layer_in_another_order_does_not_keep_the_others_from_being_measured() -> None:
    """With drawn labels its rows count as one sample; the other layer has its samples."""
    model, x = seeded(lambda: Sequences(TURNED_ROUND)), normal(SAMPLES, 2, 4)
    each, _ = captures(model, "sampled")
    F.cross_entropy(model(x).flatten(0, 1), torch.arange(2 * SAMPLES) % 3).backward()
    assert {name: own.samples for name, (own,) in each.batches().items()} == {"tokens": SAMPLES, "head": 1}


def test_a_probe_that_tells_against_the_shape_is_believed() -> None:
    model, x = seeded(lambda: Sequences(TURNED_ROUND)), normal(SAMPLES, 2, 4)
    optimizer = TEKFAC(model, fisher="empirical")
    F.cross_entropy(model(x).flatten(0, 1), torch.arange(2 * SAMPLES) % 3).backward()
    with pytest.raises(ValueError, match="'head' cannot be told apart by sample"):
        optimizer.step()


@pytest.mark.usefixtures("always_summed")
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_what_was_captured_is_freed_without_the_garbage_collector(fisher: str) -> None:
    """A cycle of references would keep a step's gradients alive through the next forward pass."""
    model, (x, y) = seeded(lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten())), batch()
    _, sums = captures(model, fisher)
    gc.disable()
    try:
        F.cross_entropy(model(x), y).backward()
        batches = sums.batches()
        living = [weakref.ref(own.gradients) for (own,) in batches.values() if isinstance(own, FormedBatch)]
        assert len(living) == 2
        del batches
        sums.clear()
        assert [ref() for ref in living] == [None, None]
    finally:
        gc.enable()
