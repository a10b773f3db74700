"""Promise: two models that are trained in two threads do not take notice of each other."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from tekfac import TEKFAC
from training import assert_identical, everything, mlp, train, vectors

SETTINGS: dict[str, Any] = {"lr": 0.05, "seed": 0, "factors_every": 1, "basis_every": 1}


class Waiting(torch.autograd.Function):
    """The identity; its backward pass waits for the other thread's to be at the same place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, barrier: threading.Barrier) -> Tensor:
        ctx.barrier = barrier
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.barrier is not None:
            ctx.barrier.wait(timeout=60)
        return gradient, None


class Meeting(nn.Module):
    """A network whose backward passes, measured or not, go hand in hand with those of the other thread."""

    def __init__(self, barrier: threading.Barrier | None) -> None:
        super().__init__()
        self.body, self.barrier = mlp(), barrier

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body[:1](x)
        return self.body[1:](Waiting.apply(out, self.barrier))  # type: ignore[no-any-return,no-untyped-call]


def start(barrier: threading.Barrier | None) -> tuple[nn.Module, TEKFAC]:
    """A model and its optimizer; made in one thread, for all threads share torch's generator."""
    model = Meeting(barrier)
    return model, TEKFAC(model, **SETTINGS)


def test_each_gives_what_it_gives_alone() -> None:
    alone = start(None)
    train(*alone, vectors(6))
    barrier = threading.Barrier(2)
    runs = [start(barrier) for _ in range(2)]
    threads = [threading.Thread(target=train, args=(*run, vectors(6))) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for run in runs:
        assert_identical(everything(*run), everything(*alone))
