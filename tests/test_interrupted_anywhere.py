"""Promise: Ctrl-C at any line of forward, backward and step is as if it had not come, or after the step.

A real SIGINT is raised at one line after another of the library's code. Somebody in a notebook goes on with the
same batch, or, where the step was taken, with the next one: the run ends as one that nobody interrupted.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tekfac
from tekfac import KFAC, TEKFAC
from tekfac.common.interrupts import Uninterrupted
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, differences, everything, mlp

SOURCE = str(Path(tekfac.__file__).parent)
MEASURING, PLAIN = 2, 3
"""Steps."""

PHASES = ("forward", "backward", "step")
Make = Callable[..., NaturalGradient]


class At:
    """Counts the lines of the library that are come by, and interrupts at one of them."""

    def __init__(self, line: int | None) -> None:
        self.count = 0
        self._line = line

    @contextmanager
    def traced(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._came_by if frame.f_code.co_filename.startswith(SOURCE) else None

    def _came_by(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self._line:
                signal.raise_signal(signal.SIGINT)
        return self._came_by


def run(make: Make, settings: dict[str, Any], phase: str, step: int, line: int | None) -> tuple[Any, int]:
    """What a run of a few steps ends with, and how many lines the phase of that step has."""
    clocks = {"factors_every": 2, "basis_every": 2}
    model = mlp()
    optimizer = make(model, lr=0.05, seed=0, turns=False, interval_growth=None, **clocks, **settings)
    here, taken, interrupted = At(line), 0, False
    while taken < 5:
        torch.manual_seed(taken)
        x, y = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
        is_here = taken == step and not interrupted

        def go(name: str, function: Callable[[], Any], is_here: bool = is_here) -> Any:
            if not (is_here and name == phase):
                return function()
            with here.traced():
                return function()

        try:
            optimizer.zero_grad()
            loss = F.cross_entropy(go("forward", lambda x=x: model(x)), y)
            go("backward", loss.backward)
            go("step", optimizer.step)
            taken += 1
        except KeyboardInterrupt:
            interrupted = True
            taken += optimizer.num_steps > taken
    return everything(model, optimizer), here.count


CASES = {
    "as it comes": (TEKFAC, {}),
    "drawn labels": (TEKFAC, {"fisher": "sampled"}),
    "natural": (TEKFAC.natural, {"rescaling_every": 2, "likelihood": "categorical"}),
    "KFAC": (KFAC, {}),
}


def nesting_of_autocast() -> int:
    """How many uses of it are open, by torch's own count."""
    deeper = torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == deeper - 1
    return deeper - 1


def interrupted_at_every(name: str, phase: str, step: int, stride: int) -> None:
    make, settings = CASES[name]
    expected, lines = run(make, settings, phase, step, None)
    assert lines or step == PLAIN
    for line in range(1, lines + 1, stride):
        found, _ = run(make, settings, phase, step, line)
        assert not differences(expected, found), f"line {line} of {lines}"
        assert nesting_of_autocast() == 0, f"line {line} of {lines}"
        assert torch.is_grad_enabled(), f"line {line} of {lines}"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("step", [MEASURING, PLAIN], ids=["measuring", "plain"])
def test_it_is_as_if_it_had_not_come_at_many_lines(phase: str, step: int) -> None:
    interrupted_at_every("as it comes", phase, step, stride=7)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("step", [MEASURING, PLAIN], ids=["measuring", "plain"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_as_if_it_had_not_come_at_any_line(name: str, phase: str, step: int) -> None:
    interrupted_at_every(name, phase, step, stride=1 if name == "as it comes" else 5)


def test_a_pass_that_a_module_leaves_by_an_interrupt_ends_nothing() -> None:
    class Leaving(nn.Module):
        leaves = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.leaves:
                raise KeyboardInterrupt
            return x

    ends = []
    for at in (None, 0, 1, 2):
        leaving = Leaving()
        model = nn.Sequential(*mlp(), leaving)
        optimizer = TEKFAC(model, lr=0.05, seed=0, interval_growth=None, factors_every=1, basis_every=1)
        for step in range(4):
            torch.manual_seed(step)
            x, y = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
            optimizer.zero_grad()
            leaving.leaves = step == at
            try:
                model(x)
            except KeyboardInterrupt:
                leaving.leaves = False
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append(everything(model, optimizer))
    for end in ends[1:]:
        assert_identical(ends[0], end)


def test_what_holds_it_back_lets_it_go_at_the_end_and_only_once() -> None:
    done = []

    def interrupted() -> None:
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_elsewhere_it_does_nothing() -> None:
    """In other threads, and where SIGINT is ignored."""
    found: list[Any] = []

    def elsewhere() -> None:
        with Uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        elsewhere()
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [signal.default_int_handler, signal.SIG_IGN]
