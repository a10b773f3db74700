"""Finished runs are kept, one line each, so that what was interrupted goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tekfac.common.files import append_text, settle_on_disk, write_json, write_text
from tekfac.lab.contest.running import Job, Outcome, run_all
from tekfac.lab.provenance import provenance

IN_COMMON = ("commit", "machine", "versions", "runs at a time")
"""What runs must share to be compared: else their scores, or their seconds, mean different things."""


def origin_of(command: str, seeds: Sequence[int], processes: int) -> dict[str, Any]:
    """Where runs come from that have one thread each, so many at a time."""
    shared = provenance(command, torch.device("cpu"))
    return {**shared, "seeds": list(seeds), "threads": 1, "runs at a time": processes}


def written(path: Path, page: str, origin: Mapping[str, Any], numbers: Mapping[str, Any]) -> str:
    """A page with where it comes from, which is written as PATH.md, and all numbers as PATH.json."""
    text = page + "\n".join(f"- {key}: {value}" for key, value in origin.items()) + "\n"
    write_text(path.with_suffix(".md"), text)
    write_json(path.with_suffix(".json"), {"origin": origin, **numbers})
    return text


@dataclass
class Ledger:
    """The runs that are finished, in a file with a line for each.

    Attributes:
        path: of the file.
        made_by: the code, and what else its runs have in common: their times can be compared.
        runs: outcomes, by job.
    """

    path: Path
    made_by: Mapping[str, Any]
    runs: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path, origin: Mapping[str, Any]) -> Ledger:
        """With what is in a file, if there is one.

        Args:
            path: of the file.
            origin: of the runs that will be added.

        Raises:
            ValueError: if a line of it is something else, or was made by something else.
        """
        made_by = {key: origin[key] for key in IN_COMMON}
        ledger = cls(path, made_by)
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), start=1):
            try:
                entry = json.loads(line)
                ledger.runs[entry["job"]] = Outcome.of_plain(entry["outcome"])
                by = entry["made by"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"Line {number} of {path} is no finished run. Remove the line to run it again, or give "
                    "another folder by --out."
                ) from error
            if by != made_by:
                raise ValueError(
                    f"{path} has runs that were made by {by}; others would be made by {made_by}, and "
                    "cannot be compared with them. Give another folder by --out, or remove the file."
                )
        return ledger

    def add(self, job: Job, outcome: Outcome) -> None:
        """Keep a run."""
        key = _key(job)
        self.runs[key] = outcome
        line = json.dumps({"job": key, "made by": self.made_by, "outcome": outcome.plain()})
        append_text(
            self.path, f"{line}\n", "Free some room; the same command goes on with the runs that are left."
        )
        settle_on_disk(self.path)

    def outcomes(self, jobs: Iterable[Job], processes: int, say: Callable[[str], None]) -> list[Outcome]:
        """Of all jobs; those that are not there yet are run."""
        jobs = list(jobs)
        missing = {_key(job): job for job in jobs if _key(job) not in self.runs}
        run_all(missing.values(), processes, say, self.add)
        return [self.runs[_key(job)] for job in jobs]


def _key(job: Job) -> str:
    return f"{job.task}, {job.entry.in_words}, seed {job.seed}, {job.steps} steps, {job.kept}"
