"""What a sweep tries: points of grids, each a few settings that replace those of a base config."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from tekfac.common.checks import require_choice
from tekfac.lab.config import RunConfig, require_keys

Point = Mapping[str, Any]
"""Settings by name; `options.kl_clip` and `model_options.width` reach into the config's options."""

NESTED = ("options", "model_options")
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "qmc": "QMCSampler", "cmaes": "CmaEsSampler"}
"""Of Optuna, by the names that files have for them."""

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
        numbers = all(isinstance(end, int | float) for end in (self.low, self.high))
        if not numbers or not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(
                f"Invalid range: {self.low!r} to {self.high!r}. Expected numbers with 0 < low < high (or log = "
                "false)."
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
        require_choice("sampler", self.sampler, tuple(SAMPLERS))
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
        if not self.seeds:
            raise ValueError("A sweep needs at least one seed.")
        different: dict[Any, Point] = {}
        for point in self.points or self.examples():
            different.setdefault(tuple(config.fingerprint() for config in self.configs(point)), point)
        if self.points:
            object.__setattr__(self, "points", tuple(different.values()))  # every config once

    def examples(self) -> list[Point]:
        """Points in which every value of every setting occurs, of ranges both ends; of grids, all points."""
        if self.search is None:
            return list(self.points)
        values = {
            key: (value.low, value.high) if isinstance(value, Range) else tuple(value)
            for key, value in self.search.space.items()
        }
        first = {key: value[0] for key, value in values.items()}
        return [{**first, key: value} for key in values for value in values[key]]

    def configs(self, point: Point) -> tuple[RunConfig, ...]:
        """The configs of a point, one per seed."""
        plain = applied(self.base.plain(), point)
        origin = "The grid" if self.search is None else "The search"
        return tuple(RunConfig.from_plain({**plain, "seed": seed}, origin) for seed in self.seeds)

    def require_own(self, point: Point) -> None:
        """Raise ValueError for a point that is none of the sweep's: of a study that was edited."""
        if self.search is None:
            is_own = any(_as_json(point) == _as_json(own) for own in self.points)
        else:
            space = self.search.space
            is_own = all(key in space and _is_in(value, space[key]) for key, value in point.items())
        if not is_own:
            raise ValueError(
                f"The study has a trial with settings that are none of the sweep {self.name!r}: {dict(point)}. "
                "Its file was written by something else: give another folder by --out, or remove it."
            )

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], origin: str) -> Self:
        """A sweep from plain values, as in a file: name, seeds, [base], and [[grid]] or [search].

        Raises:
            ValueError: for an unknown key or an invalid value.
        """
        require_keys(plain, KEYS, origin)
        base = RunConfig.from_plain(_table(plain.get("base", {}), "[base]", origin), f"[base] of {origin}")
        grids, seeds = plain.get("grid", []), plain.get("seeds", (0,))
        if not isinstance(seeds, Sequence) or not seeds or not all(type(seed) is int for seed in seeds):
            raise ValueError(f"Invalid seeds in {origin}: {seeds!r}. Expected a list of whole numbers.")
        listed = grids if isinstance(grids, list) else [grids]
        return cls(
            name=str(plain.get("name", "sweep")),
            base=base,
            points=tuple(point for grid in listed for point in product(_table(grid, "[[grid]]", origin))),
            search=_search(plain["search"], origin) if "search" in plain else None,
            seeds=tuple(seeds),
        )


def _as_json(point: Point) -> str:
    return json.dumps(dict(point), sort_keys=True)


def _is_in(value: Any, allowed: Any) -> bool:
    return allowed.low <= value <= allowed.high if isinstance(allowed, Range) else value in allowed


def values_in(points: Iterable[Point]) -> dict[str, list[Any]]:
    """For each setting of some points the values that it has anywhere, in order of appearance."""
    found: dict[str, list[Any]] = {}
    for point in points:
        for key, value in point.items():
            if value not in found.setdefault(key, []):
                found[key].append(value)
    return found


def product(grid: Mapping[str, Any]) -> list[Point]:
    """Every combination of the values of a grid; a value that is not a list stands for itself.

    Raises:
        ValueError: for a list without values.
    """
    for key, value in grid.items():
        if isinstance(value, list | tuple) and not value:
            raise ValueError(f"The grid has no values for {key!r}. Expected at least one.")
    values = [value if isinstance(value, list | tuple) else [value] for value in grid.values()]
    return [dict(zip(grid, combination, strict=True)) for combination in itertools.product(*values)]


def applied(plain: Mapping[str, Any], point: Point) -> dict[str, Any]:
    """The plain config with the settings of a point in place of its own."""
    result = {key: dict(value) if key in NESTED else value for key, value in plain.items()}
    for key, value in point.items():
        outer, _, inner = key.partition(".")
        if inner and outer in NESTED:
            result[outer] = {**result[outer], inner: value}
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
    require_keys(_table(plain, "[search]", origin), ("space", "trials", "sampler"), f"[search] of {origin}")
    space = {
        key: _choices(key, value) for key, value in _table(plain.get("space", {}), "space", origin).items()
    }
    trials = plain.get("trials", 0)
    if type(trials) is not int:
        raise ValueError(f"Invalid trials in {origin}: {trials!r}. Expected a whole number.")
    return Search(space, trials, str(plain.get("sampler", "tpe")))


def _choices(key: str, value: Any) -> Range | Sequence[Any]:
    """What a search may choose for a setting."""
    if isinstance(value, Mapping):
        require_keys(value, ("low", "high", "log"), f"The range of {key!r}")
        if "low" in value and "high" in value:
            return Range(**value)
    elif isinstance(value, list) and value:
        return tuple(value)
    raise ValueError(
        f"Invalid choices for {key!r}: {value!r}. Expected a list, or {{ low = NUMBER, high = NUMBER }}."
    )


def _table(value: Any, name: str, origin: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"Invalid {name} in {origin}: {value!r}. Expected keys and values.")
    return value
