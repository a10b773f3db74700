"""The four methods: two independent choices, and what follows from them.

Read this file first. KFAC and EKFAC decompose the plain factors A, U; TKFAC and TEKFAC the
trace-restricted ones, Phi and Psi. KFAC and TKFAC re-scale by the product of the factors' eigenvalues;
EKFAC and TEKFAC by the second moments measured in the eigenbasis. Nothing else tells them apart, and no
other file asks for a method's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tekfac.curvature.factors import PLAIN, TRACE_RESTRICTED, FactorRule
from tekfac.curvature.rescaling import CORRECTED, PRODUCT, RescalingRule
from tekfac.damping import (
    BesideConvolutions,
    BetaReading,
    ByNetwork,
    DampingRule,
    Factored,
    Relative,
    Tikhonov,
    TraceBased,
)
from tekfac.layers.side_forms import DEFAULT_MAX_DIM


@dataclass(frozen=True)
class Method:
    """One cell of the table.

    Attributes:
        name: as in the papers.
        factors: plain or trace-restricted.
        rescaling: product of eigenvalues or corrected second moments.
        damping: the rule of the natural gradient unless another one is asked for; the same for all layers.
        own_damping: the paper's rule for this method, from its trace floor and reading of beta.
    """

    name: str
    factors: FactorRule
    rescaling: RescalingRule
    damping: DampingRule
    own_damping: Callable[[float, BetaReading], DampingRule]


def _by_trace(without_convolutions: DampingRule) -> Callable[[float, BetaReading], DampingRule]:
    """The damping of the trace-restricted methods; they differ in networks without convolutions."""

    def rule(trace_floor: float, beta: BetaReading) -> DampingRule:
        return ByNetwork(
            convolution=TraceBased(trace_floor),
            beside=BesideConvolutions(beta, trace_floor),
            without=without_convolutions,
        )

    return rule


KFAC = Method("KFAC", PLAIN, PRODUCT, Factored(), own_damping=lambda floor, beta: Factored())
EKFAC = Method("EKFAC", PLAIN, CORRECTED, Tikhonov(), own_damping=lambda floor, beta: Tikhonov())
TKFAC = Method("TKFAC", TRACE_RESTRICTED, PRODUCT, Factored(split="equal"), _by_trace(Factored(split="equal")))
TEKFAC = Method("TEKFAC", TRACE_RESTRICTED, CORRECTED, Tikhonov(), _by_trace(Tikhonov()))

ALL = (KFAC, EKFAC, TKFAC, TEKFAC)


def named(name: str) -> Method:
    """The method of that name, in capitals or not.

    Raises:
        ValueError: for an unknown name.
    """
    found = {method.name.lower(): method for method in ALL}.get(str(name).lower())
    if found is None:
        known = ", ".join(method.name.lower() for method in ALL)
        raise ValueError(f"Unknown method: {name!r}. Expected one of {known}.")
    return found


def own_sharing(method: Method) -> str:
    """How the method treats positions that share weights, unless it is told otherwise."""
    return "exact" if "exact" in method.factors.sharings else "expand"


def default_settings(method: Method, *, is_moving: bool) -> dict[str, Any]:
    """Where the method's choices, or those of the step, move a default.

    Args:
        method: a row of the table.
        is_moving: whether second moments are taken from the gradient of every step.
    """
    return {"sharing": own_sharing(method), "damping": Relative() if is_moving else method.damping}


def refused_settings(method: Method, *, is_moving: bool) -> dict[str, str]:
    """Keywords that mean nothing for the method's choices, with the reason.

    Args:
        method: a row of the table.
        is_moving: whether second moments are taken from the gradient of every step.
    """
    refused: dict[str, str] = {}
    if is_moving:
        refused["rescaling_every"] = "second moments move at every step (rescaling='moving')"
    elif not method.rescaling.measured:
        reason = f"{method.name} re-scales by {method.rescaling.name}, which is not averaged"
        refused |= {"rescaling_decay": reason, "rescaling_every": reason}
    if not method.factors.trace_restricted:
        reason = f"{method.name} has {method.factors.name} factors"
        refused |= {
            "trace_floor": f"{reason}, whose damping has no floor (damping=TraceBased(...) has)",
            "beta": f"{reason}, whose damping knows no beta",
            "averaging": f"{reason}, which are not normalised",
        }
    return refused


def natural_settings(method: Method, *, judged: bool = False) -> dict[str, Any]:
    """The natural gradient proper, (F_hat + lambda I)^-1 g, with a velocity of such steps.

    Args:
        method: a row of the table.
        judged: whether steps are judged by the loss (LevenbergMarquardt): then they are few, and worth more.
    """
    every = 5 if judged else 50
    settings: dict[str, Any] = {
        "lr": 1e-3,
        "momentum": 0.9,
        "power": 1.0,
        "rescaling": "measured",
        "momentum_at": "after",
        "factor_decay": 0.95,
        "decay_per": "update",
        "factors_every": every,
        "basis_every": every,
        "interval_growth": None,
        "fisher": "sampled",
        "first_order_step": "sgd",
        "max_dim": 800,
        "precondition_norms": True,
    }
    if method.rescaling.measured:
        settings |= {"rescaling_decay": 0.95, "rescaling_every": every}
    return settings


def paper_settings(method: Method) -> dict[str, Any]:
    """The paper's settings, in the reading of docs/mathematics.md, section 8: a natural gradient."""
    settings: dict[str, Any] = {
        **natural_settings(method),
        "weight_decay": 0.0,
        "damping": None,
        "basis_every": 50 if method.rescaling.measured else 200,
        "statistics_samples": None,
        "turns": False,
        "max_dim": DEFAULT_MAX_DIM,
        "basis_tolerance": 0.0,
        "track_basis": False,
        "first_order": "all norms",
        "sharing": "expand",
        "kl_clip": None,
    }
    if method.factors.trace_restricted:
        settings |= {"trace_floor": 1e-2, "beta": "add", "averaging": "factors"}
    return settings
