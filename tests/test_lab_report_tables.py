"""Promise: tables say the same in every format; what is special there is escaped, and the best is bold."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from rich.console import Console

from lab_runs import METHODS, write_comparison, write_run
from tekfac.lab.report import Asked, find_runs, write_report
from tekfac.lab.report.summary import summarise
from tekfac.lab.report.table_formats import Table, rendered, to_csv, to_rich
from tekfac.lab.report.tables import accuracies, brief, comparison, numbers, times
from tekfac.lab.report.words import highlights, lead, setup

NASTY = Table(
    title="a_b & <c>",
    header=("op|t", "50%", "x"),
    rows=(("<script>alert(1)</script>", "1 ± 2", "a_b*"), ("[bold]red[/bold]", "—", "$#{}~^\\")),
    bold=frozenset({(0, 1)}),
    notes=("100% <i>",),
)


def test_markdown_is_escaped_and_bold() -> None:
    lines = rendered("table.md", table=NASTY).splitlines()
    assert lines[0] == r"## a\_b \& \<c\>"
    assert lines[2:5] == [
        r"| op\|t | 50% | x |",
        "| --- | ---: | ---: |",
        r"| \<script\>alert(1)\</script\> | **1 ± 2** | a\_b\* |",
    ]
    assert lines[-1] == r"100% \<i\>"


def test_latex_is_escaped_and_bold() -> None:
    text = rendered("table.tex", table=NASTY)
    assert "\\caption{a\\_b \\& \\textless{}c\\textgreater{}}\n  \\label{tab:a-b-c}\n" in text
    below = text.partition(r"\end{tabular}")[2]
    assert below.split() == [
        r"\par\smallskip",
        r"\begin{minipage}{\linewidth}\footnotesize",
        *(r"100\%", r"\textless{}i\textgreater{}\par"),
        r"\end{minipage}",
        r"\end{table}",
    ]
    assert r"\begin{tabular}{lrr}" in text
    assert r"\textbf{1 $\pm$ 2} & a\_b* \\" in text
    assert r"[bold]red[/bold] & --- & \$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{} \\" in text
    assert [rule for rule in ("toprule", "midrule", "bottomrule") if text.count(rule) != 1] == []


@pytest.mark.parametrize("notes", [(), ("a {b} \\", "50% $x_1$ & #2")])
def test_latex_has_its_braces_and_environments_closed_in_order(notes: tuple[str, ...]) -> None:
    text = rendered("table.tex", table=replace(NASTY, notes=notes))
    depths = list(accumulate({"{": 1, "}": -1}[brace] for brace in re.findall(r"(?<!\\)[{}]", text)))
    assert (min(depths), depths[-1]) == (0, 0)
    inside: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            inside.append(name)
        else:
            assert inside.pop() == name
    assert inside == []
    assert ("minipage" in text) == bool(notes)
    assert re.findall(r"(?<!\\)[%#]", text) == []


def test_html_is_escaped_and_bold_and_names_rows_and_columns(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [0.5])
    write_report(find_runs([tmp_path]), tmp_path / "out", Asked(title="Tables", extra_tables=[NASTY]))
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<script>" not in text
    assert "<caption>a_b &amp; &lt;c&gt;</caption>" in text
    assert '<th scope="col">op|t</th>' in text
    assert '<th scope="row">&lt;script&gt;alert(1)&lt;/script&gt;</th><td><strong>1 ± 2</strong></td>' in text
    assert '<p class="note">100% &lt;i&gt;</p>' in text


def test_csv_is_read_back() -> None:
    assert list(csv.reader(io.StringIO(to_csv(NASTY)))) == [list(NASTY.header), *map(list, NASTY.rows)]


def test_the_terminal_shows_cells_as_they_are() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(to_rich(NASTY))
    shown = console.export_text()
    assert "[bold]red[/bold]" in shown
    assert "1 ± 2" in shown


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_loses_no_letter(tmp_path: Path, width: int) -> None:
    write_comparison(tmp_path, epochs=4)
    table = brief(summarise(find_runs([tmp_path]))[0])
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(to_rich(table))
    shown = Counter("".join(console.export_text().replace("─", "").split()))
    assert shown == Counter("".join("".join([table.title, *table.header, *map("".join, table.rows)]).split()))


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


@pytest.mark.parametrize("status", ["diverged", None])
def test_only_what_finished_with_every_seed_is_bold(tmp_path: Path, status: str | None) -> None:
    for optimizer, accuracy, loss, speed, end in (
        ("sgdm", 0.9, 0.1, 1.0, status),
        ("adam", 0.8, 0.2, 2.0, "finished"),
        ("adamw", 0.7, 0.3, 3.0, "finished"),
    ):
        own = {"losses": [loss], "optimizer": optimizer, "per_epoch": speed}
        write_run(tmp_path / f"{optimizer}0", [accuracy], seed=0, **own)
        write_run(tmp_path / f"{optimizer}1", [accuracy], seed=1, status=end, **own)
    summaries = summarise(find_runs([tmp_path]), 70)
    found = comparison(summaries[0]), times(summaries[0]), accuracies(summaries)
    assert found[0].bold == {(1, 2), (1, 3), (1, 4), (1, 5), (2, 5), (1, 6)}
    assert found[1].bold == {(1, 1), (1, 2)}
    assert found[2].bold == {(0, 2)}
    assert brief(summaries[0]).bold == {(1, 2), (1, 3), (2, 3), (1, 4), (1, 5)}
    assert all("among the settings all of whose runs finished" in table.notes[0] for table in found)
    best = [which for _, which, _ in highlights(summaries[0])]
    assert best == ["Adam", "Adam, AdamW", "Adam"]
    assert "Adam has the best mean final test accuracy among the settings all of whose runs" in lead(summaries)


def test_times_and_their_shares(tmp_path: Path) -> None:
    write_run(tmp_path / "a0", [0.5], per_epoch=1.0, seed=0)
    write_run(tmp_path / "a1", [0.5], per_epoch=3.0, seed=1, threads=2)
    table = times(summarise(find_runs([tmp_path]))[0])
    assert table.rows == (("SGDM", "2.00 ± 1.41", "200 ± 141", "11", "22", "33", "17", "17"),)
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
    assert "the same settings and seed is counted: 1 of SGDM (seed 0)." in notes
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


def test_a_difference_within_the_deviation_is_said_to_be_one(tmp_path: Path) -> None:
    for optimizer, accuracies_ in (("adam", (0.95, 0.85)), ("sgdm", (0.93, 0.85)), ("adamw", (0.5, 0.5))):
        for seed, accuracy in enumerate(accuracies_):
            write_run(tmp_path / f"{optimizer}{seed}", [accuracy], optimizer=optimizer, seed=seed)
    summaries = summarise(find_runs([tmp_path]))
    text = lead(summaries).replace("\N{NO-BREAK SPACE}", " ")
    assert "90.00 ± 7.07%, before SGDM with 89.00 ± 5.66%, a difference within the deviation over seeds" in text
    assert highlights(summaries[0])[0][2].endswith("; SGDM is within the deviation over seeds")


def test_a_difference_beyond_the_deviation_or_of_single_runs_is_not_doubted(tmp_path: Path) -> None:
    for optimizer, accuracy in (("adam", 0.95), ("sgdm", 0.90)):
        write_run(tmp_path / "one" / optimizer, [accuracy], optimizer=optimizer)
        for seed in range(2):
            write_run(
                tmp_path / "two" / f"{optimizer}{seed}",
                [accuracy + 0.01 * seed],
                optimizer=optimizer,
                seed=seed,
            )
    for name in ("one", "two"):
        summaries = summarise(find_runs([tmp_path / name]))
        assert "Adam has the best mean" in lead(summaries)
        assert "within the deviation" not in lead(summaries) + highlights(summaries[0])[0][2]


@pytest.mark.parametrize(
    ("optimizers", "named"),
    [
        (["sgdm", "adam"], "SGDM, Adam"),
        (["sgdm", "adam", "adamw"], "SGDM, Adam, AdamW"),
        (["sgd", "sgdm", "adam", "adamw"], "4 settings"),
    ],
)
def test_all_that_tie_are_named(tmp_path: Path, optimizers: list[str], named: str) -> None:
    for optimizer in optimizers:
        write_run(tmp_path / optimizer, [0.4, 0.8], optimizer=optimizer)
    write_run(tmp_path / "worse", [0.4, 0.5], optimizer=METHODS[0])
    summaries = summarise(find_runs([tmp_path]), 80)
    assert [found[1:] for found in highlights(summaries[0])] == [
        (named, "80.00%"),
        (named, "2"),
        (named, "2.00 s"),
    ]
    assert f"{named} share the best mean final test accuracy, 80.00%." in lead(summaries)


def test_over_many_tasks_ties_and_doubts_are_counted(tmp_path: Path) -> None:
    for model, other in (("a", 0.8), ("b", 0.9), ("c", 0.9)):
        write_run(tmp_path / f"{model}0", [0.9], model=model)
        write_run(tmp_path / f"{model}1", [other], model=model, optimizer="adam")
    text = lead(summarise(find_runs([tmp_path])))
    assert "SGDM on 3, Adam on 2; on 2 of the tasks the difference to the next is none or within" in text


def test_without_a_finished_run_nothing_is_best(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5], losses=[None], status="diverged")
    summaries = summarise(find_runs([tmp_path]))
    assert "SGDM (1 of 1 diverged) ends with a test accuracy of 50.00%" in lead(summaries)
    assert highlights(summaries[0]) == []
    assert lead(summaries * 3).endswith("On none of them a setting has finished all of its runs.")


@pytest.mark.parametrize("schedule", ["step", "cosine", "constant"])
def test_the_decay_is_told_where_there_is_one(tmp_path: Path, schedule: str) -> None:
    write_run(tmp_path / "a", [0.5], schedule=schedule)
    text = setup(summarise(find_runs([tmp_path]))[0])
    assert f"schedule {schedule}" in text
    assert ("decay_every 40 · decay_factor 0.1" in text) == (schedule == "step")
    assert ("decay" in text) == (schedule == "step")
