"""Promise: backward passes between two steps count as one batch, however it is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS, assert_close, every_method, normal, seeded
from tekfac import KFAC, TEKFAC
from tekfac.optim.natural_gradient import NaturalGradient
from training import Batch

N = 16
IGNORED = -100
SPLITS = {"equal": (4, 4, 4, 4), "ragged": (7, 5, 4), "with a batch of one": (1, 14, 1)}
FISHERS = ("exact", "empirical")
SETTINGS: dict[str, Any] = {
    "lr": 0.05,
    "momentum": 0.5,
    "damping": 0.1,
    "factors_every": 2,
    "basis_every": 2,
    "statistics_samples": None,
}


def settings_of(method: type[NaturalGradient], **others: Any) -> dict[str, Any]:
    """Every second step measures; KFAC and TKFAC have no clock of their own for the re-scaling."""
    clock = {"rescaling_every": 2} if method.method.rescaling.measured else {}
    return {**SETTINGS, **clock, **others}


PartOfLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(outputs, targets, targets of the whole batch) -> what a micro-batch adds to the loss of the whole."""


def of_mean(outputs: Tensor, y: Tensor, whole: Tensor) -> Tensor:
    """Mean over all targets of the whole batch that are not ignored; classes come last."""
    return summed(outputs, y, whole) / (whole != IGNORED).sum()


def of_batchmean(outputs: Tensor, y: Tensor, whole: Tensor) -> Tensor:
    """Summed over the targets of a sample, mean over the samples of the whole batch."""
    return summed(outputs, y, whole) / len(whole)


def summed(outputs: Tensor, y: Tensor, whole: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="sum", ignore_index=IGNORED)


def classifier() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))


def convolutional() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 2, groups=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 2, stride=2, groups=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 3),
        )
    )


def tokenwise() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))


def labelled(shape: tuple[int, ...], steps: int = 1) -> list[Batch]:
    """Batches of N inputs of the shape, with labels of three classes."""
    return [
        (normal(N, *shape, seed=step), torch.randint(3, (N,), generator=torch.Generator().manual_seed(step)))
        for step in range(steps)
    ]


def with_ignored_tokens(steps: int = 1) -> list[Batch]:
    """Sequences of four tokens; some targets are ignored, one sample's all are, and a run of samples' too."""
    batches = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        y = torch.randint(3, (N, 4), generator=generator)
        y[torch.rand(N, 4, generator=generator) < 0.4] = IGNORED
        y[2] = IGNORED
        y[4:8] = IGNORED  # a whole micro-batch of the equal split
        batches.append((normal(N, 4, 5, seed=step), y))
    return batches


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[Batch]]]] = {
    "linear": (classifier, lambda steps: labelled((5,), steps)),
    "convolutions": (convolutional, lambda steps: labelled((1, 6, 6), steps)),
    "tokens": (tokenwise, with_ignored_tokens),
}


def pieces(batch: Batch, split: Sequence[int]) -> list[Batch]:
    return list(zip(batch[0].split(list(split)), batch[1].split(list(split)), strict=True))


def run(
    method: type[NaturalGradient],
    model: nn.Module,
    batches: Sequence[Batch],
    split: Sequence[int],
    part_of_loss: PartOfLoss = of_mean,
    **settings: Any,
) -> NaturalGradient:
    """Train with one step per batch and one backward pass per micro-batch."""
    optimizer = method.natural(model, **settings_of(method, **settings))
    for batch in batches:
        optimizer.zero_grad()
        for x, y in pieces(batch, split):
            part_of_loss(model(x), y, batch[1]).backward()
        optimizer.step()
    assert optimizer.num_steps == len(batches)
    return optimizer


def assert_alike(a: nn.Module, of_a: NaturalGradient, b: nn.Module, of_b: NaturalGradient) -> None:
    """The same curvature, layer by layer, and the same parameters."""
    assert set(of_a.curvature) == set(of_b.curvature) == set(layers_of(a))
    for layer, block in of_b.curvature.items():
        assert_close(of_a.curvature[layer].to_dense(), block.to_dense())
    for own, other in zip(a.parameters(), b.parameters(), strict=True):
        assert_close(own.detach(), other.detach())


def layers_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]


every_split = pytest.mark.parametrize("split", SPLITS.values(), ids=list(SPLITS))
every_fisher = pytest.mark.parametrize("fisher", FISHERS)


@pytest.mark.every_pair
@every_split
@every_fisher
@pytest.mark.parametrize("case", CASES)
@every_method
def test_micro_batches_give_the_curvature_and_the_step_of_the_whole_batch(
    method: type[NaturalGradient], case: str, fisher: Any, split: Sequence[int]
) -> None:
    build, data = CASES[case]
    whole, cut = build(), build()
    start = [p.detach().clone() for p in whole.parameters()]
    of_whole = run(method, whole, data(1), (N,), fisher=fisher)
    of_cut = run(method, cut, data(1), split, fisher=fisher)
    assert_alike(cut, of_cut, whole, of_whole)
    assert all(not torch.equal(p, before) for p, before in zip(whole.parameters(), start, strict=True))


@pytest.mark.every_pair
@every_fisher
@pytest.mark.parametrize("case", CASES)
@every_method
def test_several_steps_in_a_row_are_those_of_whole_batches(
    method: type[NaturalGradient], case: str, fisher: Any
) -> None:
    """Momentum and running averages included; the second and fourth step do not measure."""
    build, data = CASES[case]
    whole, cut = build(), build()
    of_whole = run(method, whole, data(5), (N,), fisher=fisher)
    of_cut = run(method, cut, data(5), (7, 5, 4), fisher=fisher)
    assert_alike(cut, of_cut, whole, of_whole)


@every_fisher
@pytest.mark.parametrize(("reduction", "part_of_loss"), [("sum", summed), ("batchmean", of_batchmean)])
@pytest.mark.parametrize("case", ["linear", "tokens"])
def test_other_reductions_of_the_loss_add_up_as_well(
    case: str, reduction: Any, part_of_loss: PartOfLoss, fisher: Any
) -> None:
    build, data = CASES[case]
    for method in METHODS:
        for split in ((4, 4, 4, 4), (7, 5, 4)):
            whole, cut = build(), build()
            settings = {"lr": 0.05 / N, "fisher": fisher, "loss_reduction": reduction}
            of_whole = run(method, whole, data(3), (N,), part_of_loss, **settings)
            of_cut = run(method, cut, data(3), split, part_of_loss, **settings)
            assert_alike(cut, of_cut, whole, of_whole)


@every_fisher
def test_a_reduction_is_measured_on_its_own_scale(fisher: Any) -> None:
    """Sum and batch mean describe the same Fisher of one label per sample; so must their micro-batches."""
    dense = []
    for reduction, part_of_loss in (("mean", of_mean), ("batchmean", of_batchmean), ("sum", summed)):
        settings = {"fisher": fisher, "loss_reduction": reduction}
        optimizer = run(TEKFAC, classifier(), labelled((5,)), (7, 5, 4), part_of_loss, **settings)
        dense.append(optimizer.curvature.to_dense())
    assert_close(dense[1], dense[0])
    assert_close(dense[2], dense[0])


@pytest.mark.every_pair
@every_fisher
@every_split
@every_method
def test_several_forward_passes_before_one_backward_pass_count_as_one_batch(
    method: type[NaturalGradient], split: Sequence[int], fisher: Any
) -> None:
    whole, cut = classifier(), classifier()
    (batch,) = labelled((5,))
    of_whole = run(method, whole, [batch], (N,), fisher=fisher)
    of_cut = method.natural(cut, **settings_of(method, fisher=fisher))
    of_cut.zero_grad()
    sum((of_mean(cut(x), y, batch[1]) for x, y in pieces(batch, split)), torch.zeros(())).backward()
    of_cut.step()
    assert_alike(cut, of_cut, whole, of_whole)


@every_fisher
@every_method
def test_statistics_of_one_step_do_not_leak_into_the_next(method: type[NaturalGradient], fisher: Any) -> None:
    """With averages that forget at once, the last batch alone is left, however many were before."""
    settings = settings_of(method, factors_every=1, basis_every=1, lr=1e-30, factor_decay=0.0, fisher=fisher)
    if method.method.rescaling.measured:
        settings |= {"rescaling_every": 1, "rescaling_decay": 0.0}
    first, second = labelled((5,), 2)

    def trained(batches: list[tuple[Batch, Sequence[int]]], zero: bool) -> NaturalGradient:
        model = classifier()
        optimizer = method.natural(model, **settings)
        for batch, split in batches:
            if zero:
                optimizer.zero_grad()
            for x, y in pieces(batch, split):
                of_mean(model(x), y, batch[1]).backward()
            optimizer.step()
        return optimizer

    alone = trained([(second, (N,))], True).curvature
    for zero in (True, False):  # to keep the gradients is odd, but no reason to keep the statistics
        after = trained([(first, (7, 5, 4)), (second, (4, 4, 4, 4))], zero).curvature
        assert_close(after.to_dense(), alone.to_dense())


@pytest.mark.parametrize("who", ["the optimizer", "the model"])
@every_fisher
def test_gradients_that_are_thrown_away_take_their_statistics_along(fisher: Any, who: str) -> None:
    first, second = labelled((5,), 2)
    model, other = classifier(), classifier()
    expected = run(TEKFAC, other, [second], (N,), fisher=fisher)
    optimizer = TEKFAC.natural(model, **SETTINGS, fisher=fisher)
    of_mean(model(first[0]), first[1], first[1]).backward()
    (optimizer if who == "the optimizer" else model).zero_grad()
    of_mean(model(second[0]), second[1], second[1]).backward()
    optimizer.step()
    assert_alike(model, optimizer, other, expected)


def test_a_micro_batch_more_changes_the_curvature() -> None:
    """The comparisons above can fail: leaving a micro-batch out is seen."""
    (batch,) = labelled((5,))
    whole, cut = classifier(), classifier()
    of_whole = run(KFAC, whole, [batch], (N,), fisher="exact")
    optimizer = KFAC.natural(cut, **SETTINGS, fisher="exact")
    for x, y in pieces(batch, (7, 5, 4))[:2]:
        of_mean(cut(x), y, batch[1]).backward()
    optimizer.step()
    error = (optimizer.curvature.to_dense() - of_whole.curvature.to_dense()).norm()
    assert error > 1e-3 * of_whole.curvature.to_dense().norm()


def test_sampled_labels_need_no_weights_on_the_losses() -> None:
    """Plain means of equal micro-batches, added up: the Fisher does not see the factor on the loss."""
    (batch,) = labelled((5,))
    dense = []
    for factor in (1.0, 0.25):
        model = classifier()
        optimizer = TEKFAC.natural(model, **SETTINGS, fisher="sampled", seed=0)
        for x, y in pieces(batch, (4, 4, 4, 4)):
            (factor * F.cross_entropy(model(x), y)).backward()
        optimizer.step()
        dense.append(optimizer.curvature.to_dense())
    assert_close(dense[0], dense[1])
