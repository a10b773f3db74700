"""Where the time of a step goes, phase by phase: heard over one cycle after the timing, to not disturb it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tekfac.common.phases import PHASES, listening
from tekfac.lab.bench.timing import Racer

OF_PLAIN_STEPS = ("precondition", "update")
MEASURING = tuple(phase for phase in PHASES if phase not in OF_PLAIN_STEPS)
REST = "forward and backward"

LITTLE = 0.01
"""A step of which measuring is at most this share measures nothing."""

Heard = Mapping[str, float]
"""Seconds of a step by phase, and of the REST."""


def listen(racer: Racer, steps: int) -> list[Heard]:
    """Take some steps and note the seconds of every phase of each."""
    heard: list[Heard] = []
    for _ in range(steps):
        with listening() as seconds:
            whole = racer.step()
        heard.append({**seconds, REST: whole - sum(seconds.values())})
    return heard


def broken_down(racer: Racer) -> dict[str, Any]:
    """One cycle as plain values: seconds per step of every phase; which positions of it measure nothing.

    Empty where the library names no phases.
    """
    cycle, begin = racer.contestant.cycle, racer.taken
    heard = listen(racer, cycle)
    if not any(phase in step for step in heard for phase in PHASES):
        return {}
    total: Counter[str] = Counter()
    for step in heard:
        total.update(step)
    positions = {(begin + index) % cycle: measures_little(step) for index, step in enumerate(heard)}
    return {
        "phases": {phase: total[phase] / cycle for phase in (*PHASES, REST) if phase in total},
        "plain": [positions[position] for position in range(cycle)],
    }


def measures_little(step: Heard) -> bool:
    """Whether a step is a plain one."""
    return of_measuring(step) <= LITTLE * sum(step.values())


def of_measuring(step: Heard) -> float:
    """Seconds that a step spends on measuring."""
    return sum(step.get(phase, 0.0) for phase in MEASURING)


def of_plain_step(heard: Sequence[Heard]) -> float:
    """Seconds of preconditioning and updating, median over steps."""
    return median(sum(step.get(phase, 0.0) for phase in OF_PLAIN_STEPS) for step in heard)
