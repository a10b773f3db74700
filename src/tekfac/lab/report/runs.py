"""Runs, read and put together: seeds of one setting are a group, groups that can be compared are a task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tekfac.lab import config
from tekfac.lab.optimizers import display, position
from tekfac.lab.run_folder import RUN, RunFolder
from tekfac.lab.run_log import Epoch, LayerEpoch

Status = Literal["finished", "diverged", "unfinished"]
Settings = Mapping[str, Any]

WHERE = frozenset({"seed", *config.PLACE})
"""What tells the runs of a group apart: the seed, and where they ran."""

OF_OPTIMIZER = frozenset({"name", *config.OF_OPTIMIZER, "options"})
"""What tells the groups of a task apart. Everything else that a configuration has belongs to the task."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        folder: it was read from.
        config: everything that was asked for, as plain values.
        provenance: command, commit, machine and versions.
        epochs: those that were finished, in order.
        layers: the curvature of the layers, if it was recorded.
        status: "unfinished" as long as there is no result.
    """

    folder: RunFolder
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    epochs: tuple[Epoch, ...]
    layers: tuple[LayerEpoch, ...]
    status: Status

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.folder.path

    @property
    def optimizer(self) -> str:
        """Its name in the configuration."""
        return str(self.config["optimizer"])

    @property
    def seed(self) -> Any:
        """The seed, None where the configuration has none."""
        return self.config.get("seed")


def find_runs(folders: Iterable[str | Path]) -> list[Run]:
    """The runs in the folders and anywhere below them, each once, in the order of their paths.

    Raises:
        ValueError: if a folder does not exist or holds no run, or if a file of a run is damaged.
    """
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(
                f"There is no folder {str(folder)!r}. Expected a run or a folder with runs below it."
            )
        below = {run.path.resolve(): run.path for run in RunFolder.below(folder)}
        if not below:
            raise ValueError(
                f"No run in {str(folder)!r}: no {RUN} in it or below. Expected what `tekfac train` wrote."
            )
        found = below | found
    return [read_run(path) for path in sorted(found.values())]


def read_run(path: Path) -> Run:
    """One run, as far as it has got.

    Raises:
        ValueError: for a damaged file; the message names it, and the line.
    """
    folder = RunFolder(path)
    ended = folder.result()
    return Run(
        folder=folder,
        config=folder.settings(),
        provenance=folder.provenance(),
        epochs=tuple(folder.epochs()),
        layers=tuple(folder.layers()),
        status="unfinished" if ended is None else ended["status"],
    )


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed and in where they ran.

    Attributes:
        label: the optimizer's name, and the settings that tell it from others of its task.
        optimizer: its name in the configuration.
        settings: lr, momentum and so on, the further options among them.
        runs: by seed, one of each.
        repeated: further runs with a seed that is among them; they say nothing new and are not counted.
    """

    label: str
    optimizer: str
    settings: Settings
    runs: tuple[Run, ...]
    repeated: tuple[Run, ...] = ()

    @property
    def seeds(self) -> list[Any]:
        """The seeds of its runs."""
        return [run.seed for run in self.runs]

    @property
    def finished(self) -> bool:
        """Whether all of its runs did."""
        return all(run.status == "finished" for run in self.runs)

    @property
    def status(self) -> str:
        """How many runs there are, and what became of those that did not finish."""
        count = Counter(run.status for run in self.runs)
        failed = [f"{count[s]} of {len(self.runs)} {s}" for s in ("diverged", "unfinished") if count[s]]
        return ", ".join(failed) or str(len(self.runs))


@dataclass(frozen=True)
class Task:
    """Groups that were trained on the same data, with the same model, batches and schedule.

    Attributes:
        title: data and model, and the settings that tell it from other tasks with these.
        data: its name in the configuration.
        model: its name in the configuration.
        settings: everything that its runs have in common beside the optimizer.
        groups: in the order of the optimizers, then of their settings.
    """

    title: str
    data: str
    model: str
    settings: Settings
    groups: tuple[Group, ...]


def tasks_of(runs: Iterable[Run]) -> list[Task]:
    """The tasks of the runs, by data and model."""
    together: dict[tuple[str, str], dict[Any, list[Run]]] = {}
    for run in runs:
        same = together.setdefault((str(run.config["data"]), str(run.config["model"])), {})
        same.setdefault(_key(task_settings(run)), []).append(run)
    tasks = []
    for (data, model), same in sorted(together.items()):
        settings = [task_settings(own[0]) for own in same.values()]
        different = differing(settings)
        for setting, own in sorted(
            zip(settings, same.values(), strict=True), key=lambda pair: _place(pair[0], different)
        ):
            title = ", ".join([data, model, *words(setting, different)])
            tasks.append(Task(title, data, model, setting, _groups(own)))
    return tasks


def _groups(runs: Sequence[Run]) -> tuple[Group, ...]:
    """The groups of one task."""
    together: dict[str, dict[Any, list[Run]]] = {}
    for run in runs:
        together.setdefault(run.optimizer, {}).setdefault(_key(optimizer_settings(run)), []).append(run)
    groups = []
    for optimizer in sorted(together, key=position):
        own = list(together[optimizer].values())
        different = differing([optimizer_settings(same[0]) for same in own])
        for same in sorted(own, key=lambda same: _place(optimizer_settings(same[0]), different)):
            settings = optimizer_settings(same[0])
            label = ", ".join([display(optimizer), *words(settings, different)])
            groups.append(Group(label, optimizer, settings, *_once(same)))
    return tuple(groups)


def _once(runs: Iterable[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """A run of every seed, by seed, and the others; those that have ended go before those that have not."""
    in_order = sorted(runs, key=lambda run: (ordered(run.seed), run.status == "unfinished", str(run.path)))
    first: dict[Any, Run] = {}
    for run in in_order:
        first.setdefault(run.seed, run)
    return tuple(first.values()), tuple(run for run in in_order if first[run.seed] is not run)


def task_settings(run: Run) -> Settings:
    """What a run has in common with all of its task."""
    return flat({key: value for key, value in run.config.items() if key not in WHERE | OF_OPTIMIZER})


def optimizer_settings(run: Run) -> Settings:
    """What a run has in common with its group, beside the task; a label that was not given is none."""
    own = {key: value for key, value in run.config.items() if key in OF_OPTIMIZER}
    return flat({key: value for key, value in own.items() if key != "name" or value})


def differing(settings: Sequence[Settings]) -> list[str]:
    """The names whose values are not the same everywhere, a value that is missing among them."""
    names = dict.fromkeys(name for own in settings for name in own)
    missing = object()
    return [
        name
        for name in names
        if any(own.get(name, missing) != settings[0].get(name, missing) for own in settings)
    ]


def plain(value: Any) -> str:
    """A setting as text; a number as short as it can be without becoming another one."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(plain, value)) + ")"
    return str(value)


def words(settings: Settings, names: Iterable[str]) -> list[str]:
    """Some of the settings as text, as far as they are there; a label of the user's own stands for itself."""
    own = [name for name in names if name in settings]
    return [plain(settings[name]) if name == "name" else f"{name} {plain(settings[name])}" for name in own]


def flat(nested: Settings) -> dict[str, Any]:
    """Values inside of values brought to the top; with the outer name where there is such a one already."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            for inner, own in flat(value).items():
                found[f"{name}.{inner}" if inner in nested else inner] = own
        else:
            found[name] = tuple(value) if isinstance(value, list) else value
    return found


def _key(settings: Settings) -> frozenset[tuple[str, Any]]:
    """The same for settings that are equal, in whatever order."""
    return frozenset(
        (name, repr(value) if isinstance(value, tuple) else value) for name, value in settings.items()
    )


def _place(settings: Settings, names: Iterable[str]) -> list[tuple[int, float, str]]:
    """To sort by: the values under some names."""
    return [ordered(settings.get(name)) for name in names]


def ordered(value: Any) -> tuple[int, float, str]:
    """To sort by: nothing, numbers, words."""
    if value is None:
        return (0, 0.0, "")
    if isinstance(value, int | float):
        return (1, float(value), "")
    return (2, 0.0, str(value))
