"""The quadratic model of the loss along a few directions, with the exact curvature.

    h(w + sum_i x_i d_i) - h(w)  ~  b.x + x^T (B + lambda D) x / 2

    b_i = g.d_i,   D_ij = d_i.d_j,   B_ij = (J d_i)^T H (J d_j)

J is the Jacobian of the predictions by the parameters and H the Hessian of the loss by the predictions, so that
J^T H J is the generalised Gauss-Newton matrix of the very loss: for those of docs/mathematics.md, section 6,
the Fisher matrix of the whole network, with nothing approximated. Section 7 there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tekfac.capture.autograd import sending

Move = Mapping[Tensor, Tensor]
"""A change of the parameters."""


@dataclass(frozen=True)
class QuadraticModel:
    """The model along k moves, without damping.

    Attributes:
        slopes: b, [k], in float64.
        curvatures: B, [k, k].
        lengths: D, [k, k].
    """

    slopes: Tensor
    curvatures: Tensor
    lengths: Tensor

    @classmethod
    def along(
        cls, moves: Sequence[Move], loss: Tensor, predictions: Sequence[Tensor], gradients: Move
    ) -> QuadraticModel:
        """Along some moves.

        Args:
            moves: k of them.
            loss: a scalar, with its graph.
            predictions: that it is a function of, with their graphs.
            gradients: of the loss, by parameter.

        Raises:
            RuntimeError: where the loss cannot be differentiated twice, or is no function of the predictions.
        """
        slopes = torch.stack([_product(move, gradients) for move in moves])
        lengths = torch.stack([torch.stack([_product(a, b) for b in moves]) for a in moves])
        with sending():
            return cls(slopes, _curvatures(moves, loss, predictions), lengths)

    @property
    def is_finite(self) -> bool:
        """Whether all its numbers are."""
        numbers = (self.slopes, self.curvatures, self.lengths)
        return all(bool(torch.isfinite(own).all()) for own in numbers)

    def change(self, shares: Tensor, damping: float) -> float:
        """What the model says of the loss after so much of each move, [k]."""
        curved = self.curvatures + damping * self.lengths
        return float(self.slopes @ shares + 0.5 * shares @ curved @ shares)

    def best(self, damping: float) -> Tensor:
        """How much of each move makes the model least, [k]."""
        values, vectors = torch.linalg.eigh(self._scaled(self.curvatures + damping * self.lengths))
        kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1].clamp_min(0)
        inverse = torch.where(kept, 1 / values.where(kept, 1.0), 0.0)
        solved: Tensor = vectors @ (inverse * (vectors.T @ (self._units * self.slopes)))
        return -self._units * solved

    @property
    def _units(self) -> Tensor:
        """What gives every move the length 1, so that rounding is judged alike."""
        return self.lengths.diagonal().clamp_min(torch.finfo(torch.float64).tiny).rsqrt()

    def _scaled(self, matrix: Tensor) -> Tensor:
        return self._units[:, None] * matrix * self._units


def _curvatures(moves: Sequence[Move], loss: Tensor, predictions: Sequence[Tensor]) -> Tensor:
    """B, [k, k]."""
    tangents = _tangents(moves, predictions)
    with torch.enable_grad():
        by_predictions = torch.autograd.grad(
            loss, predictions, create_graph=True, allow_unused=True, materialize_grads=True
        )
    curved = [_hessian_product(by_predictions, predictions, tangent) for tangent in tangents]
    found = torch.stack([torch.stack([_inner(tangent, own) for own in curved]) for tangent in tangents])
    return (found + found.T) / 2


def _tangents(moves: Sequence[Move], predictions: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """J d of every move, like the predictions: the derivative of u -> J^T u, which is linear in u."""
    parameters = list({parameter: None for move in moves for parameter in move})
    with torch.enable_grad():
        ones = [torch.ones_like(prediction, requires_grad=True) for prediction in predictions]
        pulled = torch.autograd.grad(
            predictions, parameters, ones, create_graph=True, allow_unused=True, materialize_grads=True
        )
    found: list[Sequence[Tensor]] = []
    for move in moves:
        along = [move.get(p, None) for p in parameters]
        pairs = [(g, d) for g, d in zip(pulled, along, strict=True) if d is not None and g.requires_grad]
        outputs, vectors = zip(*pairs, strict=True) if pairs else ((), ())
        found.append(
            torch.autograd.grad(
                outputs, ones, vectors, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            if pairs
            else [torch.zeros_like(own) for own in ones]
        )
    return found


def _hessian_product(
    gradients: Sequence[Tensor], predictions: Sequence[Tensor], tangent: Sequence[Tensor]
) -> Sequence[Tensor]:
    """H t, like the predictions."""
    pairs = [(g, t) for g, t in zip(gradients, tangent, strict=True) if g.requires_grad]
    if not pairs:
        return [torch.zeros_like(own) for own in predictions]
    outputs, vectors = zip(*pairs, strict=True)
    return torch.autograd.grad(
        outputs, predictions, vectors, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def _product(a: Move, b: Move) -> Tensor:
    """Over all parameters that are in both."""
    both = [(own, b[parameter]) for parameter, own in a.items() if parameter in b]
    return _inner(*zip(*both, strict=True)) if both else torch.zeros((), dtype=torch.float64)


def _inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The sum of products of all entries, on the host."""
    products = [_wide(x) * _wide(y) for x, y in zip(a, b, strict=True)]
    return torch.stack([own.sum().cpu().double() for own in products]).sum()


def _wide(x: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return x.float() if x.device.type == "mps" else x.double()
