"""Promise: the numbers of a report are those that one computes by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lab_runs import write_run
from tekfac.lab.report.runs import find_runs, tasks_of
from tekfac.lab.report.summary import (
    CHOSEN,
    GIVEN,
    Spread,
    TaskSummary,
    over_epochs,
    over_time,
    spread,
    summarise,
)


def summary(folder: Path, target: float | None = None) -> TaskSummary:
    (found,) = summarise(find_runs([folder]), target)
    return found


def numbers(found: Spread | None) -> tuple[float, float | None]:
    assert found is not None
    return found.mean, found.deviation


def test_mean_and_sample_deviation() -> None:
    found = spread([1.0, 2.0, 4.0])
    assert found is not None
    assert found.mean == pytest.approx(7 / 3)
    assert found.deviation == pytest.approx(math.sqrt((16 / 9 + 1 / 9 + 25 / 9) / 2))
    assert spread([5.0]) == Spread(5.0, None, 1)
    assert spread([]) is None


def test_the_numbers_of_a_group(tmp_path: Path) -> None:
    write_run(tmp_path / "0", [0.5, 0.9, 0.8], losses=[1.0, 0.6, 0.2], per_epoch=2.0, seed=0)
    write_run(tmp_path / "1", [0.5, 0.7, 0.9], losses=[1.0, 0.6, 0.4], per_epoch=3.0, seed=1)
    (row,) = summary(tmp_path, target=90).rows
    half = math.sqrt(0.5)  # the deviation of two numbers is their distance over the root of two
    assert numbers(row.final_accuracy) == pytest.approx((0.85, 0.1 * half))
    assert numbers(row.best_accuracy) == pytest.approx((0.9, 0.0))
    assert numbers(row.train_loss) == pytest.approx((0.3, 0.2 * half))
    assert numbers(row.seconds) == pytest.approx((7.5, 3 * half))
    assert numbers(row.step_ms) == pytest.approx((250, 100 * half))
    assert row.parts_ms == pytest.approx(
        {"data": 25, "forward": 50, "backward": 75, "curvature": 37.5, "update": 37.5}
    )
    assert (row.epochs_to_target.median, row.seconds_to_target.median) == pytest.approx((2.5, 6.5))
    assert row.epochs_to_target.by_all


def test_a_run_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    for folder in ("first", "again"):
        write_run(tmp_path / folder, [0.5, 0.9], seed=3)
    (row,) = summary(tmp_path).rows
    assert numbers(row.final_accuracy) == (0.9, None)  # and no deviation, which would be zero
    assert row.epochs_to_target.runs == 1


def test_the_target_is_reached_at_the_first_epoch_with_it_and_not_between(tmp_path: Path) -> None:
    for seed, accuracies in enumerate([[0.1, 0.57, 0.5], [0.569, 0.5699, 0.9], [0.1, 0.2, 0.3]]):
        write_run(tmp_path / str(seed), accuracies, per_epoch=10.0 + seed, seed=seed)
    (row,) = summary(tmp_path, target=57).rows
    assert (row.epochs_to_target.median, row.epochs_to_target.count, row.epochs_to_target.runs) == (2.5, 2, 3)
    assert row.seconds_to_target.median == pytest.approx((20 + 33) / 2)
    (row,) = summary(tmp_path, target=99).rows
    assert (row.epochs_to_target.median, row.epochs_to_target.count) == (None, 0)


def test_diverged_and_unfinished_runs_count_with_their_last_epoch(tmp_path: Path) -> None:
    write_run(tmp_path / "0", [0.5, 0.8], losses=[0.5, 0.1], seed=0)
    write_run(tmp_path / "1", [0.2], losses=[None], status="diverged", seed=1)
    write_run(tmp_path / "2", [0.5], losses=[0.5], status=None, seed=2)
    write_run(tmp_path / "3", [], status="diverged", seed=3)
    (row,) = summary(tmp_path, target=40).rows
    assert row.final_accuracy is not None
    assert (row.final_accuracy.mean, row.final_accuracy.count) == (pytest.approx(0.5), 3)
    assert row.train_loss is not None
    assert math.isnan(row.train_loss.mean)
    assert (row.epochs_to_target.count, row.epochs_to_target.runs) == (2, 4)
    assert row.group.status == "2 of 4 diverged, 1 of 4 unfinished"


def test_the_chosen_target_is_what_three_quarters_reach_with_every_seed(tmp_path: Path) -> None:
    worst = [0.3, 0.917, 0.57, 0.95, 0.93]
    for index, accuracy in enumerate(worst):
        write_run(tmp_path / f"{index}-0", [accuracy, 0.1], lr=0.1 * (index + 1), seed=0)
        write_run(tmp_path / f"{index}-1", [0.99], lr=0.1 * (index + 1), seed=1)
    write_run(tmp_path / "diverged", [0.05], lr=9.0, status="diverged")
    found = summary(tmp_path)
    assert (found.target, found.target_rule) == (0.57, CHOSEN)
    assert sum(row.epochs_to_target.by_all for row in found.rows) == 4
    assert summary(tmp_path, 60).target_rule == GIVEN


def test_the_best_group_of_each_optimizer_and_the_ranking(tmp_path: Path) -> None:
    for index, (optimizer, accuracy) in enumerate([("adam", 0.7), ("adam", 0.9), ("sgdm", 0.8)]):
        write_run(tmp_path / str(index), [accuracy], optimizer=optimizer, lr=0.1 * (index + 1))
    found = summary(tmp_path)
    assert [row.group.label for row in found.ranked] == ["Adam, lr 0.2", "SGDM", "Adam, lr 0.1"]
    assert [row.group.label for row in found.best_of_optimizers] == ["SGDM", "Adam, lr 0.2"]


@pytest.mark.parametrize("target", [0.0, -3.0, 101.0, math.nan])
def test_a_target_that_is_no_percentage_is_an_error(tmp_path: Path, target: float) -> None:
    write_run(tmp_path / "run", [0.5])
    with pytest.raises(ValueError, match="expected a test accuracy in percent"):
        summary(tmp_path, target)


def test_without_any_epoch_there_is_nothing_to_report(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [], status=None)
    with pytest.raises(ValueError, match="No run has finished an epoch"):
        summary(tmp_path)


def test_curves_are_means_along_epochs_and_along_the_mean_times_of_epochs(tmp_path: Path) -> None:
    write_run(tmp_path / "0", [0.2, 0.6, 0.8], per_epoch=1.0, seed=0)
    write_run(tmp_path / "1", [0.4, 0.8, 0.8], per_epoch=2.0, seed=1)
    write_run(tmp_path / "2", [0.3], per_epoch=90.0, status="diverged", seed=2)
    runs = tasks_of(find_runs([tmp_path]))[0].groups[0].runs
    line = over_epochs(runs, lambda epoch: epoch.test_accuracy)
    assert line.x == [1, 2, 3]
    assert line.mean == pytest.approx([0.3, 0.7, 0.8])
    assert line.high[1] == pytest.approx(0.7 + 0.2 / math.sqrt(2))
    assert over_time(runs, lambda epoch: epoch.test_accuracy) == line._replace(x=[1.5, 3.0, 4.5])


def test_curves_along_time_end_with_the_numbers_of_the_table(tmp_path: Path) -> None:
    for seed, accuracies in enumerate([[0.2, 0.5, 0.9], [0.3, 0.4, 0.8], [0.1, 0.6, 0.7]]):
        write_run(tmp_path / str(seed), accuracies, per_epoch=1.0 + 3 * seed, seed=seed)
    (row,) = summary(tmp_path).rows
    line = over_time(row.group.runs, lambda epoch: epoch.test_accuracy)
    assert (line.mean[-1], line.high[-1] - line.mean[-1]) == pytest.approx(numbers(row.final_accuracy))
    assert line.x[-1] == pytest.approx(numbers(row.seconds)[0])
