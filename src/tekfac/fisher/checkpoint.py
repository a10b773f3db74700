"""Going on with an interrupted survey: what was summed up so far, in a file that is renewed as it runs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tekfac.capture.capture import Capture
from tekfac.capture.tally import Shares, Tally, merged, shares_of
from tekfac.common.data_hash import DataHash
from tekfac.fisher import tensor_files
from tekfac.fisher.collectors import Collectors

logger = logging.getLogger("tekfac")

KIND = "an unfinished survey"
FORMAT = 3


@dataclass(frozen=True)
class Count:
    """What a pass over the data has seen.

    Attributes:
        batches: how many batches.
        samples: how many samples.
        data: a hash of the data.
        tallies: of loss terms, by the name of the prediction, or "" where all were measured together.
        likelihoods: that predictions were measured with, by name, in words.
    """

    batches: int = 0
    samples: int = 0
    data: DataHash = field(default_factory=DataHash)
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    likelihoods: Mapping[str, str] = field(default_factory=dict)

    @property
    def shares(self) -> Shares:
        """What the sums over samples are multiplied by."""
        return shares_of(self.tallies)

    @classmethod
    def of_all(cls, counts: Sequence[Count], *, same_data: bool) -> Count:
        """What several processes have seen.

        Args:
            counts: of each.
            same_data: whether all have read the same batches, and measured some of them.

        Raises:
            ValueError: if they have found different likelihoods.
        """
        batches, data = counts[0].batches, counts[0].data
        if not same_data:
            batches, data = sum(own.batches for own in counts), DataHash.of_parts([own.data for own in counts])
        return cls(
            batches,
            sum(own.samples for own in counts),
            data,
            reduce(merged, [own.tallies for own in counts]),
            reduce(_agreeing, [own.likelihoods for own in counts]),
        )

    def plain(self) -> dict[str, Any]:
        """What is noted beside a result: of several predictions, by their names."""
        terms = {name: tally.terms for name, tally in self.tallies.items()}
        plain = {"samples": self.samples, "terms": _only(terms), "likelihood": _only(self.likelihoods)}
        if len(terms) > 1:
            plain["weights"] = _only({name: share.weight for name, share in self.shares.items()})
        return plain

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> Count:
        """From what `dataclasses.asdict` has made of it."""
        tallies = {name: Tally(**tally) for name, tally in saved["tallies"].items()}
        return cls(**{**saved, "data": DataHash(**saved["data"]), "tallies": tallies})


def _agreeing(first: Mapping[str, str], second: Mapping[str, str]) -> Mapping[str, str]:
    """Likelihoods of both."""
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            of, setting = f" of the prediction {name!r}" if name else "", "likelihood=..."
            if name:
                setting = f"likelihood={{{name!r}: ...}}"
            raise ValueError(
                f"The loss{of} told one process {first[name]} as its likelihood, and another one "
                f"{second[name]}. Say which is meant: {setting}."
            )
    return {**first, **second}


def _only(by_name: Mapping[str, Any]) -> Any:
    """The value of the only prediction, or those of several by name."""
    return next(iter(by_name.values())) if len(by_name) == 1 else dict(sorted(by_name.items()))


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
        ValueError: if the file is that of a survey with another signature, or not as it was written.
    """

    def __init__(self, path: str | Path, signature: Mapping[str, Any], seconds: float) -> None:
        tensor_files.require_safetensors("checkpoint=")
        if not seconds >= 0:
            raise ValueError(f"Invalid checkpoint_seconds: {seconds!r}. Expected a number, not negative.")
        self._path = Path(path)
        self._signature = {"format": FORMAT, **signature}
        self._seconds = seconds
        self._written = time.monotonic()
        self._records: dict[str, Record] = {}
        self._tensors: dict[str, Tensor] = {}
        self._likelihoods: str | None = None
        if self._path.exists():
            self._read()

    def take_up(self, title: str, collectors: Collectors, capture: Capture, device: torch.device) -> Record:
        """How far a pass had come; what was summed up and found in it is put back."""
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
        if self._likelihoods is not None:
            capture.likelihoods.load(self._likelihoods)
        logger.info("%s: taken up after %d batch(es) from %s.", title, record.count.batches, self._path)
        return record

    @property
    def is_due(self) -> bool:
        """Whether it is time to write the file."""
        return time.monotonic() - self._written >= self._seconds

    def require_same_data(self, record: Record, seen: DataHash) -> None:
        """Raise ValueError where what the loader gave is not what the pass had seen."""
        if seen != record.count.data:
            raise ValueError(
                f"{self._path} cannot be taken up: the loader gives other data, or another order, than when it "
                "was written. Use a loader that does not shuffle or augment, or remove the file to start anew."
            )

    def write(self, title: str, record: Record, collectors: Collectors, capture: Capture) -> None:
        """Write how far a pass has come, and what was summed up in it."""
        self._records[title] = record
        for name, own in collectors.items():
            for index, collector in enumerate(own):
                for part, tensor in collector.state().items():
                    self._tensors[json.dumps([title, name, index, part])] = tensor
        metadata = {
            "kind": KIND,
            "signature": self._signature,
            "records": {name: asdict(record) for name, record in self._records.items()},
            "likelihoods": capture.likelihoods.state(),
        }
        tensor_files.write(self._path, self._tensors, metadata)
        self._written = time.monotonic()

    def _read(self) -> None:
        self._tensors, metadata = tensor_files.read(self._path, KIND)
        theirs = metadata.get("signature")
        if not isinstance(theirs, dict):
            raise ValueError(f"{self._path} does not say of which survey it is. Remove it to start anew.")
        different = [key for key in self._signature if theirs.get(key) != self._signature[key]]
        if different:
            changes = "; ".join(f"{key} was {theirs.get(key)}, is {self._signature[key]}" for key in different)
            raise ValueError(
                f"{self._path} is of another survey: {changes}. Give another file, or remove this one to start "
                "anew."
            )
        try:
            for name, record in metadata["records"].items():
                count = Count.from_plain(record["count"])
                self._records[name] = Record(count, record["seen"], record["complete"])
            self._likelihoods = metadata["likelihoods"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self._path} is no whole survey: {type(error).__name__}, {error}. Remove it to start anew."
            ) from error
