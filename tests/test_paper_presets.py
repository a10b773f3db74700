"""`.paper(model)` is the paper's reading of every setting (mathematics, sections 1, 4 and 5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dense import METHODS, statistics
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC
from tekfac.damping import BesideConvolutions, TraceBased
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, cnn, everything, images, mlp, train, vectors

ALL: dict[str, Any] = {
    "lr": 1e-3,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "damping": None,
    "factor_decay": 0.95,
    "decay_per": "update",
    "factors_every": 50,
    "interval_growth": None,
    "fisher": "sampled",
    "power": 1,
    "rescaling": "measured",
    "momentum_at": "after",
    "first_order_step": "sgd",
    "first_order": [nn.BatchNorm2d],
    "sharing": "expand",
    "kl_clip": None,
}
CORRECTED: dict[str, Any] = {"basis_every": 50, "rescaling_every": 50, "rescaling_decay": 0.95}
PRODUCT: dict[str, Any] = {"basis_every": 200}
RESTRICTED: dict[str, Any] = {"trace_floor": 1e-2, "averaging": "factors", "beta": "add"}
PAPER: dict[type[NaturalGradient], dict[str, Any]] = {
    KFAC: ALL | PRODUCT,
    EKFAC: ALL | CORRECTED,
    TKFAC: ALL | PRODUCT | RESTRICTED,
    TEKFAC: ALL | CORRECTED | RESTRICTED,
}


@pytest.mark.parametrize("method", METHODS)
def test_the_preset_trains_as_its_settings_written_out(method: type[NaturalGradient]) -> None:
    preset, written = cnn(), cnn()
    first, second = method.paper(preset, seed=0), method(written, seed=0, **PAPER[method])
    train(preset, first, images(3))
    train(written, second, images(3))
    assert_identical(everything(preset, first), everything(written, second))


NORMS: dict[str, nn.Module] = {
    "LayerNorm": nn.LayerNorm(4),
    "RMSNorm": nn.RMSNorm(4),
    "GroupNorm": nn.GroupNorm(2, 4),
    "BatchNorm1d": nn.BatchNorm1d(4),
    "InstanceNorm1d": nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", METHODS)
def test_norms_are_first_order_as_the_paper_knows_only_matrices(
    method: type[NaturalGradient], norm: str
) -> None:
    """Unless they are asked for."""

    def layers(make: Any, **settings: Any) -> set[str]:
        model = nn.Sequential(nn.Linear(5, 4), NORMS[norm], nn.Tanh(), nn.Linear(4, 3)).double()
        optimizer = make(model, **settings)
        train(model, optimizer, vectors(1))
        return set(optimizer.curvature)

    with_norm = {"0", "1.1" if norm == "InstanceNorm1d" else "1", "3"}
    assert layers(method.paper) == {"0", "3"}
    assert layers(method.paper, first_order=()) == with_norm
    assert layers(method) == {"0", "3"}
    assert layers(method, precondition_norms=True) == layers(method.natural) == with_norm


@pytest.mark.parametrize("method", METHODS)
def test_the_intervals_are_those_of_the_paper(method: type[NaturalGradient]) -> None:
    """T_FIM = 50; T_EIG = T_RE = 50 with corrected second moments; T_INV = 200 without."""
    model = mlp(sizes=(5, 3))
    optimizer = method.paper(model)
    batch = vectors(1)
    factors, bases, thetas = [], [], []
    old = None
    for k in range(201):
        train(model, optimizer, batch)
        new = statistics(optimizer)["0"]
        if old is None or new.moments is not old.moments:
            factors.append(k)
        if old is None or new.basis is not old.basis:
            bases.append(k)
        if new.theta is not None and (old is None or old.theta is None or new.theta.weight != old.theta.weight):
            thetas.append(k)
        old = new
    assert factors == [0, 50, 100, 150, 200]
    assert bases == ([0, 50, 100, 150, 200] if method in (EKFAC, TEKFAC) else [0, 200])
    assert thetas == ([0, 50, 100, 150, 200] if method in (EKFAC, TEKFAC) else [])


@pytest.mark.parametrize("method", METHODS)
def test_single_settings_of_the_preset_can_be_overridden(method: type[NaturalGradient]) -> None:
    optimizer = method.paper(mlp(), lr=0.5, momentum=0.0, damping=0.1)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["damping"]) == (0.5, 0.0, 0.1)
    assert type(optimizer) is method


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(TypeError, match="rescaling_every"):
        KFAC.paper(mlp(), rescaling_every=10)


def test_tekfac_damps_convolutions_by_their_trace_and_the_layer_beside_them_by_beta() -> None:
    """lambda = max(tr Theta, floor) / dim for the convolution; D = Theta + beta beside it."""
    steps = []
    for damped in (None, "by hand"):
        model = cnn()
        groups = (
            []
            if damped is None
            else [
                {"params": ["0"], "damping": TraceBased(1e-2)},
                {"params": ["4"], "damping": BesideConvolutions("add", floor=1e-2)},
            ]
        )
        optimizer = TEKFAC.paper(model, seed=0, param_groups=groups)
        train(model, optimizer, images(1))
        steps.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*steps)
