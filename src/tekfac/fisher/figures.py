"""Figures of a comparison, for print: one column or one page wide, with colours that the colour-blind can tell.

The look of a method is its place in the table of methods: blue for plain factors, orange for trace-restricted
ones; light and dashed for products of eigenvalues, dark and solid for corrected second moments; hatched and
dotted where the sharing is not the method's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tekfac.common.extras import require
from tekfac.common.files import write_whole
from tekfac.curvature.blocks.block import Block
from tekfac.fisher.approximation import Approximation
from tekfac.fisher.comparison_table import Comparison, Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {  # (trace-restricted, corrected)
    (False, False): "#6baed6",
    (False, True): "#08519c",
    (True, False): "#fdae6b",
    (True, True): "#d94801",
}
TRUE_COLOUR = "#222222"
PAGE = 7.0
"""Width in inches."""

CHARACTERS_PER_PAGE = 100

STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,
}


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure twice, for the screen (PNG) and for print (PDF); `path` has no ending."""
    for ending in ("png", "pdf"):
        with style():
            save_figure(figure, Path(f"{path}.{ending}"), dpi=250)


def save_figure(figure: Figure, path: Path, **settings: Any) -> None:
    """Write a figure in the format that its name ends with, whole or not at all."""
    told = {"format": path.suffix.removeprefix("."), **settings}
    write_whole(path, lambda unfinished: figure.savefig(unfinished, **told))


def errors(comparison: Comparison) -> Figure:
    """Relative Frobenius error of every layer and method, with intervals where it is estimated."""
    found = {
        a.label: [comparison.row(layer, a.label).error for layer in comparison.truths]
        for a in comparison.compared
    }
    return _bars(comparison, found, "‖F − F̂‖ / ‖F‖")


def angles(comparison: Comparison) -> Figure:
    """Angle between the preconditioned gradients, by the approximation and by the exact block."""
    found = {}
    for approximation in comparison.compared:
        rows = [comparison.row(layer, approximation.label) for layer in comparison.truths]
        degrees = [math.nan if row.angle is None else row.angle for row in rows]
        found[approximation.label] = [Interval(angle, angle, angle) for angle in degrees]
    return _bars(comparison, found, "angle, degrees")


def _bars(comparison: Comparison, found: Mapping[str, Sequence[Interval]], ylabel: str) -> Figure:
    """A group of bars per layer."""
    compared, labels = comparison.compared, _short(list(comparison.truths))
    width = 0.8 / len(compared)
    upright = sum(len(label) + 3 for label in labels) > CHARACTERS_PER_PAGE
    with style():
        figure = empty(3.2 if upright else 2.6)
        axes = figure.subplots()
        for index, approximation in enumerate(compared):
            own = found[approximation.label]
            places = [place + (index - (len(compared) - 1) / 2) * width for place in range(len(labels))]
            heights = [e.value for e in own]
            bars = axes.bar(
                places, heights, 0.92 * width, label=approximation.label, color=_colour(approximation)
            )
            if not approximation.usual:
                for bar in bars:
                    bar.set(hatch="////", edgecolor="white", linewidth=0)
            if any(e.low < e.high for e in own):
                spread = [[e.value - e.low for e in own], [e.high - e.value for e in own]]
                axes.errorbar(places, heights, spread, fmt="none", ecolor="k", elinewidth=0.6)
        axes.set_xticks(range(len(labels)), labels, rotation=90 if upright else 0)
        axes.set_ylabel(ylabel)
        axes.set_xlabel("layer")
        axes.margins(x=0.01)
        figure.legend(loc="outside upper center", ncols=len(compared), frameon=False)
    return figure


def spectra(comparison: Comparison) -> Figure:
    """Eigenvalues of the exact block and every method's diagonal, in descending order.

    Raises:
        ValueError: if the comparison was made without spectra.
    """
    if all(row.diagonal is None for row in comparison.rows):
        raise ValueError("The comparison has no spectra. Make it with fisher.compare(..., spectra=True).")
    with style():
        truths = {layer: truth for layer, truth in comparison.truths.items() if truth.trace > 0}
        figure, panels = _panels(len(truths), height=2.0)
        for axes, (layer, truth) in zip(panels, truths.items(), strict=False):
            rows = [comparison.row(layer, approximation.label) for approximation in comparison.compared]
            floor = 1e-8 * max(float(row.diagonal[0]) for row in rows if row.diagonal is not None)
            if truth.eigenvalues is not None:
                values = truth.eigenvalues.flip(0)
                _ranked(axes, values, floor, color=TRUE_COLOUR, linewidth=2.2, alpha=0.55, label="F")
            for approximation, row in zip(comparison.compared, rows, strict=True):
                if row.diagonal is not None:
                    _ranked(axes, row.diagonal, floor, label=approximation.label, **_line(approximation))
            axes.set(xscale="log", yscale="log", title=f"{_short([layer])[0]}\n{truth.shape.size:,} parameters")
        _outer_labels(panels, "rank", "eigenvalue")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def heat_maps(exact: Block, approximations: Mapping[str, Block]) -> Figure:
    """The exact block beside its approximations, and under each of these its difference from it."""
    colors = require("matplotlib.colors", "A figure")
    truth = exact.to_dense().double().cpu()
    norm = float(truth.norm())
    dense = {label: block.to_dense().double().cpu() for label, block in approximations.items()}
    largest = float(truth.abs().max())
    scale = colors.SymLogNorm(linthresh=largest * 1e-3, vmin=-largest, vmax=largest)
    columns = 1 + len(dense)
    with style():
        figure = empty(2 * (PAGE - 0.6) / columns + 0.55)
        axes = figure.subplots(2, columns)
        look: dict[str, Any] = {"cmap": "RdBu_r", "norm": scale, "interpolation": "nearest", "rasterized": True}
        image = axes[0, 0].imshow(truth.numpy(), **look)
        axes[0, 0].set_title(f"F of {exact.name} ({exact.size} × {exact.size})")
        axes[1, 0].axis("off")
        axes[1, 0].text(
            0.5,
            0.5,
            "above: the block\nand its approximations\n\n"
            "below: the differences\nF̂ − F, and the error\n‖F − F̂‖ / ‖F‖",
            ha="center",
            va="center",
            transform=axes[1, 0].transAxes,
        )
        for column, (label, matrix) in enumerate(dense.items(), start=1):
            axes[0, column].imshow(matrix.numpy(), **look)
            axes[0, column].set_title(label)
            axes[1, column].imshow((matrix - truth).numpy(), **look)
            axes[1, column].set_xlabel(f"error {float((matrix - truth).norm()) / norm:.3f}")
        for panel in axes.flat:
            panel.set(xticks=[], yticks=[])
            panel.spines[["top", "right"]].set_visible(True)
        figure.colorbar(
            image, ax=axes, shrink=0.7, aspect=40, pad=0.01, extend="both", label="entry of the matrix"
        )
    return figure


def along_training(comparisons: Mapping[str, Comparison], xlabel: str = "epoch") -> Figure:
    """Relative Frobenius error of every layer and method at several points of a training run."""
    first = next(iter(comparisons.values()))
    labels = _without_common_start(list(comparisons))
    shown = range(0, len(labels), math.ceil(len(labels) / 6))
    longest = max(len(labels[index]) for index in shown)
    upright = longest * len(shown) > 20
    with style():
        figure, panels = _panels(len(first.truths), height=1.8 + (0.06 * longest if upright else 0))
        for axes, layer in zip(panels, first.truths, strict=False):
            for approximation in first.compared:
                found = [c.row(layer, approximation.label).error for c in comparisons.values()]
                places = range(len(found))
                axes.plot(places, [e.value for e in found], marker="o", markersize=3, **_line(approximation))
                if any(not e.exact for e in found):
                    axes.fill_between(
                        places,
                        [e.low for e in found],
                        [e.high for e in found],
                        color=_colour(approximation),
                        alpha=0.15,
                    )
            axes.set_xticks(shown, [labels[index] for index in shown], rotation=90 if upright else 0)
            axes.set(title=_short([layer])[0], ylim=(0, None))
        _outer_labels(panels, xlabel, "‖F − F̂‖ / ‖F‖")
        methods = [approximation.label for approximation in first.compared]
        figure.legend(panels[0].lines, methods, loc="outside upper center", ncols=len(methods), frameon=False)
    return figure


# -- looks -----------------------------------------------------------------------------------------------


def style(settings: Mapping[str, Any] = STYLE) -> AbstractContextManager[None]:
    """The settings of all figures, for as long as one is drawn."""
    return require("matplotlib", "A figure").rc_context(settings)  # type: ignore[no-any-return]


def empty(height: float) -> Figure:
    """A page of some height in inches; no screen is touched."""
    page: Figure = require("matplotlib.figure", "A figure").Figure(figsize=(PAGE, height), layout="constrained")
    return page


def _colour(approximation: Approximation) -> str:
    return COLOURS[approximation.method.factors.trace_restricted, approximation.corrected]


def _line(approximation: Approximation) -> dict[str, Any]:
    style = "-" if approximation.corrected else "--"
    return {"color": _colour(approximation), "linestyle": style if approximation.usual else ":"}


def _panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """A page of small panels, as many as needed."""
    columns = min(count, 3 if count <= 6 else 4)
    rows = math.ceil(count / columns)
    figure = empty(height * rows + 0.3)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[count:]:
        unused.set_visible(False)
    return figure, panels[:count]


def _outer_labels(panels: Sequence[Axes], xlabel: str, ylabel: str) -> None:
    for axes in panels:
        place = axes.get_subplotspec()
        if place is not None and place.is_first_col():
            axes.set_ylabel(ylabel)
        axes.set_xlabel(xlabel)


def _ranked(axes: Axes, values: torch.Tensor, floor: float, **look: Any) -> None:
    """Values against their rank, down to a floor."""
    kept = values[values > floor].cpu().numpy()
    axes.plot(range(1, len(kept) + 1), kept, **look)


def _short(layers: Sequence[str]) -> list[str]:
    return [layer if len(layer) <= 18 else "…" + layer[-17:] for layer in layers]


def _without_common_start(labels: Sequence[str]) -> list[str]:
    """Labels without what all of them begin with, numbers kept whole; the last few letters of long ones."""
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*labels, strict=False))
    start = "".join(letters[0] for letters in same) if len(labels) > 1 else ""
    kept = [label[len(start.rstrip("0123456789.")) :] or label for label in labels]
    return [label if len(label) <= 10 else "…" + label[-9:] for label in kept]
