"""Promise: `tekfac report` prints the tables and where the page is; what is wrong is said in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab_runs import write_run
from tekfac.cli.main import parser_of


def run(*arguments: str) -> None:
    """The command as the main program calls it."""
    options = parser_of("report").parse_args(arguments)
    options.command_line = "tekfac report ..."
    options.run(options)


def test_tables_are_printed_and_the_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write_run(tmp_path / "runs" / "a", [0.5, 0.9])
    write_run(tmp_path / "runs" / "b", [0.4, 0.8], optimizer="adam", status=None)
    run(str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--target", "85", "--title", "Mine & yours")
    out = capsys.readouterr().out
    assert "90.00" in out
    assert "1 of 1 unfinished" in out
    assert "to 85%" in out
    assert "ms per" in out
    assert all(len(line) <= 80 for line in out.splitlines() if "report.html" not in line)
    assert str(tmp_path / "out" / "report.html") in out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<h1>Mine &amp; yours</h1>" in page
    assert "tekfac report ..." in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "There is no folder 'nowhere'"),
        (["."], "No run in '.'"),
        (["a", "--target", "0"], "The target is 0, expected a test accuracy in percent"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if "a" in arguments:
        write_run(tmp_path / "a", [0.5])
    with pytest.raises(ValueError, match=said):
        run(*arguments)
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("package", ["rich", "matplotlib", "jinja2"])
def test_a_package_that_is_missing_is_named_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}, which is not installed.*tekfac\[lab\]"):
        run("nowhere")
