"""Promise: tables say the same in every format; what is special there is escaped, and the best is bold."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from lab_runs import METHODS, write_comparison, write_run
from tekfac.lab.report.rendering import Table, to_csv, to_html, to_latex, to_markdown, to_rich
from tekfac.lab.report.runs import find_runs
from tekfac.lab.report.summary import summarise
from tekfac.lab.report.tables import accuracies, brief, comparison, numbers, times
from tekfac.lab.report.wording import lead

NASTY = Table(
    title="a_b & <c>",
    header=("op|t", "50%", "x"),
    rows=(("<script>alert(1)</script>", "1 ± 2", "a_b*"), ("[bold]red[/bold]", "—", "$#{}~^\\")),
    bold=frozenset({(0, 1)}),
    notes=("100% <i>",),
)


def test_markdown_is_escaped_and_bold() -> None:
    lines = to_markdown(NASTY).splitlines()
    assert lines[0] == r"## a\_b \& \<c\>"
    assert lines[2:5] == [
        r"| op\|t | 50% | x |",
        "| --- | ---: | ---: |",
        r"| \<script\>alert(1)\</script\> | **1 ± 2** | a\_b\* |",
    ]
    assert lines[-1] == r"100% \<i\>"


def test_latex_is_escaped_and_bold() -> None:
    text = to_latex(NASTY)
    assert r"\caption{a\_b \& \textless{}c\textgreater{}. 100\% \textless{}i\textgreater{}}" in text
    assert r"\begin{tabular}{lrr}" in text
    assert r"\textbf{1 $\pm$ 2} & a\_b* \\" in text
    assert r"[bold]red[/bold] & --- & \$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{} \\" in text
    assert [rule for rule in ("toprule", "midrule", "bottomrule") if text.count(rule) != 1] == []


def test_html_is_escaped_and_bold_and_names_rows_and_columns() -> None:
    text = to_html(NASTY)
    assert "<script>" not in text
    assert "<caption>a_b &amp; &lt;c&gt;</caption>" in text
    assert '<th scope="col">op|t</th>' in text
    assert '<th scope="row">&lt;script&gt;alert(1)&lt;/script&gt;</th><td><strong>1 ± 2</strong></td>' in text


def test_csv_is_read_back() -> None:
    assert list(csv.reader(io.StringIO(to_csv(NASTY)))) == [list(NASTY.header), *map(list, NASTY.rows)]


def test_the_terminal_shows_cells_as_they_are() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(to_rich(NASTY))
    shown = console.export_text()
    assert "[bold]red[/bold]" in shown
    assert "1 ± 2" in shown


def test_the_comparison_of_a_task(tmp_path: Path) -> None:
    write_run(tmp_path / "a0", [0.5, 0.9], losses=[1.0, 0.5], seed=0)
    write_run(tmp_path / "a1", [0.5, 0.8], losses=[1.0, 0.25], seed=1)
    write_run(tmp_path / "b0", [0.88], losses=[0.0001234], seed=0, optimizer="adam", per_epoch=125.0)
    write_run(tmp_path / "c0", [0.1], losses=[None], seed=0, optimizer="adamw", status="diverged")
    table = comparison(summarise(find_runs([tmp_path]), 85)[0])
    assert table.header[-2:] == ("epochs to 85%", "seconds to 85%")
    assert table.rows == (
        ("SGDM", "2", "85.00 ± 7.07", "85.00 ± 7.07", "0.3750 ± 0.1768", "2 (1 of 2)", "2.00 (1 of 2)"),
        ("Adam", "1", "88.00", "88.00", "1.2e-04", "1", "125"),
        ("AdamW", "1 of 1 diverged", "10.00", "10.00", "not finite", "—", "—"),
    )
    assert table.bold == {(1, column) for column in range(2, 7)}


def test_the_brief_form_takes_over_cells_and_bold(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], per_epoch=1.0)
    write_run(tmp_path / "b", [0.6], per_epoch=2.0, optimizer="adam")
    table = brief(summarise(find_runs([tmp_path]), 50)[0])
    assert table.rows == (
        ("SGDM", "1", "50.00", "1", "1.00", "100"),
        ("Adam", "1", "60.00", "1", "2.00", "200"),
    )
    assert table.bold == {(1, 2), (0, 4), (0, 5)}


def test_what_all_share_is_not_bold(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], per_epoch=1.0)
    write_run(tmp_path / "b", [0.5], per_epoch=2.0, optimizer="adam")
    summary = summarise(find_runs([tmp_path]))[0]
    assert comparison(summary).bold == {(0, 6)}
    assert times(summary).bold == {(0, 1), (0, 2)}


def test_times_and_their_shares(tmp_path: Path) -> None:
    write_run(tmp_path / "a0", [0.5], per_epoch=1.0, seed=0)
    write_run(tmp_path / "a1", [0.5], per_epoch=3.0, seed=1, threads=2)
    table = times(summarise(find_runs([tmp_path]))[0])
    assert table.rows == (("SGDM", "2.00 ± 1.41", "200 ± 141", "10", "20", "30", "15", "15", "10"),)
    assert "their times do not compare" in table.notes[-1]


def test_the_form_of_the_paper(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.8], optimizer="sgdm")
    write_run(tmp_path / "b", [0.9], optimizer=METHODS[3], lr=0.1)
    write_run(tmp_path / "c", [0.7], optimizer=METHODS[3], lr=0.2)
    write_run(tmp_path / "d", [0.6], optimizer="adam", model="resnet20")
    paper = {("digits", "cnn", METHODS[0]): "93.35 ± 0.17", ("other", "net", "adamw"): "1"}
    table = accuracies(summarise(find_runs([tmp_path])), paper)
    assert [name.lower() for name in table.header[1:]] == ["sgdm", "adam", METHODS[0], METHODS[3]]
    assert table.rows == (
        ("digits, cnn", "80.00", "—", "—", "90.00"),
        ("digits, cnn, in the paper", "—", "—", "93.35 ± 0.17", "—"),
        ("digits, resnet20", "—", "60.00", "—", "—"),
    )
    assert table.bold == {(0, 4), (2, 2)}
    assert "several settings" in table.notes[-1]


def test_all_numbers_are_kept_in_full_precision(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [1 / 3], seed=7)
    table = numbers(summarise(find_runs([tmp_path])))
    row = dict(zip(table.header, table.rows[0], strict=True))
    assert float(row["final_test_accuracy_mean"]) == 1 / 3
    assert (row["final_test_accuracy_std"], row["seeds"], row["finished"], row["target"]) == (
        "",
        "7",
        "1",
        "0.33",
    )


def test_what_a_reader_has_to_know_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], seed=0)
    write_run(tmp_path / "b", [0.5], seed=0)
    write_run(tmp_path / "c", [], seed=1, status="diverged")
    notes = " ".join(comparison(summarise(find_runs([tmp_path]))[0]).notes)
    assert "in no mean: 1 of SGDM" in notes
    assert "more than once in SGDM (seed 0)" in notes
    assert "The target of 50% is chosen so that" in notes


@pytest.mark.parametrize("models", [("cnn",), ("cnn", "b"), ("cnn", "b", "c")])
def test_the_first_sentence_says_what_was_compared_and_what_was_best(
    tmp_path: Path, models: tuple[str, ...]
) -> None:
    for model in models:
        write_comparison(tmp_path / model, epochs=4, model=model)
    text = lead(summarise(find_runs([tmp_path])))
    start = (
        "Six optimizers were compared on " + {1: "digits, cnn", 2: "two tasks", 3: "three tasks"}[len(models)]
    )
    assert text.startswith(f"{start}, three runs each.")
    assert METHODS[3].upper() in text
