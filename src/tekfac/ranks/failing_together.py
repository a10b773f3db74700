"""Errors of one process, told in all: nobody waits for a message that will not come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tekfac.ranks.group import Ranks


class OtherProcessError(RuntimeError):
    """Another process could not go on."""


class _Word(NamedTuple):
    """What a process tells the others.

    Attributes:
        problem: why it cannot go on, if it cannot.
        value: what was asked for.
    """

    problem: str | None
    value: Any = None


class _Telling:
    """The same processes, which hear of each other's problems before whatever they do together."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.index, self.count = ranks.index, ranks.count

    def gather(self, value: Any) -> list[Any]:
        """What every process has given, in their order."""
        words: list[_Word] = self._ranks.gather(_Word(None, value))
        problems = [f"rank {rank}, {word.problem}" for rank, word in enumerate(words) if word.problem]
        if problems:
            raise OtherProcessError(
                f"{len(problems)} of {self.count} processes could not go on: {'; '.join(problems)}"
            )
        return [word.value for word in words]

    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over processes of tensors that are alike in all of them."""
        self.gather(None)
        return self._ranks.add(tensors)

    def share(self, tensors: Sequence[Tensor], owner: int) -> None:
        """Fill tensors with those of one process."""
        self.gather(None)
        self._ranks.share(tensors, owner)


@contextlib.contextmanager
def failing_together(ranks: Ranks) -> Iterator[Ranks]:
    """The processes, of which an error in one is an error in all, at the next thing that they do together.

    Raises:
        OtherProcessError: where another one has failed, with what it said.
    """
    if ranks.count == 1:
        yield ranks
        return
    telling = _Telling(ranks)
    try:
        yield telling
        telling.gather(None)
    except OtherProcessError:
        raise
    except Exception as error:
        ranks.gather(_Word(f"{type(error).__name__}: {error}"))
        raise
