"""The adaptive step is that of its definition, docs/mathematics.md, section 7, step by step, in float64.

The reference keeps dense matrices over a layer's parameters: the basis as one orthogonal matrix, what was
gathered as vectors in the parameters' own coordinates, averages as sums with their weights written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS, assert_close, every_method, seeded
from tekfac import KFAC, TEKFAC, TKFAC
from tekfac.curvature.layer_curvature import LayerCurvature
from tekfac.damping import Relative, Tikhonov
from tekfac.layers.layer import Layer
from tekfac.optim.natural_gradient import NaturalGradient
from training import Batch, assert_identical, backward, cnn, everything, images, mlp, train, vectors

LR, SHARE = 2.0**-7, 0.003
STRETCH = 2.0


class Grouped(nn.Module):
    """A convolution in groups, a norm, two linear layers of equal size, and a parameter of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 4, 2, groups=2), nn.BatchNorm2d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.convolution(x))).mean(dim=(2, 3))
        out: Tensor = self.scale * self.second(torch.tanh(self.first(x)))
        return out


def grouped_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(6, 2, 3, 3, generator=generator).double(), torch.randint(4, (6,), generator=generator))
        for _ in range(count)
    ]


# -- the reference -----------------------------------------------------------------------------------------


def whole(side: Tensor) -> Tensor:
    """Eigenvectors of a side, which may be kept in blocks, as one matrix."""
    dim, size = side.shape
    if size == dim:
        return side
    blocks = [side[start : start + size, : min(size, dim - start)] for start in range(0, dim, size)]
    return torch.block_diag(*blocks)


def basis_of(curvature: LayerCurvature, group: int) -> Tensor:
    """Q over row-major vectors of the gradient matrix, eigenvectors in columns."""
    basis = curvature.basis
    sides = (whole(side[group]).contiguous() for side in (basis.vectors_out, basis.vectors_in))
    return torch.kron(*sides)


class Reference:
    """One group of a layer: what was gathered, and the direction that follows from the definitions."""

    def __init__(self, settings: dict[str, Any], *, entrywise: bool) -> None:
        self.entrywise = entrywise
        self.momentum, self.decay = settings["momentum"], settings["rescaling_decay"]
        self.power, self.nesterov = settings["power"], settings["nesterov"]
        self.before = settings["momentum_at"] == "before"
        self.gradients: list[Tensor] = []
        self.second: Tensor | None = None
        self.basis: Tensor | None = None
        self.means: list[Tensor] = []

    def direction(self, gradient: Tensor, curvature: LayerCurvature, group: int) -> Tensor:
        """Of the next gradient, a row-major vector."""
        q = basis_of(curvature, group)
        squares, count = (q.T @ gradient).square(), len(self.gradients) + 1
        weight = (1 - self.decay**count) / (1 - self.decay)
        if self.second is None or self.basis is None:
            self.second = squares
        else:
            held = self.basis @ torch.diag(self.second) @ self.basis.T  # what is diagonal in the old basis
            self.second = (1 - 1 / weight) * (q.T @ held @ q).diagonal() + squares / weight
        self.basis = q
        self.means.append(squares.mean())
        self.gradients.append(gradient)
        divisor = self.second
        if not self.entrywise:
            values = torch.kron(curvature.basis.values_out[group], curvature.basis.values_in[group])
            mean = averaged(self.means, self.decay)
            divisor = mean * values / values.mean()
        damped = (divisor + SHARE * divisor.mean()) ** self.power
        return q @ ((q.T @ self._first()) / damped)

    def _first(self) -> Tensor:
        if not self.before:
            return self.gradients[-1]
        once_more = [*self.gradients, self.gradients[-1]] if self.nesterov else self.gradients
        return averaged(once_more, self.momentum)


def averaged(values: list[Tensor], decay: float) -> Tensor:
    weights = [decay ** (len(values) - 1 - place) for place in range(len(values))]
    parts = [weight * value for weight, value in zip(weights, values, strict=True)]
    return torch.stack(parts).sum(0) / sum(weights)


def gradient_of(layer: Layer) -> Tensor:
    assert layer.weight.grad is not None
    return layer.to_matrix(layer.weight.grad, None if layer.bias is None else layer.bias.grad)


def assert_steps(
    method: type[NaturalGradient], model: nn.Module, batches: list[Batch], **settings: Any
) -> None:
    """Every step moves every layer as the reference says."""
    form: dict[str, Any] = {
        "momentum": 0.9,
        "rescaling_decay": 0.85,
        "power": 0.5,
        "nesterov": True,
        "momentum_at": "before",
        **settings,
    }
    stretch = STRETCH if form.get("power", 0.5) == 0.5 and form.get("momentum_at") != "after" else 1.0
    optimizer = method(
        model,
        lr=LR,
        damping=Relative(SHARE),
        interval_growth=None,
        basis_every=2,
        factors_every=2,
        seed=0,
        **form,
    )
    references: dict[tuple[str, int], Reference] = {}
    velocities: dict[str, Tensor] = {}
    for batch in batches:
        optimizer.zero_grad()
        backward(model, batch)
        gradients = {name: gradient_of(layer) for name, layer in optimizer._layers.items()}
        before = {name: matrix_of(layer) for name, layer in optimizer._layers.items()}
        optimizer.step()
        for name, layer in optimizer._layers.items():
            curvature = optimizer._network.blocks[name]
            expected = []
            for group, gradient in enumerate(gradients[name]):
                entrywise = method.method.rescaling.measured
                reference = references.setdefault((name, group), Reference(form, entrywise=entrywise))
                expected.append(reference.direction(gradient.flatten(), curvature, group).view_as(gradient))
            direction = torch.stack(expected)
            if form["momentum_at"] == "after":
                velocities[name] = direction + form["momentum"] * velocities.get(name, 0.0)
                direction = velocities[name]
            assert_close((before[name] - matrix_of(layer)) / (LR * stretch), direction, rtol=1e-9)


def matrix_of(layer: Layer) -> Tensor:
    bias = None if layer.bias is None else layer.bias.detach().clone()
    return layer.to_matrix(layer.weight.detach().clone(), bias)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nesterov": False},
        {"momentum_at": "after"},
        {"power": 1.0},
        {"power": 0.75},
        {"momentum": 0.0},
        {"rescaling_decay": 0.0, "momentum": 0.0},
        {"max_dim": 3},
        {"fisher": "exact"},
    ],
    ids=str,
)
@every_method
def test_every_step_is_that_of_the_definition(method: type[NaturalGradient], settings: dict[str, Any]) -> None:
    """Over two new bases."""
    assert_steps(method, seeded(Grouped), grouped_batches(5), **settings)


@every_method
def test_so_is_that_of_layers_that_are_stacked(method: type[NaturalGradient]) -> None:
    assert_steps(method, mlp(sizes=(4, 4, 4, 4)), vectors(5, d_in=4, classes=4))


def test_the_reference_notices_moments_that_stay_behind_when_the_basis_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the tests above can fail."""
    monkeypatch.setattr("tekfac.curvature.motion.turned", lambda motion, *_: motion)
    with pytest.raises(AssertionError):
        assert_steps(TEKFAC, mlp(), vectors(5))


# -- what follows from it ----------------------------------------------------------------------------------


def run_with_scaled_loss(method: type[NaturalGradient], scale: float, dtype: torch.dtype) -> list[Tensor]:
    model = cnn(dtype=dtype)
    optimizer = method(
        model, lr=0.01, first_order=["4.bias"], interval_growth=None, factors_every=3, basis_every=3
    )
    train(model, optimizer, images(12, dtype=dtype), lambda out, y: scale * F.cross_entropy(out, y))
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
@every_method
def test_the_scale_of_the_loss_does_not_matter(
    method: type[NaturalGradient], scale: float, dtype: torch.dtype
) -> None:
    """By powers of two, the nearest ones, which round nothing.

    Where a factor has a null space its eigenvectors are as rounding has it, and others lead to other steps.
    """
    scale = 2.0 ** round(math.log2(scale))
    ends = run_with_scaled_loss(method, 1.0, dtype), run_with_scaled_loss(method, scale, dtype)
    for own, scaled in zip(*ends, strict=True):
        torch.testing.assert_close(own, scaled, rtol=1e-9 if dtype == torch.float64 else 1e-4, atol=1e-9)


def test_no_entry_moves_much_further_than_the_stretched_learning_rate_at_the_first_step() -> None:
    """In the eigenbasis every entry moves by twice lr, or less; Adam's by lr, at once and not by and by."""
    model = mlp(sizes=(5, 4, 3))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = TEKFAC(model, lr=0.01)
    train(model, optimizer, vectors(1))
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    assert 0 < moved.norm() <= STRETCH * 0.01 * len(moved) ** 0.5


@pytest.mark.parametrize(
    ("settings", "stretch"),
    [
        ({}, STRETCH),
        ({"step_scale": 0.5}, 0.5),
        ({"power": 1.0}, 1.0),
        ({"momentum_at": "after"}, 1.0),
        ({"rescaling": "measured"}, 1.0),
    ],
    ids=str,
)
def test_directions_are_stretched_and_nothing_else_is(settings: dict[str, Any], stretch: float) -> None:
    """Not weight decay, nor what has no block."""
    runs = []
    for scale in (settings.get("step_scale", "auto"), 1.0):
        model = mlp()
        optimizer = TEKFAC(
            model, lr=LR, weight_decay=0.5, first_order=["0"], **{**settings, "step_scale": scale}
        )
        before = [parameter.detach().clone() for parameter in model.parameters()]
        train(model, optimizer, vectors(1))
        runs.append(
            [parameter.detach() - old for parameter, old in zip(model.parameters(), before, strict=True)]
        )
        decayed = [-LR * 0.5 * old for old in before]
    for place, (stretched, plain, decay) in enumerate(zip(*runs, decayed, strict=True)):
        assert_close(stretched - decay, (1.0 if place < 2 else stretch) * (plain - decay), rtol=1e-9)


@pytest.mark.parametrize("wrong", [0, -1.0, "long", None, math.inf])
def test_a_scale_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"Invalid step_scale: .* Expected a positive number, or 'auto'"):
        TEKFAC(mlp(), step_scale=wrong)


def test_a_layer_that_no_gradient_reaches_stays_where_it_is() -> None:
    model = mlp()
    model[2].weight.data.zero_()
    model[2].bias.data.zero_()
    optimizer = TEKFAC(model, lr=0.1)
    before = model[0].weight.detach().clone()
    train(model, optimizer, vectors(1))
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(model[2].weight, torch.zeros_like(model[2].weight))
    train(model, optimizer, vectors(3))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.parametrize("every", [1, 2, 5])
def test_intervals_do_not_change_how_long_the_past_counts(every: int) -> None:
    model, data = mlp(), vectors(11)
    clocks = {"factors_every": every, "basis_every": every, "interval_growth": None}
    optimizer = TEKFAC(model, lr=1e-12, factor_decay=0.9, seed=0, **clocks)
    train(model, optimizer, data)
    measured = 1 + 10 // every
    weights = [0.9 ** (every * age) for age in range(measured)]
    for block in optimizer._network.blocks.values():
        assert block.moments.weight == pytest.approx(sum(weights))


def test_a_decay_per_update_is_one() -> None:
    optimizer = TEKFAC.natural(mlp(), factors_every=5, rescaling_every=7, factor_decay=0.9, rescaling_decay=0.8)
    recipe = optimizer._recipe
    assert (recipe.past_factors(5), recipe.past_rescaling(7)) == (0.9, 0.8)
    optimizer = TEKFAC.natural(
        mlp(), factors_every=5, rescaling_every=7, factor_decay=0.9, rescaling_decay=0.8, decay_per="step"
    )
    recipe = optimizer._recipe
    assert (recipe.past_factors(5), recipe.past_rescaling(7)) == (0.9**5, 0.8**7)
    assert recipe.past_factors(50) == 0.9**10


@every_method
def test_a_layer_without_a_gradient_keeps_what_was_gathered_of_it(method: type[NaturalGradient]) -> None:
    model = mlp(sizes=(4, 4, 4, 4))
    optimizer = method(model, lr=0.01, interval_growth=None)
    train(model, optimizer, vectors(2, d_in=4, classes=4))
    kept = optimizer._network.motions["2"]
    assert kept.first is not None
    before, weight = kept.first.value.clone(), kept.first.weight
    optimizer.zero_grad()
    backward(model, vectors(1, d_in=4, classes=4)[0])
    model[2].weight.grad = model[2].bias.grad = None
    optimizer.step()
    after = optimizer._network.motions
    assert after["2"].first is not None
    assert after["0"].first is not None
    assert torch.equal(after["2"].first.value, before)
    assert after["2"].first.weight == weight
    assert after["0"].first.weight > weight


def test_what_was_gathered_follows_a_layer_when_others_come_and_go() -> None:
    """Layers that are stacked together are put together anew; nothing of them is lost."""
    frozen, never = mlp(sizes=(4, 4, 4, 4)), mlp(sizes=(4, 4, 4, 4))
    data = vectors(6, d_in=4, classes=4)
    ends = []
    for model in (frozen, never):
        optimizer = TEKFAC(model, lr=0.01, interval_growth=None, factors_every=2, basis_every=2, seed=0)
        train(model, optimizer, data[:3])
        if model is frozen:
            model[0].requires_grad_(False)
        else:
            model[0].weight.grad = model[0].bias.grad = None
        optimizer.zero_grad()
        backward(model, data[3])
        model[0].weight.grad = model[0].bias.grad = None
        optimizer.step()
        ends.append([optimizer._network.motions[name] for name in ("2", "4")])
    for own, other in zip(*ends, strict=True):
        assert own.first is not None
        assert other.first is not None
        assert own.first.weight == other.first.weight
        assert_close(own.first.value, other.first.value)


@every_method
def test_a_layer_that_gradients_reach_late_takes_steps_as_long_as_others(method: type[NaturalGradient]) -> None:
    """Below a head of zeros there is no gradient at first, when curvature is measured."""
    model = mlp()
    nn.init.zeros_(model[2].weight)
    optimizer = method(model, lr=0.01)
    for batch in vectors(4):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        train(model, optimizer, [batch])
        for old, parameter in zip(before, model.parameters(), strict=True):
            assert float((parameter.detach() - old).norm()) <= 0.05 * parameter.numel() ** 0.5


def test_what_was_gathered_of_a_frozen_layer_is_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp(sizes=(4, 4, 4, 4))
    optimizer = TEKFAC(model, lr=0.01)
    train(model, optimizer, vectors(2, d_in=4, classes=4))
    model[2].weight.requires_grad_(False)  # its bias alone has no block
    x, y = vectors(1, d_in=4, classes=4)[0]
    train(model, optimizer, [(x * math.nan, y)])  # which is skipped, but takes notice
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    kept = {names[index] for index, own in optimizer.state_dict()["state"].items() if "motion" in own}
    assert kept == {"0.weight", "4.weight"}


@pytest.mark.parametrize("method", [TKFAC, TEKFAC])
def test_damping_that_looks_at_other_layers_sees_all_of_this_step(method: type[NaturalGradient]) -> None:
    """Whatever the order in which the model has its layers."""

    class Ordered(nn.Module):
        def __init__(self, *, first: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            layers = {"convolution": nn.Conv2d(1, 2, 2), "linear": nn.Linear(8, 3)}
            for name in (first, *(name for name in layers if name != first)):
                self.add_module(name, layers[name])
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(torch.tanh(self.convolution(x)).flatten(1))
            return out

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 1, 3, 3, generator=generator).double(), torch.arange(6) % 3
    ends = []
    for first in ("convolution", "linear"):
        model = Ordered(first=first)
        train(model, method(model, lr=0.01, damping=None), [(x, y)] * 3)
        ends.append(model.linear.weight.detach())
    assert_close(ends[0], ends[1])


def test_half_precision_that_a_direction_leaves_is_not_moved_along_it() -> None:
    model = mlp(dtype=torch.float32).half()
    optimizer = TEKFAC(model, lr=1e-6, power=1.0)
    x, y = vectors(1, dtype=torch.float32)[0]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, [(x.half(), y)], lambda out, y: 1e-5 * F.cross_entropy(out.float(), y))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_momentum_that_is_changed_after_loading_is_heeded() -> None:
    """As by a scheduler that cycles it; loading puts new groups in place."""
    ends = []
    for loaded in (False, True):
        model = mlp()
        optimizer = TEKFAC(model, lr=0.01, seed=0)
        train(model, optimizer, vectors(1))
        if loaded:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["momentum"] = 0.5
        train(model, optimizer, vectors(3))
        ends.append(everything(model, optimizer))
    assert_identical(*ends)
    motion = optimizer._network.motions["0"].first
    assert motion is not None
    assert motion.weight == pytest.approx(1 + 0.5 * (1 + 0.5 * (1 + 0.5 * 1)))


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Invalid kl_clip: 0.001 with momentum_at='before'"):
        TEKFAC(mlp(), kl_clip=1e-3)
    with pytest.raises(ValueError, match=r"Invalid rescaling_decay: 0.5 with momentum 0.9.*0.81"):
        TEKFAC(mlp(), rescaling_decay=0.5)
    for method in METHODS:
        assert method.natural(mlp(), rescaling="moving")._form.moving_decay == 0.95


def test_the_curvature_of_an_optimizer_is_still_that_of_the_fisher() -> None:
    """Second moments of the steps' gradients are none of it: the block is the product of eigenvalues."""
    models = mlp(), mlp()
    optimizers = TEKFAC(models[0], fisher="exact", lr=0.01), TKFAC.natural(models[1], fisher="exact", lr=0.01)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, vectors(1))
    for name, block in optimizers[0].curvature.items():
        assert_close(block.to_dense(), optimizers[1].curvature[name].to_dense())


# -- parameters without a block ----------------------------------------------------------------------------


def test_what_has_no_block_follows_torchs_adamw() -> None:
    """With the same memories; torch's epsilon is a number, ours a share."""
    models = mlp(), mlp()
    ours = TEKFAC(models[0], lr=0.01, weight_decay=0.1, first_order=["0"], momentum=0.9)
    theirs = torch.optim.AdamW(
        models[1][0].parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-30, weight_decay=0.1
    )
    for batch in vectors(5):
        ours.zero_grad()
        backward(models[0], batch)
        gradients = [parameter.grad.clone() for parameter in models[0][0].parameters()]  # type: ignore[union-attr]
        ours.step()
        for parameter, gradient in zip(models[1][0].parameters(), gradients, strict=True):
            parameter.grad = gradient
        theirs.step()
    for own, other in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-8)


def test_its_averages_come_back_in_the_precision_that_they_had() -> None:
    def start() -> tuple[nn.Module, NaturalGradient]:
        model = mlp(dtype=torch.float32).bfloat16()
        return model, TEKFAC(model, lr=0.01, first_order=["0"], seed=0)

    data = [(x.bfloat16(), y) for x, y in vectors(6)]
    model, optimizer = start()
    train(model, optimizer, data[:3])
    other, resumed = start()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for at, opt in ((model, optimizer), (other, resumed)):
        train(at, opt, data[3:])
    assert_identical(everything(other, resumed), everything(model, optimizer))


MAKERS: dict[str, Callable[..., NaturalGradient]] = {m.__name__: m for m in METHODS}


def test_other_dampings_may_be_used_with_it() -> None:
    for make in MAKERS.values():
        model = mlp()
        train(model, make(model, lr=0.01, damping=Tikhonov(1e-4)), vectors(2))
    with pytest.raises(ValueError, match="Expected a positive"):
        Relative(0.0)
    model = mlp()
    train(model, KFAC(model, lr=0.01, damping=None), vectors(2))
