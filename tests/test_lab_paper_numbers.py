"""The numbers and settings that we say the paper prints are those in its source, where that is at hand."""

from __future__ import annotations

import re

import pytest

from lab_data import SHARED
from tekfac.lab import paper

SOURCE = SHARED.parent / "reference" / "tekfac-paper.tex"
if not SOURCE.is_file():
    pytest.skip("no source of the paper beside the project", allow_module_level=True)

DATA = {"SVHN": "svhn", "CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}


def table(label: str) -> list[list[str]]:
    """The cells of a table, mean ± deviation as we write them."""
    text = SOURCE.read_text(encoding="utf-8").split(rf"\label{{{label}}}")[1].split(r"\end{tabular}")[0]
    text = re.sub(r"\\textbf\{([^}]*)\}", r"\1", re.sub(r"\s*\$\\pm\$\s*", " ± ", text))
    rows = [re.sub(r"\\(mid|bottom|top)rule", "", row) for row in text.split(r"\\")]
    return [[cell.strip() for cell in row.split("&")] for row in rows if "&" in row]


def by_value(label: str) -> dict[float, str]:
    """A table of two kinds of rows: values of a setting, and the accuracies below them."""
    rows = table(label)
    found = {}
    for values, accuracies in zip(rows[::2], rows[1::2], strict=True):
        found |= {float(v): a for v, a in zip(values[1:], accuracies[1:], strict=True) if v}
    return found


def test_the_table_of_accuracies() -> None:
    rows = [row for row in table("tabacc") if row[0] in DATA]
    printed = {
        (DATA[data], model.lower(), optimizer): cell
        for data, model, *cells in rows
        for optimizer, cell in zip(paper.OPTIMIZERS, cells, strict=True)
    }
    assert len(printed) == 30
    assert paper.accuracies() == printed


def test_the_tables_of_sensitivity() -> None:
    assert by_value("parameter") == paper.VARTHETA
    assert by_value("rate") == paper.LEARNING_RATE


def test_the_grids_and_the_length_of_runs() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    grids = [
        tuple(map(float, listed.split(",")))
        for listed in re.findall(r"\\item [^:]*(?:eta|lambda)\$: \\\{([^}]*)\\\}", text)
    ]
    assert grids == [paper.LEARNING_RATES, paper.DAMPINGS, paper.TRACE_FLOORS]
    epochs, decay = paper.EPOCHS, paper.DECAY_EVERY
    assert f"{epochs['svhn']} epochs for SVHN and {epochs['cifar10']} epochs for CIFAR" in text
    assert f"every {decay['svhn']} epochs for SVHN and every {decay['cifar10']} epochs for CIFAR" in text
