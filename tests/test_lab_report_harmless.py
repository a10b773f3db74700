"""Promise: names from run folders are shown letter by letter: no HTML, no formulas, no escape sequences."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

from lab_runs import write_run
from tekfac.cli.main import main
from tekfac.common.console import output, printable, progress, remark
from tekfac.lab.report.table_formats import code, markdown, prose

ESCAPE = "\x1b]0;title\x07\x1b[2J"
EVIL = f"=cmd|' /C calc'!A0<script>alert(1)</script><img src=x onerror=alert(2)>[red]`{ESCAPE}\u202e\x9b31m"


@pytest.fixture
def out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A report of runs all of whose texts are evil; what was printed is in `printed`."""
    for optimizer in ("sgdm", "adam"):
        write_run(
            tmp_path / f"runs-{optimizer}",
            [0.5, 0.6],
            optimizer=optimizer,
            name=EVIL,
            data=EVIL,
            model=EVIL,
            options={EVIL: EVIL},
            model_options={EVIL: EVIL},
            provenance={"machine": EVIL, EVIL: EVIL},
        )
    arguments = [str(path) for path in tmp_path.glob("runs-*")]
    assert main(["report", *arguments, "--out", str(tmp_path / "out"), "--title", EVIL]) == 0
    (tmp_path / "out" / "printed").write_text(capsys.readouterr().out)
    return tmp_path / "out"


def without_code(text: str) -> str:
    """What stands outside of Markdown's code."""
    return re.sub(r"(?<!\\)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


def test_the_page_in_markdown_has_no_html(out: Path) -> None:
    text = without_code((out / "report.md").read_text())
    assert "script" in text
    assert re.search(r"(?<!\\)[<>]", text) is None


def test_no_cell_of_the_table_of_all_numbers_is_a_formula(out: Path) -> None:
    rows = list(csv.reader(io.StringIO((out / "summary.csv").read_text())))
    assert any("script" in cell for row in rows for cell in row)
    for cell in (cell for row in rows for cell in row):
        assert cell[:1] not in ("=", "@", "\t")
        if cell[:1] in ("+", "-"):
            float(cell)


@pytest.mark.parametrize("name", ["printed", "report.md", "summary.csv", "tables.tex"])
def test_no_escape_sequence_reaches_a_terminal(name: str, out: Path) -> None:
    text = (out / name).read_text()
    assert "title" in text or name == "tables.tex"
    assert all(letter.isprintable() or letter in "\n\t" for letter in text)


def test_errors_show_the_names_of_folders_letter_by_letter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / f"a{ESCAPE}b"
    folder.mkdir()
    (folder / "run.json").write_text("{")
    assert main(["train", "--config", str(folder)]) == 1
    assert main(["train", "--model", f"no{ESCAPE}", "--out", str(tmp_path / "run")]) == 1
    told = capsys.readouterr().err
    assert "title" in told
    assert "\x1b" not in told
    assert "\x07" not in told


def test_what_is_printed_is_no_markup_and_keeps_our_own_style(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    output().print(f"[red]a[/red] :smile: {ESCAPE}", style="bold")
    remark(f"[link=x]b[/link] {ESCAPE}")
    told = capsys.readouterr()
    assert told.out == "\x1b[1m" + r"[red]a[/red] :smile: \x1b]0;title\x1b[2J" + "\x1b[0m\n"
    assert told.err == r"[link=x]b[/link] \x1b]0;title\x1b[2J" + "\n"


def test_progress_bars_show_names_letter_by_letter() -> None:
    bars = progress("told")
    task = bars.add_task(f"[red]a{ESCAPE}", total=2, told=f"[b]c{ESCAPE}")
    columns = [column for column in bars.columns if type(column).__name__ == "TextColumn"]
    shown = [column(bars.tasks[task]).plain for column in columns]  # type: ignore[union-attr, operator]
    assert shown == [r"[red]a\x1b]0;title\x1b[2J", r"[b]c\x1b]0;title\x1b[2J"]


def test_letters_are_kept_and_only_what_has_no_look_is_escaped() -> None:
    assert printable("λ ‖ é 漢 \n\t ±") == "λ ‖ é 漢 \n\t ±"
    assert printable("\x1b\x9b\x00\u202e\udcff\u2028") == r"\x1b\x9b\x00\u202e\udcff\u2028"


def test_the_forms_of_markdown() -> None:
    assert markdown("a <b> `c`\nd") == r"a \<b\> \`c\` d"
    assert prose("a <b> & `c`") == "a &lt;b&gt; &amp; `c`"
    assert code("a b") == "`a b`"
    assert code("a ``b` c") == "``` a ``b` c ```"
