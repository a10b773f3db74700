"""Going on with an interrupted survey: what was summed up so far, in a file that is renewed as it runs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tekfac.capture.sampling import Sampling
from tekfac.common.data_hash import DataHash
from tekfac.fisher import tensor_files
from tekfac.fisher.collectors import Collectors

logger = logging.getLogger("tekfac")

KIND = "an unfinished survey"


@dataclass(frozen=True)
class Count:
    """What a pass over the data has seen.

    Attributes:
        batches: how many batches.
        samples: how many samples.
        terms: M, the number of loss terms.
        data: a hash of the data.
    """

    batches: int = 0
    samples: int = 0
    terms: int = 0
    data: DataHash = field(default_factory=DataHash)

    def plain(self) -> dict[str, int]:
        """What is noted beside a result."""
        return {"samples": self.samples, "terms": self.terms}


@dataclass(frozen=True)
class Record:
    """How far a pass has come.

    Attributes:
        count: what it has seen.
        seen: the layers it has seen.
        complete: whether it has come to the end.
    """

    count: Count = field(default_factory=Count)
    seen: list[str] = field(default_factory=list)
    complete: bool = False


class Checkpoint:
    """The state of a survey in a file.

    Args:
        path: of the file; what an earlier survey left there is taken up.
        signature: what must be the same for the sums to be of the same thing, as plain values.
        seconds: between two writings.

    Raises:
        ValueError: if the file is that of a survey with another signature.
    """

    def __init__(self, path: str | Path, signature: Mapping[str, Any], seconds: float) -> None:
        tensor_files.require_safetensors("checkpoint=")
        if not seconds >= 0:
            raise ValueError(f"Invalid checkpoint_seconds: {seconds!r}. Expected a number, not negative.")
        self._path = Path(path)
        self._signature = dict(signature)
        self._seconds = seconds
        self._written = time.monotonic()
        self._records: dict[str, Record] = {}
        self._tensors: dict[str, Tensor] = {}
        self._sampling: dict[str, Any] | None = None
        if self._path.exists():
            self._read()

    def take_up(self, title: str, collectors: Collectors, sampling: Sampling, device: torch.device) -> Record:
        """How far a pass had come; what was summed up in it is put back into its collectors."""
        record = self._records.get(title)
        if record is None:
            return Record()
        states: dict[tuple[str, int], dict[str, Tensor]] = {}
        for key, tensor in self._tensors.items():
            of_pass, name, index, part = json.loads(key)
            if of_pass == title:
                states.setdefault((name, index), {})[part] = tensor.to(device)
        for name, own in collectors.items():
            for index, collector in enumerate(own):
                if (name, index) in states:
                    collector.load(states[name, index])
        if self._sampling is not None and not record.complete:
            sampling.load(self._sampling)
        logger.info("%s: taken up after %d batch(es) from %s.", title, record.count.batches, self._path)
        return record

    def note(self, title: str, record: Record, collectors: Collectors, sampling: Sampling) -> None:
        """Note how far a pass has come; write the file at its end, or if it is time to."""
        self._records[title] = record
        if record.complete or time.monotonic() - self._written >= self._seconds:
            self._write(title, collectors, sampling)

    def require_same_data(self, record: Record, seen: DataHash) -> None:
        """Raise ValueError where what the loader gave is not what the pass had seen."""
        if seen != record.count.data:
            raise ValueError(
                f"{self._path} cannot be taken up: the loader gives other data, or another order, than when it "
                "was written. Use a loader that does not shuffle or augment, or remove the file to start anew."
            )

    def _write(self, title: str, collectors: Collectors, sampling: Sampling) -> None:
        for name, own in collectors.items():
            for index, collector in enumerate(own):
                for part, tensor in collector.state().items():
                    self._tensors[json.dumps([title, name, index, part])] = tensor
        saved = sampling.state()
        metadata = {
            "kind": KIND,
            "signature": self._signature,
            "records": {name: asdict(record) for name, record in self._records.items()},
            "sampling": {"seed": saved["seed"], "device": saved["device"]},
        }
        drawn = {} if saved["state"] is None else {"sampling": saved["state"]}
        tensor_files.write(self._path, {**self._tensors, **drawn}, metadata)
        self._written = time.monotonic()

    def _read(self) -> None:
        self._tensors, metadata = tensor_files.read(self._path, KIND)
        theirs = metadata["signature"]
        different = [key for key in self._signature if theirs.get(key) != self._signature[key]]
        if different:
            changes = "; ".join(f"{key} was {theirs.get(key)}, is {self._signature[key]}" for key in different)
            raise ValueError(
                f"{self._path} is of another survey: {changes}. Give another file, or remove this one to start "
                "anew."
            )
        for name, record in metadata["records"].items():
            count = Count(**{**record["count"], "data": DataHash(**record["count"]["data"])})
            self._records[name] = Record(count, record["seen"], record["complete"])
        self._sampling = {**metadata["sampling"], "state": self._tensors.pop("sampling", None)}
