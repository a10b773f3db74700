"""Promise: what docs/frameworks.md shows runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tekfac import TEKFAC
from test_documentation import blocks, surroundings

PAGE = "docs/frameworks.md"
NEEDS = {"transformers": "huggingface", "accelerate": "huggingface", "lightning": "lightning"}

# What the frameworks and the compiler themselves warn of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


def test_there_is_a_block_for_every_framework() -> None:
    assert len(blocks(PAGE)) == 5


@pytest.mark.parametrize("number", range(5))
def test_every_python_block_runs_by_itself(number: int, tmp_path: Path) -> None:
    code = blocks(PAGE)[number]
    for package, extra in NEEDS.items():
        if f"import {package}" in code:
            pytest.importorskip(package, reason=f"needs {package}: pip install 'tekfac[{extra}]'")
    names = surroundings(folder=tmp_path)
    exec(code, names)
    if "layers" in names:
        assert "transformer.h.0.mlp.c_fc" in names["layers"]
    else:
        assert isinstance(names["optimizer"], TEKFAC)
        assert {"body.0", "head"} <= set(names["optimizer"].curvature)
