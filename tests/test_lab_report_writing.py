"""Promise: a report is a page that needs nothing else, tables, numbers and figures, written whole."""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lab_runs import METHODS, write_comparison, write_run
from tekfac.lab.report import find_runs, write_report
from tekfac.lab.report.drawing import svg_of
from tekfac.lab.report.figures import curvature, curves
from tekfac.lab.report.rendering import Table
from tekfac.lab.report.sensitivity import heat_map, sensitivity, swept
from tekfac.lab.report.summary import TaskSummary, summarise
from tekfac.lab.report.svg import inline

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Elements of a page, and whether every one is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def values(self, attribute: str) -> list[str]:
        return [value for _, name, value in self.attributes if name == attribute]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of six optimizers, one of which diverges, with nasty names and further parts."""
    folder = tmp_path_factory.mktemp("report")
    write_comparison(folder / "runs", epochs=4, seeds=2, model="<b>&net")
    names = write_report(
        find_runs([folder / "runs"]),
        folder / "out",
        title="A <script>title</script> & more",
        extra_tables=[Table("Further", ("a", "b"), (("x", "1"),))],
        paper={("digits", "<b>&net", "sgdm"): "93.35 ± 0.17"},
        notes=["Read <this> first."],
    )
    (folder / "names").write_text("\n".join(names))
    return folder


@pytest.fixture(scope="module")
def text(report: Path) -> str:
    return (report / "out" / "report.html").read_text()


def test_everything_that_was_promised_is_written_and_nothing_else(report: Path) -> None:
    out = report / "out"
    names = (report / "names").read_text().splitlines()
    assert sorted(names) == sorted(
        path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()
    )
    assert names[:4] == ["report.html", "tables.md", "tables.tex", "summary.csv"]
    kinds = ["digits-b-net-curves", "digits-b-net-time", "digits-b-net-curvature"]
    assert names[4:] == [f"figures/{kind}.{ending}" for kind in kinds for ending in ("png", "svg", "pdf")]


def test_the_figures_are_what_their_names_say(report: Path) -> None:
    figures = report / "out" / "figures"
    assert {path.read_bytes()[:8] for path in figures.glob("*.png")} == {b"\x89PNG\r\n\x1a\n"}
    assert {path.read_bytes()[:5] for path in figures.glob("*.pdf")} == {b"%PDF-"}
    assert all(ElementTree.parse(path).getroot().tag.endswith("svg") for path in figures.glob("*.svg"))


def test_the_page_is_well_formed_and_its_ids_are_its_own(text: str) -> None:
    page = Page(text)
    assert [name for name, times in Counter(page.values("id")).items() if times > 1] == []
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | {v[1:] for v in page.values("href") if v.startswith("#")}
    assert used - set(page.values("id")) == set()
    assert (page.count["svg"], page.count["table"], page.count["caption"]) == (3, 4, 4)
    assert page.count["details"] == 12
    assert set(page.values("scope")) == {"col", "row"}


def test_the_page_loads_nothing(text: str) -> None:
    page = Page(text)
    assert page.count["script"] + page.count["link"] + page.count["img"] + page.count["iframe"] == 0
    assert not any(value.startswith(("http", "//")) for name in ("src", "href") for value in page.values(name))
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text


def test_the_page_can_be_read_by_everybody(text: str) -> None:
    page = Page(text)
    assert ("html", "lang", "en") in page.attributes
    assert any("width=device-width" in value for value in page.values("content"))
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == 3
    assert all(labels)
    assert any("<b>&net" in label for label in labels)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_the_page_says_what_was_best_and_where_it_comes_from(text: str, report: Path) -> None:
    assert "&lt;script&gt;title&lt;/script&gt; &amp; more" in text
    assert "Read &lt;this&gt; first." in text
    assert f"{METHODS[3].upper()} has the best mean final test accuracy" in text
    assert "1 of 2 diverged" in text
    assert "93.35 ± 0.17" in text
    for known in ("0123abc", "a machine", "2.13.0", "2025-01-02", "tekfac train --config"):
        assert known in text
    assert f"tekfac report {report}" in text


def test_tables_and_numbers_are_beside_it(report: Path) -> None:
    out = report / "out"
    assert (out / "tables.md").read_text().count("\n| --- |") == 4
    assert (out / "tables.tex").read_text().count(r"\begin{tabular}") == 4
    with (out / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["optimizer"] for row in rows] == ["sgdm", "adam", *METHODS]
    assert {row["diverged"] for row in rows} == {"0", "1"}


def test_a_report_is_the_same_when_made_again_and_leaves_other_files(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", [0.5, 0.6])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    made = []
    for _ in range(2):
        names = write_report(find_runs([tmp_path / "runs"]), tmp_path / "out", title="One run", target=55)
        made.append({name: (tmp_path / "out" / name).read_bytes() for name in names})
    assert made[0] == made[1]
    assert (tmp_path / "out" / "mine.txt").read_text() == "kept"
    assert b"--target 55" in made[0]["report.html"]


def sweep(folder: Path) -> TaskSummary:
    """Two optimizers over lr, one over lr and the floor of its trace."""
    for index, lr in enumerate((0.001, 0.01, 0.1)):
        for seed in range(2):
            for optimizer in ("sgdm", METHODS[3]):
                write_run(
                    folder / f"{optimizer}{index}{seed}",
                    [0.5 + 0.1 * index],
                    optimizer=optimizer,
                    lr=lr,
                    seed=seed,
                )
            for floor in (0.1, 1.0):
                own = {"optimizer": METHODS[2], "lr": lr, "seed": seed, "options": {"trace_floor": floor}}
                write_run(folder / f"floor{index}{seed}{floor}", [0.9 - 0.1 * index - 0.01 * floor], **own)
    return summarise(find_runs([folder]))[0]


def test_sweeps_are_found_and_drawn(tmp_path: Path) -> None:
    summary = sweep(tmp_path)
    drawings = {drawing.name: drawing for drawing in swept(summary)}
    assert set(drawings) == {"sensitivity-lr", f"{METHODS[2]}-lr-trace_floor"}
    axes = drawings["sensitivity-lr"].figure.axes[0]
    assert axes.get_xscale() == "log"
    drawn = {line.get_label(): list(line.lines[0].get_ydata()) for line in axes.containers}
    assert drawn["SGDM"] == pytest.approx([50, 60, 70])
    assert drawn[METHODS[2].upper()] == pytest.approx([89.9, 79.9, 69.9])
    image = drawings[f"{METHODS[2]}-lr-trace_floor"].figure.axes[0].images[0].get_array()
    assert image is not None
    assert image.tolist()[1] == pytest.approx([89, 79, 69])
    assert len(drawings["sensitivity-lr"].alternative) > 100


def test_what_was_not_swept_cannot_be_drawn(tmp_path: Path) -> None:
    summary = sweep(tmp_path)
    with pytest.raises(ValueError, match="several values of 'momentum'"):
        sensitivity(summary, "momentum")
    with pytest.raises(ValueError, match="not tried with numbers for 'lr' and 'beta'"):
        heat_map(summary, "sgdm", "lr", "beta")
    with pytest.raises(ValueError, match="has recorded its curvature"):
        curvature(summary)


def test_the_curves_are_those_of_the_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.25, 0.5], losses=[1.0, 0.5], per_epoch=4.0)
    write_run(tmp_path / "b", [0.125], losses=[None], optimizer="adam", status="diverged")
    accuracy, over_time, loss, _ = curves(summarise(find_runs([tmp_path]))[0]).axes
    lines = {line.get_label(): line for line in accuracy.lines}
    assert list(lines["SGDM"].get_ydata()) == [25, 50]
    assert list(lines["Adam"].get_ydata()) == [12.5]
    assert [line.get_marker() for line in accuracy.lines].count("x") == 1
    assert list(over_time.lines[0].get_xdata())[-1] == 8
    assert loss.get_yscale() == "log"


def test_svg_ids_carry_their_prefix(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.25, 0.5])
    drawn = inline(svg_of(curves(summarise(find_runs([tmp_path]))[0])), "f1", "words")
    ids = re.findall(r'\bid="([^"]*)"', drawn)
    assert len(ids) > 10
    assert all(name.startswith("f1-") for name in ids)
    assert drawn.startswith('<svg role="img" aria-label="words" viewBox=')
