"""How the curvature of every layer is doing, and what to change where it is not doing well."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tekfac.common.tables import aligned
from tekfac.curvature.network import LayerSignals
from tekfac.optim.refresh_log import Refreshes, RefreshLog

EMPTY = 3
"""Due refreshes in a row without statistics from which something is off: an expert may get no token twice."""

ILL_CONDITIONED = 1e6
"""Condition number."""

OFF_DIAGONAL = 0.5
"""Of a factor's norm, outside of the diagonal in the basis in use."""

HEADER = (
    *("layer", "factors", "basis", "Theta", "empty", "failed"),
    *("trace", "damping", "condition", "off-diagonal", "what to change"),
)


class Problem(NamedTuple):
    """Something that is off.

    Attributes:
        kind: one of "no statistics", "failed refreshes", "no gradient", "ill-conditioned" and "old basis".
        layer: the name of the layer.
        advice: what it is and what to change, in a sentence.
    """

    kind: str
    layer: str
    advice: str


@dataclass(frozen=True)
class LayerHealth:
    """The curvature of one layer.

    Attributes:
        layer: its name.
        age_of_factors: steps since a refresh that brought statistics; None: none did, or not since a state was
            loaded in which this was not saved.
        age_of_basis: steps since factors were decomposed.
        age_of_rescaling: steps since Theta was measured; None also where it is not: where S is the product of
            eigenvalues, or moves at every step.
        empty_refreshes: due refreshes that brought no statistics.
        failed_refreshes: decompositions that failed for good, or had no memory: an older basis was kept.
        trace: of S (see LayerSignals); NaN before the first statistics, as are the next two.
        damping: the mean of what damping adds to S.
        condition: the largest entry of S + lambda divided by the smallest.
        off_diagonal: the share of the factors that lies outside of the diagonal in the basis in use, of the
            worse side; None: not asked for.
        problem: what is off; None: nothing.
    """

    layer: str
    age_of_factors: int | None
    age_of_basis: int | None
    age_of_rescaling: int | None
    empty_refreshes: int
    failed_refreshes: int
    trace: float
    damping: float
    condition: float
    off_diagonal: float | None
    problem: Problem | None

    @property
    def advice(self) -> str:
        """What is off and what to change, in one line; empty if nothing is."""
        return "" if self.problem is None else self.problem.advice


@dataclass(frozen=True)
class Health:
    """The curvature of all layers that are preconditioned; its `str` is a table.

    Attributes:
        optimizer: its name.
        layers: one entry for each.
        num_steps: steps taken.
        skipped_steps: steps not taken because of numbers that are not finite.
    """

    optimizer: str
    layers: tuple[LayerHealth, ...]
    num_steps: int
    skipped_steps: int

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is off, the worst of each layer; empty if nothing is."""
        return tuple(layer.problem for layer in self.layers if layer.problem is not None)

    def __getitem__(self, layer: str) -> LayerHealth:
        """The entry of a layer, by its name."""
        for own in self.layers:
            if own.layer == layer:
                return own
        raise KeyError(f"No preconditioned layer {layer!r}. There are {[own.layer for own in self.layers]}.")

    def __str__(self) -> str:
        rows = [
            (
                own.layer or "(the model)",
                *map(_age, (own.age_of_factors, own.age_of_basis, own.age_of_rescaling)),
                f"{own.empty_refreshes}",
                f"{own.failed_refreshes}",
                *map(_number, (own.trace, own.damping, own.condition, own.off_diagonal)),
                own.problem.kind if own.problem else "",
            )
            for own in self.layers
        ]
        lines = aligned([HEADER, *rows], right_from=1)
        lines += [f"{problem.layer or '(the model)'}: {problem.advice}" for problem in self.problems]
        steps = f"{self.num_steps} steps, {self.skipped_steps} skipped."
        return "\n".join([f"{self.optimizer}: {steps} Ages in steps.", *lines])


def health_of(
    optimizer: str,
    layers: Iterable[str],
    signals: Mapping[str, LayerSignals],
    log: RefreshLog,
    off_diagonals: Mapping[str, float],
    num_steps: int,
    skipped_steps: int,
) -> Health:
    """The report.

    Args:
        optimizer: its name.
        layers: names of those that are trained.
        signals: of those that have a block.
        log: of their refreshes.
        off_diagonals: of the layers, where they were asked for.
        num_steps: steps taken.
        skipped_steps: steps that were not.
    """
    found = (_of_layer(name, signals.get(name), log, off_diagonals.get(name), num_steps) for name in layers)
    return Health(optimizer, tuple(found), num_steps, skipped_steps)


def _of_layer(
    name: str, signals: LayerSignals | None, log: RefreshLog, off_diagonal: float | None, num_steps: int
) -> LayerHealth:
    refreshes = log.layers.get(name, Refreshes())
    last_steps = refreshes.factors, refreshes.basis, refreshes.rescaling
    ages = [None if step is None else max(0, num_steps - 1 - step) for step in last_steps]
    trace, damping, condition, failed = (math.nan, math.nan, math.nan, 0) if signals is None else signals
    return LayerHealth(
        name,
        ages[0],
        ages[1],
        ages[2],
        refreshes.empty,
        failed,
        trace,
        damping,
        condition,
        off_diagonal,
        _problem(name, signals, refreshes, log.why.get(name), off_diagonal, num_steps),
    )


def _problem(
    name: str,
    signals: LayerSignals | None,
    refreshes: Refreshes,
    why: str | None,
    off_diagonal: float | None,
    num_steps: int,
) -> Problem | None:
    """The worst of what is off with a layer."""
    if signals is None:
        if not num_steps:
            return None
        return Problem("no statistics", name, f"it is trained by first order: {why or 'nothing came of it.'}")
    if refreshes.failed_in_a_row:
        return Problem(
            "failed refreshes",
            name,
            f"its last {refreshes.failed_in_a_row} refreshes failed, and an older basis is in use: look at its "
            f"inputs, lower max_dim where memory is short, or leave it to first order: first_order=[{name!r}].",
        )
    if refreshes.empty_in_a_row >= EMPTY:
        return Problem(
            "no statistics",
            name,
            f"its last {refreshes.empty_in_a_row} due refreshes brought no statistics: "
            f"{why or 'see the log, or leave it to first_order.'}",
        )
    if signals.trace == 0:
        return Problem(
            "no gradient",
            name,
            "no gradient reaches it: its trace is 0. tekfac.explain(model) tells what is measured.",
        )
    if not signals.condition <= ILL_CONDITIONED:
        return Problem(
            "ill-conditioned",
            name,
            f"its condition is {signals.condition:.1e}: raise damping, to Relative(0.03) perhaps.",
        )
    if off_diagonal is not None and off_diagonal > OFF_DIAGONAL:
        return Problem(
            "old basis",
            name,
            f"{off_diagonal:.0%} of its factors lie outside of the diagonal in its basis: lower basis_every.",
        )
    return None


def _age(steps: int | None) -> str:
    return "-" if steps is None else f"{steps}"


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2g}"
