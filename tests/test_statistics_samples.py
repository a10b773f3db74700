"""Curvature may be measured on some samples of a batch: drawn at random, without bias, and as reproducibly."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, dense_block, every_method, normal, seeded, statistics
from tekfac import EKFAC, TEKFAC
from tekfac.capture.capture import Capture
from tekfac.capture.measurement import Measurement
from tekfac.capture.sampling import Sampling
from tekfac.capture.selection import COVER, FEWEST, FEWEST_OF_UNITS, TERMS, Selection, wanted
from tekfac.curvature.averages import Average
from tekfac.layers.inventory import take_inventory
from tekfac.layers.shapes import LayerShape
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.ranks.group import ALONE
from tekfac.ranks.whole_batch import WholeBatch
from training import assert_identical, everything, resumed, train

SAMPLES, CHOSEN = 6, 2


class Net(nn.Module):
    """A convolution, a batch norm, attention and a linear layer: all the ways that samples are picked out."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.tokens, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.convolution(x))).flatten(2).mT
        x = self.tokens(self.attention(x, x, x, need_weights=False)[0])
        out: Tensor = self.head(torch.tanh(x).mean(1))
        return out


def batch(seed: int = 0, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    return normal(samples, 1, 3, 3, seed=seed), torch.arange(samples) % 3


def capture_of(model: nn.Module, known: list[str], samples: int | None, fisher: Any = "empirical") -> Capture:
    layers = take_inventory(model, []).layers
    capture = Capture(model, layers.values(), Measurement(fisher=fisher, seed=0), statistics_samples=samples)
    capture.arm(measurements=dict.fromkeys(known, 1.0))
    return capture


# -- which samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_the_rows_of_some_samples_are_theirs_among_all(fisher: str) -> None:
    """In every layer, whether they are picked out in the backward pass or afterwards (attention)."""
    model, (x, y) = seeded(Net), batch()
    names = list(take_inventory(model, []).layers)
    whole, part = (capture_of(model, names, samples, fisher) for samples in (None, CHOSEN))
    whole.arm(measurements=dict.fromkeys(names, 1.0))  # whose hooks a newer one has taken off
    F.cross_entropy(model(x), y).backward()
    all_batches, batches = whole.batches(), part.batches()
    assert set(batches) == set(all_batches) == set(names)
    chosen = {}
    for name in names:
        (full,), (some,) = all_batches[name], batches[name]
        assert (full.shape.samples, some.shape.samples) == (SAMPLES, CHOSEN)
        assert some.num_terms == full.num_terms * CHOSEN / SAMPLES
        (of_all,) = (rows.per_sample_gradients() for rows in full.chunks(SAMPLES))
        (of_some,) = (rows.per_sample_gradients() for rows in some.chunks(CHOSEN))
        fitting = [
            pair
            for pair in itertools.combinations(range(SAMPLES), CHOSEN)
            if torch.allclose(of_all[:, :, list(pair)], of_some, rtol=1e-9, atol=1e-15)
        ]
        chosen[name] = fitting
    pairs = set.intersection(*(set(fitting) for fitting in chosen.values()))
    assert len(pairs) == 1, chosen  # the same two samples for all layers


def test_the_mean_over_all_choices_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing adds noise but no bias: moments and Theta are linear in the samples."""
    model, (x, y) = seeded(Net), batch()
    samples = oracle.per_sample(model.eval(), F.cross_entropy, x, y, "tokens")
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    total = torch.zeros(())
    choices = list(itertools.combinations(range(SAMPLES), CHOSEN))
    for choice in choices:
        monkeypatch.setattr(Selection, "of", lambda self, *_, c=choice: torch.tensor(c))
        capture = capture_of(model, ["tokens"], CHOSEN)
        F.cross_entropy(model(x), y).backward()
        (some,) = capture.batches()["tokens"]
        rows = some.rows(0, CHOSEN).per_sample_gradients()[0, 0].flatten(1)
        total = total + rows.T @ rows / some.num_terms / len(choices)
    gradients = samples.gradients[:, 0].flatten(1)
    assert_close(total, gradients.T @ gradients / SAMPLES)


def test_samples_without_a_term_in_the_loss_are_not_chosen() -> None:
    counted = torch.tensor([[True], [False], [True], [True], [False], [True]])
    shape = LayerShape("layer", (3, 4), has_bias=False)
    seen = set()
    for seed in range(40):
        selection = Selection(2, WholeBatch.of(counted, ALONE), Sampling(seed))
        rows = selection.of(5, shape, 1.0)
        assert rows is not None
        assert selection.samples == 4
        assert rows.tolist() == sorted(set(rows.tolist()))
        seen |= set(rows.tolist())
    assert seen == {0, 2, 3, 5}


# -- how many ------------------------------------------------------------------------------------------


def test_auto_takes_all_rows_that_are_single_and_few_that_are_many() -> None:
    wide = LayerShape("layer", (64, 64, 3, 3), has_bias=False)  # 64 x 576
    many = 1000.0  # terms of a sample
    assert wanted("auto", 1, wide, many, 39.0) == math.inf
    assert wanted("auto", 64, wide, many, 39.0) == math.ceil(COVER * 576 / 64 / 39)
    assert wanted("auto", 64, wide, many, 1.0) == COVER * 576 / 64
    assert wanted("auto", 64, wide, 1.0, 39.0) == math.ceil(TERMS / 39)
    assert wanted("auto", 64, wide, 3.0, 5.0) == TERMS / 15
    assert wanted("auto", 10**6, LayerShape("small", (4, 3), has_bias=False), many, 39.0) == FEWEST
    norm = LayerShape("norm", (8,), True, layout="units")
    assert wanted("auto", 64, norm, many, 39.0) == FEWEST_OF_UNITS
    assert wanted("auto", 64, norm, 1.0, 10.0) == TERMS / 10
    assert wanted(None, 64, wide, 1.0, 39.0) == math.inf
    assert wanted(5, 64, wide, 1.0, 39.0) == 5
    assert wanted(5, 64, wide, 1.0, 0) == math.inf  # the first time
    in_blocks = LayerShape("layer", (64, 64, 3, 3), has_bias=False, block_in=288)
    assert wanted("auto", 64, in_blocks, many, 1.0) == COVER * 288 / 64


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_an_average_holds_as_many_measurements_as_its_noise_says(decay: float) -> None:
    """The variance of a weighted mean of independent numbers is sum w^2 / (sum w)^2 of one number's."""
    average = Average.of((torch.zeros(1),))
    for count in range(1, 200):
        weights = [decay**i for i in range(count)]
        expected = sum(weights) ** 2 / sum(weight**2 for weight in weights)
        assert average.measurements == pytest.approx(expected)
        average = average.updated((torch.zeros(1),), decay)
    assert average.measurements == pytest.approx((1 + decay) / (1 - decay), rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_layers_first_measurement_is_of_all_samples(method: type[NaturalGradient]) -> None:
    model, other = seeded(Net), seeded(Net)
    few = method.natural(model, lr=1e-30, statistics_samples=CHOSEN, fisher="empirical")
    all_of_them = method.natural(other, lr=1e-30, statistics_samples=None, fisher="empirical")
    for net, optimizer in ((model, few), (other, all_of_them)):
        train(net, optimizer, [batch()])
    for name, block in statistics(all_of_them).items():
        assert_close(dense_block(statistics(few)[name]), dense_block(block))


@every_method
def test_a_number_beyond_the_batch_changes_nothing(method: type[NaturalGradient]) -> None:
    runs = []
    for samples in (None, SAMPLES, 1000):
        model = seeded(Net)
        every = {"factors_every": 1, "basis_every": 1}
        optimizer = method.natural(model, lr=0.01, statistics_samples=samples, seed=0, **every)
        train(model, optimizer, [batch(seed) for seed in range(3)])
        runs.append(everything(model, optimizer))
    assert_identical(runs[0], runs[1])
    assert_identical(runs[0], runs[2])


# -- random numbers ------------------------------------------------------------------------------------


def run(stop: int | None, statistics_samples: int | None = CHOSEN, **settings: Any) -> Any:
    """Six steps; from `stop` on by another optimizer, which is given the state."""
    every = {"factors_every": 2, "basis_every": 2, "rescaling_every": 1}
    settings = {"lr": 0.01, "seed": 3, "statistics_samples": statistics_samples, **every, **settings}
    return resumed(lambda: seeded(Net), map(batch, range(6)), stop, **settings)


@pytest.mark.parametrize("stop", range(1, 6))
def test_a_resumed_run_chooses_the_same_samples(stop: int) -> None:
    assert_identical(run(stop), run(None))


def test_the_choice_is_drawn_by_a_generator_of_its_own() -> None:
    """The global one is not touched, and labels are drawn as if there were no choice."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    states = [run(None, samples)["optimizer"]["param_groups"][0]["tekfac"] for samples in (CHOSEN, None)]
    torch.manual_seed(5)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(states[0]["sampling"]["state"], states[1]["sampling"]["state"])
    untouched = torch.Generator().manual_seed(4).get_state()
    assert torch.equal(states[1]["choosing"]["state"], untouched)
    assert not torch.equal(states[0]["choosing"]["state"], untouched)


def test_a_skipped_step_takes_its_choice_back() -> None:
    model = seeded(Net)
    every = {"factors_every": 1, "basis_every": 1}
    optimizer = EKFAC.natural(model, lr=0.01, statistics_samples=CHOSEN, rescaling_every=1, seed=0, **every)
    train(model, optimizer, [batch(), batch(7)])
    before = everything(model, optimizer)
    x, y = batch(1)
    F.cross_entropy(model(x), y).backward()
    next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
    optimizer.step()
    assert optimizer.skipped_steps == 1
    after = everything(model, optimizer)
    for whole in (before, after):
        whole["model"] = {k: v for k, v in whole["model"].items() if "norm." not in k}
        whole["optimizer"]["param_groups"][0]["tekfac"].pop("skipped_steps")
    assert_identical(before, after)


@pytest.mark.parametrize("value", [0, -1, 1.5, "all", True])
def test_what_is_no_number_of_samples_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="statistics_samples") as caught:
        TEKFAC.natural(nn.Linear(3, 2), statistics_samples=value)
    assert repr(value) in str(caught.value)
    assert "auto" in str(caught.value)


# -- odd layers ----------------------------------------------------------------------------------------


def test_a_table_that_is_tied_to_an_unused_head_is_measured_whole() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.unused = nn.Embedding(50, 4), nn.Linear(4, 50, bias=False)
            self.unused.weight = self.table.weight
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(self.table(x)).mean(1))
            return out

    model = seeded(Tied)
    optimizer = TEKFAC.natural(model, factors_every=1, basis_every=1, statistics_samples=CHOSEN)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.arange(30).reshape(6, 5)), torch.arange(6) % 3).backward()
        optimizer.step()
    assert optimizer.num_steps == 3


def test_a_layer_that_is_called_with_nothing_disturbs_nobody() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rare, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(x.mean(1) + self.rare(x[:, :0]).sum(1))
            return out

    model = seeded(Empty)
    optimizer = TEKFAC.natural(model, factors_every=1, basis_every=1)
    for seed in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(normal(6, 5, 4, seed=seed)), torch.arange(6) % 3).backward()
        optimizer.step()
    assert "head" in optimizer.curvature


def test_norms_have_the_same_samples_whether_rows_are_clear_or_not() -> None:
    """A probe of the first pass after a resumption must not change how many are measured."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)))
    x, y = normal(40, 7, 4), torch.arange(280).reshape(40, 7) % 3
    found = []
    for probed in (True, False):
        layers = take_inventory(model, []).layers
        capture = Capture(model, layers.values(), Measurement(seed=0), statistics_samples="auto")
        if probed:
            for name in layers:
                capture.probing.saw(name)
        capture.arm(measurements=dict.fromkeys(layers, 30.0))
        F.cross_entropy(model(x).mT, y).backward()
        found.append({name: own[0].shape.samples for name, own in capture.batches().items()})
    assert found[0] == found[1] == {"0": 12, "1": FEWEST_OF_UNITS, "2": 12}


def test_theta_with_a_shorter_memory_than_the_factors_decides() -> None:
    """The number of samples is that of the shorter average."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)))
    optimizer = TEKFAC.natural(model, factors_every=1, basis_every=1, rescaling_every=1, rescaling_decay=0.0)
    for seed in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(normal(6, 5, 4, seed=seed)), torch.arange(6) % 3).backward()
        optimizer.step()
    assert set(optimizer._measurements().values()) == {1.0}
