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
_before: Any = None
_ours: Any = None


class Handle:
    """Ends one wish to run eagerly; `remove` like that of a hook, which may be called twice."""

    def __init__(self) -> None:
        self._held = True

    def remove(self) -> None:
        """With the last wish the stance is what it was before the first, unless it was changed meanwhile."""
        global _holders
        if self._held:
            self._held = False
            _holders -= 1
            settle()


def run_eagerly() -> Handle:
    """Let compiled code run eagerly until the handle is removed."""
    global _holders, _before, _ours
    _holders += 1
    if _holders == 1 and _ours is None:
        change = torch.compiler.set_stance("force_eager")
        _before, _ours = change.prev, change.stance
    return Handle()


def settle() -> None:
    """Put the compiler's stance back if nobody wishes to run eagerly and the stance is ours.

    While another stance is in force, ours may come back when that ends: then it is put back the next time.
    """
    global _before, _ours
    if _holders or _ours is None:
        return
    change = torch.compiler.set_stance(_before.stance)
    if change.prev is _ours:
        _before = _ours = None
    else:
        change.__exit__(None, None, None)
