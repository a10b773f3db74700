"""A progress bar hands on what it is given, and is shown where somebody watches."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator

import pytest

from tekfac.common.console import track


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_hands_on_every_item_and_shows_how_many_on_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = _Terminal()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", screen)
    assert list(track([1, 2, 3], "Pass 1 of 2")) == [1, 2, 3]
    shown = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "Pass 1 of 2" in shown
    assert "3/3 batch" in shown


def test_a_bar_is_silent_where_nobody_watches_and_takes_what_has_no_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def unsized() -> Iterator[int]:
        yield from range(3)

    assert list(track(unsized(), "Pass")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
