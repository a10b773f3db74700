"""fisher="sampled" draws from its own generator, one backward pass per measurement; "empirical"; "exact"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, dense_block, oracle_block, sample_loss, statistics
from tekfac import KFAC, TEKFAC, TKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import (
    assert_identical,
    backward,
    cnn,
    copied,
    everything,
    images,
    mlp,
    saved_curvature,
    train,
    vectors,
)

FISHERS = ("sampled", "empirical", "exact")
LAYERS = ("0", "2")


def measure(method: type[NaturalGradient], **settings: Any) -> NaturalGradient:
    """An optimizer after one step on one batch."""
    model = mlp()
    optimizer = method.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, **settings)
    train(model, optimizer, vectors(1))
    return optimizer


# -- the dense references ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layer", LAYERS)
def test_exact_is_the_expectation_over_labels(method: type[NaturalGradient], layer: str) -> None:
    inputs = vectors(1)[0][0]
    samples = oracle.per_column(oracle.softmax_column, mlp(), inputs, layer)
    sharing = "exact" if method in (TKFAC, TEKFAC) else "expand"
    block = dense_block(statistics(measure(method, fisher="exact"))[layer])
    if method is KFAC:  # A once, U summed over columns: A is the mean over the repeated samples
        assert_close(block, oracle.kfac_expand(samples.a[:, 0], samples.u[:, 0]).dense())
    else:
        assert_close(block, oracle_block(method, samples, sharing))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layer", LAYERS)
def test_empirical_is_of_the_training_labels(method: type[NaturalGradient], layer: str) -> None:
    inputs, labels = vectors(1)[0]
    samples = oracle.per_sample(mlp(), sample_loss, inputs, labels, layer)
    sharing = "exact" if method in (TKFAC, TEKFAC) else "expand"
    assert_close(
        dense_block(statistics(measure(method, fisher="empirical"))[layer]),
        oracle_block(method, samples, sharing),
    )


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_statistics_do_not_depend_on_the_reduction_of_the_loss(fisher: Any, reduction: Any) -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=1e-30, fisher=fisher, loss_reduction=reduction, seed=0)
    train(model, optimizer, vectors(1), lambda z, y: F.cross_entropy(z, y, reduction=reduction))
    reference = measure(TEKFAC, fisher=fisher, seed=0)
    for layer in LAYERS:
        assert_close(dense_block(statistics(optimizer)[layer]), dense_block(statistics(reference)[layer]))


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_micro_batches_are_one_large_batch(fisher: Any) -> None:
    x, y = vectors(1)[0]
    blocks = []
    for parts in ([slice(0, 6)], [slice(0, 2), slice(2, 6)]):
        model = mlp()
        optimizer = TEKFAC.natural(model, lr=1e-30, fisher=fisher, loss_reduction="sum")
        for part in parts:
            F.cross_entropy(model(x[part]), y[part], reduction="sum").backward()
        optimizer.step()
        blocks.append(dense_block(statistics(optimizer)["0"]))
    assert_close(blocks[1], blocks[0])


def test_exact_knows_neither_the_labels_nor_the_seed() -> None:
    states = []
    for shift, seed in ((0, 1), (1, 2)):
        model = mlp()
        optimizer = TEKFAC.natural(model, lr=1e-30, fisher="exact", seed=seed)
        train(model, optimizer, [(x, (y + shift) % 3) for x, y in vectors(1)])
        states.append(saved_curvature(optimizer.state_dict()))
    assert_identical(*states)


# -- sampling ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_average_of_many_draws_converges_to_the_exact_fisher() -> None:
    exact = measure(TKFAC, fisher="exact")
    errors = []
    for draws in (20, 1000):
        model = mlp()
        optimizer = TKFAC.natural(
            model,
            lr=1e-30,
            factor_decay=1 - 1e-12,
            factors_every=1,
            basis_every=10**6,
            fisher="sampled",
            seed=0,
        )
        train(model, optimizer, vectors(1) * draws)
        mean, expected = statistics(optimizer)["0"].moments.values, statistics(exact)["0"].moments.values
        errors.append(
            max(
                float((a - b).norm() / b.norm())
                for a, b in ((mean.input, expected.input), (mean.output, expected.output))
            )
        )
    assert errors[1] < 0.05
    assert errors[1] < errors[0] / 2


def test_draws_leave_the_global_generator_alone() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.05, factors_every=1)
    before = torch.get_rng_state()
    train(model, optimizer, vectors(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_generator_leaves_the_draws_alone() -> None:
    def run(disturb: bool) -> Any:
        model = mlp()
        optimizer = TEKFAC.natural(model, lr=0.05, seed=0, factors_every=1, rescaling_every=1)
        for k, batch in enumerate(vectors(4)):
            if disturb:
                torch.manual_seed(1000 + k)
                torch.rand(k + 1)
            train(model, optimizer, [batch])
        return everything(model, optimizer)

    assert_identical(run(disturb=True), run(disturb=False))


def test_dropout_draws_the_same_masks_as_without_the_optimizer() -> None:
    def losses(with_optimizer: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(), nn.Linear(4, 3)).double()
        optimizer = TEKFAC.natural(model, lr=1e-30, factors_every=1) if with_optimizer else None
        values = []
        for batch in vectors(3):
            values.append(float(backward(model, batch)))
            if optimizer is not None:
                optimizer.step()
        return values

    assert losses(with_optimizer=True) == losses(with_optimizer=False)


def test_the_seed_decides_the_draws() -> None:
    first, again, other = (statistics(measure(TKFAC, seed=seed))["2"].moments.values for seed in (1, 1, 2))
    assert_identical(list(first), list(again))
    assert not torch.equal(first.output, other.output)


def test_without_a_seed_the_global_one_decides() -> None:
    moments = []
    for seed in (5, 5, 6):
        model = mlp()
        torch.manual_seed(seed)
        optimizer = TKFAC.natural(model, lr=1e-30)
        train(model, optimizer, vectors(1))
        moments.append(statistics(optimizer)["2"].moments.values)
    assert_identical(list(moments[0]), list(moments[1]))
    assert not torch.equal(moments[0].output, moments[2].output)


def test_every_measurement_draws_anew() -> None:
    model = mlp()
    optimizer = TKFAC.natural(model, lr=1e-30, factor_decay=0.0, factors_every=1)
    outputs = []
    for _ in range(2):
        train(model, optimizer, vectors(1))
        outputs.append(statistics(optimizer)["2"].moments.values.output)
    assert not torch.equal(*outputs)


# -- cost ----------------------------------------------------------------------------------------------


class Counted(torch.autograd.Function):
    """The identity, counting how often a backward pass comes through."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Counted.passes += 1
        return gradient


class WithCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = Counted.apply(self.body(x))  # type: ignore[no-untyped-call]
        out: Tensor = self.head(hidden)
        return out


def passes_per_step(method: type[NaturalGradient], steps: int, **settings: Any) -> list[int]:
    model = WithCounter()
    optimizer = method.natural(model, lr=0.01, **settings)
    counts = []
    for batch in vectors(steps):
        Counted.passes = 0
        train(model, optimizer, [batch])
        counts.append(Counted.passes)
    return counts


@pytest.mark.parametrize("method", METHODS)
def test_sampling_costs_one_more_backward_pass_and_only_where_the_step_measures(
    method: type[NaturalGradient],
) -> None:
    settings = {"factors_every": 3, "basis_every": 2}
    if method.method.rescaling.measured:
        settings["rescaling_every"] = 6
    assert passes_per_step(method, 7, **settings) == [2, 1, 1, 2, 1, 1, 2]


def test_a_step_that_only_measures_the_rescaling_costs_one_too() -> None:
    assert passes_per_step(TEKFAC, 5, factors_every=4, basis_every=4, rescaling_every=2) == [2, 1, 2, 1, 2]


def test_the_exact_fisher_costs_one_for_each_class() -> None:
    assert passes_per_step(TEKFAC, 3, factors_every=2, rescaling_every=2, fisher="exact") == [4, 1, 4]


# -- the training itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("fisher", FISHERS)
def test_the_gradient_that_the_user_sees_is_untouched(fisher: Any) -> None:
    plain, watched = cnn(), cnn()
    optimizer = TEKFAC.natural(watched, fisher=fisher)
    gradients = []
    for model in (plain, watched):
        backward(model, images(1)[0])
        gradients.append(copied({n: p.grad for n, p in model.named_parameters()}))
    assert_identical(*gradients)
    assert optimizer.num_steps == 0
    assert_identical(copied(watched.state_dict()), copied(plain.state_dict()))
