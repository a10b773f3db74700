"""The largest memory of a process that trains, beside what the state of its optimizer takes by counting."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tekfac.explanation import explain
from tekfac.lab.bench.contestants import Contestant, Stepping, Together
from tekfac.lab.bench.networks import TINY, Network
from tekfac.lab.bench.timing import Racer

GIVES_BACK = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}
"""The environment in which glibc gives freed memory back to the system, and holds on to little of it."""

LEAST_STEPS = 4
"""What is freed in one step may still be in use by the next."""

STATUS = Path("/proc/self/status")


def measured(network: Network, contestant: Contestant, *, steps: int | None, seed: int) -> dict[str, Any]:
    """Train for some steps in this process, which nothing else has used, and tell what it took.

    A tiny network goes first: what the process has then is code, of torch and of the contestant, not of the
    network's size.

    Args:
        network: which is trained.
        contestant: by whom.
        steps: how many; None: the first and one whole cycle, at least LEAST_STEPS.
        seed: of weights and batches.
    """
    whole_cycle = max(LEAST_STEPS, contestant.cycle + 1)
    _trained(TINY["cnn"], contestant, whole_cycle, seed)
    code = peak()
    taken = whole_cycle if steps is None else steps
    racer = _trained(network, contestant, taken, seed)
    return {
        "steps": taken,
        "code": code,
        "peak": peak(),
        "parameters": bytes_of_parameters(racer.model),
        "counted": counted(contestant, racer.model, racer.optimizer),
        "environment": {name: os.environ.get(name, "") for name in GIVES_BACK},
    }


def _trained(network: Network, contestant: Contestant, steps: int, seed: int) -> Racer:
    racer = Racer.of(contestant, network, seed)
    for _ in range(steps):
        racer.step()
    return racer


def peak() -> int:
    """The most memory that this process has had in use so far, in bytes.

    Linux tells it of the program that runs now; what `resource` tells there is at least what the process had
    that started it.
    """
    if STATUS.exists():
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
        if "VmHWM" in lines:
            return int(lines["VmHWM"].split()[0]) * 1024
    import resource  # not on Windows

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def counted(contestant: Contestant, model: nn.Module, optimizer: Stepping) -> int:
    """Bytes of an optimizer's state with its momentum: of ours as `explain` says, of others by looking."""
    if contestant.is_ours:
        curvature = explain(model, method=contestant.name, file=None, **contestant.options).memory
        return curvature + bytes_of_parameters(model)
    return sum(tensor.nbytes for tensor in _tensors_of(optimizer))


def bytes_of_parameters(model: nn.Module) -> int:
    """Also those of a momentum."""
    return sum(parameter.nbytes for parameter in model.parameters())


def _tensors_of(optimizer: Stepping) -> list[Tensor]:
    """Every tensor in an optimizer's state, each once; a parameter is the model's."""
    parts = optimizer.parts if isinstance(optimizer, Together) else [optimizer]
    waiting: list[Any] = [dict(getattr(part, "state", {})) for part in parts]
    found: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if id(value) not in found:
            found[id(value)] = value
            waiting += _inside(value)
    return [v for v in found.values() if isinstance(v, Tensor) and not isinstance(v, nn.Parameter)]


def _inside(value: Any) -> list[Any]:
    """What dicts, lists and objects hold."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    return [] if isinstance(value, Tensor | type) else list(getattr(value, "__dict__", {}).values())
