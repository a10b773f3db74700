"""How far an eigenbasis is from being that of the present moments: for those who ask, never for a step."""

from __future__ import annotations

import torch

from tekfac.curvature import symmetric
from tekfac.curvature.layer_curvature import LayerCurvature, Recipe


def off_diagonal(curvature: LayerCurvature, recipe: Recipe) -> float:
    """The off-diagonal part's share of the Frobenius norm of a factor in the basis in use, of the worse side.

    0 right after a decomposition; what lies outside of the diagonal is what the basis does not see. The largest
    of all groups. A factor that is zero is diagonal in every basis.

    Args:
        curvature: of a layer.
        recipe: that its moments are read by.
    """
    factors, basis = recipe.factors.read(curvature.moments.values), curvature.basis
    shares = []
    for factor, vectors in ((factors.input, basis.vectors_in), (factors.output, basis.vectors_out)):
        wide = torch.float64 if factor.device.type != "mps" else factor.dtype  # which has no other
        along = symmetric.Along.of(factor.to(wide), vectors.to(wide))
        shares.append(along.off_diagonal.nan_to_num(0.0).max())
    return float(torch.stack(shares).max())
