"""Other processes of this machine."""

from __future__ import annotations

import os


def is_running(number: int) -> bool:
    """Whether there is a process of a number on this machine; where that cannot be asked, there may be."""
    if os.name != "posix":
        return True
    try:
        os.kill(number, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
