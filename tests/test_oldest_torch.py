"""Promise: the oldest torch that pyproject.toml admits is the one that `make test-oldest` tests with."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_floor_is_installed_by_make() -> None:
    (torch,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floor = re.fullmatch(r"torch>=([0-9.]+)", torch)
    assert floor
    asked = ["make", "--dry-run", "--always-make", "test-oldest"]
    commands = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"torch==(\S*)", commands) == [floor[1]]
