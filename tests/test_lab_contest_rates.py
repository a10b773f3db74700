"""Promise: a contest tunes every learning rate alike, until the best lies inside, and goes on where it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tekfac.lab.contest import contest, ledger, rates
from tekfac.lab.contest.contest import BORROWED, ENTRANTS, Contest, compete
from tekfac.lab.contest.ledger import Ledger
from tekfac.lab.contest.running import Entry, Job, Outcome
from tekfac.lab.contest.standing import Standing, page
from tekfac.lab.contest.tasks import TASKS

RUNS: list[Job] = []


def valley(job: Job) -> Outcome:
    """Best at a rate of the optimizer's own; TEKFAC is twice as fast as AdamW."""
    best = {"tekfac": 1e-2, "adamw": 1e-5}[job.entry.optimizer]
    far = abs(math.log10(job.entry.lr / best))
    speed = {"tekfac": 2.0, "adamw": 1.0}[job.entry.optimizer]
    looks = [(step, 0.1 * step, 3.0 - 2.0 * min(1.0, speed * step / 100) + far) for step in (25, 50, 75, 100)]
    return Outcome([(step * job.steps // 100, seconds, score) for step, seconds, score in looks], 1.0 + far)


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    RUNS.clear()

    def run_all(
        jobs: Iterable[Job], processes: int, say: Callable[[str], None], keep: Callable[[Job, Outcome], None]
    ) -> None:
        for job in jobs:
            RUNS.append(job)
            keep(job, valley(job))

    monkeypatch.setattr(ledger, "run_all", run_all)


def wish() -> Contest:
    return Contest("classifier", ["TEKFAC", "AdamW"], [0, 1], 1, None)


@pytest.mark.usefixtures("imagined")
def test_the_grid_grows_until_the_best_rate_lies_inside(tmp_path: Path) -> None:
    text = compete(wish(), tmp_path, "the command", lambda _: None)
    tried = {
        name: sorted(job.entry.lr for job in RUNS if job.entry.optimizer == name and job.kept == "tuning")
        for name in ("tekfac", "adamw")
    }
    assert tried["tekfac"] == [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
    assert tried["adamw"] == [3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
    assert {job.seed for job in RUNS if job.kept == "tuning"} == {contest.TUNING_SEED}
    final = [(job.entry.optimizer, job.entry.lr, job.seed) for job in RUNS if job.kept == "test"]
    assert final == [
        (name, lr, seed)
        for seed in (0, 1)
        for name, lr in (("tekfac", 1e-2), ("adamw", 1e-5), ("tekfac", 1e-5))
    ]
    assert "| TEKFAC | `tekfac, lr=0.01` | 1 ± 0 | 1 ± 0 | 0.50 | 0.50 | 16.7 |" in text
    assert "| AdamW | `adamw, lr=1e-05` | 1 ± 0 | 1 ± 0 | 1.00 | 1.00 |" in text
    assert f"| {BORROWED} | `tekfac, lr=1e-05` | 4 ± 0 | 4 ± 0 | not reached | not reached |" in text
    assert "- command: the command" in text
    numbers = json.loads((tmp_path / "classifier.json").read_text())
    assert numbers["tuned"]["TEKFAC"]["0.01"] == 1
    assert len(numbers["runs"][BORROWED]) == 2


@pytest.mark.usefixtures("imagined")
def test_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    text = compete(wish(), tmp_path, "the command", lambda _: None)
    lines = (tmp_path / "classifier.jsonl").read_text().splitlines()
    assert len(lines) == len(RUNS)
    (tmp_path / "classifier.jsonl").write_text("\n".join(lines[:-2]) + "\n")
    RUNS.clear()
    assert compete(wish(), tmp_path, "the command", lambda _: None) == text
    assert len(RUNS) == 2


def test_a_ledger_keeps_what_diverged_and_refuses_what_is_no_run_or_of_other_code(tmp_path: Path) -> None:
    path, code = tmp_path / "gpt.jsonl", dict.fromkeys(ledger.IN_COMMON, "abc")
    job = Job("gpt", Entry("sgd", 1.0), 0, 10)
    Ledger.at(path, code).add(job, Outcome([(5, 0.5, 2.0), (10, 1.0, math.inf)], math.inf))
    (again,) = Ledger.at(path, code).runs.values()
    assert again == Outcome([(5, 0.5, 2.0), (10, 1.0, math.inf)], math.inf)
    with pytest.raises(
        ValueError, match=r"were made by \{'commit': 'abc', .*\}; others would be made by .*'def'"
    ):
        Ledger.at(path, {**code, "commit": "def"})
    with path.open("a") as file:
        file.write('{"job": "gpt"\n')
    with pytest.raises(ValueError, match=r"Line 2 of .* is no finished run\. Remove the line"):
        Ledger.at(path, code)


def test_places_are_rates() -> None:
    assert [rates.rate(place) for place in range(-6, 2)] == [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0]
    assert rates.first_places(-4) == [-6, -5, -4, -3, -2]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([3.0, 2.0, 1.0, 2.0, 3.0], None),
        ([1.0, 2.0, 3.0], -1),
        ([3.0, 2.0, 1.0], 3),
        ([1.0, 1.0, math.inf], -1),
        ([math.inf] * 3, -1),
        ([float(place) for place in range(9)], None),
    ],
)
def test_a_grid_goes_on_beyond_the_end_that_is_best(scores: list[float], expected: int | None) -> None:
    assert rates.next_place(dict(enumerate(scores))) == expected


def test_the_width_of_good_rates_is_read_from_lines_between_them() -> None:
    assert rates.width({0: 3.0, 1: 1.0, 2: 2.0}, 0.5) == (pytest.approx((0.25 + 0.5) / 2), False)
    assert rates.width({0: math.inf, 1: 1.0, 2: 1.0, 3: math.inf}, 0.5) == (pytest.approx(0.5), False)
    assert rates.width({0: 1.0, 1: 1.0, 2: 1.0}, 0.5) == (pytest.approx(1.0), True)
    assert rates.width({0: 1.0, 1: 1.1, 2: 4.0}, 0.5) == (pytest.approx((1 + 0.4 / 2.9) / 2), True)


def test_a_target_is_reached_where_a_curve_stays_below_it() -> None:
    curve = [(0.0, 5.0), (10.0, 4.0), (20.0, 2.0), (30.0, 1.0)]
    assert rates.settled(curve, 3.0) == pytest.approx(15.0)
    assert rates.settled(curve, 6.0) == 0.0
    assert rates.settled(curve, 0.5) == math.inf
    assert rates.settled([(10.0, math.inf), (20.0, 1.0)], 3.0) == 20.0
    assert rates.settled([(0.0, 5.0), (10.0, 2.0), (20.0, 4.0), (30.0, 2.0)], 3.0) == pytest.approx(25.0)


def test_a_target_that_diverged_is_none() -> None:
    runs = {
        "AdamW": [
            Outcome([(0, 0.0, 5.0), (10, 1.0, math.inf)], 1.0),
            Outcome([(0, 0.0, 5.0), (10, 1.0, 2.0)], 1.0),
        ],
        "TEKFAC": [Outcome([(0, 0.0, 5.0), (10, 1.0, 2.0)], 1.0)] * 2,
    }
    tuned = {name: {-5: math.inf, -4: math.inf} for name in runs}
    entries = {name: ENTRANTS[name].at(-4) for name in runs}
    text = page(Standing(TASKS["gpt"], 300, tuned, entries, runs))
    assert "| TEKFAC | `tekfac, lr=0.01` | 2 ± 0 | 1 ± 0 | – | – | 100 |" in text
    assert "| AdamW | diverged | diverged | – |" in text


def test_without_adamw_there_is_no_target() -> None:
    runs = {"TEKFAC": [Outcome([(10, 1.0, 2.0)], 1.0)]}
    entry = ENTRANTS["TEKFAC"].at(-4)
    text = page(
        Standing(TASKS["gpt"], 300, {"TEKFAC": {-5: 3.0, -4: 2.0, -3: math.inf}}, {"TEKFAC": entry}, runs)
    )
    assert "| TEKFAC | `tekfac, lr=0.01` | 2 | 1 | – | – | 100 |" in text
    assert "| TEKFAC | 3 | **2** | diverged | 0.01 |" in text


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected one of TEKFAC"):
        Contest("gpt", ["SAOP"], [0], 1, None)
    with pytest.raises(ValueError, match="Did you mean 'gpt'"):
        Contest("gtp", ["SOAP"], [0], 1, None)
