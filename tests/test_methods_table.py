"""methods.py is the whole difference between the four methods; no other file asks for a method's name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import tekfac
from dense import METHODS
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC, methods
from tekfac.curvature.factors import PLAIN, TRACE_RESTRICTED
from tekfac.curvature.rescaling import CORRECTED, PRODUCT
from tekfac.optim.natural_gradient import NaturalGradient
from training import mlp

SOURCE = Path(tekfac.__file__).parent
NAMES = {"KFAC", "EKFAC", "TKFAC", "TEKFAC"}
MAY_NAME_METHODS = {"methods.py", "optimizers.py", "__init__.py"}

NO_RESCALING = {"rescaling_decay": 0.9, "rescaling_every": 10}
NO_NORMALISATION = {"trace_floor": 0.1, "beta": "add", "averaging": "moments"}
REFUSED: dict[type[NaturalGradient], dict[str, Any]] = {
    KFAC: NO_RESCALING | NO_NORMALISATION,
    EKFAC: NO_NORMALISATION,
    TKFAC: NO_RESCALING,
    TEKFAC: {},
}


def test_the_table_is_two_choices_of_factors_times_two_of_rescaling() -> None:
    assert {m.name: (m.factors, m.rescaling) for m in methods.ALL} == {
        "KFAC": (PLAIN, PRODUCT),
        "EKFAC": (PLAIN, CORRECTED),
        "TKFAC": (TRACE_RESTRICTED, PRODUCT),
        "TEKFAC": (TRACE_RESTRICTED, CORRECTED),
    }


@pytest.mark.parametrize("method", METHODS)
def test_each_class_is_its_row_and_nothing_else(method: type[NaturalGradient]) -> None:
    assert method.method.name == method.__name__
    own = {name for name in vars(method) if not (name.startswith("__") and name.endswith("__"))}
    assert own - {"step"} == {"method"}  # torch puts its profiling wrapper of step() into every class
    assert "step" not in (SOURCE / "optimizers.py").read_text()


def names_in(tree: ast.AST) -> list[str]:
    """Methods' names as identifiers, attributes or whole strings; docstrings and comments do not count."""
    found = []
    for node in ast.walk(tree):
        name = {
            ast.Name: lambda n: n.id,
            ast.Attribute: lambda n: n.attr,
            ast.Constant: lambda n: n.value,
            ast.alias: lambda n: n.name,
        }.get(type(node), lambda n: None)(node)  # type: ignore[no-untyped-call]
        if isinstance(name, str) and name.strip() in NAMES:
            found.append(f"{name} in line {getattr(node, 'lineno', '?')}")
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.name)
def test_no_other_file_knows_a_methods_name(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.parent == SOURCE and path.name in MAY_NAME_METHODS:
        return
    names = names_in(tree)
    if path.name == "fisher_demo.py":  # the network that `tekfac fisher` trains for itself
        names = [name for name in names if not name.startswith("TEKFAC")]
    assert names == []


def test_the_file_of_the_classes_takes_no_decisions() -> None:
    tree = ast.parse((SOURCE / "optimizers.py").read_text())
    decisions = (ast.If, ast.IfExp, ast.Match, ast.Compare, ast.BoolOp, ast.FunctionDef)
    assert not [node for node in ast.walk(tree) if isinstance(node, decisions)]


def test_methods_py_itself_does_not_branch_on_names() -> None:
    """It asks a row for its choices, so that a fifth row needs no change elsewhere."""
    tree = ast.parse((SOURCE / "methods.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            assert names_in(node) == []


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [(m, key, value) for m, refused in REFUSED.items() for key, value in refused.items()],
)
def test_keywords_without_a_meaning_for_a_method_are_refused_by_name_with_the_reason(
    method: type[NaturalGradient], key: str, value: Any
) -> None:
    with pytest.raises(TypeError, match=rf"{method.__name__} takes no '{key}': .+") as error:
        method.natural(mlp(), **{key: value})
    reason = "re-scales by" if key in NO_RESCALING else "plain factors"
    assert reason in str(error.value)


@pytest.mark.parametrize("method", METHODS)
def test_where_second_moments_move_none_has_an_interval_for_them_and_all_have_a_decay(
    method: type[NaturalGradient],
) -> None:
    with pytest.raises(TypeError, match=r"takes no 'rescaling_every': second moments move at every step"):
        method(mlp(), rescaling_every=10)
    assert method(mlp(), rescaling_decay=0.98)._form.moving_decay == 0.98


@pytest.mark.parametrize("method", [KFAC, EKFAC])
def test_a_sharing_that_plain_factors_do_not_have_is_refused_with_those_they_have(
    method: type[NaturalGradient],
) -> None:
    with pytest.raises(ValueError, match=rf"Unknown sharing: 'exact'.*expand, reduce for {method.__name__}"):
        method(mlp(), sharing="exact")
    assert method(mlp())._settings.sharing == "expand"
