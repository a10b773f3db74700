"""Seconds of a step of several processes, by counting: operations over a rate, bytes over a link.

What is added up goes round a ring, so that every process sends 2 (N - 1) / N of it; what is shared out reaches
every process once. Gradients are added up as DistributedDataParallel does it. Nothing is taken to happen at the
same time; calls of Python and torch, and what memory takes, are left out. What measuring takes is counted as if
all layers were measured in sums; of very large ones a few samples are, which takes less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

from torch import nn

from tekfac.common.checks import require_keywords
from tekfac.common.tables import aligned, in_seconds
from tekfac.layers.layer import Layer
from tekfac.optim.work_plan import WorkPlan

FLOPS_PER_MULTIPLICATION = 2
"""Each comes with an addition."""

SUMS, IN_A_SUM = 16, 2
"""As many sums are measured in the whole batch, of so many samples each (capture/selection.py)."""

WEIGHTS_OF_A_PASS = 1 / 3
"""Of a forward and a backward pass: the products that give the gradients of weights."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one process, and what it does in a step without curvature.

    Attributes:
        flops: floating-point operations per second.
        link: bytes per second that it sends.
        eigh_flops: operations per second of decompositions; None: as of others.
        latency: seconds of a message.
        step_flops: operations of a forward and backward pass of one process; None: not told.
        samples: in it; None: all of them are measured.
    """

    flops: float
    link: float
    eigh_flops: float | None = None
    latency: float = 0.0
    step_flops: float | None = None
    samples: float | None = None

    @classmethod
    def of(cls, given: Mapping[str, float]) -> Machine:
        """Checked.

        Raises:
            TypeError: for names that do not exist, or are missing.
            ValueError: for values that are no rates.
        """
        require_keywords("machine", given, [field.name for field in fields(cls)])
        missing = [name for name in ("flops", "link") if name not in given]
        if missing:
            raise TypeError(f"machine needs {' and '.join(missing)}, such as {{'flops': 1e13, 'link': 1e10}}.")
        for name, value in given.items():
            if value < 0 or (value == 0 and name != "latency") or not math.isfinite(value):
                raise ValueError(f"Invalid machine[{name!r}]: {value!r}. Expected a positive number.")
        return cls(**given)


@dataclass(frozen=True)
class StepCosts:
    """Seconds, by counting.

    Attributes:
        passes: of forward and backward passes, at every step; None: their operations were not told.
        gradients: of adding them up, at every step.
        precondition: at every step, in every process.
        measure: what a process forms and squares of its samples, per refresh.
        decompose: of the process that has most to do, per refresh.
        moments: of adding them up, and Theta where it is measured, per refresh.
        bases: of sharing them out, per refresh.
        factors_every: steps between two measurements.
        basis_every: steps between two bases.
    """

    passes: float | None
    gradients: float
    precondition: float
    measure: float
    decompose: float
    moments: float
    bases: float
    factors_every: int
    basis_every: int

    @property
    def ddp_step(self) -> float | None:
        """A step of first order; None where passes are not told."""
        return None if self.passes is None else self.passes + self.gradients

    @property
    def refresh(self) -> float:
        """All that a refresh takes."""
        return self.measure + self.decompose + self.moments + self.bases

    @property
    def added(self) -> float:
        """To the mean step."""
        measuring, basis = self.measure + self.moments, self.decompose + self.bases
        return self.precondition + measuring / self.factors_every + basis / self.basis_every

    @property
    def ratio(self) -> float | None:
        """The mean step over one of first order."""
        return None if self.ddp_step is None else 1 + self.added / self.ddp_step

    def __str__(self) -> str:
        step = self.ddp_step
        rows = [("seconds, by counting", "each time", "every", "per step", "of a DDP step")]
        every = {"measure": self.factors_every, "moments": self.factors_every}
        every |= dict.fromkeys(("decompose", "bases"), self.basis_every)
        for name, words in WORDS.items():
            seconds = asdict(self)[name]
            if seconds is None:
                rows.append((words, "not told", "1", "", ""))
                continue
            mean = seconds / every.get(name, 1)
            share = "" if step is None else f"{mean / step:.3f}"
            rows.append((words, in_seconds(seconds), f"{every.get(name, 1)}", in_seconds(mean), share))
        lines = aligned(rows, right_from=1)
        lines.append(
            f"A refresh takes {in_seconds(self.refresh)}, and curvature {in_seconds(self.added)} a step."
        )
        if self.ratio is not None and step is not None:
            lines.append(f"The mean step takes {self.ratio:.2f} of DDP's ({in_seconds(step)}).")
        return "\n".join(lines)


WORDS = {
    "passes": "forward and backward",
    "gradients": "gradients, added up",
    "precondition": "precondition",
    "measure": "measure",
    "moments": "moments, added up",
    "decompose": "decompose",
    "bases": "bases, to all",
}
"""Fields of StepCosts, as they are printed."""


def costs_of(model: nn.Module, layers: Iterable[Layer], plan: WorkPlan, machine: Machine) -> StepCosts:
    """Seconds of a step.

    Args:
        model: whose gradients are added up.
        layers: those that are preconditioned.
        plan: of their refreshes.
        machine: its rates.
    """
    ranks, trained = plan.ranks, [layer for layer in layers if layer.weight.requires_grad]
    around = 2 * (ranks - 1) / ranks
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    precondition = measure = 0.0
    for layer in trained:
        turning = sum(
            turn for turn in layer.shape.forms.turning(layer.shape.d_in, layer.shape.d_out) if turn > 1
        )
        precondition += 2 * FLOPS_PER_MULTIPLICATION * layer.shape.size * turning
        measure += SUMS / ranks * FLOPS_PER_MULTIPLICATION * layer.shape.size * turning
    if machine.step_flops is not None:
        share = 1.0 if machine.samples is None else min(1.0, SUMS * IN_A_SUM / (machine.samples * ranks))
        measure += share * WEIGHTS_OF_A_PASS * machine.step_flops
    together = ranks > 1
    added_up = together * plan.turns * (4 if plan.sent.theta else 2)  # in every turn counts of terms, then sums
    return StepCosts(
        passes=None if machine.step_flops is None else machine.step_flops / machine.flops,
        gradients=around * gradients / machine.link + together * machine.latency,
        precondition=precondition / machine.flops,
        measure=measure / machine.flops,
        decompose=plan.longest / (machine.eigh_flops or machine.flops),
        moments=around * (plan.sent.moments + plan.sent.theta) / machine.link + added_up * machine.latency,
        bases=plan.sent.bases / machine.link + plan.broadcasts * machine.latency,
        factors_every=plan.intervals.factors,
        basis_every=plan.intervals.basis,
    )
