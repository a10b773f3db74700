"""Compiled models run as they are, eagerly, while some hook is waiting for a forward pass.

Code that `torch.compile` has made does not look for hooks: it would pass by those that came later, and break
its graph at those that were there before. So hooks are on a model only for the steps that measure, and for as
long the compiler's stance is "force_eager": the module's own code runs, hooks included. On all other steps the
compiled code runs, without a break. Nothing has to be compiled anew.
"""

from __future__ import annotations

from typing import Any

import torch

_holders = 0
_stance: Any = None


class Handle:
    """Ends one wish to run eagerly; `remove` like that of a hook, which may be called twice."""

    def __init__(self) -> None:
        self._held = True

    def remove(self) -> None:
        """With the last wish the stance is what it was before the first."""
        global _holders, _stance
        if not self._held:
            return
        self._held = False
        _holders -= 1
        if _holders == 0 and _stance is not None:
            _stance.__exit__(None, None, None)
            _stance = None


def run_eagerly() -> Handle:
    """Let compiled code run eagerly until the handle is removed."""
    global _holders, _stance
    _holders += 1
    if _holders == 1:
        _stance = torch.compiler.set_stance("force_eager")
    return Handle()
