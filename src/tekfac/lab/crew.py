"""The processes of one run: each trains on its part of every batch, and the first one keeps the folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tekfac.lab.counting import Sums
from tekfac.lab.data.batches import Batch, Batches
from tekfac.lab.devices import random_states
from tekfac.ranks.group import Ranks
from tekfac.ranks.launched import in_parallel
from tekfac.ranks.replicas import require_same

T = TypeVar("T")


class Part(NamedTuple):
    """What one process has of a batch.

    Attributes:
        inputs: its samples.
        labels: of these.
        weight: what its mean loss is multiplied by, so that the mean of all processes' gradients is that of the
            batch.
        counts: whether its loss and its right answers count, and are not those of another process once more.
    """

    inputs: Tensor
    labels: Tensor
    weight: float
    counts: bool


class Crew:
    """The processes that train a run together; mostly there is one.

    Attributes:
        count: how many they are.
        is_first: whether this is the one that writes and reports.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self.count, self.is_first = ranks.count, ranks.index == 0

    def part(self, inputs: Tensor, labels: Tensor) -> Part:
        """This process's part of a batch; a batch with fewer samples than processes is everybody's."""
        index, count, samples = self._ranks.index, self.count, len(labels)
        if samples < count:
            return Part(inputs, labels, 1.0, self.is_first)
        own = slice(samples * index // count, samples * (index + 1) // count)
        return Part(inputs[own], labels[own], count * (own.stop - own.start) / samples, True)

    def share_of(self, batches: Batches) -> Iterator[Batch]:
        """Of the batches of an epoch, whole, those that are this process's to look at."""
        if self.count == 1:
            return batches.epoch(0)
        return (batches.batch(0, number) for number in range(self._ranks.index, len(batches), self.count))

    def together(self, model: nn.Module) -> nn.Module:
        """The model as all of them train it."""
        return in_parallel(model, self._ranks)

    def seed(self, seed: int) -> None:
        """Begin with random numbers of its own, but for the first, which has those of a run alone."""
        if not self.is_first:
            torch.manual_seed(seed * self.count + self._ranks.index + 2**32)

    def any(self, answers: Sequence[bool]) -> list[bool]:
        """Whether any process says so, of each of some questions; all have to ask at the same time."""
        if self.count == 1:
            return list(answers)
        (found,) = self._ranks.add([torch.tensor(answers, dtype=torch.float32, device=self._device)])
        return [bool(own) for own in found > 0]

    def added(self, sums: Sums) -> Sums:
        """The sums of all."""
        if self.count == 1:
            return sums
        total = Sums(self._device)
        for own in self._ranks.gather({name: _on_cpu(value) for name, value in sums.state().items()}):
            total.add_state(own)
        return total

    def of_first(self, make: Callable[[], T]) -> T:
        """What the first one makes, plain values and tensors; an error that it meets is everybody's."""
        if self.count == 1:
            return make()
        made: T | None = None
        problem: Exception | None = None
        if self.is_first:
            try:
                made = make()
            except Exception as error:
                problem = error
        made, problem = self._ranks.gather((made, problem))[0]
        if problem is not None:
            raise problem
        return made

    def random_states(self) -> list[dict[str, Tensor]]:
        """Of the generators of all."""
        return self._ranks.gather(random_states(self._device))

    def require_as_many(self, count: int, folder: str) -> None:
        """Raise ValueError where another number of processes has begun the run in a folder."""
        if count != self.count:
            raise ValueError(
                f"{folder!r} holds a run of {count} processes, and goes on bit by bit with as many. Expected "
                f"torchrun --nproc-per-node {count}, or no torchrun for 1; there are {self.count}."
            )

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Raise ReplicaError in all processes where one of them is to train something else."""
        require_same(self._ranks, "A run", facts, "Start all of them with the same command and the same data.")

    def own(self, of_all: Sequence[T]) -> T:
        """This one's, of what is listed for all."""
        return of_all[self._ranks.index]

    def level_buffers(self, model: nn.Module) -> None:
        """Let all have the first one's buffers, such as a batch norm's running averages."""
        self._ranks.share([buffer for buffer in model.buffers() if buffer.numel()], 0)


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
