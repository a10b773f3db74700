"""Promise: with fully_shard, processes train as one with the whole batch and the whole parameters does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dense import METHODS, assert_close, normal, seeded
from processes import run_together
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.ranks.replicas import ReplicaError
from tekfac.ranks.shards import own_part
from training import assert_identical, copied, maker

SAMPLES = 8
STEPS = 4

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")


class Net(nn.Module):
    """A convolution, a norm of each sample by itself, two linear layers; the head has three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.hidden = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.convolution(x))).flatten(2).mean(-1)
        return self.head(torch.tanh(self.hidden(x)))  # type: ignore[no-any-return]


class Attentive(nn.Module):
    """A layer whose calls are repeated, and a table that is the head's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        return self.head(x + self.attention(x, x, x)[0])  # type: ignore[no-any-return]


class Case(NamedTuple):
    """Settings, and how the model is cut."""

    method: int = 3
    step: str = "adaptive"
    settings: Mapping[str, Any] = {}
    net: Callable[[], nn.Module] = Net
    parts: tuple[str, ...] = ("convolution", "hidden")
    frozen: str | None = None
    accumulated: int = 1
    reshards: bool | None = None
    of_root: bool = True


ALL = ("convolution", "norm", "hidden", "head")

CASES: dict[str, Case] = {
    **{
        f"{METHODS[method].__name__}, {step}": Case(method, step)
        for method in range(4)
        for step in ("adaptive", "natural")
    },
    "the root alone": Case(parts=()),
    "every module": Case(parts=ALL, reshards=True),
    "sampled labels": Case(settings={"fisher": "sampled"}),
    "sampled labels, kept whole": Case(settings={"fisher": "sampled"}, reshards=False),
    "sampled labels, no root": Case(settings={"fisher": "sampled"}, parts=ALL, of_root=False),
    "exact": Case(
        step="natural", settings={"fisher": "exact"}, parts=("convolution", "norm", "hidden", "head")
    ),
    "norms": Case(settings={"precondition_norms": True}),
    "frozen": Case(frozen="hidden"),
    "accumulated": Case(accumulated=2),
    "accumulated, sampled": Case(step="natural", settings={"fisher": "sampled"}, accumulated=2),
    "clipped": Case(step="natural", settings={"kl_clip": 1e-3}),
    "SGD for the others": Case(settings={"first_order_step": "sgd"}),
    "attention, tied": Case(net=Attentive, parts=("attention",)),
    "attention, sampled": Case(net=Attentive, parts=("attention",), settings={"fisher": "sampled"}),
}


def optimizer_of(case: Case, model: nn.Module, **more: Any) -> NaturalGradient:
    settings = {"lr": 0.05, "seed": 3, "interval_growth": None, "factors_every": 1, "basis_every": 1}
    if case.step == "natural" and METHODS[case.method].method.rescaling.measured:
        settings["rescaling_every"] = 1
    make = maker(METHODS[case.method], case.step)
    return make(model, **{**settings, **case.settings, **more})


def batch_of(case: Case, step: int) -> tuple[Tensor, Tensor]:
    if case.net is Attentive:
        tokens = torch.randint(7, (SAMPLES, 4), generator=torch.Generator().manual_seed(step))
        return tokens[:, :-1], tokens[:, 1:]
    return normal(SAMPLES, 2, 4, 4, seed=step), torch.arange(SAMPLES).roll(step) % 3


def model_of(case: Case) -> nn.Module:
    model = seeded(case.net).double()
    if case.frozen is not None:
        model.get_submodule(case.frozen).requires_grad_(False)
    return model


def sharded(case: Case, mesh: Any) -> nn.Module:
    model = model_of(case)
    more = {} if case.reshards is None else {"reshard_after_forward": case.reshards}
    for name in case.parts:
        fully_shard(model.get_submodule(name), mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more) if case.of_root else model


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def own_samples(case: Case, ranks: Iterable[int], world: int, micro_batch: int) -> Tensor:
    """Numbers of the samples of a micro-batch: those of some ranks, one after the other."""
    size = SAMPLES // (world * case.accumulated)
    return torch.cat([(rank * case.accumulated + micro_batch) * size + torch.arange(size) for rank in ranks])


def train(
    case: Case, model: nn.Module, optimizer: NaturalGradient, ranks: Iterable[int], world: int, start: int = 0
) -> dict[str, Tensor]:
    """Parameters and curvature after some steps with the samples of some ranks."""
    for step in range(start, start + STEPS):
        x, y = batch_of(case, step)
        optimizer.zero_grad()
        for micro_batch in range(case.accumulated):
            own = own_samples(case, ranks, world, micro_batch)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro_batch == case.accumulated - 1)
            loss = F.cross_entropy(model(x[own]).flatten(0, -2), y[own].flatten())
            (loss / case.accumulated).backward()
        optimizer.step()
    found = {f"parameter {name}": whole(p) for name, p in model.named_parameters()}
    blocks = {f"curvature {name}": block.to_dense() for name, block in optimizer.curvature.items()}
    return {**found, **blocks}


def train_all(rank: int, world: int, cases: Mapping[str, Case], mesh: Any) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, case in cases.items():
        model = sharded(case, mesh)
        found[name] = train(case, model, optimizer_of(case, model), [rank], world)
    return found


# -- what else a step promises ---------------------------------------------------------------------------

PLAIN = Case(settings={"lr": 0.03}, parts=("hidden",))


def step_once(model: nn.Module, optimizer: NaturalGradient, number: int = 0, *, poison: bool = False) -> None:
    x, y = batch_of(PLAIN, number)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if poison:
        own_part(model.norm.bias.grad)[:] = torch.nan
    optimizer.step()


def of_a_bad_gradient(mesh: Any, rank: int) -> dict[str, Any]:
    """One process has a part of a gradient that is not finite."""
    model = sharded(PLAIN, mesh)
    optimizer = optimizer_of(PLAIN, model)
    step_once(model, optimizer)
    before = [whole(p) for p in model.parameters()]
    step_once(model, optimizer, 1, poison=rank == 1)
    stays = all(torch.equal(whole(p), own) for p, own in zip(model.parameters(), before, strict=True))
    step_once(model, optimizer, 1)
    moved = all(not torch.equal(whole(p), own) for p, own in zip(model.parameters(), before, strict=True))
    return {"skipped": optimizer.skipped_steps, "stays": stays, "goes on": moved}


def of_a_part_without_labels(mesh: Any, rank: int) -> list[Tensor]:
    """In the first of two micro-batches one process has no label: nothing is measured there, and all go on."""
    model = sharded(PLAIN, mesh)
    optimizer = optimizer_of(PLAIN, model)
    for step in range(2):
        optimizer.zero_grad()
        for micro_batch in range(2):
            x, y = batch_of(PLAIN, 2 * step + micro_batch)
            y = torch.full_like(y, -100) if (rank, micro_batch) == (1, 0) else y
            F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
    return [whole(p) for p in model.parameters()]


def of_resuming(rank: int, world: int, mesh: Any, folder: Path) -> dict[str, dict[str, Tensor]]:
    """A run, and others that go on with its state, or with that of one process, cut in another way."""
    model = sharded(PLAIN, mesh)
    optimizer = optimizer_of(PLAIN, model)
    train(PLAIN, model, optimizer, [rank], world)
    weights, saved = copied(model.state_dict()), copied(optimizer.state_dict())
    state = {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / "of two")
    found = {"uninterrupted": train(PLAIN, model, optimizer, [rank], world, STEPS)}
    for way in ("by itself", "of two", "of one"):
        other = sharded(PLAIN._replace(parts=("convolution", "head")), mesh)
        loaded = optimizer_of(PLAIN, other, seed=7)
        if way == "by itself":
            other.load_state_dict(weights)
            loaded.load_state_dict(saved)
        else:
            load_from(folder / way, other, loaded)
        found[way] = train(PLAIN, other, loaded, [rank], world, STEPS)
    return found


def load_from(folder: Path, model: nn.Module, optimizer: NaturalGradient) -> None:
    step_once(model, optimizer)  # so that there is a place for everything
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def refusals(mesh: Any) -> dict[str, str]:
    """What is said of models that do not go."""

    def by_the_tensor(model: nn.Module) -> nn.Module:
        parallelize_module(model, mesh, {"hidden": ColwiseParallel()})
        return model

    def in_part(model: nn.Module) -> nn.Module:
        fully_shard(model.hidden, mesh=mesh)
        return model

    def by_columns(model: nn.Module) -> nn.Module:
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 4 else Shard(0))
        return model

    def called(model: nn.Module) -> nn.Module:
        fully_shard(model, mesh=mesh)
        model(batch_of(PLAIN, 0)[0])
        return model

    def flat(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    found = {}
    for make in (by_the_tensor, in_part, by_columns, called, flat):
        model = make(model_of(PLAIN))
        with pytest.raises(ValueError, match=r"Parameter|FullyShardedDataParallel") as error:
            optimizer_of(PLAIN, model)
        found[make.__name__] = str(error.value)
    with pytest.raises(ValueError, match="Parameter") as error:
        optimizer_of(PLAIN, sharded(PLAIN, mesh), process_group="alone")
    found["alone"] = str(error.value)
    return found


def of_drifting_replicas(rank: int, mesh: Any) -> str:
    """What is said where a part of a weight is another one in the second replica."""
    model = sharded(PLAIN, mesh)
    optimizer = optimizer_of(PLAIN, model, replica_check_every=1)
    if rank == 3:
        own_part(model.hidden.weight).data[-1, 0] += 1.0
    with pytest.raises(ReplicaError) as error:
        step_once(model, optimizer)
    return str(error.value)


# -- all of it, in one start of the processes ------------------------------------------------------------


def everything(rank: int, world: int, shape: tuple[int, ...], folder: Path) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    found: dict[str, Any] = {"cases": train_all(rank, world, CASES, mesh)}
    if shape == (2,):
        found["bad gradient"] = of_a_bad_gradient(mesh, rank)
        found["without labels"] = of_a_part_without_labels(mesh, rank)
        found["refusals"] = refusals(mesh)
        found["resuming"] = of_resuming(rank, world, mesh, folder)
    if shape == (2, 2):
        found["drifting"] = of_drifting_replicas(rank, mesh)
    return found


@pytest.fixture(scope="module", autouse=True)
def double() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(dtype)


def alone(case: Case, world: int) -> dict[str, Tensor]:
    model = model_of(case)
    return train(case, model, optimizer_of(case, model), range(world), world)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def of_two(folder: Path, double: None) -> list[dict[str, Any]]:
    model = model_of(PLAIN)
    optimizer = optimizer_of(PLAIN, model)
    train(PLAIN, model, optimizer, range(2), 2)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder / "of one")
    return run_together(2, folder, everything, (2,), folder)


def assert_all_as(expected: dict[str, Tensor], everywhere: list[dict[str, Tensor]]) -> None:
    for found in everywhere:
        assert found.keys() == expected.keys()
        for what, own in found.items():
            assert torch.equal(own, everywhere[0][what]), what
            assert_close(own, expected[what])


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name: str, of_two: list[dict[str, Any]]) -> None:
    assert_all_as(alone(CASES[name], 2), [found["cases"][name] for found in of_two])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["FSDP", "HSDP"])
def test_four_processes_train_as_one(shape: tuple[int, ...], tmp_path: Path) -> None:
    of_four = run_together(4, tmp_path, everything, shape, tmp_path)
    for name, case in CASES.items():
        assert_all_as(alone(case, 4), [found["cases"][name] for found in of_four])
    for found in of_four if shape == (2, 2) else ():
        assert "part 1 of hidden.weight is" in found["drifting"]


def test_a_step_is_taken_by_no_process_where_a_part_of_a_gradient_is_not_finite(
    of_two: list[dict[str, Any]],
) -> None:
    for found in of_two:
        assert found["bad gradient"] == {"skipped": 1, "stays": True, "goes on": True}


def test_a_process_may_have_no_label_in_a_micro_batch(of_two: list[dict[str, Any]]) -> None:
    first, second = (found["without labels"] for found in of_two)
    assert all(torch.isfinite(own).all() for own in first)
    assert_identical(first, second)


def test_a_run_goes_on_with_its_state_bit_for_bit(of_two: list[dict[str, Any]]) -> None:
    for found in of_two:
        runs = found["resuming"]
        assert_identical(runs["by itself"], runs["uninterrupted"])
        assert_identical(runs["of two"], runs["uninterrupted"])


def test_a_run_of_one_process_goes_on_in_two(of_two: list[dict[str, Any]]) -> None:
    runs = of_two[0]["resuming"]
    assert_all_as(runs["uninterrupted"], [found["resuming"]["of one"] for found in of_two])


def test_a_run_of_two_processes_goes_on_in_one(of_two: list[dict[str, Any]], folder: Path) -> None:
    model = model_of(PLAIN)
    optimizer = optimizer_of(PLAIN, model, seed=7)
    load_from(folder / "of two", model, optimizer)
    through = train(PLAIN, model, optimizer, range(2), 2, STEPS)
    assert_all_as(through, [found["resuming"]["uninterrupted"] for found in of_two])


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("by_the_tensor", "no tensor parallelism"),
        ("by_columns", "no shard_placement_fn"),
        ("in_part", "'convolution.weight' is whole in every process"),
        ("called", "call model.reshard"),
        ("flat", "fully_shard(model) instead"),
        ("alone", "cut over a mesh of 2 processes, but 1 train together"),
    ],
)
def test_what_does_not_go_is_refused(made: str, words: str, of_two: list[dict[str, Any]]) -> None:
    for found in of_two:
        assert words in found["refusals"][made]
