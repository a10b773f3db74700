"""Promise: what the documentation shows runs as it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tekfac.fisher
import tekfac.layers
from tekfac import TEKFAC, fisher
from tekfac.lab import optimizers, recipes
from tekfac.lab.config import RunConfig
from tekfac.lab.grids import Sweep
from tekfac.lab.run_folder import read_plain

ROOT = Path(__file__).resolve().parent.parent


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def surroundings(**more: Any) -> dict[str, Any]:
    """What the examples take for granted: a model with a loss, data, and the usual imports."""
    loader = [(torch.randn(8, 1, 5, 5), torch.randint(3, (8,))) for _ in range(2)]

    def loss_of(model: nn.Module) -> Tensor:
        x, y = loader[0]
        return F.cross_entropy(model(x), y)

    names = {"torch": torch, "F": F, "nn": nn, "TEKFAC": TEKFAC, "loss_of": loss_of}
    return {"model": Model(), "loader": loader, **names, **more}


def test_every_python_block_about_the_settings_runs_by_itself() -> None:
    assert blocks("docs/settings.md")
    for code in blocks("docs/settings.md"):
        names = surroundings()
        exec(code, names)
        assert isinstance(names["optimizer"], TEKFAC)


@pytest.mark.parametrize(("page", "count"), [("README.md", 2), ("docs/fisher.md", 9)])
def test_the_python_blocks_of_a_page_run_one_after_the_other(page: str, count: int, tmp_path: Path) -> None:
    names = surroundings(folder=tmp_path)
    assert len(blocks(page)) == count
    for code in blocks(page):
        exec(code, names)
    assert isinstance(names["optimizer"], TEKFAC)
    assert isinstance(names["blocks"], fisher.BlockDiagonal)


def test_the_python_blocks_about_layers_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names = surroundings()
    assert len(blocks("docs/layers.md")) == 6
    for code in blocks("docs/layers.md"):
        exec(code, names)
    assert list(names["optimizer"].curvature) == ["0", "1", "2"]
    assert capsys.readouterr().out.splitlines()[-2] == "['0', '1', '2']"


def test_the_settings_in_the_guide_to_the_lab_are_valid() -> None:
    found = [tomllib.loads(code) for code in blocks("docs/lab.md", "toml")]
    sweeps = [plain for plain in found if "grid" in plain or "search" in plain]
    runs = [plain for plain in found if plain not in sweeps]
    assert [RunConfig.from_plain(plain).optimizer for plain in runs] == ["tekfac"]
    assert [len(Sweep.from_plain(plain, "here").points) for plain in sweeps] == [11, 0]


def test_the_sweep_among_the_examples_has_settings_that_every_method_takes() -> None:
    plan = Sweep.from_plain(read_plain(ROOT / "examples" / "damping.toml"), "here")
    assert len(plan.points) == 16
    for point in plan.points:
        (config,) = plan.configs(point)
        optimizers.build(config, Model())


def test_the_learning_rates_of_the_demo_lie_inside_of_those_that_were_tried() -> None:
    plan = Sweep.from_plain(tomllib.loads((ROOT / "examples" / "digits_rates.toml").read_text()), "here")
    tried: dict[str, list[float]] = {}
    for point in plan.points:
        tried.setdefault(point["optimizer"], []).append(point["lr"])
    assert tried.keys() == recipes.DIGITS_RATES.keys()
    for optimizer, rate in recipes.DIGITS_RATES.items():
        assert rate in sorted(tried[optimizer])[1:-1]


def test_every_link_between_pages_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_the_errors_in_the_readme_are_those_of_the_result() -> None:
    last_epoch = (ROOT / "docs/results/fisher-digits.md").read_text().split("\nepoch ")[-1]
    shown = re.findall(r"^\| (\w+) +\| +[\d,]+ \|(.*)\|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(shown) == 5
    for layer, cells in shown:
        block = re.search(rf"^{layer} .*(?:\n  .*){{3}}", last_epoch, flags=re.MULTILINE)
        assert block, layer
        measured = re.findall(r" T?E?KFAC +\S+ +(\S+)", block[0])
        assert re.findall(r"[\d.]+", cells) == measured


@pytest.mark.parametrize(
    ("module", "pages"), [(tekfac, "*.md"), (tekfac.fisher, "fisher.md"), (tekfac.layers, "layers.md")]
)
def test_every_public_name_is_in_the_reference(module: ModuleType, pages: str) -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs/api").glob(pages))
    public = {name for name in module.__all__ if not name.startswith("_")}
    parts = {
        name for name in public if isinstance(getattr(module, name), ModuleType)
    }  # have pages of their own
    named = re.findall(r"^::: tekfac[\w.]*\.(\w+)$", text, flags=re.MULTILINE)
    assert not public - parts - set(named)


def test_every_page_of_results_says_what_it_was_made_with() -> None:
    pages = [page for page in (ROOT / "docs/results").rglob("*.md") if page.name != "README.md"]
    overview = (ROOT / "docs/results/README.md").read_text()
    today, former = overview.split("## With former defaults")
    assert pages
    for page in pages:
        link = f"]({page.relative_to(ROOT / 'docs/results').as_posix()})"
        assert (link in today) != (link in former), page
        says_so = re.search(r"^> Of (a )?former ", page.read_text(), flags=re.MULTILINE)
        assert bool(says_so) == (link in former), page
