"""What a network's outputs mean as a distribution p(y | outputs).

The Fisher is an expectation over labels drawn from the model's own prediction. In the space of the
outputs that needs two things, neither of which runs the loss:

    sample    the gradient of -log p(y~ | outputs) for labels y~ drawn from the prediction
    columns   vectors whose outer products sum to the exact expectation of that gradient's

and the number of terms that the training loss is a mean of. docs/mathematics.md, section 6.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

SampledLoss = Callable[[Tensor, torch.Generator], Tensor]
"""(outputs, generator) -> -log p of labels drawn with that generator: one number per term."""

IGNORED = -100
"""The class index of a target that does not count, as in torch's losses."""


class OutputShapeError(ValueError):
    """The model's outputs do not have a shape that the likelihood can read."""


@dataclass(frozen=True)
class Prediction(ABC):
    """The predicted distribution of one batch.

    Attributes:
        counted: [N, P] of booleans: which of each sample's P terms take part in the loss.
        doubt: what speaks against these outputs being of this kind, in words.
    """

    counted: Tensor
    doubt: str | None = field(default=None, kw_only=True)

    @abstractmethod
    def sample(self, generator: torch.Generator) -> Tensor:
        """Gradient of -log p(y~ | outputs) for drawn labels, shaped like the outputs.

        It is 0 at terms that do not count.
        """

    def sample_part(self, generator: torch.Generator, start: int, samples: int) -> Tensor:
        """The same, where this batch is a part of one of so many samples, from sample `start` on.

        A likelihood that can draws what `sample` would for the whole batch, whoever has the rest of it. By
        default the labels of each part are drawn with a generator of its own.
        """
        seeds = torch.randint(2**62, (samples,), generator=generator, device=generator.device)
        own = torch.Generator(device=generator.device).manual_seed(int(seeds[min(start, samples - 1)]))
        return self.sample(own)

    @abstractmethod
    def columns(self) -> Iterator[Tensor]:
        """Vectors like the outputs whose outer products, per sample, sum to the exact output Fisher."""

    def loss_factor(self, gradient: Tensor) -> float | None:
        """What the training loss multiplies its terms by, on average, as its gradient, like the outputs, tells.

        None where it does not: where labels are soft, or any number.
        """
        return None


class Likelihood(ABC):
    """How outputs [N, ...] are read as a distribution."""

    def check(self, outputs: Tensor) -> None:
        """Raise OutputShapeError where outputs of this shape cannot be read: by default a scalar's."""
        if outputs.ndim < 1:
            raise OutputShapeError(
                f"The likelihood {type(self).__name__} got a scalar output. Expected outputs of shape [N, ...]."
            )

    @abstractmethod
    def predict(self, outputs: Tensor, gradient: Tensor) -> Prediction:
        """Read a batch of outputs; `gradient` is that of the training loss with respect to them."""

    def losses(self, outputs: Tensor, targets: Tensor | None) -> Losses:
        """-log p(targets | outputs) up to a constant, term by term; samples are axis 0.

        Without targets it is the loss of some targets that no outputs predict for certain: a gradient from
        which `predict` sees that every term counts.

        Raises:
            NotImplementedError: for a likelihood that does not tell its loss.
        """
        raise NotImplementedError(
            f"The likelihood {type(self).__name__} does not tell its loss. Give it: "
            "loss=lambda model, batch: ..."
        )


class Losses(NamedTuple):
    """The terms of a loss.

    Attributes:
        total: their sum.
        counted: which of them count, [N, P].
    """

    total: Tensor
    counted: Tensor


# -- classes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Classes with logits at [N, C], [N, C, d1, ...] or [N, T, C].

    A term whose logits get no gradient at all from the training loss has an ignored target and does not
    count, unless its prediction is certain anyway.

    Attributes:
        class_dim: the axis of the classes, counted with the samples as axis 0. None: axis 1 of a matrix;
            with more axes it is 1 or the last, whichever the loss's gradient sums to zero along, as a
            cross-entropy's does.
    """

    class_dim: int | None = None

    def check(self, outputs: Tensor) -> None:
        """At least two axes, `class_dim` among them."""
        if outputs.ndim < 2:
            raise OutputShapeError(
                f"The categorical likelihood got outputs of shape {list(outputs.shape)}. Expected class "
                "logits of shape [N, C], [N, C, d1, ...] or [N, T, C]. If the logits are a part of what "
                "the model returns, pick them with outputs=...; if it returns its loss, let it return the "
                "logits with it; for other targets choose "
                "likelihood='bernoulli', 'gaussian' or a callable."
            )
        if self.class_dim is not None and not -outputs.ndim <= self.class_dim < outputs.ndim:
            raise OutputShapeError(
                f"class_dim={self.class_dim} is not an axis of outputs of shape {list(outputs.shape)}."
            )
        if outputs.ndim == 2 and outputs.shape[1] == 1:
            raise OutputShapeError(
                f"The categorical likelihood got outputs of shape {list(outputs.shape)}, a single class. For a "
                "yes/no target choose likelihood='bernoulli', for a real one 'gaussian'."
            )

    def predict(self, outputs: Tensor, gradient: Tensor) -> Prediction:
        """Probabilities with one row of classes per term."""
        axis = self._class_axis(outputs, gradient)
        logits = _at_least_float32(outputs).movedim(axis, -1)
        logits = logits.reshape(len(outputs), -1, logits.shape[-1])
        counted = (gradient != 0).any(dim=axis).reshape(len(outputs), -1)
        if not bool(counted.all()):
            counted |= 1 - logits.softmax(-1).amax(-1) <= torch.finfo(outputs.dtype).eps  # certain
        doubt = None
        was_looked_at = self.class_dim is None and outputs.ndim > 2
        if not (was_looked_at or _holds_classes(outputs, gradient, axis) or _is_nearly_certain(outputs, axis)):
            doubt = (
                "the gradient of the loss is not that of a cross-entropy of the model's outputs as class "
                "logits: it does not sum to zero over the classes. Is likelihood='categorical' right, and are "
                "these the logits (outputs=...)?"
            )
        shape = outputs.movedim(axis, -1).shape
        return _Classes(counted, logits, shape, axis, outputs.dtype, doubt=doubt)

    def losses(self, outputs: Tensor, targets: Tensor | None) -> Losses:
        """Cross-entropy of class indices (-100: ignored) or class probabilities."""
        axis = self._class_axis_by_targets(outputs, targets)
        logits = _at_least_float32(outputs).movedim(axis, 1)
        if targets is None:
            targets = logits.detach().argmin(1)
        elif targets.is_floating_point() and targets.shape == outputs.shape:
            targets = targets.movedim(axis, 1)
            _require_probabilities(targets)
        else:
            targets = _class_indices(targets, logits)
        total = nn.functional.cross_entropy(logits, targets, reduction="sum")
        terms = logits[:, 0]
        counted = _all_of(terms) if targets.ndim == logits.ndim else targets.ne(IGNORED).reshape(len(terms), -1)
        return Losses(total, counted)

    def _class_axis_by_targets(self, outputs: Tensor, targets: Tensor | None) -> int:
        if self.class_dim is not None or outputs.ndim == 2:
            return 1 if self.class_dim is None else self.class_dim % outputs.ndim
        shape = list(outputs.shape)
        if targets is not None:
            without = {axis: shape[:axis] + shape[axis + 1 :] for axis in (1, outputs.ndim - 1)}
            fitting = [axis for axis in without if list(targets.shape) in (without[axis], shape)]
            if len(fitting) == 1:
                return fitting[0]
        raise OutputShapeError(
            f"Cannot tell which axis of the outputs, of shape {shape}, holds the classes: there are "
            f"{'no targets' if targets is None else f'targets of shape {list(targets.shape)}'}. Expected "
            "targets like the outputs without axis 1 or the last. Name the axis: "
            "likelihood=Categorical(class_dim=...)."
        )

    def _class_axis(self, outputs: Tensor, gradient: Tensor) -> int:
        if self.class_dim is not None:
            return self.class_dim % outputs.ndim
        if outputs.ndim == 2:
            return 1
        axes = (1, outputs.ndim - 1)
        likely = [axis for axis in axes if _sums_to_zero(gradient, axis)]
        likely = likely or [axis for axis in axes if _is_normalised(outputs, axis)]
        if likely:
            return likely[0]
        certain = [axis for axis in (1, outputs.ndim - 1) if _is_nearly_certain(outputs, axis)]
        if certain:
            return min(certain, key=lambda axis: float(gradient.sum(axis).abs().sum()))
        raise OutputShapeError(
            f"Cannot tell which axis of the outputs, of shape {list(outputs.shape)}, holds the classes: "
            "the gradient of the loss sums to zero along neither axis 1 nor the last one, as a "
            "cross-entropy's does along its classes. Name it, likelihood=Categorical(class_dim=...), or the "
            "likelihood that belongs to the loss, if that is no cross-entropy."
        )


def _holds_classes(outputs: Tensor, gradient: Tensor, axis: int) -> bool:
    """Whether the loss treats this axis as classes: its gradient sums to zero, or it got log-probabilities."""
    return _sums_to_zero(gradient, axis) or _is_normalised(outputs, axis)


def _sums_to_zero(gradient: Tensor, axis: int) -> bool:
    """Whether the gradient does, as that of a cross-entropy of logits."""
    wide = _at_least_float32(gradient)  # sums leave the range of float16
    return bool(wide.sum(axis).abs().sum() <= 1e-2 * wide.abs().sum())


def _is_normalised(outputs: Tensor, axis: int) -> bool:
    """Whether the outputs are log-probabilities along this axis."""
    normalised = _at_least_float32(outputs).logsumexp(axis).abs().max()
    return bool(normalised <= 1e3 * torch.finfo(outputs.dtype).eps)


def _is_nearly_certain(outputs: Tensor, axis: int) -> bool:
    """Whether almost nothing is left to learn: gradients are then mere rounding, and sum to anything."""
    probabilities = _at_least_float32(outputs).softmax(axis)
    left = 1 - probabilities.amax(axis).mean()
    return bool(left <= 1e4 * torch.finfo(outputs.dtype).eps)


@dataclass(frozen=True)
class _Classes(Prediction):
    logits: Tensor  # [N, P, C]
    shape: torch.Size  # of the outputs, classes moved last
    axis: int
    dtype: torch.dtype

    @cached_property
    def probabilities(self) -> Tensor:
        """[N, P, C]."""
        return self.logits.softmax(-1)

    def sample(self, generator: torch.Generator) -> Tensor:
        return self.sample_part(generator, 0, len(self.logits))

    def sample_part(self, generator: torch.Generator, start: int, samples: int) -> Tensor:
        """Labels by a race: each class takes a time of its own, and the first one wins, as torch draws them."""
        p = self.probabilities
        times = p.new_empty(samples, *p.shape[1:]).exponential_(generator=generator)[start : start + len(p)]
        labels = (p / times).argmax(-1, keepdim=True)
        gradient = self.probabilities.scatter_add(-1, labels, -torch.ones_like(self.probabilities[..., :1]))
        return self._like_outputs(gradient)

    def columns(self) -> Iterator[Tensor]:
        _, terms, classes = self.probabilities.shape
        for term in range(terms):
            for label in range(classes):
                p = self.probabilities[:, term]
                column = torch.zeros_like(self.probabilities)
                column[:, term] = -p
                column[:, term, label] += 1
                column[:, term] *= p[:, label : label + 1].sqrt()
                yield self._like_outputs(column)

    def loss_factor(self, gradient: Tensor) -> float | None:
        """By the labels' entries: the gradient of a term is a multiple of p - e_y."""
        rows = gradient.movedim(self.axis, -1).reshape(self.logits.shape)[self.counted].to(self.logits.dtype)
        p, labels = self.probabilities[self.counted], rows.argmin(-1, keepdim=True)
        left = (1 - p.gather(-1, labels)).squeeze(-1)
        return _common_factor(-rows.gather(-1, labels).squeeze(-1), left)

    def _like_outputs(self, gradient: Tensor) -> Tensor:
        gradient = gradient * self.counted[..., None]
        return gradient.reshape(self.shape).movedim(-1, self.axis).to(self.dtype)


# -- independent outputs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Independent yes/no targets; every output is a logit and a term of the loss.

    An output that gets no gradient from the training loss is masked and does not count, unless its
    prediction is certain anyway.
    """

    def predict(self, outputs: Tensor, gradient: Tensor) -> Prediction:
        """Probabilities of yes."""
        p = _at_least_float32(outputs).sigmoid()
        certain = p * (1 - p) <= torch.finfo(outputs.dtype).eps
        counted = ((gradient != 0) | certain).reshape(len(outputs), -1)

        def draw(generator: torch.Generator, start: int, samples: int) -> Tensor:
            of_all = p.new_empty(samples, *p.shape[1:]).uniform_(generator=generator)
            return p - (of_all[start : start + len(p)] < p).to(p.dtype)

        return _YesOrNo(counted, outputs, p * (1 - p), draw)

    def losses(self, outputs: Tensor, targets: Tensor | None) -> Losses:
        """Binary cross-entropy of logits."""
        logits = _at_least_float32(outputs)
        if targets is None:
            targets = logits.detach() < 0
        _require_like(outputs, targets)
        targets = targets.to(logits.dtype)
        total = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        return Losses(total, _all_of(outputs))


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Real targets with a fixed variance; every output is a mean and a term of the loss.

    Variance 1 belongs to the loss |f - y|^2 / 2 and variance 1/2 to torch's mse_loss, |f - y|^2.

    Attributes:
        variance: of the targets.
        masked: whether an output without any gradient has no target, and does not count; else it may be
            predicted perfectly, and does.
    """

    variance: float = 1.0
    masked: bool = False

    def __post_init__(self) -> None:
        if not self.variance > 0:
            raise ValueError(f"Invalid variance: {self.variance!r}. Expected a positive number.")

    def predict(self, outputs: Tensor, gradient: Tensor) -> Prediction:
        """Means, all with the same variance."""
        means = _at_least_float32(outputs)
        noise = 1 / math.sqrt(self.variance)

        def draw(generator: torch.Generator, start: int, samples: int) -> Tensor:
            of_all = means.new_empty(samples, *means.shape[1:]).normal_(generator=generator)
            return noise * of_all[start : start + len(means)]

        counted = (gradient != 0).reshape(len(outputs), -1) if self.masked else _all_of(outputs)
        return _Independent(counted, outputs, torch.full_like(means, 1 / self.variance), draw)

    def losses(self, outputs: Tensor, targets: Tensor | None) -> Losses:
        """|f - y|^2 / (2 variance)."""
        means = _at_least_float32(outputs)
        if targets is None:
            targets = means.detach() + 1
        _require_like(outputs, targets)
        total = (means - targets).square().sum() / (2 * self.variance)
        return Losses(total, _all_of(outputs))


@dataclass(frozen=True)
class _Independent(Prediction):
    outputs: Tensor
    information: Tensor  # the Fisher of each output, like outputs
    draw: Callable[[torch.Generator, int, int], Tensor]

    def sample(self, generator: torch.Generator) -> Tensor:
        return self.sample_part(generator, 0, len(self.outputs))

    def sample_part(self, generator: torch.Generator, start: int, samples: int) -> Tensor:
        """Of all samples as many numbers are drawn, of which this part takes its own."""
        return self._masked(self.draw(generator, start, samples))

    def columns(self) -> Iterator[Tensor]:
        root = self.information.sqrt().reshape(len(self.outputs), -1)
        for term in range(root.shape[1]):
            column = torch.zeros_like(root)
            column[:, term] = root[:, term]
            yield self._masked(column)

    def _masked(self, gradient: Tensor) -> Tensor:
        counted = self.counted.reshape(self.outputs.shape)
        return (gradient.reshape(self.outputs.shape) * counted).to(self.outputs.dtype)


class _YesOrNo(_Independent):
    def loss_factor(self, gradient: Tensor) -> float | None:
        """The gradient of a term is a multiple of p - y."""
        counted = self.counted.reshape(self.outputs.shape)
        g, p = (_at_least_float32(own[counted]) for own in (gradient, self.outputs.sigmoid()))
        return _common_factor(g.abs(), torch.where(g > 0, p, 1 - p))


UNCERTAIN, ALIKE = 1e-3, 0.2
"""Which terms tell their factor: those whose label is not certain; by how much their factors may differ."""


def _common_factor(sizes: Tensor, distances: Tensor) -> float | None:
    """The mean of sizes / distances, if they are much the same."""
    telling = distances > UNCERTAIN
    factors = sizes[telling] / distances[telling]
    if not factors.numel() or not bool(factors.std(correction=0) <= ALIKE * factors.mean()):
        return None
    return float(factors.mean())


# -- no likelihood -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unknown(Likelihood):
    """Of a loss that is no -log p, or of none that is known: every sample is a term.

    The gradients of its samples have an empirical Fisher, and no other.
    """

    def predict(self, outputs: Tensor, gradient: Tensor) -> Prediction:
        """Every sample counts: one without gradient may have no loss left, as that of a hinge."""
        return _Unpredicted(torch.ones(len(outputs), 1, dtype=torch.bool, device=outputs.device))


@dataclass(frozen=True)
class _Unpredicted(Prediction):
    def sample(self, generator: torch.Generator) -> Tensor:
        raise ValueError("There are no labels to draw: the likelihood of the loss is not known.")

    def columns(self) -> Iterator[Tensor]:
        raise ValueError("There is no exact Fisher: the likelihood of the loss is not known.")


# -- the user's own ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Custom(Likelihood):
    """A likelihood given by a function that draws labels and returns their loss.

    Attributes:
        sampled_loss: (outputs, generator) -> -log p(y~ | outputs), one number per term, or one for the
            whole batch (then every sample is one term).
    """

    sampled_loss: SampledLoss

    def predict(self, outputs: Tensor, gradient: Tensor) -> Prediction:
        """Everything counts. A trial draw, with a generator of its own, tells the number of terms."""
        with torch.no_grad():
            try:
                losses = self.sampled_loss(outputs, torch.Generator(device=outputs.device))
            except TypeError as error:
                raise TypeError(
                    "The likelihood callable was called with (outputs, generator), to draw labels and return "
                    f"their losses, and failed: {error}. For torch's own losses name the likelihood instead: "
                    f"{', '.join(LIKELIHOODS)}."
                ) from error
        if losses.ndim and losses.shape[0] != len(outputs):
            raise OutputShapeError(
                f"The likelihood callable returned losses of shape {list(losses.shape)} for {len(outputs)} "
                "samples. Expected a scalar, or [N, ...] with one number per term."
            )
        terms = losses if losses.ndim else losses.expand(len(outputs))
        return _Drawn(_all_of(terms), outputs, self.sampled_loss)


@dataclass(frozen=True)
class _Drawn(Prediction):
    outputs: Tensor
    sampled_loss: SampledLoss

    def sample(self, generator: torch.Generator) -> Tensor:
        with torch.enable_grad():
            outputs = self.outputs.detach().requires_grad_()
            losses = self.sampled_loss(outputs, generator)
            (gradient,) = torch.autograd.grad(losses.sum(), outputs)
        return gradient

    def columns(self) -> Iterator[Tensor]:
        raise ValueError(
            "fisher='exact' needs the columns of the output Fisher, which a likelihood callable does "
            "not tell. Use fisher='sampled', or derive a class from tekfac.likelihoods.Likelihood."
        )


LIKELIHOODS: dict[str, Likelihood] = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(),
}


def as_likelihood(likelihood: str | Likelihood | SampledLoss) -> Likelihood:
    """The likelihood that a setting names."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str) and likelihood in LIKELIHOODS:
        return LIKELIHOODS[likelihood]
    if callable(likelihood) and not isinstance(likelihood, type):
        return Custom(likelihood)
    raise ValueError(
        f"Unknown likelihood: {likelihood!r}. Expected one of {', '.join(LIKELIHOODS)}, a "
        "tekfac.likelihoods.Likelihood, or a callable (outputs, generator) -> losses of drawn labels."
    )


def _require_probabilities(targets: Tensor) -> None:
    """Raise OutputShapeError for rows, along axis 1, that are no probabilities."""
    sums = targets.sum(1)
    if bool((targets < 0).any()) or not bool(((sums - 1).abs() < 1e-3).all()):
        raise OutputShapeError(
            "The categorical likelihood got real targets of the shape of the outputs that are no class "
            f"probabilities: they go from {float(targets.min()):.3g} to {float(targets.max()):.3g} and add up "
            f"to {float(sums.min()):.3g} to {float(sums.max()):.3g}. For a regression choose "
            "likelihood='gaussian', for yes/no targets 'bernoulli'."
        )


def _class_indices(targets: Tensor, logits: Tensor) -> Tensor:
    """Targets as class indices; raises OutputShapeError for what is none."""
    expected = [*logits.shape[:1], *logits.shape[2:]]
    classes = logits.shape[1]
    if targets.is_floating_point() or targets.is_complex() or list(targets.shape) != expected:
        raise OutputShapeError(
            f"The categorical likelihood got targets of shape {list(targets.shape)} and type {targets.dtype} "
            f"for {classes} classes. Expected class indices of shape {expected}, or probabilities like the "
            "outputs. For other targets choose likelihood='gaussian' or 'bernoulli'."
        )
    targets = targets.long()
    wrong = targets[(targets != IGNORED) & ((targets < 0) | (targets >= classes))]
    if wrong.numel():
        raise OutputShapeError(
            f"The categorical likelihood got the class {int(wrong[0])}. Expected 0 to {classes - 1}, or "
            f"{IGNORED} for a target that is ignored."
        )
    return targets


def _require_like(outputs: Tensor, targets: Tensor) -> None:
    if targets.is_complex():
        raise OutputShapeError(f"Got targets of type {targets.dtype}. Expected real numbers.")
    if targets.shape != outputs.shape:
        raise OutputShapeError(
            f"Got targets of shape {list(targets.shape)} for outputs of shape {list(outputs.shape)}. Expected "
            "the same shape."
        )


def _all_of(terms: Tensor) -> Tensor:
    """That every term [N, ...] counts, [N, P]."""
    return torch.ones_like(terms, dtype=torch.bool).reshape(len(terms), -1)


def _at_least_float32(outputs: Tensor) -> Tensor:
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))
