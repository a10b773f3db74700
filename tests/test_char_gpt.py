"""Promise: benchmarks/char_gpt.py compares optimizers on equal terms and writes what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tekfac

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def char_gpt() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    threads = torch.get_num_threads()
    try:
        import char_gpt as module

        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text(char_gpt: ModuleType) -> object:
    return char_gpt.standard_library()


def test_the_quick_run_writes_page_curves_and_figure(char_gpt: ModuleType, tmp_path: Path) -> None:
    char_gpt.main(["--quick", "--threads", "1", "--out", str(tmp_path / "gpt")])
    page = (tmp_path / "gpt.md").read_text()
    assert all(f"| {name} | " in page for name in char_gpt.GRIDS)
    assert "](gpt/curves.png)" in page
    assert (tmp_path / "gpt" / "curves.png").read_bytes().startswith(b"\x89PNG")
    curves = json.loads((tmp_path / "gpt" / "curves.json").read_text())
    assert {name: set(runs) for name, runs in curves.items()} == {name: {"1", "2"} for name in char_gpt.GRIDS}
    steps = [point[0] for point in curves["TEKFAC"]["1"]]
    assert steps == [0, 4, 8, 12]


def test_all_optimizers_start_at_the_same_weights_and_see_the_same_batches(
    char_gpt: ModuleType, text: object
) -> None:
    runs = [
        char_gpt.Run(name, grid[0], 1, char_gpt.QUICK.steps, char_gpt.QUICK, text)
        for name, grid in char_gpt.GRIDS.items()
    ]
    assert len({run.loss for run in runs}) == 1
    for run in runs:
        run.advance(3)
    states = [run.batches.get_state() for run in runs]
    assert all(torch.equal(state, states[0]) for state in states)


def test_every_optimizer_is_tuned_over_as_many_settings(char_gpt: ModuleType) -> None:
    assert len({len(grid) for grid in char_gpt.GRIDS.values()}) == 1


def test_taking_turns_does_not_change_a_run(char_gpt: ModuleType, text: object) -> None:
    task = replace(char_gpt.QUICK, steps=6, turn=2, seeds=(1,))
    best = {name: grid[0] for name, grid in char_gpt.GRIDS.items()}
    together = char_gpt.compared(best, task, text)
    for name, setting in best.items():
        alone = char_gpt.Run(name, setting, 1, 6, task, text)
        alone.advance(6)
        assert alone.loss == together[name][0].loss


def test_tuning_and_validation_look_at_different_text(char_gpt: ModuleType, text: object) -> None:
    of_tuning = char_gpt.Run("SGD", {"lr": 0.1}, 0, 1, char_gpt.QUICK, text)
    of_result = char_gpt.Run("SGD", {"lr": 0.1}, 0, 1, replace(char_gpt.QUICK, tuning_seed=9), text)
    assert torch.equal(of_tuning.model.head.weight, of_result.model.head.weight)
    assert of_tuning.loss != of_result.loss


def test_every_layer_of_the_network_is_preconditioned(char_gpt: ModuleType, text: object) -> None:
    run = char_gpt.Run("TEKFAC", char_gpt.NATURAL[0], 1, 2, char_gpt.QUICK, text)
    run.advance(1)
    assert isinstance(run.optimizer, tekfac.TEKFAC)
    assert set(run.optimizer.curvature.parameters) == {name for name, _ in run.model.named_parameters()}


def test_a_run_that_never_gets_to_the_loss_of_adamw_is_said_to_be_so(
    char_gpt: ModuleType, text: object
) -> None:
    def made(name: str, seed: int, losses: list[float]) -> object:
        run = char_gpt.Run(name, char_gpt.GRIDS[name][0], seed, 2, char_gpt.QUICK, text)
        run.taken = [0.5, 0.5]
        run.curve = [(step, step / 2, loss) for step, loss in enumerate(losses)]
        return run

    runs = {
        "AdamW": [made("AdamW", 1, [3, 2, 1]), made("AdamW", 2, [3, 2, 1])],
        "SGD": [made("SGD", 1, [3, 3, 0.9]), made("SGD", 2, [3, 3, 3])],
        "TEKFAC": [made("TEKFAC", 1, [3, 1, 0.5]), made("TEKFAC", 2, [3, 0.8, 0.5])],
    }
    tuning = {name: [(char_gpt.GRIDS[name][0], 1.0)] for name in runs}
    page = char_gpt.report(runs, tuning, text=text, task=char_gpt.QUICK, figure="f.png", made_by="- here")
    assert "| SGD | 1 of 2 runs got there | 1 of 2 runs got there | 500.0 (500.0 to 500.0) | 500.0 |" in page
    assert "| TEKFAC | 1 ± 0 | 0.5 ± 0.0 | 500.0 (500.0 to 500.0) | 500.0 |" in page
    assert "TEKFAC (0.500), then AdamW (1.000), then SGD (1.950)" in page
    assert "TEKFAC by steps, TEKFAC by the clock" in page


def test_a_run_that_diverges_counts_as_the_worst(char_gpt: ModuleType, text: object) -> None:
    tried = char_gpt.tuned("SGD", [{"lr": 1e6}, {"lr": 1e-3}], char_gpt.QUICK, text)
    assert [setting["lr"] for setting, _ in tried] == [1e-3, 1e6]
    assert tried[-1][1] == char_gpt.DIVERGED
