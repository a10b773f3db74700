"""The natural gradient of one layer, as three matrix steps (paper, Eq. nat3 and Algorithm 1)."""

from __future__ import annotations

from torch import Tensor

from tekfac.curvature.eigenbasis import Eigenbasis


def precondition(gradient: Tensor, basis: Eigenbasis, denominators: Tensor) -> Tensor:
    """Q_out [(Q_out^T X Q_in) / D] Q_in^T for a gradient matrix X, all [G, d_out, d_in].

    With D = S + lambda this is the solution of (F_hat + lambda I) vec(P) = vec(X), where F_hat is the
    approximation with re-scaling S in this basis.
    """
    return basis.unproject(basis.project(gradient) / denominators)
