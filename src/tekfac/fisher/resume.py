"""Going on with an interrupted survey: what was summed up so far, in a file that is renewed as it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tekfac.fisher import files
from tekfac.sampling import Sampling

logger = logging.getLogger("tekfac")

KIND = "an unfinished survey"
SEPARATOR = "::"


@dataclass
class Count:
    """What a pass over the data has seen.

    Attributes:
        batches: how many batches.
        samples: how many samples.
        terms: M, the number of loss terms.
        checksum: a sum over the data that does not depend on their order.
        magnitude: what the rounding of that sum goes by.
    """

    batches: int = 0
    samples: int = 0
    terms: int = 0
    checksum: float = 0.0
    magnitude: float = 0.0

    def of_same_data_as(self, other: Count) -> bool:
        """Whether two passes have seen the same samples, in whatever order."""
        same_sums = abs(self.checksum - other.checksum) <= 1e-9 * max(self.magnitude, other.magnitude)
        return (self.samples, self.terms) == (other.samples, other.terms) and same_sums


class HasState(Protocol):
    """What can be put away and taken up again."""

    def state(self) -> dict[str, Tensor]:
        """As tensors."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """From these."""
        ...


Collectors = Mapping[str, Sequence[HasState]]


@dataclass
class Record:
    """How far a pass has come.

    Attributes:
        count: what it has seen.
        seen: the layers it has seen.
        first: fingerprint of the first batch.
        last: fingerprint of the last batch.
        complete: whether it has come to the end.
    """

    count: Count = field(default_factory=Count)
    seen: list[str] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0
    complete: bool = False


class Resume:
    """The state of a survey in a file.

    Args:
        path: of the file; what an earlier survey left there is taken up.
        signature: what must be the same for the sums to be of the same thing, as plain values.
        seconds: between two writings.

    Raises:
        ValueError: if the file is that of a survey with another signature.
    """

    def __init__(self, path: str | Path, signature: Mapping[str, Any], seconds: float) -> None:
        files.require_safetensors("checkpoint=")
        self._path = Path(path)
        self._signature = dict(signature)
        self._seconds = seconds
        self._written = time.monotonic()
        self._records: dict[str, Record] = {}
        self._tensors: dict[str, Tensor] = {}
        self._sampling: dict[str, Any] | None = None
        if self._path.exists():
            self._read()

    def record(self, title: str) -> Record | None:
        """How far the pass had come, if it had begun."""
        return self._records.get(title)

    def restore(self, title: str, collectors: Collectors, sampling: Sampling) -> None:
        """Put what was summed up in the pass back into its collectors."""
        for name, own in collectors.items():
            for index, collector in enumerate(own):
                prefix = _key(title, name, index, "")
                state = {k.removeprefix(prefix): t for k, t in self._tensors.items() if k.startswith(prefix)}
                if state:
                    collector.load(state)
        if self._sampling is not None and not self._records[title].complete:
            sampling.load(self._sampling)
        count = self._records[title].count
        logger.info("%s: taken up after %d batch(es) from %s.", title, count.batches, self._path)

    def note(
        self,
        title: str,
        count: Count,
        seen: Iterable[str],
        collectors: Collectors,
        sampling: Sampling,
        fingerprint: float,
    ) -> None:
        """One more batch is done; write the file if it is time to."""
        record = self._records.setdefault(title, Record(first=fingerprint))
        record.count, record.seen, record.last = count, sorted(seen), fingerprint
        if time.monotonic() - self._written >= self._seconds:
            self._write(title, collectors, sampling)

    def finish(self, title: str, collectors: Collectors, sampling: Sampling) -> None:
        """The pass has come to its end."""
        self._records[title].complete = True
        self._write(title, collectors, sampling)

    def require_same_data(self, title: str, fingerprint: float, *, first: bool = False) -> None:
        """Raise ValueError where a batch is not the one that was there when the pass was interrupted."""
        record = self._records[title]
        if fingerprint != (record.first if first else record.last):
            raise ValueError(
                f"{self._path} cannot be taken up: the loader gives other data, or another order, than when it "
                "was written. Use a loader that does not shuffle or augment, or remove the file to start anew."
            )

    def _write(self, title: str, collectors: Collectors, sampling: Sampling) -> None:
        for name, own in collectors.items():
            for index, collector in enumerate(own):
                for key, tensor in collector.state().items():
                    self._tensors[_key(title, name, index, key)] = tensor
        saved = sampling.state()
        tensors = dict(self._tensors)
        if saved["state"] is not None:
            tensors["sampling"] = saved["state"]
        metadata = {
            "kind": KIND,
            "signature": self._signature,
            "records": {name: asdict(record) for name, record in self._records.items()},
            "sampling": {"seed": saved["seed"], "device": saved["device"]},
        }
        files.write(self._path, tensors, metadata)
        self._written = time.monotonic()

    def _read(self) -> None:
        self._tensors, metadata = files.read(self._path, KIND)
        theirs = metadata["signature"]
        different = [key for key in self._signature if theirs.get(key) != self._signature[key]]
        if different:
            changes = "; ".join(f"{key} was {theirs.get(key)}, is {self._signature[key]}" for key in different)
            raise ValueError(
                f"{self._path} is of another survey: {changes}. Give another file, or remove this one to start "
                "anew."
            )
        self._records = {
            name: Record(**{**record, "count": Count(**record["count"])})
            for name, record in metadata["records"].items()
        }
        self._sampling = {**metadata["sampling"], "state": self._tensors.pop("sampling", None)}


def _key(*parts: object) -> str:
    return SEPARATOR.join(map(str, parts))
