"""What the benchmark measures: turns of equal number, seconds by phase, multiplications, memory and growth."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import tekfac
from tekfac.common.phases import PHASES, Phase
from tekfac.lab.bench import breakdown, counting, growth, memory
from tekfac.lab.bench.ageing import age, with_full_intervals
from tekfac.lab.bench.breakdown import REST, broken_down
from tekfac.lab.bench.contestants import Contestant
from tekfac.lab.bench.networks import NETWORKS, TINY, Network, loss_of
from tekfac.lab.bench.timing import Racer, race, round_of, timed, turns
from tekfac.optim.natural_gradient import NaturalGradient

OURS = Contestant("tekfac", 2)


# -- networks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("networks", [NETWORKS, TINY], ids=["real", "tiny"])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_takes_its_own_batches(networks: dict[str, Network], name: str) -> None:
    one = networks[name]
    with torch.device("meta"):
        model = one.make()
    inputs, labels = one.batches()[0]
    assert inputs.shape == (one.batch, *one.shape)
    assert int(labels.max()) < one.classes
    assert loss_of(model(inputs.to("meta")), labels.to("meta")).shape == ()


def test_the_sizes_of_the_networks_are_those_that_are_told() -> None:
    images = {name: one for name, one in NETWORKS.items() if name != "gpt"}
    assert {name: (one.batch, one.shape[0]) for name, one in images.items()} == {
        "mlp": (128, 1),
        "cnn": (64, 1),
        "resnet20-he": (128, 3),
        "resnet20": (128, 3),
        "vgg16": (128, 3),
    }
    gpt = NETWORKS["gpt"]
    assert (gpt.batch, gpt.shape, gpt.options) == (8, (128,), {"width": 128, "depth": 4, "heads": 4})


def test_weights_and_batches_follow_from_the_seed() -> None:
    first, again, other = (TINY["mlp"].make(seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    batches = [TINY["gpt"].batches(seed)[0][0] for seed in (1, 1, 2)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


# -- turns ---------------------------------------------------------------------------------------------------


def test_at_every_step_everybody_has_one_turn_and_the_order_goes_round() -> None:
    order = list(turns(3, range(4)))
    assert order == [0, 1, 2, 1, 2, 0, 2, 0, 1, 0, 1, 2]
    assert Counter(order) == {0: 4, 1: 4, 2: 4}


def test_a_round_is_whole_cycles_of_everybody() -> None:
    assert round_of([Contestant("sgd"), Contestant("kfac", 4), Contestant("tekfac", 6)]) == 12


def test_a_race_takes_every_contestant_through_the_same_steps() -> None:
    contestants = [Contestant("sgd"), Contestant("adamw"), OURS, Contestant("kfac", 3)]
    racers = race(TINY["mlp"], contestants, warmup=2, rounds=2, seed=3)
    assert {racer.taken for racer in racers} == {2 + 2 * 6}
    assert {len(racer.seconds) for racer in racers} == {2 + 2 * 6}
    plain = timed(racers[2], warmup=2)
    assert len(plain["seconds"]) == 12
    assert plain["first_step"] == racers[2].seconds[0]
    assert (plain["cycle"], plain["begin"], plain["plain"], plain["skipped"]) == (2, 2, [False, True], 0)
    assert all(seconds > 0 for seconds in plain["seconds"])


def test_taking_turns_does_not_change_what_a_contestant_computes() -> None:
    together = race(TINY["cnn"], [Contestant("sgd"), OURS], warmup=1, rounds=2, seed=3, early=True)[1]
    alone = Racer.of(OURS, TINY["cnn"], 3)
    alone.step()
    with_full_intervals(alone.optimizer)
    for _ in range(1, together.taken):
        alone.step()
    weights = zip(together.model.parameters(), alone.model.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in weights)


def test_an_aged_optimizer_has_the_averages_of_late_steps() -> None:
    """Their weights, which say what the next measurement is worth; their values stay."""
    ours = Contestant("tekfac", 3, {"rescaling": "measured", "decay_per": "update"})
    racer = Racer.of(ours, TINY["cnn"], 3)
    racer.step()
    optimizer = racer.optimizer
    assert isinstance(optimizer, NaturalGradient)
    before = dict(optimizer._network.blocks)
    age(optimizer)
    for name, block in optimizer._network.blocks.items():
        assert before[name].moments.weight == 1
        assert block.moments.measurements == pytest.approx(39)
        assert block.theta is not None
        assert block.theta.weight == pytest.approx(20)
        assert block.moments.values is before[name].moments.values
        assert block.basis is before[name].basis


# -- phases --------------------------------------------------------------------------------------------------


class Told:
    """An optimizer that names phases: of measuring at every third step."""

    def __init__(self) -> None:
        self.steps = 0

    def zero_grad(self) -> None: ...

    def step(self) -> None:
        if self.steps % 3 == 0:
            with Phase("eigh"):
                time.sleep(0.02)
        with Phase("precondition"):
            time.sleep(0.001)
        self.steps += 1


def told_racer() -> Racer:
    network = TINY["mlp"]
    return Racer(Contestant("tekfac", 3), network.make(), Told(), network.batches(), taken=0)


def test_a_cycle_tells_its_phases_and_which_positions_measure_nothing() -> None:
    racer = told_racer()
    racer.step()
    found = broken_down(racer)
    assert set(found["phases"]) == {"eigh", "precondition", REST}
    assert found["plain"] == [False, True, True]
    assert racer.taken == racer.optimizer.steps == 4  # type: ignore[attr-defined]


def test_without_any_phase_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def deaf() -> Iterator[dict[str, float]]:
        yield {}

    monkeypatch.setattr(breakdown, "listening", deaf)
    assert broken_down(told_racer()) == {}


def test_our_own_methods_name_known_phases() -> None:
    racer = Racer.of(OURS, TINY["mlp"], 0)
    racer.step()
    found = broken_down(racer)
    assert set(found.get("phases", {})) <= {*PHASES, REST}


# -- multiplications -----------------------------------------------------------------------------------------


def test_multiplications_of_a_network_are_those_of_its_matrix_products() -> None:
    """Forward, and backward for weights and inputs; the images' own gradient is not needed."""
    layers = [(64, 128), (128, 64), (64, 10)]
    forward = sum(inputs * outputs for inputs, outputs in layers)
    assert counting.of_network(NETWORKS["mlp"]) == 128 * (3 * forward - 64 * 128)


def test_multiplications_of_preconditioning_are_two_turns_into_the_basis_and_back() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))
    optimizer = tekfac.KFAC(model, lr=1e-4)
    nn.functional.cross_entropy(model(torch.randn(8, 3)), torch.zeros(8).long()).backward()
    optimizer.step()
    expected = 2 * 4 * 4 * (4 + 4) + 2 * 2 * 4 * (4 + 2)
    assert counting.of_preconditioning(optimizer.curvature) == expected
    assert counting.limit(2 * expected, expected) == 1.5
    assert counting.limit(2 * expected, expected, 4 * expected, every=4) == 2.0


def test_a_side_in_blocks_costs_their_size_and_a_diagonal_one_nothing() -> None:
    def preconditioning(**settings: object) -> int:
        model = nn.Sequential(nn.Linear(7, 3))
        optimizer = tekfac.TEKFAC(model, lr=1e-4, **settings)  # type: ignore[arg-type]
        nn.functional.cross_entropy(model(torch.randn(8, 7)), torch.zeros(8).long()).backward()
        optimizer.step()
        return counting.of_preconditioning(optimizer.curvature)

    assert preconditioning() == 2 * 24 * (8 + 3)
    assert preconditioning(max_dim=4, large_dims="blocks") == 2 * 24 * (4 + 3)
    assert preconditioning(max_dim=4, large_dims="diagonal") == 2 * 24 * 3


# -- memory --------------------------------------------------------------------------------------------------


def test_the_state_of_an_optimizer_is_counted_to_the_byte() -> None:
    parameters = 4 * sum(parameter.numel() for parameter in TINY["mlp"].make().parameters())
    found = {}
    for contestant in (Contestant("sgd"), Contestant("adamw"), OURS):
        found[contestant.name] = memory.measured(TINY["mlp"], contestant, steps=2, seed=0)
    curvature = tekfac.explain(TINY["mlp"].make(), method="tekfac", file=None).memory
    assert {one["parameters"] for one in found.values()} == {parameters}
    assert found["sgd"]["counted"] == parameters
    assert found["adamw"]["counted"] == 2 * parameters + 4 * len(list(TINY["mlp"].make().parameters()))
    assert found["tekfac"]["counted"] == curvature + parameters
    for one in found.values():
        assert one["peak"] >= one["code"] > 2**20
        assert one["steps"] == 2
        assert set(one["environment"]) == set(memory.GIVES_BACK)


def test_the_peak_is_that_of_the_program_that_runs_where_the_system_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "status"
    monkeypatch.setattr(memory, "STATUS", file)
    of_process = memory.peak()
    file.write_text("Name:\tpython\nVmPeak:\t  9999 kB\nVmHWM:\t  2048 kB\n")
    assert memory.peak() == 2 * 2**20
    assert of_process > 2**24


# -- growth --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_an_exponent_is_that_of_the_power_it_is_fitted_to(power: float) -> None:
    sizes = [4, 8, 32]
    assert growth.exponent(sizes, [3e-3 * size**power for size in sizes]) == pytest.approx(power, abs=1e-9)


def test_an_exponent_is_of_least_squares_and_needs_two_points() -> None:
    assert growth.exponent([1, 2, 4], [1.0, 4.0, 4.0]) == pytest.approx(1.0)
    assert growth.exponent([1, 2], [0.0, 4.0]) is None


def test_the_growth_has_seconds_of_every_size() -> None:
    found = growth.measured(quick=True, seed=0)
    assert set(found) == set(growth.SWEEPS)
    for sweep in found.values():
        assert set(sweep["seconds"]) == set(sweep["exponents"]) == set(growth.MEASURED)
        assert all(len(seconds) == len(sweep["sizes"]) == 3 for seconds in sweep["seconds"].values())
        assert all(seconds > 0 for seconds in sweep["seconds"]["forward and backward"])
