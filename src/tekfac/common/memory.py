"""Errors that say there is not enough memory, of every sort."""

from __future__ import annotations

import torch

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError, RuntimeError)
"""Types of errors that may say so."""

WORDS_OF_HOST = "can't allocate memory"
"""In the message of torch's allocator of the CPU, whose error has no type of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, on the host or on a device."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and WORDS_OF_HOST in str(error)
    )
