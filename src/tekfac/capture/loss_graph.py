"""What a loss does with a model's outputs, as far as the graph between the two tells.

While a backward pass runs, the nodes above the outputs have let go of what they saved, but not of their names
and edges. Values on the way from the outputs up to the loss are sorted into few sorts,

    outputs          rearranged at most (views, some of them, another precision)
    residual         outputs minus something fixed, which no gradient goes to
    log-softmax      of outputs
    a loss           that is linear in one of the three below

of which the last names the likelihood: logarithms of probabilities (categorical), logistic losses (Bernoulli),
squares of residuals (Gaussian). Whatever is not known to keep a sort, loses it. docs/mathematics.md, section 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from tekfac.common.torch_internals import (
    base_name,
    exponent_of,
    joins_rows,
    length_along,
    sequence_number,
)


class Sort(Enum):
    """What is known of a value between the outputs and the loss."""

    OUTPUTS = "outputs"
    RESIDUAL = "outputs minus something fixed"
    LOG_SOFTMAX = "log-probabilities of the outputs"
    LOG_PROBABILITIES = "the outputs as log-probabilities, linearly"
    CATEGORICAL = "log-probabilities of the outputs, linearly"
    BERNOULLI = "logistic losses of the outputs, linearly"
    GAUSSIAN = "squares of the outputs, linearly"
    OTHER = "something else"


REORDERING = frozenset(
    {"View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "T", "MT", "Squeeze", "Unsqueeze"}
    | {"Clone", "ToCopy", "Alias", "Flip", "Roll"}
)
"""Operations whose result has the entries of their input."""

PICKING = frozenset(
    {"Slice", "Select", "Index", "IndexSelect", "Unbind", "Split", "SplitWithSizes", "MaskedSelect"}
)
"""Operations whose result has some of the entries."""

LINEAR = (
    REORDERING
    | PICKING
    | {"Neg", "Sum", "Mean", "Mul", "Div", "Add", "Sub", "Rsub", "Stack", "Cat", "Where", "MaskedFill"}
    | {"Gather", "Nansum", "Dot", "Mv", "NllLoss", "NllLoss2D", "NllLossNd", "Expand", "Repeat"}
)
"""Operations that are linear in one input, where everything else is fixed."""

LOSSES = {
    "BinaryCrossEntropyWithLogits": Sort.BERNOULLI,
    "MseLoss": Sort.GAUSSIAN,
    "NllLoss": Sort.LOG_PROBABILITIES,
    "NllLoss2D": Sort.LOG_PROBABILITIES,
}
"""What losses of torch are, of the outputs themselves and something fixed."""

SHIFTS = ("Sub", "Rsub", "Add")
"""Operations that give outputs minus something, up to signs."""

MOVABLE = (Sort.OUTPUTS, Sort.RESIDUAL, Sort.LOG_SOFTMAX)
"""What stays the same beside other samples."""

FOUND = (Sort.LOG_PROBABILITIES, Sort.CATEGORICAL, Sort.BERNOULLI, Sort.GAUSSIAN)


class LossSort(NamedTuple):
    """What a loss is of the outputs.

    Attributes:
        sort: one of FOUND, or OTHER.
        classes: the lengths of the axes that log-softmaxes of the outputs were taken along, as far as they are
            known: another one than an axis of the outputs has is that of a part of them, or of several axes.
        of_part: whether it may be of some of their entries only, or of some of them twice.
    """

    sort: Sort
    classes: frozenset[int] = frozenset()
    of_part: bool = False


def sort_of_loss(roots: Iterable[tuple[Any, int]], node: Any, output_nr: int) -> LossSort:
    """What the values that a backward pass started from are, of the outputs.

    Args:
        roots: the nodes of these values, and which of their results they are.
        node: that made the outputs.
        output_nr: which of its results they are.
    """
    sorts = _Sorts(node, output_nr)
    found = {sort for root in roots if (sort := sorts.of(*root)) is not None}
    found = {Sort.CATEGORICAL if sort is Sort.LOG_SOFTMAX else sort for sort in found}
    (only, *more) = found or {Sort.OTHER}
    sort = only if only in FOUND and not more else Sort.OTHER
    return LossSort(sort, frozenset(sorts.classes), sorts.of_part)


class _Sorts:
    """The sorts of values above the outputs, each found once.

    Attributes:
        classes: lengths of the axes that log-softmaxes were taken along.
        of_part: whether entries of the outputs were picked out on the way.
    """

    def __init__(self, node: Any, output_nr: int) -> None:
        self.classes: set[int] = set()
        self.of_part = False
        self._outputs = (node, output_nr)
        self._oldest = sequence_number(node)
        self._known: dict[Any, Sort | None] = {}

    def of(self, node: Any, output_nr: int) -> Sort | None:
        """The sort of a node's result; None if it does not depend on the outputs."""
        if node == self._outputs[0]:  # whose other results are of the same age, and not made of this one
            return Sort.OUTPUTS if output_nr == self._outputs[1] else None
        waiting = [node]
        while waiting:  # not by recursion, as graphs are deep
            here = waiting[-1]
            below = [n for n, _ in here.next_functions if n is not None and self._may_depend(n)]
            missing = [n for n in below if n not in self._known]
            if missing:
                waiting.extend(missing)
            else:
                self._known[here] = self._made(here)
                waiting.pop()
        return self._known[node]

    def _may_depend(self, node: Any) -> bool:
        return node != self._outputs[0] and sequence_number(node) > self._oldest

    def _input(self, node: Any, output_nr: int) -> Sort | None:
        if node == self._outputs[0]:
            return self.of(node, output_nr)
        return self._known.get(node)

    def _made(self, node: Any) -> Sort | None:
        """The sort of a result, by those of what it is made of."""
        edges = [(n, nr) for n, nr in node.next_functions if n is not None]
        inputs = [(edge, sort) for edge in edges if (sort := self._input(*edge)) is not None]
        if not inputs:
            return None
        name = base_name(node)
        sorts = [sort for _, sort in inputs]
        if len(inputs) > 1:
            return self._made_of_several(name, [edge for edge, _ in inputs], sorts)
        if name == "Div" and self._is_denominator(node):
            return Sort.OTHER
        if sorts[0] in MOVABLE and joins_rows(node):  # those of another call of the model, say
            return sorts[0]
        if sorts[0] in (Sort.OUTPUTS, Sort.RESIDUAL):
            self.of_part |= name in PICKING
            if len(edges) > 1 and (name in SHIFTS or name == "MseLoss"):  # a target that is trained, too
                return Sort.OTHER
        sort = _made_of_one(name, sorts[0], exponent_of(node))
        if sort is Sort.LOG_SOFTMAX and name == "LogSoftmax" and (length := length_along(node)) is not None:
            self.classes.add(length)
        return sort

    def _is_denominator(self, node: Any) -> bool:
        first = node.next_functions[0]
        return first[0] is None or self._input(*first) is None

    def _made_of_several(self, name: str, edges: Sequence[Any], sorts: Sequence[Sort]) -> Sort:
        """Of several values that all depend on the outputs."""
        one = sorts[0]
        if any(sort is not one for sort in sorts):
            return Sort.OTHER
        if name == "Mul" and one in (Sort.OUTPUTS, Sort.RESIDUAL) and all(edge == edges[0] for edge in edges):
            return Sort.GAUSSIAN
        is_sum = name in ("Add", "Sub", "Rsub", "Stack", "Cat", "Where")
        keeps = (*FOUND, Sort.LOG_SOFTMAX)
        return one if is_sum and one in keeps else Sort.OTHER


def _made_of_one(name: str, sort: Sort, exponent: float | None) -> Sort:
    """Of one value that depends on the outputs, and perhaps of something fixed."""
    if sort in (Sort.OUTPUTS, Sort.RESIDUAL):
        if name in REORDERING or name in PICKING:
            return sort
        if name in SHIFTS:
            return Sort.RESIDUAL
        if name == "MseLoss" or (name == "Pow" and exponent == 2):
            return Sort.GAUSSIAN
        if sort is Sort.OUTPUTS:
            return Sort.LOG_SOFTMAX if name == "LogSoftmax" else LOSSES.get(name, Sort.OTHER)
        return Sort.OTHER
    if sort is Sort.LOG_SOFTMAX:
        if name in REORDERING or name in PICKING:
            return sort
        return Sort.CATEGORICAL if name in LINEAR else Sort.OTHER
    return sort if sort in FOUND and name in LINEAR else Sort.OTHER
