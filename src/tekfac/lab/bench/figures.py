"""Figures of a benchmark: bars of the time of a step beside SGD's, and how costs grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tekfac.fisher.figures import COLOURS, empty
from tekfac.lab.bench.contestants import REFERENCE
from tekfac.lab.bench.growth import MEASURED
from tekfac.lab.bench.result import Result
from tekfac.lab.bench.summary import summarised
from tekfac.lab.optimizers import NATURAL
from tekfac.lab.report.drawing import Drawing, legend, make_logarithmic, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RIVALS: Mapping[str, str] = {"adamw": "#66c2a4", "soap": "#984ea3", "shampoo": "#c994c7", "muon": "#a6761d"}
WIDE = 20.0
"""Where a ratio is larger, the axis is logarithmic."""

LINES = ("#d94801", "#08519c", "#555555")


def drawings(result: Result) -> list[Drawing]:
    """Of what there is."""
    found = []
    if result["networks"]:
        caption = "Mean step of a cycle over SGD's: median over cycles; lines from the least to the most."
        told = "Bars of the time of a step beside SGD's; the numbers are in the table"
        found.append(Drawing("bench", caption, told, bars(result["networks"])))
    if result["growth"] is not None:
        caption = "Milliseconds over size, with the exponents of straight lines."
        told = "Lines of milliseconds over size; the numbers are in the table"
        found.append(Drawing("growth", caption, told, lines(result["growth"]["sweeps"])))
    return found


def bars(networks: Mapping[str, Any]) -> Figure:
    """A panel for every number of threads, a group of bars for every network."""
    numbers = list(dict.fromkeys(threads for one in networks.values() for threads in one["threads"]))
    timings = [timing for one in networks.values() for timing in one["threads"].values()]
    labels = [label for label in dict.fromkeys(label for t in timings for label in t) if label != REFERENCE]
    with style():
        figure = empty(0.5 + 2.2 * len(numbers))
        panels = list(figure.subplots(len(numbers), 1, sharex=True, sharey=True, squeeze=False).flat)
        handles: list[Any] = []
        for axes, threads in zip(panels, numbers, strict=True):
            shown = {name: one["threads"].get(threads) for name, one in networks.items()}
            handles = _draw_bars(axes, shown, labels)
            axes.set_ylabel(f"step ÷ SGD's, {threads} thread{'' if threads == '1' else 's'}")
        if max(axes.dataLim.y1 for axes in panels) > WIDE:
            make_logarithmic(panels)
        legend(figure, handles, labels)
    return figure


def _draw_bars(axes: Axes, timings: Mapping[str, Any], labels: Sequence[str]) -> list[Any]:
    """Draw them; what stands in a legend, in the order of the labels."""
    handles: list[Any] = []
    width = 0.8 / max(1, len(labels))
    found = {name: summarised(timing) for name, timing in timings.items() if timing is not None}
    colours = _colours(labels)
    for index, label in enumerate(labels):
        spreads = {
            place: found[name][label].ratio
            for place, name in enumerate(timings)
            if name in found and label in found[name]
        }
        places = [place + (index - (len(labels) - 1) / 2) * width for place in spreads]
        heights = [spread.median for spread in spreads.values()]
        below = [spread.median - spread.least for spread in spreads.values()]
        above = [spread.most - spread.median for spread in spreads.values()]
        look: dict[str, Any] = {"color": colours[label][0], "alpha": colours[label][1]}
        error = {"elinewidth": 0.6, "ecolor": "k"}
        handles.append(axes.bar(places, heights, 0.92 * width, yerr=[below, above], error_kw=error, **look))
    axes.axhline(1.0, color="#888888", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(timings)), list(timings))
    axes.grid(visible=True, axis="y")
    return handles


def lines(sweeps: Mapping[str, Any]) -> Figure:
    """A panel for every sweep."""
    with style():
        figure = empty(4.6)
        panels = list(figure.subplots(2, (len(sweeps) + 1) // 2, squeeze=False).flat)
        for axes, (name, sweep) in zip(panels, sweeps.items(), strict=False):
            for what, colour in zip(MEASURED, LINES, strict=True):
                slope = sweep["exponents"][what]
                told = what if slope is None else f"{what}: {slope:.2f}"
                values = [1000 * seconds if seconds > 0 else float("nan") for seconds in sweep["seconds"][what]]
                axes.plot(sweep["sizes"], values, marker="o", markersize=3, color=colour, label=told)
            axes.set(xscale="log", yscale="log", title=name, ylabel="ms")
            axes.set_xticks(sweep["sizes"], map(str, sweep["sizes"]))
            axes.set_xticks([], minor=True)
            axes.legend(frameon=False)
            axes.grid(visible=True)
        for unused in panels[len(sweeps) :]:
            unused.set_visible(False)
    return figure


def _colours(labels: Sequence[str]) -> dict[str, tuple[str, float]]:
    """Colour and opacity of every contestant; further ones of the same name are paler, none too pale."""
    names = [label.partition(",")[0].partition("@")[0] for label in labels]
    counts, seen = Counter(names), Counter[str]()
    found = {}
    for label, name in zip(labels, names, strict=True):
        found[label] = (_colour(name), 1 - 0.75 * seen[name] / counts[name])
        seen[name] += 1
    return found


def _colour(name: str) -> str:
    if name in NATURAL:
        method = NATURAL[name].method
        return COLOURS[method.factors.trace_restricted, method.rescaling.measured]
    return RIVALS.get(name, "#555555")
