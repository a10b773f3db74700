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
from tekfac.common.extras import EXTRAS_OF

SOURCE = Path(tekfac.__file__).parent
DOCUMENT = Path(__file__).parent.parent / "docs" / "architecture.md"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if path.stem not in ("__init__", "__main__")
)


PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def table() -> dict[str, set[str]]:
    """Package -> packages it may import; a module at the top belongs to the package it is named beside."""
    section = DOCUMENT.read_text().split("\n## Packages\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`([^|]*)\|[^|]*\|([^|]*)\|$", section, flags=re.MULTILINE)
    packages = [name for name, _, _ in rows]
    allowed = {}
    for name, _, cell in rows:
        allowed[name] = set(packages) if cell.strip() == "everything" else set(re.findall(r"\w+", cell))
    return allowed


def homes() -> dict[str, str]:
    """The package of every module at the top."""
    section = DOCUMENT.read_text().split("\n## Packages\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`([^|]*)\|", section, flags=re.MULTILINE)
    return {module: name for name, beside in rows for module in re.findall(r"`(\w+)\.py`", beside)}


def package_of(module: str) -> str:
    return module.partition(".")[0] if "." in module or module in PACKAGES else homes()[module]


def imports(module: str) -> set[str]:
    """Modules of tekfac that a module imports, wherever in the file."""
    found = set()
    path = SOURCE.joinpath(*module.split(".")).with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("tekfac.") for a in node.names if a.name.startswith("tekfac.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}.py has a relative import in line {node.lineno}"
            origin = node.module or ""
            for alias in node.names if origin.partition(".")[0] == "tekfac" else ():
                inside = f"{origin}.{alias.name}".removeprefix("tekfac.")
                found.add(inside if inside in MODULES else origin.removeprefix("tekfac."))
    return found


def test_every_package_and_every_module_at_the_top_has_a_row() -> None:
    assert sorted(table()) == PACKAGES
    assert sorted(homes()) == [module for module in MODULES if "." not in module]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_the_table_allows_and_all_of_it(package: str) -> None:
    used = {
        package_of(other) for module in MODULES if package_of(module) == package for other in imports(module)
    }
    assert used - table()[package] - {package} == set()
    if package != "cli":
        assert table()[package] - used == set(), "the table allows more than is used"


def test_no_modules_import_each_other_in_a_circle() -> None:
    order = list(TopologicalSorter({module: imports(module) for module in MODULES}).static_order())
    assert set(MODULES) <= set(order)


def test_hooks_are_registered_in_capture_alone() -> None:
    registering = {
        path.stem for path in SOURCE.rglob("*.py") if re.search(r"register_\w*hook", path.read_text())
    }
    assert registering == {"hooks", "autograd"}  # of modules and tensors; of nodes of the graph


def test_importing_the_package_needs_no_optional_one() -> None:
    """Nor does estimating; NumPy does not come with torch either."""
    missing = f"sys.modules.update(dict.fromkeys({('numpy', *EXTRAS_OF)!r}))"
    use = "tekfac.fisher.estimate(torch.nn.Linear(2, 3), [(torch.ones(4, 2), torch.zeros(4).long())])"
    code = f"import sys; {missing}; import torch, tekfac, tekfac.cli.main; print(len({use}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "1"


def test_the_package_shows_the_four_optimizers_and_what_goes_with_them() -> None:
    optimizers = {"EKFAC", "KFAC", "TEKFAC", "TKFAC"}
    assert set(tekfac.__all__) == optimizers | {"__version__", "explain", "fisher", "register_layer"}
    assert all(hasattr(tekfac, name) for name in tekfac.__all__)
