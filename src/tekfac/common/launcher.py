"""What a launcher of several processes, such as torchrun, says of them in the environment."""

from __future__ import annotations

import os


def launched() -> int:
    """How many processes a launcher has started, this one among them; 1 where there was none.

    Raises:
        ValueError: for an environment that says something else.
    """
    told = os.environ.get("WORLD_SIZE", "1")
    if not told.isdecimal() or int(told) < 1:
        raise ValueError(
            f"The environment variable WORLD_SIZE is {told!r}. Expected the number of processes that torchrun "
            "has started; remove it to run one."
        )
    return int(told)


def launched_index() -> int:
    """The number of this process among those that a launcher has started, from 0."""
    return int(os.environ.get("RANK", "0")) if launched() > 1 else 0


def has_started_again() -> bool:
    """Whether torchrun has started its processes once more, because one of them had ended in an error."""
    return launched() > 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
