"""A method with a way to treat shared weights: what a Fisher block is approximated by."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from tekfac import methods
from tekfac.common.checks import require_choice
from tekfac.curvature.eigenbasis import Eigenbasis, decompose, standard_basis
from tekfac.curvature.factors import KroneckerFactors
from tekfac.curvature.symmetric import DecompositionError

logger = logging.getLogger("tekfac")


@dataclass(frozen=True)
class Approximation:
    """One way to approximate a block.

    Attributes:
        method: the row of the table of methods.
        sharing: how positions that share weights are treated in the factors.
    """

    method: methods.Method
    sharing: str

    @classmethod
    def named(cls, name: str, sharing: str | None = None) -> Approximation:
        """From a name like "tekfac", or "kfac:reduce" for another sharing than the method's own.

        Raises:
            ValueError: for a method or a sharing that does not exist.
        """
        method_name, _, named_sharing = str(name).partition(":")
        method = methods.named(method_name)
        if sharing and named_sharing and sharing != named_sharing:
            raise ValueError(
                f"Two sharings at once: {named_sharing!r} in {name!r}, and {sharing!r}. Expected one."
            )
        sharing = sharing or named_sharing or methods.own_sharing(method)
        require_choice("sharing", sharing, list(method.factors.sharings), f" for {method.name}")
        return cls(method, sharing)

    @property
    def label(self) -> str:
        """For tables: the method, and the sharing where it is not the method's own."""
        return self.method.name if self.usual else f"{self.method.name} ({self.sharing})"

    @property
    def usual(self) -> bool:
        """Whether the sharing is the method's own."""
        return self.sharing == methods.own_sharing(self.method)

    @property
    def factor_choice(self) -> tuple[str, str]:
        """What the eigenbasis depends on: the kind of factors and the sharing."""
        return self.method.factors.name, self.sharing

    @property
    def corrected(self) -> bool:
        """Whether the diagonal is measured in the basis."""
        return self.method.rescaling.measured

    @property
    def keeps_trace(self) -> bool:
        """Whether the trace of the approximation is that of the exact block, whatever the layer."""
        return self.corrected or (self.method.factors.trace_restricted and self.sharing == "exact")

    def basis(self, layer: str, moments: KroneckerFactors, dtype: torch.dtype) -> Eigenbasis:
        """The eigenbasis of the factors that the moments stand for, decomposed in float64."""
        factors = self.method.factors.read(moments)
        try:
            basis = decompose(factors)
        except DecompositionError as error:
            logger.warning("Layer %r is approximated in the basis of its parameters: %s", layer, error)
            basis = standard_basis(factors)
        # One layout, whether it comes from LAPACK or from a file: sums in it are then equal bit by bit.
        return Eigenbasis(*(part.to(dtype).contiguous() for part in basis))
