"""Promise: whatever goes wrong at whatever moment, what comes of it is what docs/reliability.md says.

One table, FAULTS, tells what each fault does at each moment of the refresh cycle. It is what is asserted here,
for every method and both steps, and what the page shows. A run goes on after its fault, to the next refresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS, statistics
from tekfac.curvature.factors import FactorRule
from tekfac.optim.natural_gradient import NaturalGradient
from training import Batch, assert_identical, both_steps, differences, everything, maker, saved_whole, vectors

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
NAN, INFINITY, HUGE = float("nan"), float("inf"), 1e30
EIGH: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.linalg.eigh

INTERVAL = 3
MOMENTS = {
    "the first step": 0,
    "after a refresh": 1,
    "a plain step": 2,
    "a step that measures": 3,
    "a second micro-batch": 3,
}
"""The step of each; the last one is in the middle of gradient accumulation, at a step that measures."""

MEASURING = ("the first step", "a step that measures", "a second micro-batch")
ACCUMULATING = "a second micro-batch"


# -- what is trained -------------------------------------------------------------------------------------


class Network(nn.Module):
    """Two layers, and one on a branch that may be left out, or get no samples, or no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.way = "through the branch"
        self.breaks_with: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.way == "through the branch":
            hidden = hidden + torch.tanh(self.branch(hidden))
        elif self.way == "with no samples for it":
            nobody = torch.zeros(len(x), dtype=torch.bool)
            hidden = hidden.index_put((nobody,), torch.tanh(self.branch(hidden[nobody])), accumulate=True)
        elif self.way == "times 0":
            hidden = hidden + 0 * torch.tanh(self.branch(hidden))
        if self.breaks_with is not None and self.way == "breaking":
            raise self.breaks_with
        if self.breaks_with is not None:
            hidden.register_hook(self._break)  # type: ignore[no-untyped-call]
        out: Tensor = self.head(hidden)
        return out

    def _break(self, gradient: Tensor) -> None:
        assert self.breaks_with is not None
        raise self.breaks_with


class Run:
    """A model and its optimizer, in a loop as a user writes it."""

    def __init__(self, method: type[NaturalGradient], step: str) -> None:
        clocks: dict[str, Any] = {"interval_growth": None, "factors_every": INTERVAL, "basis_every": INTERVAL}
        if step == "natural" and method.method.rescaling.measured:
            clocks["rescaling_every"] = INTERVAL
        self.model = Network()
        self.optimizer = maker(method, step)(self.model, lr=0.01, seed=0, turns=False, **clocks)

    def backward(self, batch: Batch, scale: float = 1.0) -> None:
        x, y = batch
        (F.cross_entropy(self.model(x), y) * scale).backward()

    def begin(self, place: int, moment: str) -> None:
        """All of a step up to the last micro-batch."""
        self.optimizer.zero_grad()
        if moment == ACCUMULATING and place == MOMENTS[moment]:
            self.backward(EARLIER)

    def take(self, place: int, moment: str) -> None:
        self.begin(place, moment)
        self.backward(DATA[place])
        self.optimizer.step()

    def everything(self) -> Any:
        """All but how many steps were skipped."""
        found = everything(self.model, self.optimizer)
        saved_whole(found["optimizer"]).pop("skipped_steps")
        return found

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


DATA = vectors(2 * INTERVAL + 1, dtype=torch.float32)
(EARLIER,) = vectors(1, seed=5, dtype=torch.float32)


def length(moment: str) -> int:
    """So many steps: up to the refresh after the moment."""
    return MOMENTS[moment] // INTERVAL * INTERVAL + INTERVAL + 1


@cache
def undisturbed(method: type[NaturalGradient], step: str, moment: str) -> Any:
    """What a run without a fault ends with."""
    run = Run(method, step)
    for place in range(length(moment)):
        run.take(place, moment)
    return run.everything()


# -- what may come of a fault ----------------------------------------------------------------------------


@dataclass
class Cell:
    """A run with a fault.

    Attributes:
        run: as it is at its end.
        moment: of the fault.
        method: of the run, and
        step: its kind.
        before: everything, before the step of the fault.
        after: the same right after the fault, and
        moved: how far each parameter was then from where it had been.
        counts: by how much steps taken, steps skipped and failed refreshes had grown.
        kept: the layers whose basis was still the same.
        known: those that had one then, and
        axes: those whose basis was that of the coordinate axes.
        bases: what it was, of each of them.
        expected: everything at the end of a run without the fault.
    """

    run: Run
    moment: str
    method: type[NaturalGradient]
    step: str
    before: Any
    after: Any
    moved: Mapping[str, float]
    counts: tuple[int, int, int]
    kept: set[str]
    known: set[str]
    axes: set[str]
    bases: Mapping[str, Tensor]
    expected: Any

    def went_on(self) -> bool:
        """Whether all later steps were taken, and left everything finite."""
        taken = self.run.optimizer.num_steps == length(self.moment)
        skipped_later = self.run.optimizer.skipped_steps - self.counts[1]
        return taken and not skipped_later and finite(self.run.everything())

    def ends_as(self, another: Disturbed) -> None:
        """It is so with another step in the place of that of the fault."""
        expected = with_fault(another, self.moment, self.method, self.step)
        assert_identical(self.run.everything(), expected.run.everything())

    def renewed(self) -> bool:
        """Whether every layer has got another basis since."""
        now = bases_of(self.run)
        return not any(torch.equal(own, now[name]) for name, own in self.bases.items())

    def others_moved(self) -> bool:
        return all(far > 0 for name, far in self.moved.items() if not name.startswith("branch"))

    def branch_moved(self) -> bool:
        return self.moved["branch.weight"] > 0


def finite(state: Any) -> bool:
    if isinstance(state, Tensor):
        return bool(torch.isfinite(state).all())
    if isinstance(state, Mapping):
        return all(finite(value) for value in state.values())
    return all(finite(value) for value in state) if isinstance(state, list | tuple) else True


Outcome = Callable[[Cell], None]


def skipped(cell: Cell) -> None:
    assert cell.counts == (0, 1, 0)
    assert_identical(cell.after, cell.before)
    assert_identical(cell.run.everything(), cell.expected)


def nothing(cell: Cell) -> None:
    assert cell.counts[1:] == (0, 0)
    assert_identical(cell.run.everything(), cell.expected)


def summed(cell: Cell) -> None:
    assert cell.counts == (1, 0, 0)
    assert differences(cell.run.everything(), cell.expected)
    cell.ends_as(with_gradients_put_back)


def left_out(cell: Cell) -> None:
    assert cell.counts == (1, 0, 0)
    cell.ends_as(of_the_first_micro_batch)


def rests(cell: Cell) -> None:
    assert cell.counts == (1, 0, 0)
    assert not any(cell.moved.values())


def short(cell: Cell) -> None:
    assert cell.counts == (1, 0, 0)
    assert max(cell.moved.values()) < 1


def stays(cell: Cell) -> None:
    assert cell.counts == (1, 0, 0)
    assert cell.others_moved()
    assert not cell.branch_moved()


def coasts(cell: Cell) -> None:
    assert cell.counts == (1, 0, 0)
    assert cell.others_moved()
    assert cell.branch_moved()


def retried(cell: Cell) -> None:
    assert cell.counts == (1, 0, 0)
    assert cell.known == {"first", "branch", "head"}
    assert not cell.kept
    for name, expected in cell.expected["model"].items():
        torch.testing.assert_close(cell.run.model.state_dict()[name], expected, rtol=1e-3, atol=1e-4)


def old_basis(cell: Cell) -> None:
    assert cell.counts == (1, 0, 3)
    assert cell.kept == {"first", "branch", "head"}
    assert cell.renewed()
    assert cell.others_moved()
    assert cell.branch_moved()


def axes(cell: Cell) -> None:
    assert cell.counts == (1, 0, 3)
    assert cell.known == cell.axes == {"first", "branch", "head"}
    assert cell.renewed()
    assert cell.others_moved()
    assert cell.branch_moved()


def first_order(cell: Cell) -> None:
    assert cell.counts == (1, 0, 0)
    assert not cell.known
    assert cell.others_moved()
    assert cell.branch_moved()
    assert set(cell.run.optimizer.curvature) == {"first", "branch", "head"}


WORDS: dict[Outcome, str] = {
    skipped: "skipped",
    nothing: "nothing",
    summed: "summed",
    left_out: "left out",
    rests: "rests",
    short: "short",
    stays: "stays",
    coasts: "coasts",
    retried: "retried",
    old_basis: "old basis",
    axes: "axes",
    first_order: "first order",
}
MEANINGS: dict[Outcome, str] = {
    skipped: "the step is not taken, counted and logged; the run goes on as if it had not come, bit for bit",
    nothing: "as if it had not happened, bit for bit",
    summed: "the step is taken along the sum of the gradients that are there",
    left_out: "the step is taken as if that micro-batch had not been",
    rests: "the step is taken and moves nothing",
    short: "the step is taken, is finite, and no longer than others",
    stays: "the step is taken; the layer's parameters stay where they are",
    coasts: "the step is taken; what has no gradient goes on by its momentum alone",
    retried: "the basis is computed in float64, and the step taken as it would have been",
    old_basis: "the step is taken, every layer keeps its basis, which is counted; the next refresh renews it",
    axes: "the step is taken in the coordinate axes, and that is counted; the next refresh brings a basis",
    first_order: "the step is taken by first order; layers have blocks from the next step on that measures",
}


# -- faults ----------------------------------------------------------------------------------------------

Disturbed = Callable[[Run, int, str], None]
"""A step of a run with a fault, or a part of a step; what it has not taken is taken again."""


def changed_input(value: float) -> Disturbed:
    def fault(run: Run, place: int, moment: str) -> None:
        run.begin(place, moment)
        x, y = DATA[place]
        x = x.clone()
        x[0, 0] = value
        run.backward((x, y))
        run.optimizer.step()

    return fault


def scaled_loss(scale: float) -> Disturbed:
    def fault(run: Run, place: int, moment: str) -> None:
        run.begin(place, moment)
        run.backward(DATA[place], scale)
        run.optimizer.step()

    return fault


def changed_gradient(value: float) -> Disturbed:
    def fault(run: Run, place: int, moment: str) -> None:
        run.begin(place, moment)
        run.backward(DATA[place])
        gradient = run.model.head.weight.grad
        assert gradient is not None
        gradient[0, 0] = value
        run.optimizer.step()

    return fault


def bad_closure(run: Run, place: int, moment: str) -> None:
    """Only the loss that it returns is."""

    def closure() -> float:
        run.begin(place, moment)
        run.backward(DATA[place])
        return NAN

    run.optimizer.step(closure)


def no_samples(run: Run, place: int, moment: str) -> None:
    run.begin(place, moment)
    x, y = DATA[place]
    run.backward((x[:0], y[:0]))
    run.optimizer.step()


def another_way(way: str) -> Disturbed:
    def fault(run: Run, place: int, moment: str) -> None:
        with going(run, way):
            run.take(place, moment)

    return fault


@contextmanager
def going(run: Run, way: str) -> Iterator[None]:
    run.model.way = way
    try:
        yield
    finally:
        run.model.way = "through the branch"


def zeroed_gradient(run: Run, place: int, moment: str) -> None:
    run.begin(place, moment)
    run.backward(DATA[place])
    for parameter in run.model.branch.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    run.optimizer.step()


def decompositions(failures: int | None, bent: Callable[[Tensor], Tensor] | None = None) -> Disturbed:
    """eigh fails so many times, or always; with an error, or with other vectors."""

    def fault(run: Run, place: int, moment: str) -> None:
        calls = 0

        def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal calls
            calls += 1
            if failures is not None and calls > failures:
                return EIGH(matrix)
            if bent is None:
                raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")
            values, found = EIGH(matrix)
            return values, bent(found)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.linalg, "eigh", eigh)
            run.take(place, moment)

    return fault


def no_memory(where: Any, name: str) -> Disturbed:
    def fails(*arguments: Any, **keywords: Any) -> Any:
        raise MemoryError

    def fault(run: Run, place: int, moment: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, fails)
            run.take(place, moment)

    return fault


def breaking(error: type[BaseException], where: str, zero_grad: str) -> Disturbed:
    """The user goes on after an error, with the gradients zeroed by the optimizer or by the model."""

    def fault(run: Run, place: int, moment: str) -> None:
        run.begin(place, moment)
        run.model.breaks_with = error("the user's own")
        with going(run, "breaking" if where == "forward" else "through the branch"), pytest.raises(error):
            run.backward(DATA[place])
        run.model.breaks_with = None
        {"optimizer": run.optimizer, "model": run.model}[zero_grad].zero_grad()

    return fault


def no_zero_grad(run: Run, place: int, moment: str) -> None:
    if moment == ACCUMULATING:
        run.backward(EARLIER)
    run.backward(DATA[place])
    run.optimizer.step()


def with_gradients_put_back(run: Run, place: int, moment: str) -> None:
    """Those of the step before, as if `zero_grad()` had not been called."""
    old = {own: own.grad for own in run.model.parameters()}
    run.optimizer.zero_grad()
    for parameter, gradient in old.items():
        parameter.grad = gradient
    no_zero_grad(run, place, moment)


def of_the_first_micro_batch(run: Run, place: int, moment: str) -> None:
    run.begin(place, moment)
    run.optimizer.step()


def dropped(run: Run, place: int, moment: str) -> None:
    run.begin(place, moment)
    run.backward(DATA[place], NAN)
    run.optimizer.zero_grad()


def evaluated(run: Run, place: int, moment: str) -> None:
    """Between the backward pass and the step."""
    run.begin(place, moment)
    run.backward(DATA[place])
    run.model.eval()
    with torch.no_grad():
        run.model(EARLIER[0])
    run.model.train()
    run.optimizer.step()


def looked(run: Run, place: int, moment: str) -> None:
    """A forward pass in training mode, of which nothing comes."""
    run.begin(place, moment)
    run.model(EARLIER[0] * NAN)
    run.backward(DATA[place])
    run.optimizer.step()


def asked(run: Run, place: int, moment: str) -> None:
    run.begin(place, moment)
    run.backward(DATA[place])
    run.optimizer.health(off_diagonals=True)
    run.optimizer.signals()
    run.optimizer.step()


def always(outcome: Outcome) -> dict[str, Outcome]:
    return dict.fromkeys(MOMENTS, outcome)


def in_refreshes(outcome: Outcome, at_first: Outcome) -> dict[str, Outcome]:
    """Other steps do not come by it."""
    measuring = {moment: outcome if moment in MEASURING else nothing for moment in MOMENTS}
    return {**measuring, "the first step": at_first}


def but_at_first(outcome: Outcome, at_first: Outcome) -> dict[str, Outcome]:
    return {**always(outcome), "the first step": at_first}


FAULTS: dict[str, tuple[Disturbed, dict[str, Outcome]]] = {
    "NaN in the input": (changed_input(NAN), always(skipped)),
    "infinity in the input": (changed_input(INFINITY), always(skipped)),
    "a loss that is NaN": (scaled_loss(NAN), always(skipped)),
    "an infinite loss": (scaled_loss(INFINITY), always(skipped)),
    "a loss times 1e30": (scaled_loss(HUGE), always(skipped)),
    "a closure that returns NaN": (bad_closure, always(skipped)),
    "NaN in a gradient": (changed_gradient(NAN), always(skipped)),
    "infinity in a gradient": (changed_gradient(INFINITY), always(skipped)),
    "1e30 in a gradient": (changed_gradient(HUGE), always(skipped)),
    "a batch of no samples": (no_samples, {**but_at_first(coasts, rests), ACCUMULATING: left_out}),
    "a loss times 1e-30": (scaled_loss(1 / HUGE), always(short)),
    "a layer that is not called": (another_way("around the branch"), always(stays)),
    "a layer that gets no samples": (another_way("with no samples for it"), but_at_first(coasts, stays)),
    "a layer whose output counts 0": (another_way("times 0"), but_at_first(coasts, stays)),
    "a layer whose gradient is set to 0": (zeroed_gradient, but_at_first(coasts, stays)),
    "a decomposition that fails once": (decompositions(1), in_refreshes(retried, retried)),
    "decompositions that all fail": (decompositions(None), in_refreshes(old_basis, axes)),
    "eigenvectors that are NaN": (decompositions(None, lambda q: q * NAN), in_refreshes(old_basis, axes)),
    "eigenvectors that are not orthogonal": (
        decompositions(None, lambda q: q + 0.01 * q.roll(1, dims=-1)),
        in_refreshes(old_basis, axes),
    ),
    "no memory for a decomposition": (no_memory(torch.linalg, "eigh"), in_refreshes(old_basis, first_order)),
    "no memory for moments": (no_memory(FactorRule, "sums"), in_refreshes(old_basis, first_order)),
    "an error in a forward pass": (breaking(ValueError, "forward", "optimizer"), always(nothing)),
    "an error in a backward pass": (breaking(ValueError, "backward", "optimizer"), always(nothing)),
    "the same, and `model.zero_grad()`": (breaking(ValueError, "backward", "model"), always(nothing)),
    "Ctrl-C in a forward pass": (breaking(KeyboardInterrupt, "forward", "optimizer"), always(nothing)),
    "Ctrl-C in a backward pass": (breaking(KeyboardInterrupt, "backward", "model"), always(nothing)),
    "gradients that are dropped": (dropped, always(nothing)),
    "no `zero_grad()` before": (no_zero_grad, but_at_first(summed, nothing)),
    "an eval pass before `step()`": (evaluated, always(nothing)),
    "a forward pass without a backward pass": (looked, always(nothing)),
    "`health()` and `signals()` before `step()`": (asked, always(nothing)),
}


@pytest.mark.every_pair
@both_steps
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_comes_of_a_fault_is_what_the_table_says(
    fault: str, moment: str, method: type[NaturalGradient], step: str
) -> None:
    disturbed, outcomes = FAULTS[fault]
    cell = with_fault(disturbed, moment, method, step)
    outcomes[moment](cell)
    assert cell.went_on()


def with_fault(disturbed: Disturbed, moment: str, method: type[NaturalGradient], step: str) -> Cell:
    run, at = Run(method, step), MOMENTS[moment]
    for place in range(at):
        run.take(place, moment)
    before, parameters, counts = run.everything(), run.parameters(), counted(run)
    old = bases_of(run)
    disturbed(run, at, moment)
    bases = bases_of(run)
    cell = Cell(
        run=run,
        moment=moment,
        method=method,
        step=step,
        before=before,
        after=run.everything(),
        moved={name: float((own - parameters[name]).abs().max()) for name, own in run.parameters().items()},
        counts=tuple(now - then for now, then in zip(counted(run), counts, strict=True)),  # type: ignore[arg-type]
        kept={name for name, own in old.items() if torch.equal(own, bases[name])},
        known=set(bases),
        axes={name for name, own in bases.items() if is_identity(own)},
        bases=bases,
        expected=undisturbed(method, step, moment),
    )
    for place in range(run.optimizer.num_steps, length(moment)):
        run.take(place, moment)
    return cell


def bases_of(run: Run) -> dict[str, Tensor]:
    """Of the inputs of every layer that has one."""
    return {name: own.basis.vectors_in for name, own in statistics(run.optimizer).items()}


def is_identity(vectors: Tensor) -> bool:
    return torch.equal(vectors, torch.eye(vectors.shape[-1]).expand_as(vectors))


def counted(run: Run) -> tuple[int, int, int]:
    return run.optimizer.num_steps, run.optimizer.skipped_steps, run.optimizer.failed_refreshes


# -- the page --------------------------------------------------------------------------------------------


def table() -> str:
    """What the page shows of FAULTS."""
    lines = ["| fault | " + " | ".join(MOMENTS) + " |", "|---|" + "---|" * len(MOMENTS)]
    for fault, (_, outcomes) in FAULTS.items():
        lines.append(f"| {fault} | " + " | ".join(WORDS[outcomes[moment]] for moment in MOMENTS) + " |")
    lines += ["", "| | what happens |", "|---|---|"]
    return "\n".join([*lines, *(f"| {WORDS[outcome]} | {meaning} |" for outcome, meaning in MEANINGS.items())])


def test_the_page_shows_this_table() -> None:
    assert table() in PAGE.read_text("utf-8"), f"put this into {PAGE}:\n\n{table()}"


def test_there_is_a_word_for_every_outcome_and_each_occurs() -> None:
    used = {outcome for _, outcomes in FAULTS.values() for outcome in outcomes.values()}
    assert set(WORDS) == set(MEANINGS) == used
    assert all(set(outcomes) == set(MOMENTS) for _, outcomes in FAULTS.values())
