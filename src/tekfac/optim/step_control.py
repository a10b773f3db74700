"""Levenberg-Marquardt: steps as long as a quadratic model says, judged by what they do to the loss.

    moves       along the preconditioned gradient, along that of what has no block, along the last step
    model       what each of them, and any sum of them, should do to the loss          quadratic_model.py
    look        the loss where the step leads to: one that raises it is not taken, and another one tried with
                more damping; damping follows from how well the model has foretold it  damping.py

docs/mathematics.md, section 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tekfac.common.torch_internals import add_to_each
from tekfac.damping import LevenbergMarquardt
from tekfac.optim.closures import Evaluation
from tekfac.optim.quadratic_model import Move, QuadraticModel

ROUNDING = 8
"""Units in the last place of the loss: a smaller change of it says nothing."""


@dataclass(frozen=True)
class Judged:
    """A step that was taken, or not.

    Attributes:
        rule: with the damping of the next step.
        move: of the parameters; None: no step was taken.
        ratio: the change of the loss by what was foretold; NaN where nobody looked, or rounding hides it.
        rejected: how many steps were tried, and not taken.
    """

    rule: LevenbergMarquardt
    move: Move | None
    ratio: float
    rejected: int


def judged_step(
    rule: LevenbergMarquardt,
    evaluation: Evaluation,
    moves_under: Callable[[LevenbergMarquardt], Sequence[Move]],
    last: Move,
    *,
    looks: bool,
) -> Judged:
    """Move the parameters, if that lowers the loss.

    Args:
        rule: with the present damping.
        evaluation: of the closure, at the present parameters.
        moves_under: what the gradient asks for under a damping, at the learning rates.
        last: the last step; empty: there was none. It is not tried twice.
        looks: whether to look at the loss afterwards.
    """
    before = float(evaluation.loss.detach())
    noise = ROUNDING * torch.finfo(evaluation.loss.dtype).eps * abs(before)
    for rejected in range(rule.tries):
        moves = [*moves_under(rule), *([last] if last and not rejected else [])]
        model = QuadraticModel.along(moves, evaluation.loss, evaluation.predictions, evaluation.gradients)
        if model.is_finite:
            shares = model.best(rule.in_force) if rule.step == "model" else torch.ones_like(model.slopes)
            move, foretold = _sum(moves, shares), model.change(shares, rule.in_force)
            change = evaluation.loss_after(move) - before if looks else math.nan
            if not looks or change <= noise:
                add_to_each(list(move), list(move.values()))
                ratio = change / foretold if foretold < -noise else math.nan
                return Judged(rule if math.isnan(ratio) else rule.after(ratio), move, ratio, rejected)
        rule = rule.after_raise()
    return Judged(rule, None, math.nan, rule.tries)


def _sum(moves: Sequence[Move], shares: Tensor) -> dict[Tensor, Tensor]:
    """So much of each move."""
    total: dict[Tensor, Tensor] = {}
    for move, share in zip(moves, shares.tolist(), strict=True):
        for parameter, own in move.items():
            total[parameter] = share * own + total[parameter] if parameter in total else share * own
    return total
