"""Promise: the page of a report opens in a browser, offline, and shows its tables and figures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from lab_runs import METHODS, write_comparison
from tekfac.lab.report import Asked, find_runs, write_report

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
if BROWSER is None:
    pytest.skip("no Chromium on PATH: make test-browser installs it", allow_module_level=True)
pytestmark = pytest.mark.slow

MEASURE = """
<script>
addEventListener("load", () => {
  const sizes = (name) => [...document.querySelectorAll(name)].map((e) => {
    const box = e.getBoundingClientRect();
    return [box.width, box.height];
  });
  document.body.dataset.sizes = JSON.stringify({
    page: [document.documentElement.scrollWidth, innerWidth],
    table: sizes("table"), figure: sizes("figure img"),
    drawn: [...document.images].map((e) => e.complete && e.naturalWidth > 0),
    loads: performance.getEntriesByType("resource").filter((e) => !e.name.startsWith("data:")).length,
  });
});
</script>
"""


def browse(page: Path, profile: Path, *arguments: str) -> str:
    """What the browser prints for a page."""
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=2000",
        *arguments,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    write_comparison(folder / "runs", epochs=5, seeds=2)
    write_report(find_runs([folder / "runs"]), folder / "out", Asked(title="Six optimizers on the digits"))
    return folder / "out" / "report.html"


def measured(page: Path, folder: Path, width: int) -> dict[str, Any]:
    """Sizes of what is on the page, from a copy with a script that writes them down."""
    copy = folder / "measured.html"
    text, policies = re.subn("<meta http-equiv[^>]*>", "", page.read_text())  # which forbids scripts
    assert policies == 1
    copy.write_text(text.replace("</body>", f"{MEASURE}</body>"))
    shown = browse(copy, folder / "profile", f"--window-size={width},900", "--dump-dom")
    found = re.search(r'data-sizes="([^"]*)"', shown)
    assert found is not None
    sizes: dict[str, Any] = json.loads(unescape(found.group(1)))
    return sizes


def test_the_browser_finds_the_table_and_the_curves(page: Path, tmp_path: Path) -> None:
    shown = browse(page, tmp_path / "profile", "--dump-dom")
    assert "<title>Six optimizers on the digits</title>" in shown
    assert re.search(r"<caption>digits, cnn: accuracy", shown)
    assert shown.count("<img ") == 3
    assert 'alt="Learning curves of digits, cnn' in shown


@pytest.mark.parametrize("width", [1200, 500])
def test_everything_is_laid_out_and_nothing_is_loaded(page: Path, tmp_path: Path, width: int) -> None:
    sizes = measured(page, tmp_path, width)
    assert sizes["page"][0] <= sizes["page"][1]  # no scrolling to the side, but inside of wide tables
    assert len(sizes["table"]) == 2
    assert sizes["drawn"] == [True] * 3
    assert all(wide > 300 and high > 60 for wide, high in sizes["table"] + sizes["figure"])
    assert sizes["loads"] == 0


def test_the_table_of_the_paper_fits_on_a_screen(tmp_path: Path) -> None:
    write_comparison(tmp_path / "runs", epochs=2, seeds=2, data="cifar100", model="resnet20")
    paper = {("cifar100", "resnet20", name): "54.93 ± 21.24" for name in ("sgdm", "adam", *METHODS)}
    write_report(find_runs([tmp_path / "runs"]), tmp_path / "out", Asked(title="The paper", paper=paper))
    sizes = measured(tmp_path / "out" / "report.html", tmp_path, 1100)
    assert max(wide for wide, _ in sizes["table"]) <= max(wide for wide, _ in sizes["figure"]) + 1


def test_the_screen_is_not_blank(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(page, tmp_path / "profile", "--window-size=1100,2600", f"--screenshot={picture}")
    pixels = (imread(picture)[:, :, :3] * 255).round().astype(int) @ (1 << 16, 1 << 8, 1)
    assert pixels.shape == (2600, 1100)
    colours = set(pixels.ravel().tolist())
    assert len(colours) > 200
    assert 0xD94801 in colours  # the line of the best
