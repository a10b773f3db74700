"""What comparisons say about the paper's claims: what is a theorem, what is an identity, what is neither.

    theorem      in one basis, the corrected diagonal has the smallest Frobenius error (paper, its Theorem)
    identity     trace-restricted factors and corrected diagonals keep the trace of F
    no theorem   trace-restricted factors need not have a smaller error than plain ones

docs/mathematics.md, section 9.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from tekfac.fisher.approximation import Approximation
from tekfac.fisher.comparison_table import Comparison, Row

TOLERANCE = 1e-6
"""Of |F|^2, for the rounding of sums in single precision."""


@dataclass(frozen=True)
class Finding:
    """A claim, and what was seen of it.

    Attributes:
        claim: in a formula.
        kind: what the claim is.
        held: how often it was seen to hold.
        cases: how often it was looked at: layers times comparisons; for what is no theorem, without those in
            which neither approximation has an error.
        margin: by how much, in words.
    """

    claim: str
    kind: Literal["theorem", "identity", "no theorem"]
    held: int
    cases: int
    margin: str

    @property
    def contradicted(self) -> bool:
        """Whether something was seen that mathematics rules out."""
        return self.kind != "no theorem" and self.held < self.cases

    def __str__(self) -> str:
        return f"{self.kind:<10}  {self.claim}: held in {self.held} of {self.cases} cases. {self.margin}"


def findings(comparisons: Sequence[Comparison]) -> list[Finding]:
    """The claims about the approximations that were compared."""
    compared = comparisons[0].compared
    found = []
    for product, corrected in itertools.product(compared, repeat=2):
        same_basis = product.factor_choice == corrected.factor_choice
        if same_basis and corrected.corrected and not product.corrected:
            found.append(_theorem(comparisons, product, corrected))
    found += [_identity(comparisons, approximation) for approximation in compared if approximation.keeps_trace]
    for plain, restricted in itertools.product(compared, repeat=2):
        same_diagonal = plain.corrected == restricted.corrected
        kinds = plain.method.factors.trace_restricted, restricted.method.factors.trace_restricted
        if same_diagonal and kinds == (False, True):
            found.append(_no_theorem(comparisons, plain, restricted))
    return found


def _rows_of(comparisons: Sequence[Comparison], *approximations: Approximation) -> list[tuple[Row, ...]]:
    """The rows of these approximations, one case per layer and comparison; layers with F = 0 say nothing."""
    return [
        tuple(comparison.row(layer, approximation.label) for approximation in approximations)
        for comparison in comparisons
        for layer, truth in comparison.truths.items()
        if truth.trace > 0
    ]


def _with_errors(cases: Sequence[tuple[Row, ...]]) -> list[tuple[Row, ...]]:
    """Cases with errors beyond rounding; every method has the blocks of norms exactly, for instance."""
    return [
        rows
        for rows in cases
        if any(row.squared_error.value > TOLERANCE * row.squared_norm.value for row in rows)
    ]


def _theorem(comparisons: Sequence[Comparison], product: Approximation, corrected: Approximation) -> Finding:
    cases = _rows_of(comparisons, product, corrected)
    held = sum(
        better.squared_error.value <= worse.squared_error.value + TOLERANCE * worse.squared_norm.value
        for worse, better in cases
    )
    ratios = [
        (better.error.value / worse.error.value, worse.layer)
        for worse, better in _with_errors(cases)
        if worse.error.value
    ]
    # Pythagoras: the squares differ by |S - Theta|^2 exactly.
    defects = [
        abs(worse.squared_error.value - better.squared_error.value - worse.excess) / worse.squared_norm.value
        for worse, better in cases
        if worse.squared_norm.value
    ]
    margin = "Neither has an error."
    if ratios:
        largest, layer = max(ratios)
        margin = (
            f"The smaller error is {median(ratio for ratio, _ in ratios):.3f} of the larger one in the median, "
            f"{largest:.6f} at most (layer {layer!r}). Its square is smaller by ‖S − Θ‖², the distance of the "
            f"two diagonals, as it must be: the deviation is {max(defects):.0e} ‖F‖² at most."
        )
    claim = f"‖F − {corrected.label}‖ ≤ ‖F − {product.label}‖"
    return Finding(claim, "theorem", held, len(cases), margin)


def _identity(comparisons: Sequence[Comparison], approximation: Approximation) -> Finding:
    cases = _rows_of(comparisons, approximation)
    deviations = [abs(row.trace_ratio - 1) for (row,) in cases]
    held = sum(deviation <= TOLERANCE for deviation in deviations)
    margin = f"The largest relative deviation is {max(deviations, default=0):.0e}."
    return Finding(f"tr {approximation.label} = tr F", "identity", held, len(cases), margin)


def _no_theorem(comparisons: Sequence[Comparison], plain: Approximation, restricted: Approximation) -> Finding:
    cases = _with_errors(_rows_of(comparisons, plain, restricted))
    held = sum(new.squared_error.value <= old.squared_error.value for old, new in cases)
    ratios = [new.error.value / old.error.value for old, new in cases if old.error.value]
    margin = "Neither has an error."
    if ratios:
        margin = f"The quotient of the errors is between {min(ratios):.3f} and {max(ratios):.3f}."
    claim = f"‖F − {restricted.label}‖ ≤ ‖F − {plain.label}‖"
    return Finding(claim, "no theorem", held, len(cases), margin)
