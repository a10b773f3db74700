"""Promise: what `tekfac fisher` says of the paper's claims is said of errors, not of rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tekfac import fisher
from tekfac.fisher.paper_claims import Finding, findings

DATA = [
    (torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(24) % 3)
]


def found(*layers: nn.Module) -> list[Finding]:
    torch.manual_seed(0)
    return findings([fisher.compare(nn.Sequential(*layers).double(), DATA)])


def of_kind(kind: str, all_found: list[Finding]) -> list[Finding]:
    return [finding for finding in all_found if finding.kind == kind]


def test_layers_that_all_methods_have_exactly_do_not_count_where_there_is_no_theorem() -> None:
    all_found = found(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))
    assert [finding.cases for finding in of_kind("no theorem", all_found)] == [2, 2]
    assert [(finding.held, finding.cases) for finding in of_kind("theorem", all_found)] == [(3, 3), (3, 3)]
    assert not [finding for finding in all_found if "layer '2'" in finding.margin]


@pytest.mark.parametrize("kind", ["theorem", "no theorem"])
def test_where_nothing_has_an_error_that_is_what_is_said(kind: str) -> None:
    for finding in of_kind(kind, found(nn.LayerNorm(3))):
        assert finding.margin == "Neither has an error."
        assert not finding.contradicted
