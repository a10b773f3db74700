"""Promise: a report is a page that needs nothing else, tables, numbers and figures, written whole."""

from __future__ import annotations

import base64
import csv
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from lab_runs import METHODS, write_comparison, write_run
from tekfac.lab.report import Asked, find_runs, write_report
from tekfac.lab.report.drawing import settle
from tekfac.lab.report.figures import curvature, curves, time_shares
from tekfac.lab.report.summary import TaskSummary, summarise
from tekfac.lab.report.sweep_figures import heat_map, sensitivity, swept
from tekfac.lab.report.table_formats import Table

FIGURE = "data:image/svg+xml;base64,"
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
        Asked(
            title="A <script>title</script> & more",
            extra_tables=[Table("Further", ("a", "b"), (("x", "1"),))],
            paper={("digits", "<b>&net", "sgdm"): "93.35 ± 0.17"},
            notes=["Read <this> first."],
        ),
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
    assert names[:4] == ["report.html", "report.md", "tables.tex", "summary.csv"]
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
    used = {value.removeprefix("#") for value in page.values("href")}
    assert used - set(page.values("id")) == set()
    assert (page.count["img"], page.count["table"], page.count["caption"]) == (3, 4, 4)
    assert page.count["details"] == 12
    assert set(page.values("scope")) == {"col", "row"}


def test_the_page_loads_nothing(text: str) -> None:
    page = Page(text)
    assert page.count["script"] + page.count["link"] + page.count["iframe"] + page.count["object"] == 0
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert all(value.startswith("#") for value in page.values("href"))
    assert all(value.startswith(FIGURE) for value in page.values("src"))
    assert any("default-src 'none'" in value for value in page.values("content"))
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text


def test_the_figures_are_in_the_page_and_load_nothing_either(text: str) -> None:
    inside = [base64.b64decode(value.removeprefix(FIGURE)).decode() for value in Page(text).values("src")]
    assert len(inside) == 3
    for drawn in inside:
        figure = ElementTree.fromstring(drawn)
        assert figure.tag.endswith("svg")
        assert len(list(figure.iter())) > 50
        assert "<script" not in drawn
        links = re.findall(r'href="([^"]*)"', drawn) + re.findall(r"url\(([^)]+)\)", drawn)
        assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)


def test_the_page_can_be_read_by_everybody(text: str) -> None:
    page = Page(text)
    assert ("html", "lang", "en") in page.attributes
    assert any("width=device-width" in value for value in page.values("content"))
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("img", "alt")]
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
    told = (out / "report.md").read_text()
    assert told.count("\n| --- |") == 4
    drawn = re.findall(r"^!\[[^]]+\]\(([^)]+)\)$", told, flags=re.MULTILINE)
    assert sorted(drawn) == sorted(f"figures/{path.name}" for path in (out / "figures").glob("*.png"))
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
        names = write_report(
            find_runs([tmp_path / "runs"]), tmp_path / "out", Asked(title="One run", target=55)
        )
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
    curves_by_lr = {f"{optimizer}-curves-lr" for optimizer in ("sgdm", *METHODS[2:])}
    assert set(drawings) == {"sensitivity-lr", f"{METHODS[2]}-lr-trace_floor", *curves_by_lr}
    axes = drawings["sensitivity-lr"].figure.axes[0]
    assert axes.get_xscale() == "log"
    drawn = {line.get_label(): list(line.lines[0].get_ydata()) for line in axes.containers}
    assert drawn["SGDM"] == pytest.approx([50, 60, 70])
    assert drawn[METHODS[2].upper()] == pytest.approx([89.9, 79.9, 69.9])
    image = drawings[f"{METHODS[2]}-lr-trace_floor"].figure.axes[0].images[0].get_array()
    assert image is not None
    assert image.tolist()[1] == pytest.approx([89, 79, 69])
    assert len(drawings["sensitivity-lr"].alternative) > 100


def grid(folder: Path, rates: Sequence[float], floors: Sequence[float]) -> TaskSummary:
    """One optimizer over two settings; the second of each is best."""
    for i, lr in enumerate(rates):
        for j, floor in enumerate(floors):
            for seed in range(2):
                end = 0.9 - 0.1 * abs(i - 1) - 0.01 * abs(j - 1) + 0.001 * seed
                own = {"optimizer": METHODS[3], "lr": lr, "seed": seed, "options": {"trace_floor": floor}}
                write_run(folder / f"{i}{j}{seed}", [end / 2, end], **own)
    return summarise(find_runs([folder]))[0]


def test_a_large_sweep_of_one_optimizer_has_curves_along_each_setting(tmp_path: Path) -> None:
    summary = grid(tmp_path, (0.001, 0.01, 0.1, 1.0), (0.25, 0.5, 1.0))
    drawings = {drawing.name: drawing for drawing in swept(summary)}
    name = METHODS[3]
    assert set(drawings) == {f"{name}-lr-trace_floor", f"{name}-curves-lr", f"{name}-curves-trace_floor"}
    by_lr, by_floor = drawings[f"{name}-curves-lr"], drawings[f"{name}-curves-trace_floor"]
    assert "for every lr, at trace_floor 0.5 as in its best setting" in by_lr.caption
    assert "for every trace_floor, at lr 0.01 as in its best setting" in by_floor.caption
    lines = {line.get_label(): list(line.get_ydata()) for line in by_lr.figure.axes[0].lines}
    assert list(lines) == ["0.001", "0.01", "0.1", "1"]
    assert lines["0.01"] == pytest.approx([45.025, 90.05])
    assert lines["1"] == pytest.approx([35.025, 70.05])
    assert [line.get_label() for line in by_floor.figure.axes[0].lines] == ["0.25", "0.5", "1"]
    legend = by_floor.figure.legends[0]
    assert (legend.get_title().get_text(), words(by_floor.figure)) == ("trace_floor", ["0.25", "0.5", "1"])
    assert len({line.get_color() for line in by_lr.figure.axes[0].lines}) == 4


def test_a_sweep_whose_curves_are_drawn_already_has_no_others(tmp_path: Path) -> None:
    summary = grid(tmp_path, (0.001, 0.01, 0.1), (0.25, 0.5, 1.0))
    assert [drawing.name for drawing in swept(summary)] == [f"{METHODS[3]}-lr-trace_floor"]


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


def test_crosses_stand_at_the_time_that_curves_have(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.25, 0.5], per_epoch=4.0, seed=0)
    write_run(tmp_path / "b", [0.125], losses=[None], per_epoch=60.0, status="diverged", seed=1)
    figure = curves(summarise(find_runs([tmp_path]))[0])
    (cross,) = [line for line in figure.axes[1].lines if line.get_marker() == "x"]
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([4.0], [12.5])


def words(figure: Figure) -> list[str]:
    """What the legend says."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    "others",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["alone", "beside other tasks"],
)
def test_a_task_without_any_finite_loss_is_reported_as_diverged(tmp_path: Path, others: bool) -> None:
    write_run(tmp_path / "runs" / "a", [0.1], losses=[None], status="diverged", layers=("fc",))
    if others:
        write_run(tmp_path / "runs" / "b", [0.5, 0.6], model="other")
        write_run(tmp_path / "runs" / "c", [], status="diverged", model="none")
    names = write_report(find_runs([tmp_path / "runs"]), tmp_path / "out", Asked(title="Nothing learnt"))
    text = (tmp_path / "out" / "report.html").read_text()
    assert "1 of 1 diverged" in text
    assert "not finite" in text
    assert "figures/digits-cnn-curves.png" in names
    panels = curves(summarise(find_runs([tmp_path / "runs" / "a"]))[0]).axes
    assert [[text.get_text() for text in axes.texts] for axes in panels] == [[], []] + [["nothing finite"]] * 2
    assert [line.get_marker() for line in panels[0].lines].count("x") == 1
    assert not any("none" in name for name in names)


@pytest.mark.slow
def test_names_are_shown_letter_by_letter(tmp_path: Path) -> None:
    nasty = ("_of mine", "$x$", r"a\$b$ and $c_{$", "$")
    for index, name in enumerate(nasty):
        own = {"name": name, "optimizer": "_$o$", "options": {"$s$": 0.1 * 2**index}}
        write_run(tmp_path / "runs" / str(index), [0.5], layers=("_a", "_$b$"), **own)
    write_report(find_runs([tmp_path / "runs"]), tmp_path / "out", Asked(title="A $title$ of _mine"))
    summary = summarise(find_runs([tmp_path / "runs"]))[0]
    labels = [row.group.label for row in summary.rows]
    assert all(any(name in label for label in labels) for name in nasty)
    assert words(curves(summary)) == labels
    time = time_shares(summary).axes[0]
    assert [text.get_text() for text in time.get_yticklabels()] == labels
    assert not any(text.get_parse_math() for text in time.get_yticklabels())
    layers = curvature(summary)
    assert words(layers) == ["_a", "_$b$"]
    assert layers.legends[0].get_title().get_text() == "layer"
    for axes, label in zip(layers.axes, labels, strict=False):
        assert axes.get_title().replace("\n", " ") == f"{label}, seed 0"
        assert not axes.title.get_parse_math()


def test_settings_are_shown_letter_by_letter(tmp_path: Path) -> None:
    for index in range(12):
        own = {"$a_{$": 1.0 + index % 3, "_b$$": 1.0 + index // 3}
        write_run(tmp_path / str(index), [0.5 + 0.01 * index], optimizer="_$o$", options=own)
    summary = summarise(find_runs([tmp_path]))[0]
    drawings = swept(summary)
    assert len(drawings) == 3
    for drawing in drawings:
        settle(drawing.figure)
    axes, bar = drawings[0].figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == (
        "_b$$",
        "$a_{$",
        "_$o$: test accuracy, %",
    )
    settle(sensitivity(summary, "_b$$"))


@pytest.mark.slow
def test_the_curvature_is_that_of_the_first_seed_as_its_caption_says(tmp_path: Path) -> None:
    for optimizer in METHODS:
        for seed in (5, 3):
            write_run(
                tmp_path / "runs" / f"{optimizer}{seed}", [0.5], optimizer=optimizer, seed=seed, layers=("fc",)
            )
    write_report(find_runs([tmp_path / "runs"]), tmp_path / "out", Asked(title="Curvature"))
    titles = [axes.get_title() for axes in curvature(summarise(find_runs([tmp_path / "runs"]))[0]).axes[:4]]
    assert titles == [f"{optimizer.upper()}, seed 3" for optimizer in METHODS]
    text = (tmp_path / "out" / "report.html").read_text()
    assert "one run of each setting that recorded them, with its first seed." in text
    assert "every epoch stands at its mean time" in text


def tick_labels(folder: Path, dampings: Sequence[float]) -> list[str]:
    """What stands at the axis of the damping, of a run with a layer for each."""
    names = [f"layer {place}" for place in range(len(dampings))]
    write_run(folder / "run", [0.5, 0.6], optimizer=METHODS[3], layers=names, dampings=dampings)
    figure = curvature(summarise(find_runs([folder]))[0])
    settle(figure)
    axis = figure.axes[2].yaxis
    low, high = axis.get_view_interval()
    ticks = [tick for minor in (False, True) for tick in axis.get_ticklocs(minor=minor) if low <= tick <= high]
    labels = [text.get_text() for minor in (False, True) for text in axis.get_ticklabels(minor=minor)]
    assert len(ticks) == len(labels)
    return labels


@pytest.mark.parametrize("apart", [0.0, 1e-15, 1e-9, 1e-6])
def test_numbers_that_are_equal_or_nearly_so_share_one_tick(tmp_path: Path, apart: float) -> None:
    assert tick_labels(tmp_path, [0.01, 0.01 * (1 + apart)]) == ["0.01"]


@pytest.mark.parametrize("largest", [0.01001, 0.01003, 0.0102, 0.013, 0.02, 0.039])
def test_ticks_within_a_decade_are_told_apart_by_their_labels(tmp_path: Path, largest: float) -> None:
    labels = tick_labels(tmp_path, [0.01, 0.010001, largest])
    assert 2 <= len(labels) <= 7
    assert len(set(labels)) == len(labels)
    steps = [float(high) - float(low) for low, high in pairwise(labels)]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=0.05)


@pytest.mark.parametrize(("largest", "labels"), [(0.041, "0.01 0.02 0.03"), (0.08, "0.01 0.02 0.03 0.05 0.07")])
def test_ticks_along_most_of_a_decade_are_denser_below(tmp_path: Path, largest: float, labels: str) -> None:
    assert tick_labels(tmp_path, [0.01, largest]) == labels.split()
