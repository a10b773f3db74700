"""The result of a comparison: rows, what they say about the theorems, and how they are printed and saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from tekfac.common import files
from tekfac.common.tables import csv_of
from tekfac.curvature.blocks.block import Block
from tekfac.fisher.approximation import Approximation
from tekfac.layers.shapes import LayerShape


class Interval(NamedTuple):
    """A number, and where it lies; all three are the same where it is exact."""

    value: float
    low: float
    high: float

    @property
    def exact(self) -> bool:
        """Whether it is no estimate."""
        return self.low == self.high


@dataclass(frozen=True)
class LayerTruth:
    """What is known of a layer's exact block.

    Attributes:
        shape: name and sizes of the layer.
        way: how it was looked at: as a matrix, by the Gram matrix of its gradients, or by probes.
        trace: tr F.
        squared_norm: |F|^2.
        eigenvalues: all of them, ascending, if asked for.
        block: the exact block, while there is room for it.
    """

    shape: LayerShape
    way: str
    trace: float
    squared_norm: Interval
    eigenvalues: Tensor | None
    block: Block | None


@dataclass(frozen=True)
class Row:
    """One layer approximated in one way.

    Attributes:
        layer: its name.
        approximation: the method (and sharing, where it is not the method's own).
        parameters: rows of the block.
        trace_ratio: tr F_hat / tr F.
        squared_error: |F - F_hat|^2.
        squared_norm: |F|^2.
        excess: |S - Theta|^2, what a better diagonal in the same basis would take off the squared error.
        cosine: of the angle between (F_hat + lambda I)^-1 g and (F + lambda I)^-1 g; None where the exact one
            is out of reach (by probes), or the gradient is 0.
        damping: lambda.
        way: how the exact block was looked at.
        diagonal: S, in descending order, if spectra were asked for, [parameters].
    """

    layer: str
    approximation: str
    parameters: int
    trace_ratio: float
    squared_error: Interval
    squared_norm: Interval
    excess: float
    cosine: float | None
    damping: float
    way: str
    diagonal: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def error(self) -> Interval:
        """|F - F_hat| / |F|, with an interval where it is estimated."""
        if not self.squared_norm.value > 0:
            return Interval(math.nan, math.nan, math.nan)
        if self.squared_norm.exact:
            error = math.sqrt(max(0.0, self.squared_error.value) / self.squared_norm.value)
            return Interval(error, error, error)
        # error^2 = norm^2 + a known number, so that the quotient grows or falls with the norm alone.
        known = self.squared_error.value - self.squared_norm.value
        low, value, high = (
            math.sqrt(max(0.0, end + known) / end) if end > 0 else math.inf if known > 0 else 0.0
            for end in (self.squared_norm.low, self.squared_norm.value, self.squared_norm.high)
        )
        return Interval(value, min(low, high), max(low, high))

    @property
    def angle(self) -> float | None:
        """In degrees."""
        return None if self.cosine is None else math.degrees(math.acos(max(-1.0, min(1.0, self.cosine))))

    def plain(self) -> dict[str, Any]:
        """As numbers and strings, for CSV and JSON."""
        error = self.error
        return {
            "layer": self.layer,
            "approximation": self.approximation,
            "parameters": self.parameters,
            "trace_ratio": self.trace_ratio,
            "error": error.value,
            "error_low": error.low,
            "error_high": error.high,
            "cosine": self.cosine,
            "angle_degrees": self.angle,
            "damping": self.damping,
            "fisher_norm": math.sqrt(max(0.0, self.squared_norm.value)),
            "excess": math.sqrt(self.excess),
            "way": self.way,
        }


@dataclass(frozen=True)
class Comparison:
    """Layers and methods beside each other. Print it to see the table.

    Attributes:
        compared: the approximations, in the order they were asked for.
        rows: layer by layer.
        truths: what is known of each layer's exact block.
        metadata: how it was made.
    """

    compared: tuple[Approximation, ...]
    rows: tuple[Row, ...]
    truths: Mapping[str, LayerTruth]
    metadata: Mapping[str, Any]

    def row(self, layer: str, approximation: str) -> Row:
        """One row, by the layer's name and "KFAC" or "kfac:reduce".

        Raises:
            KeyError: if there is none.
        """
        labels = {a.label.lower(): a.label for a in self.compared}
        label = labels.get(approximation.lower())
        if label is None and ":" in approximation:
            label = Approximation.named(approximation).label
        for row in self.rows:
            if (row.layer, row.approximation) == (layer, label):
                return row
        raise KeyError(
            f"No row of layer {layer!r} and {approximation!r}. Layers: {', '.join(map(repr, self.truths))}; "
            f"approximations: {', '.join(a.label for a in self.compared)}."
        )

    def __str__(self) -> str:
        header = ["layer", "parameters", "method", "tr F̂ / tr F", "‖F − F̂‖ / ‖F‖", "cosine", "angle", "F by"]
        lines = [header]
        for index, row in enumerate(self.rows):
            first = index == 0 or self.rows[index - 1].layer != row.layer
            lines.append(
                [
                    row.layer if first else "",
                    f"{row.parameters}" if first else "",
                    row.approximation,
                    f"{row.trace_ratio:.4f}",
                    _in_words(row.error),
                    "–" if row.cosine is None else f"{row.cosine:.4f}",
                    "–" if row.angle is None else f"{row.angle:.1f}°",
                    row.way if first else "",
                ]
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        form = "  ".join(f"{{:{width}}}" for width in widths)
        return "\n".join(form.format(*line).rstrip() for line in lines)

    def to_csv(self, path: str | Path) -> None:
        """One line per row."""
        write_csv(path, [row.plain() for row in self.rows])

    def to_json(self, path: str | Path) -> None:
        """Rows and metadata; what is not a number is null."""
        write_json(path, self.plain())

    def plain(self) -> dict[str, Any]:
        """Rows and metadata as numbers, strings, lists and dicts."""
        return {"metadata": dict(self.metadata), "rows": [row.plain() for row in self.rows]}


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per row, after a line of names."""
    files.write_text(Path(path), csv_of([rows[0], *(row.values() for row in rows)]))


def write_json(path: str | Path, plain: Any) -> None:
    """Plain values, with null for what is not a finite number."""
    files.write_json(Path(path), _finite(plain))


def _in_words(interval: Interval) -> str:
    if interval.exact or math.isnan(interval.value):
        return f"{interval.value:.4f}"
    return f"{interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
