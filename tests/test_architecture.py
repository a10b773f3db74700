"""docs/architecture.md says who may import whom; the imports are held to it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tekfac
from tekfac.extras import EXTRAS_OF

SOURCE = Path(tekfac.__file__).parent
DOCUMENT = Path(__file__).parent.parent / "docs" / "architecture.md"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if path.stem not in ("__init__", "__main__")
)


def table() -> dict[str, set[str]]:
    """Module -> modules it may import, from the tables under the heading "Modules", top to bottom."""
    section = DOCUMENT.read_text().split("\n## Modules\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+)\.py` \|.*\|([^|]*)\|$", section, flags=re.MULTILINE)
    rows = [(name.replace("/", "."), cell) for name, cell in rows]
    order = [name for name, _ in rows]
    allowed = {}
    for index, (name, cell) in enumerate(rows):
        if cell.strip() == "everything below":
            allowed[name] = set(order[index + 1 :])
        else:
            allowed[name] = set(re.findall(r"[\w.]+", cell))
    return allowed


def imports(module: str) -> set[str]:
    """Modules of tekfac that a module imports, wherever in the file."""
    found = set()
    path = SOURCE.joinpath(*module.split(".")).with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("tekfac.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}.py has a relative import in line {node.lineno}"
            origin = node.module or ""
            for alias in node.names if origin.partition(".")[0] == "tekfac" else ():
                inside = f"{origin}.{alias.name}".removeprefix("tekfac.")
                found.add(inside if inside in MODULES else origin.removeprefix("tekfac."))
    return found


def test_the_table_lists_every_module_once() -> None:
    assert sorted(table()) == MODULES


def test_the_table_names_only_modules_that_exist() -> None:
    assert set().union(*table().values()) <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_the_table_allows(module: str) -> None:
    assert imports(module) - table()[module] == set()


@pytest.mark.parametrize("module", MODULES)
def test_the_table_allows_a_module_no_more_than_it_uses(module: str) -> None:
    assert table()[module] - imports(module) == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    order = list(TopologicalSorter({module: imports(module) for module in MODULES}).static_order())
    assert sorted(order) == MODULES


def test_hooks_are_registered_in_capture_alone() -> None:
    registering = {
        path.stem for path in SOURCE.rglob("*.py") if re.search(r"register_\w*hook", path.read_text())
    }
    assert registering == {"capture"}


def test_importing_the_package_needs_no_optional_one() -> None:
    """Nor does estimating; NumPy does not come with torch either."""
    missing = f"sys.modules.update(dict.fromkeys({('numpy', *EXTRAS_OF)!r}))"
    use = "tekfac.fisher.estimate(torch.nn.Linear(2, 3), [(torch.ones(4, 2), torch.zeros(4).long())])"
    code = f"import sys; {missing}; import torch, tekfac, tekfac.command; print(len({use}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "1"


def test_the_package_shows_the_four_optimizers_and_what_goes_with_them() -> None:
    optimizers = {"EKFAC", "KFAC", "TEKFAC", "TKFAC"}
    assert set(tekfac.__all__) == optimizers | {"__version__", "explain", "fisher", "register_layer"}
    assert all(hasattr(tekfac, name) for name in tekfac.__all__)
