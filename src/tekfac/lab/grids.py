"""What a sweep tries: points of grids, each a few settings that replace those of a base config."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tekfac.checks import nearest, require_choice
from tekfac.lab.config import RunConfig

Point = Mapping[str, Any]
"""Settings by name; `options.kl_clip` and `model_options.width` reach into the config's options."""

NESTED = ("options", "model_options")
SAMPLERS = ("tpe", "random", "qmc", "cmaes")
KEYS = ("name", "seeds", "base", "grid", "search")


@dataclass(frozen=True)
class Range:
    """Numbers between two, for a search.

    Attributes:
        low: the least.
        high: the largest.
        log: whether they are drawn evenly on a logarithmic scale.
    """

    low: float
    high: float
    log: bool = True

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(
                f"Invalid range: {self.low} to {self.high}. Expected 0 < low < high (or log = false)."
            )


@dataclass(frozen=True)
class Search:
    """Points that a sampler chooses, learning from those it has seen.

    Attributes:
        space: a range or a list of choices for each setting.
        trials: how many.
        sampler: one of Optuna's.
    """

    space: Mapping[str, Range | Sequence[Any]]
    trials: int
    sampler: str = "tpe"

    def __post_init__(self) -> None:
        require_choice("sampler", self.sampler, SAMPLERS)
        if not self.space or self.trials < 1:
            raise ValueError(
                f"Invalid search: {self.trials} trials over {list(self.space)}. Expected at least one of each."
            )


@dataclass(frozen=True)
class Sweep:
    """A base config and what is tried on it.

    Attributes:
        name: of the sweep.
        base: the config that every point starts from.
        points: of its grids; empty for a search.
        search: what a sampler tries; None for grids.
        seeds: every point is run with each of them, and judged by the mean.
    """

    name: str
    base: RunConfig
    points: tuple[Point, ...] = ()
    search: Search | None = None
    seeds: tuple[int, ...] = field(default=(0,))

    def __post_init__(self) -> None:
        if bool(self.points) == (self.search is not None):
            raise ValueError(
                "A sweep needs either grids ([[grid]]) or a search ([search]), not both or neither."
            )
        for point in self.points:
            self.configs(point)

    def configs(self, point: Point) -> tuple[RunConfig, ...]:
        """The configs of a point, one per seed."""
        plain = applied(self.base.plain(), point)
        return tuple(RunConfig.from_plain({**plain, "seed": seed}, "The grid") for seed in self.seeds)

    def choices(self) -> dict[str, list[Any]]:
        """For each setting of the grids the values that it has anywhere, in order of appearance."""
        found: dict[str, list[Any]] = {}
        for point in self.points:
            for key, value in point.items():
                if value not in found.setdefault(key, []):
                    found[key].append(value)
        return found

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], origin: str) -> Self:
        """A sweep from plain values, as in a file: name, seeds, [base], and [[grid]] or [search].

        Raises:
            ValueError: for an unknown key or an invalid value.
        """
        _require_keys(plain, KEYS, origin)
        base = RunConfig.from_plain(plain.get("base", {}), f"[base] of {origin}")
        grids = plain.get("grid", [])
        points = tuple(
            point for grid in ([grids] if isinstance(grids, Mapping) else grids) for point in product(grid)
        )
        return cls(
            name=str(plain.get("name", "sweep")),
            base=base,
            points=points,
            search=_search(plain["search"], origin) if "search" in plain else None,
            seeds=tuple(plain.get("seeds", (0,))),
        )


def product(grid: Mapping[str, Any]) -> list[Point]:
    """Every combination of the values of a grid; a value that is not a list stands for itself."""
    values = [value if isinstance(value, list | tuple) else [value] for value in grid.values()]
    return [dict(zip(grid, combination, strict=True)) for combination in itertools.product(*values)]


def applied(plain: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """The plain config with the settings of a point in place of its own."""
    result = {key: dict(value) if key in NESTED else value for key, value in plain.items()}
    for key, value in point.items():
        outer, _, inner = key.partition(".")
        if inner and outer in NESTED:
            result[outer] = {**result[outer], inner: value}
            if value is None:
                del result[outer][inner]
        else:
            result[key] = value
    return result


def described(point: Point, without: Iterable[str] = ()) -> str:
    """A point in a few words."""
    skipped = set(without)
    told = [
        str(value) if key == "optimizer" else f"{key.rpartition('.')[2]} {_number(value)}"
        for key, value in point.items()
        if key not in skipped and value is not None
    ]
    return ", ".join(told)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _search(plain: Mapping[str, Any], origin: str) -> Search:
    _require_keys(plain, ("space", "trials", "sampler"), f"[search] of {origin}")
    space = {
        key: Range(**value) if isinstance(value, Mapping) else tuple(value)
        for key, value in plain.get("space", {}).items()
    }
    return Search(space, int(plain.get("trials", 0)), str(plain.get("sampler", "tpe")))


def _require_keys(plain: Mapping[str, Any], keys: Sequence[str], origin: str) -> None:
    for key in plain:
        if key not in keys:
            raise ValueError(f"{origin} has an unknown key {key!r}.{nearest(key, keys)}")
