"""Which likelihood a loss belongs to: told by the graph between outputs and loss, and by the gradient itself.

The gradient of a cross-entropy of logits z is w (softmax(z) - onehot), that of a logistic loss
w (sigmoid(z) - y). Where y is one of few values, the gradient shows whether it is of that form, whatever code
has made it. A regression's, z - y up to a factor, may be anything; there, and where targets are soft, the graph
tells (loss_graph.py). What neither tells is not guessed. See docs/mathematics.md, section 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tekfac.capture.loss_graph import LossSort, Sort
from tekfac.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood

SEEN = 2**22
"""Entries of a batch among which rows with a gradient are looked for, roughly."""

ENTRIES = 2**18
"""Of these that are looked at closely, roughly."""

EVIDENCE = 6
"""Numbers that must agree, beyond those that were fitted to them."""

FAR = 64
"""Times the smallest numbers that keep their digits: a gradient below says nothing of its form."""

LEAST_PRECISE = 4
"""Bytes of a number that shows the form of a loss which the graph does not know: others fit too much."""

VARIANCE_OF_SQUARES = 0.5
"""Of the Gaussian whose -log p is a square itself, not half of it, as torch's mse_loss."""


@dataclass(frozen=True)
class Finding:
    """What a batch says of the likelihood.

    Attributes:
        likelihood: that of the loss; None: none that is known.
        is_certain: whether other batches would say the same. Without, a batch said nothing.
    """

    likelihood: Likelihood | None
    is_certain: bool = True


NONE_KNOWN = Finding(None)
NOTHING = Finding(None, is_certain=False)


def recognised(outputs: Tensor, gradient: Tensor, loss: LossSort | None) -> Finding:
    """The likelihood of which the loss is -log p, up to a factor of each term.

    Args:
        outputs: [N, ...].
        gradient: that of the loss, of the same shape.
        loss: what it is of the outputs, as its graph tells; None where that cannot be seen.
    """
    outputs, gradient = _some_samples(outputs), _some_samples(gradient)
    if not bool(gradient.any()):
        return NOTHING
    if loss is not None and loss.sort is not Sort.OTHER:
        return _by_graph(outputs, gradient, loss)
    if loss is not None and gradient.dtype.itemsize < LEAST_PRECISE:
        return NONE_KNOWN
    found = [_by_hard_labels(outputs, gradient, axis) for axis in _axes(outputs)]
    found.append(_by_yes_and_no(outputs, gradient))
    certain = [finding for finding in found if finding.likelihood is not None]
    if len(certain) == 1:
        return certain[0]
    return NOTHING if certain or not all(finding.is_certain for finding in found) else NONE_KNOWN


def _some_samples(x: Tensor) -> Tensor:
    """Of a large batch, samples at equal distances."""
    most = max(1, SEEN * len(x) // max(1, x.numel()))
    return x if most >= len(x) else x[torch.arange(most, device=x.device) * len(x) // most]


def _axes(outputs: Tensor) -> list[int]:
    """Those that may hold classes."""
    return [axis for axis in range(1, outputs.ndim) if outputs.shape[axis] > 1]


# -- a loss that the graph has named ---------------------------------------------------------------------


def _by_graph(outputs: Tensor, gradient: Tensor, loss: LossSort) -> Finding:
    """What the graph says; and the values, as to which axis holds the classes."""
    if loss.sort is Sort.GAUSSIAN:
        return Finding(Gaussian(VARIANCE_OF_SQUARES, masked=True))
    if loss.sort is Sort.BERNOULLI:
        return Finding(Bernoulli())
    axes = _axes(outputs)
    if loss.sort is Sort.LOG_PROBABILITIES:
        return _with_classes({axis: _is_normalised(outputs, axis) for axis in axes})
    if loss.classes:
        axes = [axis for axis in axes if loss.classes == {outputs.shape[axis]}]
    fits = {axis: _balances(outputs, gradient, axis) for axis in axes}
    if list(fits.values()) == [None] and loss.classes and not loss.of_part:  # there is no other axis for it
        return Finding(Categorical(class_dim=axes[0]))
    return _with_classes(fits)


def _with_classes(fits: Mapping[int, bool | None]) -> Finding:
    """Of the axes the one that fits; None stands for one of which these values do not tell."""
    fitting = [axis for axis, does in fits.items() if does]
    if len(fitting) == 1 and None not in fits.values():
        return Finding(Categorical(class_dim=fitting[0]))
    return NOTHING if fitting or None in fits.values() else NONE_KNOWN


def _balances(outputs: Tensor, gradient: Tensor, axis: int) -> bool | None:
    """Whether the gradient sums to zero along an axis, of which no part is left out.

    Where a row is all but certain, or its gradient as small as can be, that is rounding; None where all are.
    """
    rows = _Rows.of(outputs, gradient, axis)
    p, g = rows.outputs.softmax(1), rows.gradient
    others = torch.ones_like(p).scatter_(1, p.argmax(1, keepdim=True), 0.0)
    left = (p * others).sum(1)
    is_clear = (left > 10 * rows.noise) & (g.abs().sum(1) > FAR * rows.least * p.shape[1])
    if not bool(is_clear.any()):
        return None
    p, g, left = (own[is_clear] for own in (p, g, left))
    sums, sizes = g.sum(1).abs(), g.abs().sum(1)
    allowed = (rows.slack + rows.noise / left) * sizes + rows.least * outputs.shape[axis]
    if not bool((sums <= allowed).all()):
        return False
    likely = p > 0.1 / outputs.shape[axis]
    is_left_out = (g == 0).all(0) & (likely & (p * sizes[:, None] > 2 * rows.least)).any(0)
    return not bool(is_left_out.any())


def _is_normalised(outputs: Tensor, axis: int) -> bool:
    """Whether the outputs are log-probabilities along an axis."""
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return bool(wide.logsumexp(axis).abs().max() <= 1e3 * torch.finfo(outputs.dtype).eps)


# -- a loss that only its gradient shows -----------------------------------------------------------------


def _by_hard_labels(outputs: Tensor, gradient: Tensor, axis: int) -> Finding:
    """Whether every row is w (softmax(z) - onehot), with a w that its label alone decides.

    Losses that only depend on a label's probability (focal, say) have such rows, too, whose w differ.
    """
    rows = _Rows.of(outputs, gradient, axis)
    p, g = rows.outputs.softmax(1), rows.gradient
    labels = g.abs().argmax(1, keepdim=True)
    others = torch.ones_like(p).scatter_(1, labels, 0.0)
    left = (p * others).sum(1)  # 1 - p of the label, without the rounding of a difference
    is_clear = (left > 10 * rows.noise) & (g.abs().amax(1) > FAR * rows.least)
    if not bool(is_clear.any()):
        return NOTHING
    z, p, g, labels, others, left = (own[is_clear] for own in (rows.outputs, p, g, labels, others, left))
    slack = rows.slack_at(z).amax(1)
    weights = (g * others).sum(1) / left
    expected = (weights[:, None] * p).scatter_(1, labels, -(weights * left)[:, None])
    allowed = slack[:, None] * expected.abs() + rows.least
    allowed.scatter_add_(1, labels, rows.noise * weights.abs()[:, None])
    if not bool(((g - expected).abs() <= allowed).all()):
        return NONE_KNOWN
    count = _agreeing(weights, labels[:, 0], left, 2 * slack, rows.least)
    if count is None:
        return NONE_KNOWN
    if count < EVIDENCE or not _differ(p, others, rows):
        return NOTHING
    return Finding(Categorical(class_dim=axis))


def _by_yes_and_no(outputs: Tensor, gradient: Tensor) -> Finding:
    """Whether every entry is w (sigmoid(z) - y) with y of 0 or 1, and a w that y (and the column) decides."""
    rows = _Rows.of(outputs, gradient, outputs.ndim - 1 if outputs.ndim > 1 else None)
    z, g = rows.outputs.flatten(), rows.gradient.flatten()
    columns = torch.arange(rows.outputs.shape[1], device=z.device).repeat(len(rows.outputs))
    away = torch.where(g > 0, z.sigmoid(), (-z).sigmoid())  # |sigmoid(z) - y|
    is_clear = (g.abs() > FAR * rows.least) & (away > 10 * rows.noise)
    z, g, columns, away = (own[is_clear] for own in (z, g, columns, away))
    if len(z) <= EVIDENCE:
        return NOTHING
    labels = (g < 0).long()
    weights, slack = g.abs() / away, 2 * (rows.slack_at(z) + rows.noise / away)
    count = _agreeing(weights, labels, away, slack, rows.least)
    if count is None:
        count = _agreeing(weights, 2 * columns + labels, away, slack, rows.least)
    if count is None:
        return NONE_KNOWN
    return Finding(Bernoulli()) if count >= EVIDENCE else NOTHING


def _agreeing(
    weights: Tensor, labels: Tensor, probabilities: Tensor, slack: Tensor, least: float
) -> int | None:
    """How many weights equal that of another row with the same label; None if some do not.

    Only rows count whose probabilities differ: where all are the same, many a loss has equal weights.

    Args:
        weights: of rows, [R].
        labels: of the same.
        probabilities: that gradients were divided by to have the weights.
        slack: by how much each weight may be off, relatively.
        least: and each gradient, besides.
    """
    known, places = torch.unique(labels, return_inverse=True)

    def of_labels(values: Tensor, how: str, start: float) -> Tensor:
        """The largest, or smallest, of the values with the same label, for each of them."""
        found = torch.full((len(known),), start, dtype=values.dtype, device=values.device)
        return found.scatter_reduce_(0, places, values, how)[places]

    is_best = probabilities == of_labels(probabilities, "amax", 0.0)  # whose weight has most digits
    best = of_labels(torch.where(is_best, weights, 0.0), "amax", 0.0)
    allowed = (slack + of_labels(torch.where(is_best, slack, 0.0), "amax", 0.0)) * best
    if not bool(((weights - best).abs() <= allowed + least / probabilities).all()):
        return None
    first = of_labels(probabilities, "amin", torch.inf)
    return int((probabilities > (1 + 10 * slack) * first).sum())


def _differ(p: Tensor, others: Tensor, rows: _Rows) -> bool:
    """Whether the probabilities of classes beside the label do: else any loss of two values fits.

    Of two classes there is one beside the label, and nothing to fit: there the weights must do.
    """
    if p.shape[1] == 2:
        return True
    largest = (p * others).amax(1)
    smallest = torch.where(others > 0, p, torch.inf).amin(1)
    return bool((largest > (1 + 10 * rows.slack) * smallest).any())


@dataclass(frozen=True)
class _Rows:
    """Some rows of outputs and their gradient, [R, C], in high precision.

    Attributes:
        outputs: of the model.
        gradient: of the loss.
        slack: by how much, relatively, an entry of the gradient may be rounded.
        noise: by how much a probability may be, from which 1 is taken.
        least: below it numbers of the gradient's precision lose digits, or vanish.
    """

    outputs: Tensor
    gradient: Tensor
    slack: float
    noise: float
    least: float

    def slack_at(self, outputs: Tensor) -> Tensor:
        """The same of probabilities, exp(x), with an x that was rounded as numbers as large as outputs are."""
        return self.slack * (1 + outputs.abs() / 4)

    @classmethod
    def of(cls, outputs: Tensor, gradient: Tensor, axis: int | None) -> _Rows:
        """Rows along an axis (each entry is one where it is None) that have a gradient, spread evenly."""
        length = 1 if axis is None else outputs.shape[axis]
        z, g = (
            own.reshape(-1, 1) if axis is None else own.movedim(axis, -1).reshape(-1, length)
            for own in (outputs, gradient)
        )
        trained = (g != 0).any(1).nonzero()[:, 0]
        most = max(4 * EVIDENCE, ENTRIES // length)
        if len(trained) > most:
            trained = trained[torch.arange(most, device=z.device) * len(trained) // most]
        wide = torch.promote_types(outputs.dtype, torch.float32)
        precise = wide if outputs.device.type == "mps" else torch.float64
        eps = torch.finfo(gradient.dtype).eps
        noise = 32 * torch.finfo(wide).eps if outputs.dtype == wide else 4 * torch.finfo(outputs.dtype).eps
        least = 4 * torch.finfo(gradient.dtype).tiny
        return cls(z[trained].to(precise), g[trained].to(precise), 8 * eps, noise, least)
