"""Promise: what the documentation shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac import TEKFAC
from tekfac.settings import DESCRIPTIONS

ROOT = Path(__file__).resolve().parent.parent


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/settings.md"])
def test_every_python_block_runs(page: str) -> None:
    loader = [(torch.randn(8, 1, 5, 5), torch.randint(3, (8,))) for _ in range(2)]
    assert blocks(page)
    for code in blocks(page):
        names: dict[str, Any] = {"model": Model(), "loader": loader, "F": F, "nn": nn, "TEKFAC": TEKFAC}
        exec(code, names)
        assert isinstance(names["optimizer"], TEKFAC)


def test_every_python_block_about_the_fisher_runs_in_order(tmp_path: Path) -> None:
    model = Model()
    loader = [(torch.randn(8, 1, 5, 5), torch.randint(3, (8,))) for _ in range(2)]

    def loss_of(model: nn.Module) -> Tensor:
        x, y = loader[0]
        return F.cross_entropy(model(x), y)

    names: dict[str, Any] = {"torch": torch, "TEKFAC": TEKFAC, "folder": tmp_path}
    names |= {"model": model, "loader": loader, "loss_of": loss_of}
    assert len(blocks("docs/fisher.md")) == 5
    for code in blocks("docs/fisher.md"):
        exec(code, names)
    assert (tmp_path / "comparison.csv").exists()


def test_every_link_between_pages_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_setting_is_explained() -> None:
    text = (ROOT / "docs/settings.md").read_text()
    missing = [name for name in DESCRIPTIONS if name != "model" and f"`{name}`" not in text]
    assert not missing
