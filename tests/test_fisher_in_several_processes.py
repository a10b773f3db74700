"""Promise: `tekfac.fisher` in several processes gives each of them the blocks of one process with all data."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dense import assert_close, normal, seeded
from processes import run_together
from tekfac import fisher
from tekfac.curvature.eigenbasis import Eigenbasis, decompose
from tekfac.curvature.factors import KroneckerFactors
from training import assert_identical

SIZES = (4, 3, 5, 4, 2)
"""Of the batches; neither two nor four processes have as many each."""

Batch = tuple[Tensor, Any]
Found = dict[str, Tensor]


class Net(nn.Module):
    """A convolution, a norm that batches leave a trace in, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.convolution(x))).flatten(1))  # type: ignore[no-any-return]


class Heads(nn.Module):
    """Two predictions, of which a batch whose first number is negative has one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.cls, self.box = nn.Linear(32, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x.flatten(1)))
        return {"cls": self.cls(hidden), "box": self.box(hidden)}


class Branches(nn.Module):
    """A layer that is called in the second batch alone, which is the only one of three samples."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.once = nn.Linear(32, 3), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x.flatten(1))
        return out + self.once(x.flatten(1)) if len(x) == 3 else out


def by_hand(logits: Tensor, y: Tensor) -> Tensor:
    """A cross entropy that its graph does not name."""
    log_p = logits - logits.exp().sum(1, keepdim=True).log()
    return -log_p[y >= 0].gather(1, y[y >= 0, None]).mean()


class WithLoss(nn.Module):
    """A model that returns its loss, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x.flatten(1))
        return {"loss": by_hand(logits, y), "logits": logits}


def network(kind: type[nn.Module] = Net) -> nn.Module:
    return seeded(kind).double()


def batches() -> list[Batch]:
    return [
        (normal(size, 2, 4, 4, seed=seed), torch.arange(size).roll(seed) % 3) for seed, size in enumerate(SIZES)
    ]


def of_numbers() -> list[Batch]:
    return [(x, normal(len(x), 3, seed=9 + len(x))) for x, _ in batches()]


def of_heads() -> list[Batch]:
    return [(x, {"cls": y, "box": normal(len(x), 2, seed=len(x))}) for x, y in batches()]


def hardly_labelled() -> list[Batch]:
    """All but the first batch have one label, which does not tell what the loss is."""
    (x, _), *others = batches()
    first = x.repeat(5, 1, 1, 1) * torch.arange(1.0, 21.0).reshape(20, 1, 1, 1), torch.arange(20) % 3
    return [first, *((x, torch.where(torch.arange(len(y)) == 0, y, -100)) for x, y in others)]


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def unnamed(model: nn.Module, batch: Batch) -> Tensor:
    return by_hand(model(batch[0]), batch[1])


def of_both(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out["cls"], batch[1]["cls"]) + 0.5 * F.mse_loss(out["box"], batch[1]["box"])


class Case(NamedTuple):
    """What is asked, of which model and data."""

    settings: Mapping[str, Any] = {}
    model: type[nn.Module] = Net
    data: Callable[[], Sequence[Any]] = batches
    call: Callable[..., Any] = fisher.estimate


CASES: dict[str, Case] = {
    **{
        f"{method}, {kind}": Case({"method": method, "fisher": kind})
        for method in ("kfac", "ekfac", "tkfac", "tekfac")
        for kind in ("exact", "sampled")
    },
    "empirical": Case({"fisher": "empirical"}),
    "blocks": Case({"max_dim": 5, "large_dims": "blocks"}),
    "frequencies": Case({"max_dim": 5, "large_dims": "frequencies"}),
    "single precision": Case({"curvature_dtype": torch.float32}),
    "a regression": Case({"loss": squared_error, "fisher": "sampled"}, data=of_numbers),
    "a loss that one batch tells": Case({"loss": unnamed}, data=hardly_labelled),
    "the model's own loss": Case({}, WithLoss, lambda: [{"x": x, "y": y} for x, y in hardly_labelled()]),
    "several predictions": Case({"likelihood": {"box": "gaussian"}}, Heads, of_heads),
    "several predictions, sampled": Case(
        {"likelihood": {"box": "gaussian"}, "fisher": "sampled"}, Heads, of_heads
    ),
    "one loss of several predictions": Case({"loss": of_both}, Heads, of_heads),
    "one batch": Case({}, data=lambda: batches()[:1]),
    "an empty batch": Case(
        {"fisher": "sampled"}, data=lambda: [(x[:0], y[:0]) for x, y in batches()[:1]] + batches()
    ),
    "a layer of one batch": Case({}, Branches),
    "a loss that is a sum": Case({"loss_reduction": "sum"}),
    "exact blocks": Case({}, call=fisher.exact_blocks),
    "exact blocks, sampled": Case({"fisher": "sampled"}, call=fisher.exact_blocks),
    "exact blocks of several predictions": Case(
        {"likelihood": {"cls": "categorical", "box": "gaussian"}},
        Heads,
        lambda: [x for x, _ in batches()],
        fisher.exact_blocks,
    ),
}

COMPARED: dict[str, Case] = {
    "as matrices": Case({"exact_memory": 2**30}),
    "by the Gram matrix": Case({"fisher": "empirical", "exact_memory": 400_000, "layers": "convolution"}),
    "Gram matrix of several predictions": Case(
        {"fisher": "sampled", "likelihood": {"box": "gaussian"}, "layers": "body"}, Heads, of_heads
    ),
    "by probes": Case({"exact_memory": 0, "probes": 8}),
    "of several predictions": Case({"loss": of_both}, Heads, of_heads),
}
COMPARED = {name: case._replace(call=fisher.compare) for name, case in COMPARED.items()}


def asked(case: Case, data: Sequence[Any] | None = None, **more: Any) -> Found:
    """What there is to see of an answer, as tensors."""
    data = case.data() if data is None else data
    found = case.call(network(case.model), data, **{**case.settings, **more})
    if case.call is fisher.compare:
        numbers = ("trace_ratio", "excess", "cosine", "damping", "parameters")
        rows = [[getattr(row, name) for name in numbers] for row in found.rows]
        norms = [[*row.squared_norm, *row.squared_error] for row in found.rows]
        counts = [found.metadata["samples"]]
        plain = [[-1.0 if number is None else number for number in row] for row in rows]
        return {
            "rows": torch.tensor(plain, dtype=torch.float64),
            "norms": torch.tensor(norms, dtype=torch.float64),
            "counts": torch.tensor(counts),
        }
    terms = found.metadata["terms"]
    terms = sum(terms.values()) if isinstance(terms, dict) else terms
    counts = {"counts": torch.tensor([found.metadata["samples"], terms])}
    return {**counts, **{name: block.to_dense() for name, block in found.items()}}


# -- in every process --------------------------------------------------------------------------------------


class Failing:
    """Batches, after so many of which, over all passes, the loader breaks off."""

    def __init__(self, data: Sequence[Any], left: int | None) -> None:
        self.data, self.left = data, left

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            if self.left is not None:
                if not self.left:
                    raise OSError("the disk is gone")
                self.left -= 1
            yield batch


def error_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    try:
        function(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def parts(rank: int, world: int) -> dict[str, Any]:
    """What processes find whose loaders give a part each."""
    data, sampled = batches(), Case({"fisher": "sampled"})
    samples = TensorDataset(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))
    sampler = DistributedSampler(samples, world, rank, shuffle=False)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tekfac").addHandler(handler)
    by_sampler = asked(Case(), DataLoader(samples, 2, sampler=sampler), loader_gives="part")  # type: ignore[arg-type]
    logging.getLogger("tekfac").removeHandler(handler)
    return {
        "dealt out": asked(sampled, data[rank::world], loader_gives="part"),
        "uneven": asked(Case(), data[:1] if rank else data[1:], loader_gives="part") if world == 2 else {},
        "all in the first": asked(Case(), [] if rank else data, loader_gives="part"),
        "a sampler": by_sampler,
        "said": records,
        "compared": asked(Case(call=fisher.compare), data[rank::world], loader_gives="part"),
        "alone": asked(Case(), data[rank:], process_group="alone"),
        "a group": asked(Case(), process_group=dist.group.WORLD),
        "halves": halves(rank, world),
        "wrapped": wrapped(),
        "the same everywhere": error_of(asked, Case(), loader_gives="part"),
        "with a checkpoint": error_of(asked, Case(), loader_gives="part", checkpoint="file"),
    }


def halves(rank: int, world: int) -> Found:
    """Two groups, each with data of its own."""
    groups = [dist.new_group(list(range(world // 2))), dist.new_group(list(range(world // 2, world)))]
    half = rank * 2 // world
    return asked(Case(), batches()[half:], process_group=groups[half])


def wrapped() -> Found:
    """The last batch goes to one process alone, where a wrapper with buffers would wait for the others."""
    found = fisher.estimate(DistributedDataParallel(network()), batches())
    return {name: block.to_dense() for name, block in found.items()}


def mixed_up(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Errors, of one process or of all."""
    data, last = batches(), rank == world - 1
    spoilt = [(x * torch.inf, y) if index % world == world - 1 else (x, y) for index, (x, y) in enumerate(data)]
    other = network()
    if last:
        other.head.weight.data[0, 0] += 1e-9
    samples = TensorDataset(data[0][0], data[0][1])
    mesh = init_device_mesh("cpu", (world,))
    changing = iter([data, batches()[::-1] if last else data])

    class Changing:
        def __iter__(self) -> Iterator[Any]:
            return iter(next(changing))

    def estimate(loader: Any = data, model: nn.Module | None = None, **more: Any) -> str:
        return error_of(fisher.estimate, model or network(), loader, **more)

    return {
        "a loader that breaks": estimate(Failing(data, 3 if last else None)),
        "a loader that breaks in the second pass": estimate(Failing(data, 7 if last else None)),
        "not finite": estimate(spoilt),
        "other data": estimate([(x + rank, y) for x, y in data]),
        "another order": estimate(data[::-1] if last else data),
        "other data later": estimate([*data[:-1], (data[-1][0] + rank, data[-1][1])]),
        "fewer data": estimate(data[:-1] if last else data),
        "another order in the second pass": estimate(Changing()),
        "no data": estimate([]),
        "no data in one": estimate([] if last else data),
        "no loader in one": estimate(3 if last else data),
        "another model": estimate(model=other),
        "another method": estimate(method="kfac" if last else "tekfac"),
        "a checkpoint in one": estimate(checkpoint=folder / "x" if last else None),
        "a folder as checkpoint": estimate(checkpoint=folder),
        "a sampler": estimate(DataLoader(samples, sampler=DistributedSampler(samples, world, rank))),
        "in shards": estimate(model=fully_shard(network(), mesh=mesh)),
        "no group": estimate(process_group="all"),
        "a bar in one": estimate(progress=last),
        "and after all that": estimate(),
    }


def interrupted(rank: int, world: int, folder: Path) -> dict[str, Found]:
    """Broken off after some batches, and taken up again; only the first process is to write."""
    found = {}
    data = batches()
    for kind in ("exact", "sampled"):
        case = Case({"fisher": kind, "checkpoint_seconds": 0})
        place = folder / f"{kind}-whole" if not rank else folder / "nowhere" / "file"
        found[f"{kind} whole"] = asked(case, checkpoint=place)
        for left in (1, 4, 5, 7, 9):
            place = folder / f"{kind}-{left}" if not rank else folder / "nowhere" / "file"
            assert error_of(asked, case, Failing(data, left), checkpoint=place)  # type: ignore[arg-type]
            found[f"{kind} after {left}"] = asked(case, checkpoint=place)
    place = folder / "taken up by one" if not rank else folder / "nowhere" / "file"
    case = Case({"fisher": "sampled", "checkpoint_seconds": 0})
    assert error_of(asked, case, Failing(data, 8), checkpoint=place)  # type: ignore[arg-type]
    place = folder / "begun by one" if not rank else folder / "nowhere" / "file"
    with mock.patch("tekfac.fisher.approximation.decompose", turned_round):
        found["begun by one"] = asked(case, checkpoint=place)
    found["it was complete"] = asked(case, Failing(data, 10), checkpoint=place)  # type: ignore[arg-type]
    return found


def turned_round(factors: KroneckerFactors) -> Eigenbasis:
    """As another machine might decompose them: eigenvectors in another order."""
    basis = decompose(factors)
    return Eigenbasis(*(part.flip(-1) if part.ndim > 1 else part for part in basis))


def decomposed() -> tuple[int, int]:
    """How many bases are found here, and how many blocks there are."""
    with mock.patch("tekfac.fisher.approximation.decompose", side_effect=decompose) as counting:
        blocks = fisher.estimate(network(), batches())
    return counting.call_count, len(blocks)


def everything(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return {
        **{name: asked(case) for name, case in {**CASES, **COMPARED}.items()},
        "parts": parts(rank, world),
        "interrupted": interrupted(rank, world, folder),
        "mixed up": mixed_up(rank, world, folder),
        "decomposed": decomposed(),
    }


# -- what they find ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(world: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an estimate that one process has begun."""
    folder = tmp_path_factory.mktemp(f"in {world}")
    case = Case({"fisher": "sampled", "checkpoint_seconds": 0})
    asked_begun = error_of(asked, case, Failing(batches(), 8), checkpoint=folder / "begun by one")  # type: ignore[arg-type]
    assert "the disk is gone" in asked_begun
    return folder


@pytest.fixture(scope="module")
def results(world: int, folder: Path) -> list[dict[str, Any]]:
    return run_together(world, folder, everything, folder)


@pytest.mark.parametrize("name", [*CASES, *COMPARED])
def test_every_process_has_what_one_with_all_data_has(name: str, results: list[dict[str, Any]]) -> None:
    alone = asked({**CASES, **COMPARED}[name])
    for result in results:
        assert_identical(result[name], results[0][name])
    same(results[0][name], alone)


def same(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for what, value in expected.items():
        if what == "norms":  # a difference of sums, that are equal to rounding
            assert torch.allclose(found[what], value, rtol=1e-10, atol=1e-10 * float(value.abs().max()))
        else:
            assert_close(found[what].double(), value.double())


def in_all(results: Sequence[Mapping[str, Any]], where: str, name: str) -> list[Any]:
    return [result[where][name] for result in results]


def test_every_basis_is_decomposed_by_one_process(results: list[dict[str, Any]]) -> None:
    found, blocks = zip(*(result["decomposed"] for result in results), strict=True)
    assert set(blocks) == {3}
    assert sum(found) == 3
    assert min(found) == (1 if len(results) == 2 else 0)


def test_loaders_may_give_a_part_each(results: list[dict[str, Any]]) -> None:
    world = len(results)
    for found in in_all(results, "parts", "dealt out"):
        same(found, asked(Case({"fisher": "sampled"})))
    for name in ("uneven", "all in the first"):
        for found in in_all(results, "parts", name):
            if found or world == 2:
                same(found, asked(Case(), batches()[1:] + batches()[:1] if name == "uneven" else batches()))
    for found in in_all(results, "parts", "compared"):
        same(found, asked(Case(call=fisher.compare)))


def test_a_sampler_that_repeats_samples_has_them_counted_twice_and_that_is_said(
    results: list[dict[str, Any]],
) -> None:
    world, total = len(results), sum(SIZES)
    repeated = -total % world
    assert repeated == (0 if world == 2 else 2)
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    more = torch.cat([torch.arange(total), torch.arange(repeated)])
    for found in in_all(results, "parts", "a sampler"):
        same(found, asked(Case(), [(x[more], y[more])]))
    for said in in_all(results, "parts", "said"):
        assert ("repeats 2 of 18 samples" in "".join(said)) == bool(repeated)


def test_processes_may_be_apart_or_in_a_group_or_have_a_wrapper(results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(in_all(results, "parts", "alone")):
        same(found, asked(Case(), batches()[rank:]))
    for rank, found in enumerate(in_all(results, "parts", "halves")):
        same(found, asked(Case(), batches()[rank * 2 // len(results) :]))
    whole = asked(Case())
    for found in in_all(results, "parts", "a group"):
        same(found, whole)
    for found in in_all(results, "parts", "wrapped"):
        same(found, {name: own for name, own in whole.items() if name != "counts"})


def test_an_interrupted_estimate_is_taken_up_by_as_many_processes_or_others(
    results: list[dict[str, Any]], folder: Path
) -> None:
    wholes = {kind: asked(Case({"fisher": kind})) for kind in ("exact", "sampled")}
    for result in results:
        assert_identical(result["interrupted"], results[0]["interrupted"])
    for name, found in results[0]["interrupted"].items():
        same(found, wholes["exact" if "exact" in name else "sampled"])
        if "after" in name:
            assert_identical(found, results[0]["interrupted"][f"{name.partition(' ')[0]} whole"])
    case = Case({"fisher": "sampled", "checkpoint_seconds": 0})
    found = asked(case, Failing(batches(), 10), checkpoint=folder / "taken up by one")  # type: ignore[arg-type]
    same(found, wholes["sampled"])
    assert not (folder / "nowhere").exists()


def elsewhere(text: str) -> str:
    return rf"OtherProcessError: 1 of \d processes could not go on: rank \d, {text}"


OTHER_DATA = (
    r"ValueError: The loaders of the \d processes give other data, or another order.*loader_gives='part'"
)
DIFFERS = r"ReplicaError: tekfac\.fisher needs the same in all \d processes that train together, but "

ERRORS: dict[str, tuple[str, str]] = {
    "a loader that breaks": (elsewhere("OSError: the disk is gone"), "OSError: the disk is gone"),
    "a loader that breaks in the second pass": (
        elsewhere("OSError: the disk is gone"),
        "OSError: the disk is gone",
    ),
    "not finite": (elsewhere(r"ValueError: Batch \d of the data"), r"ValueError: Batch \d of the data"),
    "other data": (OTHER_DATA, OTHER_DATA),
    "another order": (OTHER_DATA, OTHER_DATA),
    "other data later": (OTHER_DATA, OTHER_DATA),
    "fewer data": (OTHER_DATA, OTHER_DATA),
    "another order in the second pass": (OTHER_DATA, OTHER_DATA),
    "no data": ("ValueError: The loader is empty", "ValueError: The loader is empty"),
    "no data in one": (OTHER_DATA, OTHER_DATA),
    "no loader in one": (elsewhere("TypeError: Expected batches"), "TypeError: Expected batches"),
    "another model": (DIFFERS + "the values of 'head.weight' is", DIFFERS + "the values of 'head.weight' is"),
    "another method": (DIFFERS + "method is 'TEKFAC'", DIFFERS + "method is 'TEKFAC'"),
    "a checkpoint in one": (
        DIFFERS + "whether there is a checkpoint",
        DIFFERS + "whether there is a checkpoint",
    ),
    "a folder as checkpoint": ("ValueError: .* is a folder", elsewhere("ValueError: .* is a folder")),
    "a sampler": ("ValueError: Got a loader with a DistributedSampler", "ValueError: Got a loader with a Dist"),
    "in shards": ("ValueError: tekfac.fisher got a model whose", "ValueError: tekfac.fisher got a model whose"),
    "no group": ("ValueError: Invalid process_group: 'all'", "ValueError: Invalid process_group: 'all'"),
    "a bar in one": ("$", "$"),
    "and after all that": ("$", "$"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_in_one_process_is_told_in_all(name: str, results: list[dict[str, Any]]) -> None:
    found = in_all(results, "mixed up", name)
    first, last = ERRORS[name]
    for rank, text in enumerate(found):
        expected = last if rank == len(found) - 1 else first
        if name == "a folder as checkpoint":
            expected = last if rank else first
        assert re.match(expected, text, re.DOTALL), f"rank {rank}: {text}"
    assert len(results) == len(found)


def test_parts_that_cannot_be_meant_are_refused(results: list[dict[str, Any]]) -> None:
    for text in in_all(results, "parts", "the same everywhere"):
        assert text.startswith("ValueError: With loader_gives='part' all")
    for text in in_all(results, "parts", "with a checkpoint"):
        assert text.startswith("ValueError: checkpoint= with loader_gives='part'")
