"""What the benchmark says of its numbers: ratios, their spread, tables, figures; how results are merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tekfac.lab.bench import figures, result, tables
from tekfac.lab.bench.summary import Spread, plain_seconds, plain_summary, quantile, ratios, summarised
from tekfac.lab.bench.writing import page, write


def timing(
    seconds: list[float], cycle: int = 1, plain: list[bool] | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "cycle": cycle,
        "plain": plain or [True] * cycle,
        "first_step": 9.0,
        "begin": 3,
        "seconds": seconds,
        "skipped": 0,
        **more,
    }


COUNTS = {"network": 100, "preconditioning": 50, "measuring": 500, "limit_of_plain_step": 1.5, "limit": None}
PHASES = {"eigh": 1.0, "precondition": 0.5, "forward and backward": 0.5}
TIMING = {
    "sgd": timing([1.0, 1.0, 2.0, 2.0]),
    "tekfac@2": timing([2.0, 4.0, 3.0, 9.0], 2, [True, False], multiplications=COUNTS, phases=PHASES),
}
"""SGD takes a second, then two; ours measures at every step of an odd number, the first of which is step 3."""

MEMORY = {
    "sgd": {"peak": 100 * 2**20, "code": 80 * 2**20, "counted": 2**20, "steps": 4, "environment": {"A": "1"}},
    "tekfac@2": {
        "peak": 118 * 2**20,
        "code": 90 * 2**20,
        "counted": 5 * 2**20,
        "steps": 4,
        "environment": {"A": "1"},
    },
}


def measured(commit: str = "abc", **threads: Any) -> dict[str, Any]:
    origin = {"commit": commit, "threads": [1], "versions": {"torch": "2"}, "command": "tekfac bench"}
    return {
        "provenance": origin,
        "quick": False,
        "threads": threads or {"1": TIMING},
        "memory": MEMORY,
        "network": {"batch": 8},
    }


GROWTH = {
    "provenance": measured()["provenance"],
    "quick": True,
    "sweeps": {
        "width of the MLP": {
            "sizes": [1, 2],
            "seconds": {what: [0.001, 0.004] for what in tables.MEASURED},
            "exponents": {**dict.fromkeys(tables.MEASURED, 2.0), "measuring": None},
        }
    },
}


def whole(**networks: Any) -> result.Result:
    return {"format": result.FORMAT, "networks": networks, "growth": GROWTH}


# -- numbers -------------------------------------------------------------------------------------------------


def test_a_ratio_is_of_the_means_of_a_cycle_at_the_same_turns() -> None:
    assert ratios([2.0, 4.0, 3.0, 9.0], [1.0, 1.0, 2.0, 2.0], 2) == [3.0, 3.0]
    assert ratios([2.0, 4.0, 3.0, 9.0], [1.0, 1.0, 2.0, 2.0], 1) == [2.0, 4.0, 1.5, 4.5]
    assert ratios([2.0, 4.0, 3.0], [1.0, 1.0, 2.0], 2) == [3.0]


def test_quantiles_lie_on_lines_between_the_values() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], share) for share in (0, 0.25, 0.5, 1)] == [1.0, 1.75, 2.5, 4.0]
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 5.0, 5.0, 1)


def test_plain_steps_are_told_by_their_place_in_the_cycle() -> None:
    assert plain_seconds(TIMING["tekfac@2"]) == [4.0, 9.0]
    assert plain_seconds(timing([1.0, 2.0, 3.0], 3, [True, False, False])) == [1.0]


def test_times_are_ratios_to_sgd_and_to_the_own_median() -> None:
    found = summarised(TIMING)
    assert found["sgd"].ratio == Spread(1.0, 1.0, 1.0, 1.0, 1.0, 4)
    ours = found["tekfac@2"]
    assert (ours.ratio.median, ours.ratio.count, ours.median) == (3.0, 2, 3.5)
    assert ours.longest == pytest.approx(9 / 3.5)
    assert ours.p95 == pytest.approx((4 + 0.85 * 5) / 3.5)
    assert ours.plain == pytest.approx(6.5 / 1.5)
    assert ours.first_step == 9.0
    always = timing([1.0, 2.0], 1, [False])
    assert summarised({"sgd": timing([1.0, 1.0]), "kfac@1": always})["kfac@1"].plain is None
    assert json.loads(json.dumps(plain_summary(TIMING)))["tekfac@2"]["ratio"]["least"] == 3.0


# -- tables --------------------------------------------------------------------------------------------------


def cell(table: tables.Table, row: str, column: str) -> str:
    return next(cells for cells in table.rows if cells[0] == row)[table.header.index(column)]


def test_the_tables_say_what_was_measured() -> None:
    times, steps, phases, counts, memory = tables.of_network("mlp", measured())
    assert cell(times, "tekfac@2", "step ÷ SGD's") == "3.000"
    assert cell(times, "tekfac@2", "counted") == "1.500"
    assert cell(times, "sgd", "counted") == tables.NOTHING
    assert cell(steps, "tekfac@2", "median, ms") == "3500"
    assert cell(phases, "tekfac@2", "eigh") == "1000 (50%)"
    assert cell(counts, "tekfac@2", "preconditioning") == "50"
    assert cell(memory, "tekfac@2", "above SGD") == "18.0"
    assert cell(memory, "tekfac@2", "counted") == "4.0"
    assert cell(memory, "tekfac@2", "with momentum") == "5.0"
    assert cell(memory, "tekfac@2", "÷ counted") == "2.00"
    assert "A=1" in memory.notes[-1]


def test_networks_of_different_commits_are_visible_as_such() -> None:
    same = tables.overview({"mlp": measured(), "gpt": measured()})
    other = tables.overview({"mlp": measured(), "gpt": measured("def", **{"1": TIMING, "2": TIMING})})
    assert len(same.notes) == 1
    assert "different commits" in other.notes[-1]
    assert [(row[0], row[-1]) for row in other.rows] == [
        ("mlp, 1 thread", "abc"),
        ("gpt, 1 thread", "def"),
        ("gpt, 2 threads", "def"),
    ]


def test_a_contestant_that_one_network_lacks_has_an_empty_cell() -> None:
    found = tables.overview({"mlp": measured(), "gpt": measured(**{"1": {"sgd": TIMING["sgd"]}})})
    assert cell(found, "gpt, 1 thread", "tekfac@2") == tables.NOTHING


def test_steps_that_were_skipped_are_told() -> None:
    skipping = {"sgd": TIMING["sgd"], "kfac@2": timing([1.0] * 4, 2, skipped=3)}
    times, *_ = tables.of_network("mlp", {**measured(**{"1": skipping}), "memory": {}})
    assert "do not use: kfac@2" in times.notes[-1]


def test_the_growth_shows_exponents_and_milliseconds() -> None:
    table = tables.of_growth(GROWTH)
    assert table.rows[0][2:] == ("2.00", "1: 1, 2: 4")
    assert table.rows[1][2] == tables.NOTHING


# -- files ---------------------------------------------------------------------------------------------------


def test_a_run_adds_its_networks_and_replaces_only_those(tmp_path: Path) -> None:
    result.add(tmp_path, {"mlp": measured("old"), "gpt": measured("old")})
    result.add(tmp_path, {"mlp": measured("new")})
    found = result.add(tmp_path, {}, GROWTH)
    assert {name: one["provenance"]["commit"] for name, one in found["networks"].items()} == {
        "mlp": "new",
        "gpt": "old",
    }
    assert result.add(tmp_path, {"cnn": measured()})["growth"] == GROWTH
    assert result.read(tmp_path) == json.loads((tmp_path / "bench.json").read_text())
    part = result.part(result.read(tmp_path), ["cnn"], growth=False)
    assert (list(part["networks"]), part["growth"]) == (["cnn"], None)


def test_an_empty_folder_is_an_empty_result(tmp_path: Path) -> None:
    assert result.read(tmp_path) == {"format": result.FORMAT, "networks": {}, "growth": None}


@pytest.mark.parametrize("text", ["[]", '{"networks": {}}', '{"format": 0, "networks": {}}'])
def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, text: str) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"is no result of this version of tekfac bench. Choose another folder"
    ):
        result.add(tmp_path, {"mlp": measured()})
    assert (tmp_path / "bench.json").read_text() == text


def test_the_page_has_all_tables_figures_and_where_each_network_comes_from(tmp_path: Path) -> None:
    written = write(whole(mlp=measured(), gpt=measured("def", **{"1": TIMING, "2": TIMING})), tmp_path)
    text = (tmp_path / "bench.md").read_text()
    assert all((tmp_path / name).exists() for name in written if name != "bench.json")
    assert {"bench.png", "bench.svg", "growth.png"} <= set(written)
    assert "| tekfac@2 | 3.000 |" in text
    assert "## gpt, 2 threads: time beside SGD's" in text
    assert "- commit: `abc`" in text
    assert "- commit: `def`" in text
    assert "Growth (tiny version, --quick: no numbers to use):" in text
    assert all(f"]({name}.png)" in text for name in ("bench", "growth"))


def test_large_ratios_are_drawn_on_a_logarithmic_axis() -> None:
    slow = {"1": {"sgd": TIMING["sgd"], "shampoo": timing([50.0, 50.0, 100.0, 100.0])}}
    scales = [figures.bars({"mlp": one}).axes[0].get_yscale() for one in (measured(), measured(**slow))]
    assert scales == ["linear", "log"]


def test_a_page_without_growth_has_no_word_of_it() -> None:
    without = {**whole(mlp=measured()), "growth": None}
    assert [drawing.name for drawing in figures.drawings(without)] == ["bench"]
    assert "rowth" not in page(without, [])
