"""Promise: a refresh is dealt out evenly, every block once, by a pure function that plans ask, too."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import tekfac
from dense import assert_close, normal
from tekfac.curvature import symmetric
from tekfac.curvature.placement import GRAINS, Part, Side, SideSize, placed
from tekfac.explanation import Explanation
from tekfac.lab import models
from tekfac.layers.inventory import take_inventory
from tekfac.layers.side_forms import SideRule
from tekfac.optim.work_plan import sizes

RANKS = (1, 2, 3, 8, 64, 1024)

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Of a ResNet50: channels of the inner convolutions, and blocks."""


def resnet50() -> nn.Module:
    """Its layers, none of which is ever called."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, bias=False)]
    before = 64
    for width, blocks in STAGES:
        layers.append(nn.Conv2d(before, 4 * width, 1, bias=False))
        for _ in range(blocks):
            layers.append(nn.Conv2d(before, width, 1, bias=False))
            layers.append(nn.Conv2d(width, width, 3, bias=False))
            layers.append(nn.Conv2d(width, 4 * width, 1, bias=False))
            before = 4 * width
    return nn.Sequential(*layers, nn.Linear(2048, 1000))


def transformer() -> nn.Module:
    """Twelve layers of width 768, and a table that is the output projection."""
    blocks = [nn.TransformerEncoderLayer(768, 12, 3072) for _ in range(12)]
    head = nn.Linear(768, 50257, bias=False)
    table = nn.Embedding(50257, 768)
    head.weight = table.weight
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "table": table, "head": head})


def of_the_lab(name: str) -> nn.Module:
    return models.build(name, options={}, channels=3, classes=10, size=32)


def made(name: str) -> nn.Module:
    with torch.device("meta"):
        if name == "resnet50":
            return resnet50()
        return transformer() if name == "transformer" else of_the_lab(name)


NETWORKS = ("vgg16", "resnet20", "resnet50", "transformer")


def sides_of(name: str, max_dim: int | str = "auto") -> dict[Side, SideSize]:
    rule = SideRule(max_dim)  # type: ignore[arg-type]
    layers = take_inventory(made(name), [], rule, norms=False).layers.values()
    return {side: size for layer in layers for side, size in sizes(layer.shape).items()}


def blocks_of(side: Side, groups: range, rows: range, block: int) -> list[tuple[Side, int, int]]:
    return [(side, group, row) for group, row in product(groups, range(rows.start, rows.stop, block))]


def loads_of(dealt: list[list[Part]]) -> list[int]:
    return [sum(part.size.cost for part in parts) for parts in dealt]


@pytest.mark.parametrize("max_dim", ["auto", 5000])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_block_is_dealt_out_once_and_no_share_is_larger_than_it_must(
    name: str, max_dim: int | str
) -> None:
    """At most the mean and the dearest part, which is a grain, or as small as a side can be cut."""
    sides = sides_of(name, max_dim)
    every_block = sorted(
        block
        for side, size in sides.items()
        for block in blocks_of(side, range(size.groups), range(size.dim), size.block)
    )
    total = sum(size.cost for size in sides.values())
    for ranks in RANKS:
        dealt = placed(sides, ranks)
        assert len(dealt) == ranks
        parts = [part for own in dealt for part in own]
        found = [
            block
            for part in parts
            for block in blocks_of(part.side, range(*part.groups), range(*part.rows), sides[part.side].block)
        ]
        assert sorted(found) == every_block
        assert sum(loads_of(dealt)) == total
        dearest = max(part.size.cost for part in parts)
        mean = total / ranks
        assert max(loads_of(dealt)) <= mean + dearest
        if ranks > 1:
            block = max(SideSize(1, size.block, size.block).cost for size in sides.values())
            assert dearest <= max(2 * mean / GRAINS, block)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", NETWORKS)
def test_loads_differ_by_less_than_a_quarter(name: str, ranks: int) -> None:
    loads = loads_of(placed(sides_of(name), ranks))
    assert max(loads) <= 1.25 * sum(loads) / ranks


def test_cutting_is_what_balances_many_processes() -> None:
    sides = sides_of("vgg16")
    whole, cut = (loads_of(placed(sides, 32, may_cut=may_cut)) for may_cut in (False, True))
    assert max(whole) > 2 * max(cut)


def test_it_is_a_pure_function_of_its_inputs() -> None:
    sides = sides_of("resnet20")
    before = dict(sides)
    assert placed(sides, 8) == placed(dict(sides), 8)
    assert sides == before
    assert placed(dict(reversed(sides.items())), 8) != placed(sides, 8)  # equal ones go by their order


def test_one_process_has_all_sides_whole() -> None:
    sides = sides_of("resnet20")
    (parts,) = placed(sides, 1)
    assert {part.side: part.size for part in parts} == sides


@pytest.mark.parametrize("shape", [(3, 5, 5), (2, 7, 3), (1, 6, 3), (4, 3, 1), (2, 3, 3, 4, 2), (1, 3, 6, 6)])
def test_the_parts_of_a_side_have_its_eigenvectors_and_triangles_all_of_it(shape: tuple[int, ...]) -> None:
    """Whole, in blocks, the diagonal, by frequencies."""
    rows = normal(shape[0], torch.Size(shape[1:-1]).numel(), shape[-1], seed=0).view(shape)
    blocks = symmetric._to_blocks(symmetric.in_blocks(rows))
    groups, dim, block = symmetric.in_blocks(rows).shape
    side = symmetric._to_rows((blocks @ blocks.mT).view(-1, *blocks.shape[1:]), dim)
    if dim % block:
        side[:, dim - dim % block :, dim % block :] = 0
    side = side.view(shape)
    assert torch.equal(symmetric.of_triangles(symmetric.triangles(side), side.shape), side)
    values, vectors = symmetric.eigen(side)
    for part in (part for own in placed({("a", 0): SideSize(groups, dim, block)}, 64) for part in own):
        of_groups, of_rows = slice(*part.groups), slice(*part.rows)
        own_values, own_vectors = symmetric.eigen(symmetric.part(side, part.groups, part.rows))
        assert_close(own_values, values[of_groups, of_rows])
        theirs = symmetric.in_blocks(vectors)[of_groups, of_rows, : part.size.block]
        assert_close(symmetric.in_blocks(own_vectors), theirs)


# -- what is told of it ----------------------------------------------------------------------------------


def told(name: str, ranks: int, **settings: object) -> Explanation:
    return tekfac.explain(made(name), ranks=ranks, file=None, **settings)


def test_the_plan_has_the_placement_of_the_refresh() -> None:
    work = told("resnet20", 8).work
    assert work is not None
    expected = [[(*part.side, *part[1:3]) for part in parts] for parts in placed(sides_of("resnet20"), 8)]
    places = {"inputs": 0, "outputs": 1}
    assert [[(p.layer, places[p.side], p.groups, p.rows) for p in parts] for parts in work.owned] == expected
    assert sum(work.loads) == told("resnet20", 8).refresh_flops
    assert work.balance == max(work.loads) / work.mean


def test_it_says_what_keeps_loads_from_being_even() -> None:
    def advice(ranks: int, **settings: object) -> str:
        work = told("resnet20", ranks, **settings).work
        assert work is not None
        return work.advice

    assert advice(4).endswith(": even.")
    assert "turns=False balances better" in advice(4, turns=True)
    assert "basis_tolerance=0" in advice(64, basis_tolerance=0.1)
    assert "Smaller blocks (max_dim < 256) balance better" in advice(1024)
    assert "nothing is decomposed" in advice(4, large_dims="diagonal", max_dim=1)


def test_no_more_is_sent_than_must_be_but_for_headers_and_the_last_blocks() -> None:
    for name in NETWORKS:
        work = told(name, 8).work
        assert work is not None
        for own, least in ((work.sent.moments, work.least.moments), (work.sent.bases, work.least.bases)):
            assert least <= own <= 1.02 * least


def test_what_is_amortised_follows_from_the_intervals() -> None:
    often, rarely = (told("resnet20", 8, factors_every=every, basis_every=50).work for every in (10, 50))
    assert often is not None
    assert rarely is not None
    moments = often.sent.moments
    difference = often.sent.per_step(often.intervals) - rarely.sent.per_step(rarely.intervals)
    assert difference == pytest.approx(moments / 10 - moments / 50)


# -- seconds ---------------------------------------------------------------------------------------------


def test_seconds_are_counts_over_rates() -> None:
    """A layer of 3 inputs and 2 outputs, by two processes."""
    machine = {"flops": 1.0, "link": 1.0, "eigh_flops": 9.0, "step_flops": 600.0, "samples": 32}
    explanation = tekfac.explain(nn.Linear(3, 2, bias=False), ranks=2, machine=machine, file=None)
    costs = explanation.costs
    assert costs is not None
    assert costs.passes == 600
    assert costs.gradients == 6 * 4  # 2 (N - 1) / N = 1
    assert costs.precondition == 4 * 6 * 5
    assert costs.measure == 8 * 2 * 6 * 5 + 0.5 * 200  # half of 16 sums, and 32 of 64 samples
    assert costs.decompose == 27
    assert costs.moments == 4 * (6 + 3) + 8
    assert costs.bases == 4 * (3 + 9 + 2 + 4) + 2 * 8
    assert costs.ratio == 1 + (costs.precondition + costs.refresh / 50) / 624
    assert f"The mean step takes {costs.ratio:.2f} of DDP's" in str(explanation)


def test_a_message_takes_its_latency() -> None:
    model = nn.Linear(3, 2)
    quick, slow = (
        tekfac.explain(model, ranks=2, machine={"flops": 1, "link": 1, "latency": latency}, file=None).costs
        for latency in (0, 1)
    )
    assert quick is not None
    assert slow is not None
    assert slow.gradients - quick.gradients == 1
    assert slow.bases - quick.bases == 4  # outcomes and bases of two processes
    assert slow.passes is None


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"flops": 1e9}, "machine needs link"),
        ({"flops": 1e9, "links": 1}, "Did you mean 'link'"),
        ({"flops": -1, "link": 1}, r"Invalid machine\['flops'\]: -1"),
    ],
)
def test_rates_that_do_not_fit_are_refused_by_name(machine: dict[str, float], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tekfac.explain(nn.Linear(3, 2), machine=machine, file=None)


def test_a_number_of_processes_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid ranks: 0"):
        tekfac.explain(nn.Linear(3, 2), ranks=0, file=None)
