"""Promise: what an editor shows of a keyword, what is checked and what docs/settings.md says are the same."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from dense import METHODS
from tekfac import TEKFAC, fisher
from tekfac.capture.measurement import Measurement, MeasurementKeywords
from tekfac.fisher.options import Keywords, Options
from tekfac.optim.natural_gradient import NaturalGradient
from tekfac.optim.settings import OF_SOME_METHODS, Settings
from training import mlp

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "settings.md").read_text()
OF_GROUPS = ("lr", "momentum", "weight_decay")
SIGNATURE = {
    name: parameter
    for name, parameter in inspect.signature(NaturalGradient.__init__).parameters.items()
    if name not in ("self", "model", "unknown")
}
DEFAULTS = {field.name: field.default for field in fields(Settings)}


def told_default(name: str) -> str:
    """The default that the page's table has for a keyword."""
    row = re.search(rf"^\|[^|]*`{name}`[^|]*\|([^|]*)\|", PAGE, flags=re.MULTILINE)
    assert row is not None, f"docs/settings.md has no row of {name}"
    return row.group(1).strip()


def test_lr_momentum_and_weight_decay_may_be_positional_and_the_rest_may_not() -> None:
    positional = [n for n, p in SIGNATURE.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(OF_GROUPS)
    assert all(p.kind is p.KEYWORD_ONLY for n, p in SIGNATURE.items() if n not in positional)


def test_the_signature_has_every_setting_and_no_other() -> None:
    assert set(SIGNATURE) == {*OF_GROUPS, *DEFAULTS}


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name not in ("damping", "sharing", "fisher")])
def test_a_default_in_the_signature_is_that_of_the_settings(name: str) -> None:
    if name in OF_SOME_METHODS:
        assert SIGNATURE[name].default is None
    else:
        assert SIGNATURE[name].default == DEFAULTS[name]


def test_the_docstring_describes_every_keyword_and_no_other_in_the_order_of_the_signature() -> None:
    text = inspect.getdoc(NaturalGradient.__init__) or ""
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    described = re.findall(r"^    (\w+): ", arguments, flags=re.MULTILINE)
    assert described == ["model", *SIGNATURE]


@pytest.mark.parametrize("name", OF_SOME_METHODS)
def test_the_docstring_tells_the_default_that_none_stands_for(name: str) -> None:
    text = " ".join((inspect.getdoc(NaturalGradient.__init__) or "").split())
    told = re.search(rf" {name}: .*?None: ([^ ]+?)\.? ", text)
    assert told is not None
    assert told.group(1).strip('".') == str(DEFAULTS[name])


@pytest.mark.parametrize("name", [*OF_GROUPS, *DEFAULTS])
def test_the_page_has_a_row_of_every_keyword_with_its_default(name: str) -> None:
    told = told_default(name).strip("`\"'")
    default = DEFAULTS[name] if name in OF_SOME_METHODS else SIGNATURE[name].default
    if name == "memory_budget":
        assert told == f"{default // 2**20} MiB"
    elif isinstance(default, float):
        assert float(told) == default
    else:
        assert told == str(default)


def test_the_page_has_no_row_of_a_keyword_that_does_not_exist() -> None:
    tables = re.findall(r"^\| keyword \| default \|.*\n\|[-| ]+\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE)
    cells = [row.split("|")[1] for table in tables for row in table.splitlines()]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted([*OF_GROUPS, *DEFAULTS])


@pytest.mark.parametrize("method", METHODS)
def test_every_shown_default_is_accepted_and_is_the_default(method: type[NaturalGradient]) -> None:
    given = method(mlp(), **{name: p.default for name, p in SIGNATURE.items()})
    assert given.defaults == method(mlp()).defaults
    assert given._settings == method(mlp())._settings


def test_help_shows_each_keyword(capsys: pytest.CaptureFixture[str]) -> None:
    help(TEKFAC)
    shown = capsys.readouterr().out
    assert all(f"{name}:" in shown for name in SIGNATURE)


def test_a_misspelt_keyword_gets_the_name_that_was_probably_meant() -> None:
    with pytest.raises(TypeError, match=r"TEKFAC got an unknown keyword 'dampng'\. Did you mean 'damping'\?"):
        TEKFAC(mlp(), dampng=0.1)  # type: ignore[arg-type]


# -- measurements --------------------------------------------------------------------------------------


def test_the_optimizers_and_the_fisher_share_the_settings_of_a_measurement() -> None:
    shared = {field.name for field in fields(Measurement)}
    assert shared <= {field.name for field in fields(Settings)}
    assert shared <= {field.name for field in fields(Options)}
    assert shared == set(get_type_hints(MeasurementKeywords))
    assert {field.name for field in fields(Options)} == set(get_type_hints(Keywords))


@pytest.mark.parametrize(
    ("keyword", "value", "blocks_of"),
    [
        ("max_dim", 3, "the inputs"),
        ("curvature_dtype", torch.float64, "the numbers"),
        ("padding_mask", lambda x: torch.ones(len(x), 1), "nothing"),
    ],
)
def test_keywords_that_the_optimizers_have_are_the_fishers_too(
    keyword: str, value: Any, blocks_of: str
) -> None:
    model = mlp(dtype=torch.float32)
    data = [(torch.randn(6, 5), torch.randint(3, (6,)))]
    found = fisher.estimate(model, data, **{keyword: value})
    plain = fisher.estimate(model, data)
    if blocks_of == "the inputs":
        assert found["0"].basis.vectors_in.shape == (1, 6, 3)
    elif blocks_of == "the numbers":
        assert found["0"].to_dense().dtype == torch.float64
    else:
        assert torch.equal(found["0"].to_dense(), plain["0"].to_dense())
