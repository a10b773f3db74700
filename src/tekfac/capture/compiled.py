"""Compiled models run as they are, eagerly, where a forward pass is to be measured.

Code that `torch.compile` has made does not look for hooks: it would pass by those that came later, and break
its graph at those that were there before. So hooks are on a model only for the steps that measure, and there
the compiler's stance is "force_eager": the module's own code runs, hooks included. On all other steps the
compiled code runs, without a break. Nothing has to be compiled anew.

The stance is the only switch that needs no new compilation, and it holds for the whole process. So it is
changed as late and for as short as possible: only while the model's own forward pass runs, unless the model may
be called through compiled code around it, which no hook of the model comes before. That it may be, until a
first pass has shown how it is called.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from tekfac.common.interrupts import Uninterrupted
from tekfac.common.torch_internals import (
    COMPILER,
    StanceChange,
    change_stance,
    is_compiled_in_place,
    without_compiler,
)

_lock = threading.RLock()
_change: StanceChange | None = None


class Handle:
    """A wish that compiled code runs eagerly; `remove` ends it, and may be called twice.

    One that nobody holds any more, since an interrupt came before it was put anywhere, is no wish.
    """

    def __init__(self) -> None:
        with _lock, Uninterrupted():
            _held.add(self)
            _run_eagerly()

    def remove(self) -> None:
        """With the last wish the stance is what it was before the first, unless it was changed meanwhile."""
        with _lock, Uninterrupted():
            _held.discard(self)
            settle()


_held: weakref.WeakSet[Handle] = weakref.WeakSet()


@contextlib.contextmanager
def run_eagerly() -> Iterator[None]:
    """Let compiled code run as it was written, meanwhile."""
    handle = Handle()
    try:
        yield
    finally:
        handle.remove()


def settle() -> None:
    """Put the compiler's stance back if nobody wishes to run eagerly and the stance is ours.

    While another stance is in force, ours may come back when that ends: then it is put back the next time.
    """
    global _change
    with _lock, Uninterrupted():
        if _held or _change is None:
            return
        back = change_stance("default")
        back.undo()
        if back.before is _change.now:
            _change.undo()
            _change = None


def _run_eagerly() -> None:
    """Change the stance, unless the compiler was never imported: then there is no compiled code."""
    global _change
    if _change is None and COMPILER in sys.modules:
        _change = change_stance("force_eager")


class EagerForward:
    """Sees to it that one model's watched forward passes run eagerly, and little else does."""

    def __init__(self) -> None:
        self._may_be_inside_compiled_code = True
        self._own_frames = 0  # of the compiler, among the callers of the model's hooks
        self._while_armed: Handle | None = None
        self._while_forward: Handle | None = None

    def arm(self, model: nn.Module) -> None:
        """A forward pass is going to be watched."""
        settle()
        is_wrapper = without_compiler(model) is not model
        self._own_frames = 1 if is_wrapper else 0
        # The hooks of a wrapper run before the compiled code inside of it does: they come early enough.
        if self._may_be_inside_compiled_code and not is_wrapper and self._while_armed is None:
            self._while_armed = Handle()

    def disarm(self, *, was_called: bool) -> None:
        """No forward pass is watched any more; `was_called` is whether one was seen."""
        self.end_forward()
        if self._while_armed is not None:
            self._while_armed.remove()
            self._while_armed = None
        if not was_called:
            self._may_be_inside_compiled_code = True

    def begin_forward(self) -> None:
        """The model's forward pass begins. Parts of it may be compiled."""
        self._may_be_inside_compiled_code = _compiler_frames(sys._getframe()) > self._own_frames
        if self._may_be_inside_compiled_code:  # where it is too late to change the stance
            return
        self._while_forward = self._while_forward or Handle()
        if self._while_armed is not None:
            self._while_armed.remove()
            self._while_armed = None

    def is_compiled(self, model: nn.Module) -> bool:
        """Whether the model, one of its modules or what it was last called by is compiled."""
        if without_compiler(model) is not model or self._may_be_inside_compiled_code:
            return True
        return any(is_compiled_in_place(module) for module in model.modules())

    def end_forward(self) -> None:
        """The model's forward pass has ended, or failed."""
        if self._while_forward is not None:
            self._while_forward.remove()
            self._while_forward = None


def _compiler_frames(frame: FrameType | None) -> int:
    """How many of the functions that called a frame are those by which the compiler runs code."""
    evaluation: Any = sys.modules.get(f"{COMPILER}.eval_frame")
    count = 0
    while evaluation is not None and frame is not None:
        count += frame.f_code.co_filename == evaluation.__file__
        frame = frame.f_back
    return count
