"""Promise: over hundreds of generated losses the likelihood that is found is never a wrong one.

Each is a kind of loss, a layout of the outputs, a reduction, a precision and a size of the logits; the model is
trained for a few steps by the optimizer that finds it. Where nothing is found, that is what is said.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac import TEKFAC
from tekfac.likelihoods import Bernoulli, Categorical, Gaussian, Unknown

N, WIDTH = 24, 6


class Targets(NamedTuple):
    """What losses are taken to: labels [N, ...], and entries like those of the outputs [N, C, ...]."""

    labels: Tensor
    soft: Tensor
    answers: Tensor
    numbers: Tensor
    mask: Tensor


Loss = Callable[[Tensor, Targets], Tensor]


def by_hand(z: Tensor, t: Targets) -> Tensor:
    return z.logsumexp(1) - z.gather(1, t.labels[:, None])[:, 0]


def of_label(z: Tensor, t: Targets) -> Tensor:
    return z.softmax(1).gather(1, t.labels[:, None])[:, 0]


def entropy(z: Tensor, t: Targets, **options: Any) -> Tensor:
    return F.cross_entropy(z, t.labels, reduction="none", **options)


def yes_or_no(z: Tensor, t: Targets, **options: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, t.answers, reduction="none", **options)


def weights(z: Tensor) -> Tensor:
    return torch.linspace(0.5, 2.0, z.shape[1]).to(z)


def ignoring(z: Tensor, t: Targets) -> Tensor:
    return F.cross_entropy(z, torch.where(t.mask[:, 0] > 0, t.labels, -100), reduction="none")


NAMED: dict[str, tuple[type, Loss]] = {
    "cross entropy": (Categorical, entropy),
    "weighted classes": (Categorical, lambda z, t: entropy(z, t, weight=weights(z))),
    "smoothed labels": (Categorical, lambda z, t: entropy(z, t, label_smoothing=0.1)),
    "ignored labels": (Categorical, ignoring),
    "soft labels": (Categorical, lambda z, t: F.cross_entropy(z, t.soft, reduction="none")),
    "weighted samples": (Categorical, lambda z, t: entropy(z, t) * t.numbers[:, 0].abs()),
    "log-softmax": (Categorical, lambda z, t: F.nll_loss(z.log_softmax(1), t.labels, reduction="none")),
    "distillation": (Categorical, lambda z, t: F.kl_div(z.log_softmax(1), t.soft, reduction="none").sum(1)),
    "yes or no": (Bernoulli, yes_or_no),
    "rare answers": (Bernoulli, lambda z, t: yes_or_no(z, t, pos_weight=torch.tensor(3.0).to(z))),
    "masked answers": (Bernoulli, lambda z, t: yes_or_no(z, t) * t.mask),
    "squares": (Gaussian, lambda z, t: F.mse_loss(z, t.numbers, reduction="none")),
    "squares by hand": (Gaussian, lambda z, t: (z - t.numbers) ** 2),
    "masked squares": (Gaussian, lambda z, t: t.mask * (t.numbers - z).square()),
}
"""Losses that belong to a likelihood, and that torch has functions for."""

WRITTEN: dict[str, tuple[type, Loss]] = {
    "cross entropy by hand": (Categorical, by_hand),
    "yes or no by hand": (Bernoulli, lambda z, t: F.softplus(z) - t.answers * z),
}
"""Those that the gradient alone shows, where it is precise enough."""

NONE: dict[str, Loss] = {
    "absolute": lambda z, t: (z - t.numbers).abs(),
    "Huber": lambda z, t: F.huber_loss(z, t.numbers, reduction="none"),
    "log cosh": lambda z, t: (z - t.numbers).cosh().log(),
    "hinge": lambda z, t: (1 + z - z.gather(1, t.labels[:, None])).relu(),
    "squared hinge": lambda z, t: (1 - (2 * t.answers - 1) * z).relu().square(),
    "exponential": lambda z, t: (-(2 * t.answers - 1) * z).exp(),
    "focal": lambda z, t: (1 - of_label(z, t)).square() * entropy(z, t),
    "focal answers": lambda z, t: (1 - (-yes_or_no(z, t)).exp()).square() * yes_or_no(z, t),
    "generalised": lambda z, t: (1 - of_label(z, t) ** 0.7) / 0.7,
    "with another term": lambda z, t: entropy(z, t) + 1 - of_label(z, t),
    "root": lambda z, t: (entropy(z, t) + 0.1).sqrt(),
    "temperature": lambda z, t: F.cross_entropy(z / 2, t.labels, reduction="none"),
    "margin": lambda z, t: F.cross_entropy(z - 0.35 * (t.numbers > 0), t.labels, reduction="none"),
    "penalised": lambda z, t: entropy(z, t) + 0.1 * z.square().sum(1),
    "probabilities squared": lambda z, t: (z.softmax(1) - t.soft).square(),
    "Poisson": lambda z, t: z.exp() - t.numbers.abs() * z,
    "linear": lambda z, t: z * t.numbers,
    "two halves": lambda z, t: sum(
        (F.cross_entropy(part, t.labels % 3, reduction="none") for part in z.split(3, 1)), torch.zeros(())
    ),
    "one half": lambda z, t: F.cross_entropy(z[:, :3], t.labels % 3, reduction="none"),
    "columns twice": lambda z, t: F.cross_entropy(z[:, [0, 1, 2, 0]], t.labels % 4, reduction="none"),
    "over samples": lambda z, t: -z.log_softmax(0) * t.soft,
    "to itself": lambda z, t: (z[: len(z) // 2] - z[len(z) // 2 :]).square(),
}

LAYOUTS = {"NC": (WIDTH,), "NCT": (WIDTH, 4), "NTC": (4, WIDTH), "NCHW": (WIDTH, 3, 2)}
"""Sizes behind the samples; with NTC losses see the classes on axis 1, as torch wants them."""

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "tiny": lambda loss: 1e-3 * loss.mean(),
    "huge": lambda loss: 1e3 * loss.sum(),
}

SIZES = (0.3, 3.0, 12.0)
"""Of logits; of the last most rows are certain."""


class Net(nn.Module):
    def __init__(self, shape: tuple[int, ...], size: float) -> None:
        super().__init__()
        self.shape, self.layer = shape, nn.Linear(5, torch.Size(shape).numel())
        nn.init.normal_(self.layer.weight, std=size / 5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unflatten(1, self.shape)  # type: ignore[no-any-return]


def targets_of(z: Tensor) -> Targets:
    like = torch.randn(z.shape)
    labels = torch.randint(z.shape[1], (len(z), *z.shape[2:]))
    soft, answers = torch.randn(z.shape).softmax(1), (torch.rand(z.shape) < 0.4)
    mask = torch.rand(z.shape) < 0.6
    entries = (own.to(z.dtype) for own in (soft, answers, 3 * like, mask))
    return Targets(labels, *entries)


def found(loss: Loss, layout: str, reduction: str, dtype: torch.dtype, size: float) -> Any:
    """What two steps have found; None: nothing yet."""
    torch.manual_seed(len(layout) + int(10 * size))
    model = Net(LAYOUTS[layout], size).to(dtype)
    optimizer = TEKFAC(model, lr=1e-6)
    for _ in range(2):
        optimizer.zero_grad()
        z = model(torch.randn(N, 5).to(dtype))
        z = z.movedim(-1, 1) if layout == "NTC" else z
        REDUCTIONS[reduction](loss(z, targets_of(z))).backward()
        optimizer.step()
    return optimizer.likelihoods.get("")


def cases(dtypes: tuple[torch.dtype, ...]) -> list[tuple[str, str, torch.dtype, float]]:
    return list(itertools.product(LAYOUTS, REDUCTIONS, dtypes, SIZES))


SINGLE, ALL = (torch.float32,), (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def assert_right(likelihood: Any, kind: type, layout: str) -> None:
    assert type(likelihood) is kind
    if kind is Categorical:
        assert likelihood.class_dim == (2 if layout == "NTC" else 1)


@pytest.mark.parametrize("name", NAMED)
def test_losses_that_torch_has_are_found_in_every_case(name: str) -> None:
    kind, loss = NAMED[name]
    for layout, reduction, dtype, size in cases(SINGLE):
        assert_right(found(loss, layout, reduction, dtype, size), kind, layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMED, *WRITTEN])
def test_in_other_precisions_they_are_found_or_none_is(name: str) -> None:
    kind, loss = {**NAMED, **WRITTEN}[name]
    for layout, reduction, dtype, size in cases(ALL):
        likelihood = found(loss, layout, reduction, dtype, size)
        if likelihood is not None and likelihood != Unknown():
            assert_right(likelihood, kind, layout)
        elif dtype is not torch.float16:  # whose range a tiny or huge loss leaves
            assert name in WRITTEN, (layout, reduction, dtype, size)


@pytest.mark.parametrize("name", WRITTEN)
def test_losses_that_are_written_out_are_found_by_their_gradients(name: str) -> None:
    kind, loss = WRITTEN[name]
    for layout, reduction, dtype, size in cases(SINGLE):
        if size < max(SIZES):
            assert_right(found(loss, layout, reduction, dtype, size), kind, layout)


@pytest.mark.parametrize("name", NONE)
def test_of_other_losses_none_is_found(name: str) -> None:
    for layout, reduction, dtype, size in cases(SINGLE):
        assert found(NONE[name], layout, reduction, dtype, size) in (None, Unknown())


@pytest.mark.slow
@pytest.mark.parametrize("name", NONE)
def test_of_other_losses_none_is_found_in_other_precisions(name: str) -> None:
    for layout, reduction, dtype, size in cases(ALL[1:]):
        assert found(NONE[name], layout, reduction, dtype, size) in (None, Unknown())


def test_where_none_is_found_for_long_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A few answers, all of them yes, are too few to tell."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer = TEKFAC(model, interval_growth=None, factors_every=1, basis_every=1)
    with caplog.at_level(logging.INFO, "tekfac"):
        for _ in range(20):
            optimizer.zero_grad()
            z = model(torch.randn(4, 5))
            (F.softplus(z) - z).mean().backward()
            optimizer.step()
    assert optimizer.likelihoods == {}
    said = [r.getMessage() for r in caplog.records if "has not told its likelihood" in r.getMessage()]
    assert len(said) == 1


def test_a_target_that_is_trained_is_no_target() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = TEKFAC(model)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(N, 5)
        F.mse_loss(model(x), model(x + 0.1)).backward()
        optimizer.step()
    assert optimizer.likelihoods == {"": Unknown()}
