"""Damping: how lambda enters the denominators D [G, d_out, d_in] of a layer's re-scaling S.

Every rule is a small frozen dataclass, so that it can be compared, printed, put into a param group and
saved with the optimizer. A rule sees the spectrum of its layer and those of the whole network:

    Tikhonov          D = S + lambda                                        (paper, Eq. dam1)
    Factored          D = (sqrt(sigma) l_out + sqrt(lambda)/pi)(sqrt(sigma) l_in + pi sqrt(lambda))
    Relative          lambda = share * tr S / (d_in d_out)
    TraceBased        lambda = max(tr S, floor) / (d_in d_out)              (paper, Eq. dam2)
    BesideConvolutions  fully connected layers of a convolutional network, by the largest lambda of
                        its convolutions, beta: the readings of the paper's sentence
    ByNetwork         one rule for convolutions, one for fully connected layers beside them, one for
                        networks without any
    LevenbergMarquardt  one lambda for the network, which follows from what steps do to the loss

docs/mathematics.md, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from tekfac.common.checks import require_choice, require_whole
from tekfac.curvature.eigenbasis import Eigenbasis
from tekfac.curvature.rescaling import product_of_eigenvalues

DEFAULT_DAMPING = 1e-2
"""With this lambda and the default lr of 1e-3 no direction moves further than SGD's at 0.1."""

DEFAULT_SHARE = 0.003
"""Of the mean of S. Ten times as much is worse on a GPT, ten times less the same; see docs/results/ablation."""

DEFAULT_TRACE_FLOOR = 1e-2

WELL_FORETOLD, BADLY_FORETOLD = 0.75, 0.25
"""Ratios of a change of the loss to what was foretold, above and below which lambda changes."""

RAISED = 4.0
"""By which lambda is multiplied where a step has raised the loss."""

BetaReading = Literal["add", "scale", "scale_all", "convolution"]
BETA_READINGS: tuple[BetaReading, ...] = ("add", "scale", "scale_all", "convolution")


@dataclass(frozen=True)
class Spectrum:
    """What a damping rule may look at.

    Attributes:
        basis: the layer's eigenbasis, with the factors' eigenvalues and scale.
        is_convolution: whether the layer is a convolution.
        theta: S where every entry was measured in the basis, or moves, [G, d_out, d_in]; None where it is the
            product of the factors' eigenvalues.
    """

    basis: Eigenbasis
    is_convolution: bool
    theta: Tensor | None = None

    @property
    def rescaling(self) -> Tensor:
        """S, [G, d_out, d_in]."""
        return product_of_eigenvalues(self.basis) if self.theta is None else self.theta

    @property
    def is_product(self) -> bool:
        """Whether S is the product of the factors' eigenvalues."""
        return self.theta is None


@runtime_checkable
class DampingRule(Protocol):
    """Gives the denominators of one layer. A rule is a value: they are kept until the rule is another one."""

    def denominators(self, layer: Spectrum, network: Sequence[Spectrum]) -> Tensor:
        """D, [G, d_out, d_in], every entry positive."""
        ...


class _Named:
    """Rules by name, for saving and loading."""

    registry: ClassVar[dict[str, type[Any]]] = {}

    def __init_subclass__(cls) -> None:
        _Named.registry[cls.__name__] = cls


@dataclass(frozen=True)
class Tikhonov(_Named):
    """S + lambda I: the exact Tikhonov solve of the approximation."""

    damping: float = DEFAULT_DAMPING

    def __post_init__(self) -> None:
        _require_positive("damping", self.damping)

    def added(self, rescaling: Tensor) -> float:
        """lambda."""
        return self.damping

    def denominators(self, layer: Spectrum, network: Sequence[Spectrum]) -> Tensor:
        """S + lambda."""
        return layer.rescaling + self.damping


@dataclass(frozen=True)
class Factored(_Named):
    """sqrt(lambda) on each factor, split by pi or equally.

    With the scale shared equally between the factors, A' = sqrt(sigma) A and U' = sqrt(sigma) U:
    (A' + pi sqrt(lambda) I) (x) (U' + sqrt(lambda)/pi I). `split="pi"` balances the two by their mean
    eigenvalues, pi^2 = (tr A'/d_in) / (tr U'/d_out), where neither is 0; `split="equal"` has pi = 1.
    """

    damping: float = DEFAULT_DAMPING
    split: Literal["pi", "equal"] = "pi"

    def __post_init__(self) -> None:
        _require_positive("damping", self.damping)
        if self.split not in ("pi", "equal"):
            raise ValueError(f"Invalid split: {self.split!r}. Expected 'pi' or 'equal'.")

    def denominators(self, layer: Spectrum, network: Sequence[Spectrum]) -> Tensor:
        """(l_out' + sqrt(lambda)/pi) (l_in' + pi sqrt(lambda))."""
        damping = torch.as_tensor(self.damping, dtype=layer.basis.scale.dtype)
        return factored(layer, damping.to(layer.basis.scale.device), self.split)


@dataclass(frozen=True)
class Relative(_Named):
    """lambda as a share of the mean of S: damping that does not depend on the scale of the loss.

    Each convolution group is a block with a mean of its own. Where lambda is zero (no gradient was seen, or
    none that has a square in this precision), 1 is added.
    """

    share: float = DEFAULT_SHARE

    def __post_init__(self) -> None:
        _require_positive("share", self.share)

    def added(self, rescaling: Tensor) -> Tensor:
        """share * mean S of each block, [G, d_out, d_in] -> [G, 1, 1]."""
        _, d_out, d_in = rescaling.shape
        share = self.share / max(1, d_out * d_in)
        found = rescaling.sum(dim=(1, 2), keepdim=True).mul_(share)
        return found.masked_fill_(found == 0, 1.0)

    def denominators(self, layer: Spectrum, network: Sequence[Spectrum]) -> Tensor:
        """S + share * mean S."""
        rescaling = layer.rescaling
        return rescaling + self.added(rescaling)


@dataclass(frozen=True)
class TraceBased(_Named):
    """lambda from the layer's own trace, with a floor (the paper's vartheta).

    lambda = max(tr S, floor) / (d_in d_out): the mean of S, unless the trace is below the floor. Each
    convolution group is a block with a trace of its own. `factored` splits this lambda between the
    factors by pi instead of adding it to S.
    """

    floor: float = DEFAULT_TRACE_FLOOR
    factored: bool = False

    def __post_init__(self) -> None:
        _require_positive("trace_floor", self.floor)

    def denominators(self, layer: Spectrum, network: Sequence[Spectrum]) -> Tensor:
        """S + lambda, or the factored form with the same lambda."""
        damping = trace_damping(layer.rescaling, self.floor)
        if self.factored:
            return factored(layer, damping, "pi")
        return layer.rescaling + damping


@dataclass(frozen=True)
class BesideConvolutions(_Named):
    """Fully connected layers of a convolutional network: "expanded by a factor of beta".

    beta is the largest lambda among the convolutions. The paper's sentence can be read as

        add          D = S + beta               the layer is damped like the most damped convolution
        scale        D = beta S + lambda        the block itself is multiplied
        scale_all    D = beta (S + lambda)      the damped block is multiplied
        convolution  the convolutions' own rule (no beta)

    Only `add` and `convolution` keep the proportion between layers when the loss is re-scaled.
    """

    reading: BetaReading = "add"
    floor: float = DEFAULT_TRACE_FLOOR
    damping: float = DEFAULT_DAMPING

    def __post_init__(self) -> None:
        _require_positive("trace_floor", self.floor)
        _require_positive("damping", self.damping)
        if self.reading not in BETA_READINGS:
            raise ValueError(
                f"Invalid reading of beta: {self.reading!r}. Expected one of {', '.join(BETA_READINGS)}."
            )

    def denominators(self, layer: Spectrum, network: Sequence[Spectrum]) -> Tensor:
        """By the chosen reading."""
        if self.reading == "convolution":
            return TraceBased(self.floor).denominators(layer, network)
        beta = largest_convolution_damping(network, self.floor)
        if self.reading == "add":
            return layer.rescaling + beta
        if self.reading == "scale":
            return beta * layer.rescaling + self.damping
        return beta * (layer.rescaling + self.damping)


@dataclass(frozen=True)
class ByNetwork(_Named):
    """One rule for convolutions, one for other layers beside them, one for networks without any."""

    convolution: DampingRule
    beside: DampingRule
    without: DampingRule

    def denominators(self, layer: Spectrum, network: Sequence[Spectrum]) -> Tensor:
        """By the kind of the layer and of the network."""
        if layer.is_convolution:
            rule = self.convolution
        elif any(other.is_convolution for other in network):
            rule = self.beside
        else:
            rule = self.without
        return rule.denominators(layer, network)


@dataclass(frozen=True)
class LevenbergMarquardt(_Named):
    """One lambda for the whole network, by how well a quadratic model of the loss foretells it.

    For `step(closure)` of the natural gradient, `.natural(model, damping=LevenbergMarquardt())`, on the whole
    data or large batches. After a step the loss is had again on the same data: with rho, its change by that
    which the model has foretold, lambda is multiplied by omega where rho is above 3/4 and divided by it where
    rho is below 1/4 (Martens & Grosse 2015, section 6.5). A step that has raised the loss is taken back. lambda
    is added to S, or its root to each factor where S is the product of eigenvalues.

    Attributes:
        damping: lambda, now; None: at the first step the mean of S over the network.
        omega: by what lambda changes for each step.
        every: steps between two looks at the loss (T_1): lambda changes by omega^every then.
        step: whether the lengths of the step along the preconditioned gradient, and along the last step, are
            those that are best by the "model"; or the param groups' "lr" and momentum.
        tries: with how many lambdas, each larger than the one before, a step is tried that raises the loss.
        least: lambda is never smaller.
    """

    damping: float | None = None
    omega: float = 0.8
    every: int = 1
    step: Literal["model", "lr"] = "model"
    tries: int = 4
    least: float = 1e-12

    def __post_init__(self) -> None:
        if self.damping is not None:
            _require_positive("damping", self.damping)
        _require_positive("least", self.least)
        if not isinstance(self.omega, Real) or not 0 < self.omega < 1:
            raise ValueError(f"Invalid omega: {self.omega!r}. Expected a number between 0 and 1.")
        require_choice("step", self.step, ("model", "lr"))
        require_whole("every", self.every, "of steps, at least 1")
        require_whole("tries", self.tries, "of tries, at least 1")

    @property
    def in_force(self) -> float:
        """lambda; 1 before the first step, when no curvature is known and nothing is damped."""
        return 1.0 if self.damping is None else self.damping

    def after(self, ratio: float) -> LevenbergMarquardt:
        """The rule after a step whose loss has changed by so much of what was foretold."""
        change = self.omega**self.every
        if ratio > WELL_FORETOLD:
            return self._with(self.in_force * change)
        return self._with(self.in_force / change) if ratio < BADLY_FORETOLD else self

    def after_raise(self) -> LevenbergMarquardt:
        """The rule after a step that has raised the loss."""
        return self._with(self.in_force * RAISED)

    def _with(self, damping: float) -> LevenbergMarquardt:
        return replace(self, damping=max(self.least, damping))

    def denominators(self, layer: Spectrum, network: Sequence[Spectrum]) -> Tensor:
        """S + lambda, or the factored form."""
        rule = Factored(self.in_force) if layer.is_product else Tikhonov(self.in_force)
        return rule.denominators(layer, network)


def trace_damping(rescaling: Tensor, floor: float) -> Tensor:
    """max(tr S, floor) / (d_in d_out) of each block, [G, d_out, d_in] -> [G, 1, 1]."""
    _, d_out, d_in = rescaling.shape
    return rescaling.sum(dim=(1, 2), keepdim=True).clamp_min(floor) / (d_out * d_in)


def largest_convolution_damping(network: Sequence[Spectrum], floor: float) -> Tensor:
    """beta: the largest trace-based lambda among the convolutions; a scalar tensor.

    Raises:
        ValueError: if the network has no preconditioned convolution.
    """
    dampings = [trace_damping(s.rescaling, floor).max() for s in network if s.is_convolution]
    if not dampings:
        raise ValueError(
            "BesideConvolutions needs a network with at least one preconditioned convolution. Use "
            "Tikhonov or TraceBased for networks without."
        )
    return torch.stack(dampings).max()


def factored(layer: Spectrum, damping: Tensor, split: str) -> Tensor:
    """(l_out' + sqrt(lambda)/pi) (l_in' + pi sqrt(lambda)), [G, d_out, d_in].

    Raises:
        ValueError: if the layer's re-scaling is not the product of its factors' eigenvalues.
    """
    if not layer.is_product:
        raise ValueError(
            "Factored damping is added to the Kronecker factors, but this method's re-scaling is not "
            "the product of their eigenvalues. Use Tikhonov, Relative, TraceBased or a float."
        )
    root_scale = layer.basis.scale.sqrt()[:, None]
    values_in, values_out = root_scale * layer.basis.values_in, root_scale * layer.basis.values_out
    root = damping.sqrt().reshape(-1, 1).expand(values_in.shape[0], 1)
    if split == "pi":
        mean_in, mean_out = values_in.mean(dim=1, keepdim=True), values_out.mean(dim=1, keepdim=True)
        # A layer that no gradient has reached yet has nothing to balance.
        known = (mean_in > 0) & (mean_out > 0)
        pi = torch.where(known, mean_in.sqrt() / torch.where(known, mean_out, 1.0).sqrt(), 1.0)
    else:
        pi = torch.ones_like(root)
    return (values_out + root / pi)[:, :, None] * (values_in + root * pi)[:, None, :]


def added_by(rule: DampingRule, rescaling: Tensor) -> Tensor | float | None:
    """lambda where a rule is known to add the same to all entries of a block of S; None for others."""
    return rule.added(rescaling) if type(rule) in (Tikhonov, Relative) else None  # type: ignore[attr-defined]


def looks_at_network(rule: DampingRule) -> bool:
    """Whether a rule may look at other layers than its own; those of users may."""
    return type(rule) not in (Tikhonov, Factored, Relative, TraceBased, LevenbergMarquardt)


def as_rule(damping: float | DampingRule | None, own_rule: DampingRule) -> DampingRule:
    """What a `damping` setting means: None is the method's own rule, a number is S + lambda I."""
    if damping is None:
        return own_rule
    if isinstance(damping, Real) and not isinstance(damping, bool):
        return Tikhonov(float(damping))
    if isinstance(damping, DampingRule) and not isinstance(damping, type):
        return damping
    raise ValueError(
        f"Invalid damping: {damping!r}. Expected None (the method's own rule), a positive number or a "
        "rule from tekfac.damping."
    )


def to_plain(damping: Any) -> Any:
    """A damping setting as numbers, strings and dicts."""
    if not isinstance(damping, DampingRule):
        return damping
    name = type(damping).__name__
    if _Named.registry.get(name) is not type(damping):
        raise TypeError(
            f"The damping rule {damping!r} cannot be saved: only the rules of tekfac.damping can. Set "
            "param_groups[...]['damping'] to one of them before saving."
        )
    values = {field.name: to_plain(getattr(damping, field.name)) for field in fields(damping)}  # type: ignore[arg-type]
    return {"rule": name, **values}


def from_plain(plain: Any) -> float | DampingRule | None:
    """The damping setting that `to_plain` was given."""
    if not isinstance(plain, Mapping):
        return plain  # type: ignore[no-any-return]
    values = dict(plain)
    rule = _Named.registry[values.pop("rule")]
    return rule(**{key: from_plain(value) for key, value in values.items()})  # type: ignore[no-any-return]


def _require_positive(name: str, value: float) -> None:
    if not isinstance(value, Real) or not 0 < value < float("inf"):
        raise ValueError(f"Invalid {name}: {value!r}. Expected a positive, finite number.")
