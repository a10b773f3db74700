"""The tables of a benchmark: all networks at a glance; of each its times, phases, memory and counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tekfac.common.phases import PHASES
from tekfac.lab.bench.breakdown import REST
from tekfac.lab.bench.contestants import REFERENCE
from tekfac.lab.bench.growth import MEASURED
from tekfac.lab.bench.result import Result
from tekfac.lab.bench.summary import Spread, summarised
from tekfac.lab.report.table_formats import Table

NOTHING = "–"
MIB = 2**20


def all_tables(result: Result) -> list[Table]:
    """Of all networks, and of the growth."""
    networks, growth = result["networks"], result["growth"]
    found = [overview(networks)] if networks else []
    for name, one in networks.items():
        found += of_network(name, one)
    return found if growth is None else [*found, of_growth(growth)]


def overview(networks: Mapping[str, Any]) -> Table:
    """A row for every network and number of threads, a column for every contestant."""
    timings = (timing for one in networks.values() for timing in one["threads"].values())
    labels = [label for label in _in_order(timings) if label != REFERENCE]
    rows = []
    for name, one in networks.items():
        for threads, timing in one["threads"].items():
            found = summarised(timing)
            cells = (_ratio(found[label].ratio) if label in found else NOTHING for label in labels)
            tiny = " (tiny)" if one["quick"] else ""
            rows.append((f"{name}{tiny}, {_threads(threads)}", *cells, one["provenance"]["commit"]))
    commits = {one["provenance"]["commit"] for one in networks.values()}
    notes = ["Mean step of a cycle over SGD's at the same turns: median over cycles (least to most)."]
    if len(commits) > 1:
        notes.append("The networks were measured at different commits, see the last column.")
    return Table("Time of a step beside SGD's", ("network", *labels, "commit"), tuple(rows), notes=tuple(notes))


def of_network(name: str, one: Mapping[str, Any]) -> list[Table]:
    """All tables of a network."""
    found = []
    for threads, timing in one["threads"].items():
        title = f"{name}, {_threads(threads)}"
        found += [_times(title, timing), _steps(title, timing)]
        if any(own.get("phases") for own in timing.values()):
            found.append(_phases(title, timing))
    timing = next(iter(one["threads"].values()))
    if any("multiplications" in own for own in timing.values()):
        found.append(_multiplications(name, timing))
    if one["memory"]:
        found.append(_memory(name, one["memory"]))
    return found


def _times(title: str, timing: Mapping[str, Any]) -> Table:
    rows = []
    for label, times in summarised(timing).items():
        ratio, counts = times.ratio, timing[label].get("multiplications", {})
        rows.append(
            (
                label,
                f"{ratio.median:.3f}",
                f"{ratio.first_quartile:.3f} to {ratio.third_quartile:.3f}",
                f"{ratio.least:.3f} to {ratio.most:.3f}",
                str(ratio.count),
                _number(times.plain),
                _number(counts.get("limit_of_plain_step")),
            )
        )
    header = (
        "contestant",
        "step ÷ SGD's",
        "quartiles",
        "least to most",
        "cycles",
        "plain step ÷ SGD's",
        "counted",
    )
    skipped = [label for label, own in timing.items() if own["skipped"]]
    notes = ["Plain: the median of the steps that measure nothing. Counted: the same by multiplications."]
    if skipped:
        notes.append(f"Steps were skipped for numbers that are not finite, do not use: {', '.join(skipped)}.")
    return Table(f"{title}: time beside SGD's", header, tuple(rows), notes=tuple(notes))


def _steps(title: str, timing: Mapping[str, Any]) -> Table:
    rows = [
        (
            label,
            _ms(times.median),
            f"{times.p95:.2f}",
            f"{times.longest:.2f}",
            _ms(times.first_step),
            str(len(timing[label]["seconds"])),
        )
        for label, times in summarised(timing).items()
    ]
    header = ("contestant", "median, ms", "95% ÷ median", "longest ÷ median", "first step, ms", "steps")
    return Table(f"{title}: steps", header, tuple(rows))


def _phases(title: str, timing: Mapping[str, Any]) -> Table:
    heard = {label: own["phases"] for label, own in timing.items() if own.get("phases")}
    names = [name for name in (*PHASES, REST) if any(name in phases for phases in heard.values())]
    rows = []
    for label, phases in heard.items():
        whole = sum(phases.values())
        cells = (f"{_ms(phases.get(name, 0.0))} ({phases.get(name, 0.0) / whole:.0%})" for name in names)
        rows.append((label, *cells))
    notes = ("Milliseconds per step and shares, mean over one cycle.",)
    return Table(f"{title}: where the time goes", ("contestant", *names), tuple(rows), notes=notes)


def _multiplications(name: str, timing: Mapping[str, Any]) -> Table:
    found = {label: own["multiplications"] for label, own in timing.items() if "multiplications" in own}
    rows = [
        (
            label,
            f"{counts['network']:.3g}",
            f"{counts['preconditioning']:.3g}",
            f"{counts['measuring']:.3g}",
            _number(counts["limit_of_plain_step"]),
            _number(counts["limit"]),
        )
        for label, counts in found.items()
    ]
    header = ("contestant", "forward and backward", "preconditioning", "measuring", "plain step", "mean step")
    notes = ("Multiplications; the steps are ratios to SGD's, if all multiplications take the same time.",)
    return Table(f"{name}: multiplications", header, tuple(rows), notes=notes)


def _memory(name: str, memory: Mapping[str, Any]) -> Table:
    reference, rows = memory[REFERENCE], []
    for label, own in memory.items():
        above, code, counted = (own[what] - reference[what] for what in ("peak", "code", "counted"))
        ratio = NOTHING if counted <= 0 else f"{(above - code) / counted:.2f}"
        sizes = (own["peak"], above, code, counted, own["counted"])
        rows.append((label, *(f"{size / MIB:.1f}" for size in sizes), ratio, str(own["steps"])))
    header = ("contestant", "peak", "above SGD", "code", "counted", "with momentum", "÷ counted", "steps")
    told = " ".join(f"{key}={value}" for key, value in reference["environment"].items())
    notes = (
        "MiB. Peak: the most resident memory of a process of its own, with one thread. Code: what of it above "
        "SGD's was there before the network, whatever its size.",
        "Counted: moments, bases and re-scaling, or the state of others, above SGD's momentum; then all of it. "
        "÷ counted: above SGD without the code, over that.",
        f"So that freed memory is given back, the processes ran with {told}.",
    )
    return Table(f"{name}: memory", header, tuple(rows), notes=notes)


def of_growth(growth: Mapping[str, Any]) -> Table:
    """A row for every sweep and what was timed in it."""
    rows = []
    for name, sweep in growth["sweeps"].items():
        for what in MEASURED:
            seconds = zip(sweep["sizes"], sweep["seconds"][what], strict=True)
            points = ", ".join(f"{size}: {_ms(value)}" for size, value in seconds)
            rows.append((name, what, _number(sweep["exponents"][what], 2), points))
    header = ("what grows", "time of", "exponent", "milliseconds by size")
    notes = tuple(f"{what}: {told}." for what, told in MEASURED.items())
    fitted = "Exponents: least squares through the logarithms."
    return Table("Growth of the cost of a step", header, tuple(rows), notes=(fitted, *notes))


def _in_order(timings: Iterator[Mapping[str, Any]]) -> list[str]:
    """The labels of all contestants, each once, in the order of the first that has them."""
    return list(dict.fromkeys(label for timing in timings for label in timing))


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.least:.3f} to {spread.most:.3f})"


def _number(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


def _threads(count: str) -> str:
    return f"{count} thread" if count == "1" else f"{count} threads"
