"""`fisher.estimate` and `fisher.exact_blocks` over a loader give the blocks of all the data at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import (
    METHODS,
    assert_close,
    dense_block,
    every_method,
    measured,
    normal,
    relative_error,
    seeded,
    sharings,
)
from layer_kinds import (
    assert_blocks_agree,
    case_of,
    every_bias,
    every_kind,
    fisher_of,
    groups_of,
    own_sharing,
    samples_of,
)
from tekfac import TEKFAC, fisher
from tekfac.curvature.blocks.dense import DenseBlock
from tekfac.curvature.blocks.kronecker import KroneckerBlock
from tekfac.likelihoods import Categorical, Gaussian, Likelihood
from tekfac.optim.natural_gradient import NaturalGradient
from training import Batch, assert_identical, backward, cnn, copied, images, mlp, train, vectors

every_sharing = pytest.mark.parametrize(("method", "sharing"), [(m, s) for m in METHODS for s in sharings(m)])
UNEQUAL = (5, 1, 8)


def batched(tensors: Sequence[Tensor], sizes: Sequence[int] = UNEQUAL) -> list[tuple[Tensor, ...]]:
    """Data as a loader gives it, in batches of these sizes."""
    assert sum(sizes) == len(tensors[0])
    return list(zip(*(tensor.split(list(sizes)) for tensor in tensors), strict=True))


def all_of(samples: oracle.Samples) -> Tensor:
    """The exact block, groups one after the other."""
    return torch.block_diag(*(fisher_of(samples, group) for group in groups_of(samples)))


def name_of(method: type[NaturalGradient]) -> str:
    return method.__name__.lower()


# -- against the oracle --------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize(
    ("kind_of_fisher", "bias", "method", "sharing"),
    [("exact", True, m, s) for m in METHODS for s in sharings(m)]
    + [(f, b, m, own_sharing(m)) for f, b in (("exact", False), ("empirical", True)) for m in METHODS],
)
def test_an_estimate_over_unequal_batches_is_the_definition_over_all_data(
    kind: str, bias: bool, method: type[NaturalGradient], sharing: str, kind_of_fisher: Any
) -> None:
    case = case_of(kind, bias)
    loader = batched((case.inputs, case.labels))
    blocks = fisher.estimate(case.model, loader, method=name_of(method), sharing=sharing, fisher=kind_of_fisher)
    assert list(blocks) == ["layer", "head"]
    for layer, block in blocks.items():
        assert isinstance(block, KroneckerBlock)
        samples = samples_of(kind, bias, kind_of_fisher, layer)
        assert_blocks_agree(method, samples, sharing, block)  # type: ignore[arg-type]
        expected = torch.block_diag(*(dense_block(block, group) for group in groups_of(samples)))
        assert_close(block.to_dense(), expected)


@pytest.mark.every_pair
@every_kind
@every_bias
@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical"])
def test_exact_blocks_over_unequal_batches_are_the_oracles(kind: str, bias: bool, kind_of_fisher: Any) -> None:
    case = case_of(kind, bias)
    blocks = fisher.exact_blocks(case.model, batched((case.inputs, case.labels)), fisher=kind_of_fisher)
    assert list(blocks) == ["layer", "head"]
    for layer, block in blocks.items():
        assert isinstance(block, DenseBlock)
        assert_close(block.to_dense(), all_of(samples_of(kind, bias, kind_of_fisher, layer)))


@every_method
def test_how_the_data_is_batched_makes_no_difference(method: type[NaturalGradient]) -> None:
    case = case_of("conv2d", True)
    whole, *others = (
        fisher.estimate(case.model, batched((case.inputs, case.labels), sizes), method=name_of(method))
        for sizes in ((14,), (7, 7), (1,) * 14, (13, 1))
    )
    for blocks in others:
        for layer, block in blocks.items():
            assert_close(block.to_dense(), whole[layer].to_dense())


@every_method
def test_the_memory_budget_makes_no_difference(method: type[NaturalGradient]) -> None:
    case = case_of("grouped", True)
    loader = batched((case.inputs, case.labels))
    much, little = (
        fisher.estimate(case.model, loader, method=name_of(method), memory_budget=budget)
        for budget in (2**30, 1)
    )
    exact = fisher.exact_blocks(case.model, loader, memory_budget=1)
    for layer in much:
        assert_close(little[layer].to_dense(), much[layer].to_dense())
        assert_close(exact[layer].to_dense(), all_of(samples_of("grouped", True, "exact", layer)))


@every_method
def test_the_default_sharing_is_that_of_the_optimizer(method: type[NaturalGradient]) -> None:
    case = case_of("conv2d", True)
    loader = batched((case.inputs, case.labels))
    default = fisher.estimate(case.model, loader, method=name_of(method))
    own = own_sharing(method)
    assert default.metadata["sharing"] == own
    named = fisher.estimate(case.model, loader, method=f"{method.__name__}:{own}")
    assert_close(named["layer"].to_dense(), default["layer"].to_dense())


# -- likelihoods ---------------------------------------------------------------------------------------


def bernoulli_columns(outputs: int) -> list[oracle.Loss]:
    """Every output with both labels: the root of the label's probability, held constant, times its loss."""

    def column(k: int, label: int) -> oracle.Loss:
        def loss(logits: Tensor, _: Tensor) -> Tensor:
            logit = logits.reshape(-1)[k]
            log_p = F.logsigmoid(logit if label else -logit)
            return -(log_p / 2).exp().detach() * log_p

        return loss

    return [column(k, label) for k in range(outputs) for label in (0, 1)]


def gaussian_columns(variance: float) -> Callable[[int], list[oracle.Loss]]:
    def columns(outputs: int) -> list[oracle.Loss]:
        return [lambda f, _, k=k: f.reshape(-1)[k] / variance**0.5 for k in range(outputs)]  # type: ignore[misc]

    return columns


def squared_error(variance: float) -> oracle.Loss:
    return lambda f, y: (f - y).square().sum() / (2 * variance)


def yes_or_no(logits: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, target, reduction="sum")


LIKELIHOODS: dict[str, tuple[str | Likelihood, Callable[[int], list[oracle.Loss]], oracle.Loss]] = {
    "bernoulli": ("bernoulli", bernoulli_columns, yes_or_no),
    "gaussian": ("gaussian", gaussian_columns(1.0), squared_error(1.0)),
    "gaussian of variance 1/4": (Gaussian(variance=0.25), gaussian_columns(0.25), squared_error(0.25)),
}
OUTPUTS = 3  # of the cases


def targets_of(likelihood: str, kind: str) -> Tensor:
    y = normal(14, OUTPUTS, seed=4)
    return (y > 0).double() if likelihood == "bernoulli" else y


@cache
def samples_with(likelihood: str, kind: str, kind_of_fisher: str, reduction: str, layer: str) -> oracle.Samples:
    """One loss term per output, or per sample for losses that are not divided by the outputs."""
    _, columns, loss = LIKELIHOODS[likelihood]
    case, targets = case_of(kind, True), targets_of(likelihood, kind)
    losses = columns(OUTPUTS) if kind_of_fisher == "exact" else [loss]
    parts = [oracle.per_sample(case.model, column, case.inputs, targets, layer) for column in losses]
    gradients, a, u = (torch.cat(part) for part in zip(*parts, strict=True))
    scale = (len(losses) / (OUTPUTS if reduction == "mean" else 1)) ** 0.5
    return oracle.Samples(scale * gradients, a, scale * u)


@pytest.mark.every_pair
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical"])
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum"])
@pytest.mark.parametrize("kind", ["sequence", "grouped"])
def test_other_likelihoods_give_the_definition_over_all_data(
    likelihood: str, kind_of_fisher: Any, reduction: Any, kind: str
) -> None:
    case = case_of(kind, True)
    loader = batched((case.inputs, targets_of(likelihood, kind)))
    settings: dict[str, Any] = {
        "likelihood": LIKELIHOODS[likelihood][0],
        "fisher": kind_of_fisher,
        "loss_reduction": reduction,
    }
    exact = fisher.exact_blocks(case.model, loader, **settings)
    for layer, block in exact.items():
        samples = samples_with(likelihood, kind, kind_of_fisher, reduction, layer)
        assert_close(block.to_dense(), all_of(samples))
    if reduction != "mean":
        return  # the blocks differ from the mean's by a number alone
    for method in METHODS:
        for sharing in sharings(method):
            blocks = fisher.estimate(case.model, loader, method=name_of(method), sharing=sharing, **settings)
            for layer, approximation in blocks.items():
                samples = samples_with(likelihood, kind, kind_of_fisher, reduction, layer)
                assert_blocks_agree(method, samples, sharing, approximation)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum"])
@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical", "sampled"])
def test_the_reduction_of_the_loss_makes_no_difference_where_every_sample_is_one_term(
    reduction: Any, kind_of_fisher: Any
) -> None:
    case = case_of("linear", True)
    loader = batched((case.inputs, case.labels))
    mean, other = (
        fisher.exact_blocks(case.model, loader, fisher=kind_of_fisher, loss_reduction=how)
        for how in ("mean", reduction)
    )
    for layer, block in mean.items():
        assert_close(other[layer].to_dense(), block.to_dense())


# -- drawn labels --------------------------------------------------------------------------------------


@every_method
def test_drawn_labels_are_those_of_the_seed(method: type[NaturalGradient]) -> None:
    model, loader = mlp(), vectors(3)
    one, again, other = (
        fisher.estimate(model, loader, method=name_of(method), fisher="sampled", seed=seed)
        for seed in (5, 5, 6)
    )
    for layer, block in one.items():
        assert torch.equal(again[layer].to_dense(), block.to_dense())
        assert relative_error(other[layer].to_dense(), block.to_dense()) > 1e-3


@pytest.mark.parametrize("method", ["ekfac", "tekfac"])
def test_both_passes_of_a_corrected_method_draw_the_same_labels(method: str) -> None:
    model, loader = mlp(), vectors(3)
    truth = fisher.exact_blocks(model, loader, fisher="sampled", seed=5)
    blocks = fisher.estimate(model, loader, method=method, fisher="sampled", seed=5)
    for layer, block in blocks.items():
        dense = truth[layer].to_dense()
        q_out, q_in = block.basis.vectors_out[0], block.basis.vectors_in[0]
        assert_close(block.to_dense(), oracle.eigen_corrected(dense, q_out.contiguous(), q_in.contiguous()))
        assert_close(block.trace(), dense.trace())
    restricted = fisher.estimate(model, loader, method="tkfac", fisher="sampled", seed=5)
    assert_close(restricted.trace(), truth.trace())


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_the_mean_over_many_seeds_tends_to_the_exact_blocks(likelihood: str) -> None:
    model, inputs = mlp(sizes=(2, 2, 3)), [normal(n, 2, seed=n) for n in (2, 1)]
    exact = fisher.exact_blocks(model, inputs, likelihood=likelihood)
    drawn = [
        fisher.exact_blocks(model, inputs, likelihood=likelihood, fisher="sampled", seed=seed)
        for seed in range(200)
    ]
    for layer, block in exact.items():
        found, dense = torch.stack([blocks[layer].to_dense() for blocks in drawn]), block.to_dense()
        deviation = found.std(0) / len(found) ** 0.5
        assert bool(((found.mean(0) - dense).abs() <= 5 * deviation + 1e-12).all())
        assert float((found.mean(0) - dense).norm()) < 0.25 * float(dense.norm())


# -- against the optimizers ----------------------------------------------------------------------------


@pytest.mark.every_pair
@every_sharing
@pytest.mark.parametrize("kind", ["linear", "sequence", "conv2d", "grouped"])
@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical", "sampled"])
def test_an_estimate_over_one_batch_is_the_curvature_of_an_optimizer_that_measured_it(
    method: type[NaturalGradient], sharing: str, kind: str, kind_of_fisher: Any
) -> None:
    case = case_of(kind, True)
    blocks = fisher.estimate(
        case.model,
        [(case.inputs, case.labels)],
        method=name_of(method),
        sharing=sharing,
        fisher=kind_of_fisher,
        seed=3,
    )
    optimizer = measured(
        method, case.model, case.inputs, case.loss, fisher=kind_of_fisher, sharing=sharing, seed=3
    )
    assert list(blocks) == list(optimizer.curvature)
    for layer, block in blocks.items():
        own = optimizer.curvature[layer]
        assert block.shape == own.shape
        assert_close(block.to_dense(), own.to_dense(), rtol=1e-12)
        assert_close(block.rescaling, own.rescaling, rtol=1e-12)


@every_method
def test_an_estimate_takes_the_step_of_an_optimizer_that_measured_the_same_batch(
    method: type[NaturalGradient],
) -> None:
    case = case_of("conv2d", True)
    blocks = fisher.estimate(case.model, [(case.inputs, case.labels)], method=name_of(method))
    before = {name: p.detach().clone() for name, p in case.model.named_parameters()}
    optimizer = method.natural(case.model, lr=1.0, momentum=0.0, damping=0.1, fisher="exact")
    optimizer.zero_grad()
    backward(case.model, (case.inputs, case.labels))
    gradients = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
    expected = blocks.solve(gradients, damping=0.1)
    optimizer.step()
    for name, p in case.model.named_parameters():
        assert_close(before[name] - p.detach(), expected[name])


# -- the model is left as it was -----------------------------------------------------------------------

CALLS: dict[str, Callable[..., Any]] = {
    "estimate": fisher.estimate,
    "exact_blocks": fisher.exact_blocks,
    "compare": fisher.compare,
}
every_call = pytest.mark.parametrize("call", CALLS)


def mixed_model() -> nn.Module:
    """Batch norm, dropout, a frozen parameter, modes that differ, gradients of an earlier step."""
    model = nn.Sequential(*cnn(), nn.Dropout(0.5), nn.Linear(3, 3).double())
    model.train()
    model[1].eval()
    model[4].bias.requires_grad_(False)
    for number, parameter in enumerate(model.parameters()):
        if number % 2:
            parameter.grad = torch.full_like(parameter, float(number))
    return model


def look_of(model: nn.Module) -> dict[str, Any]:
    """All there is to see of a model from outside."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "state": copied(model.state_dict()),
        "modes": [module.training for module in model.modules()],
        "hooks": [[len(getattr(module, hook)) for hook in hooks] for module in model.modules()],
        "hook options": [
            [len(module._forward_hooks_with_kwargs), len(module._forward_hooks_always_called)]
            for module in model.modules()
        ],
        "gradients": copied([p.grad if p.grad is not None else "none" for p in model.parameters()]),
        "trained": [p.requires_grad for p in model.parameters()],
        "tensor hooks": [0 if not p._backward_hooks else len(p._backward_hooks) for p in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "random": torch.get_rng_state(),
    }


@every_call
@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical", "sampled"])
def test_the_model_is_left_as_it_was(call: str, kind_of_fisher: Any) -> None:
    model = mixed_model()
    before = look_of(model)
    gradients = [p.grad for p in model.parameters()]
    CALLS[call](model, images(2), fisher=kind_of_fisher)
    assert_identical(look_of(model), before)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


@every_call
def test_the_model_is_left_as_it_was_by_a_pass_that_fails(call: str) -> None:
    model = mixed_model()
    before = look_of(model)

    class Loader:
        def __iter__(self) -> Iterator[Batch]:
            yield images(1)[0]
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        CALLS[call](model, Loader())
    assert_identical(look_of(model), before)
    broken = (torch.full((6, 1, 5, 5), torch.nan, dtype=torch.float64), images(1)[0][1])
    with pytest.raises(ValueError, match="not finite"):
        CALLS[call](model, [images(1)[0], broken])
    assert_identical(look_of(model), before)


@every_call
def test_the_data_is_left_as_it_was(call: str) -> None:
    loader = images(2)
    before = copied(loader)
    CALLS[call](cnn(), loader)  # its activation works in place
    assert_identical(copied(loader), before)


@every_call
def test_it_works_without_gradients_and_leaves_them_off(call: str) -> None:
    model, loader = mlp(), vectors(2)
    expected = CALLS[call](model, loader)
    with torch.no_grad():
        found = CALLS[call](model, loader)
        assert not torch.is_grad_enabled()
    if call == "compare":
        assert [row.plain() for row in found.rows] == [row.plain() for row in expected.rows]
    else:
        for layer, block in expected.items():
            assert torch.equal(found[layer].to_dense(), block.to_dense())
            assert not found[layer].to_dense().requires_grad


@every_call
def test_an_optimizer_that_watches_the_model_does_not_notice(call: str) -> None:
    models = cnn(), cnn()
    optimizers = [TEKFAC.natural(model, lr=0.05, seed=0, factors_every=1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, images(2))
        if model is models[0]:
            CALLS[call](model, images(2, seed=8), fisher="sampled")
        train(model, optimizer, images(2, seed=5))
    assert_identical(models[0], models[1])
    assert_identical(optimizers[0], optimizers[1])


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_uses_its_running_statistics(training: bool) -> None:
    model = cnn()
    with torch.no_grad():  # running statistics that are not those of the data
        for x, _ in images(3, seed=9):
            model(3 * x + 1)
    (x, y), sizes = images(1, samples=14)[0], UNEQUAL
    quiet = copy.deepcopy(model).eval()
    samples = {layer: oracle.per_column(oracle.softmax_column, quiet, x, layer) for layer in ("0", "4")}
    units = torch.block_diag(*fisher_of_units(quiet, x, quiet[1]))
    model.train(training)
    blocks = fisher.exact_blocks(model, batched((x, y), sizes))
    assert list(blocks) == ["0", "1", "4"]
    for layer in samples:
        assert_close(blocks[layer].to_dense(), fisher_of(samples[layer]))
    assert_close(blocks["1"].to_dense(), units)
    for method in METHODS:
        approximations = fisher.estimate(model, batched((x, y), sizes), method=name_of(method))
        assert list(approximations) == ["0", "1", "4"]
        for layer in samples:
            sharing = approximations.metadata["sharing"]
            assert_blocks_agree(method, samples[layer], sharing, approximations[layer])  # type: ignore[arg-type]
        assert_close(approximations["1"].to_dense(), units)
    assert_identical(model[1].state_dict(), quiet[1].state_dict())


def fisher_of_units(model: nn.Module, inputs: Tensor, norm: nn.Module) -> Tensor:
    """The exact Fisher of every unit's scale and shift, [C, 2, 2], by autograd, sample by sample."""
    gradients = []
    for x in inputs:
        logits = model(x[None])
        for k in range(logits.shape[-1]):
            loss = oracle.softmax_column(k)(logits, logits)
            parts = torch.autograd.grad(loss, list(norm.parameters()), retain_graph=True)
            gradients.append(logits.shape[-1] ** 0.5 * torch.stack(parts, dim=1))
    return torch.stack([oracle.mean_outer(unit) for unit in torch.stack(gradients, dim=1)])


def test_dropout_is_off() -> None:
    plain = mlp()
    dropping = nn.Sequential(plain[0], plain[1], nn.Dropout(0.9), plain[2])
    found, expected = (fisher.exact_blocks(model, vectors(2)) for model in (dropping, plain))
    assert_close(found["3"].to_dense(), expected["2"].to_dense())
    assert_close(found["0"].to_dense(), expected["0"].to_dense())


# -- what counts ---------------------------------------------------------------------------------------


@pytest.mark.every_pair
@every_sharing
@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical"])
@pytest.mark.parametrize("kind", ["linear", "sequence", "conv2d"])
def test_samples_with_an_ignored_target_do_not_count(
    method: type[NaturalGradient], sharing: str, kind_of_fisher: Any, kind: str
) -> None:
    case = case_of(kind, True)
    labels = case.labels.clone()
    ignored = [0, 5, 9, 13]  # one of them is a batch of its own
    labels[ignored] = -100
    kept = [n for n in range(14) if n not in ignored]
    blocks = fisher.estimate(
        case.model,
        batched((case.inputs, labels)),
        method=name_of(method),
        sharing=sharing,
        fisher=kind_of_fisher,
    )
    assert blocks.metadata["terms"] == len(kept)
    for layer, block in blocks.items():
        everything = samples_of(kind, True, kind_of_fisher, layer)
        chosen = [column + n for column in range(0, len(everything.a), 14) for n in kept]
        samples = oracle.Samples(*(part[chosen] for part in everything))
        assert_blocks_agree(method, samples, sharing, block)  # type: ignore[arg-type]


class Tagger(nn.Module):
    """Class logits at every position, [N, T, C]; positions do not see one another."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def tagged() -> tuple[nn.Module, Tensor, Tensor]:
    """Sequences of three tokens, some of them ignored, one of them altogether."""
    model, inputs = seeded(Tagger), normal(14, 3, 4)
    labels = torch.randint(5, (14, 3), generator=torch.Generator().manual_seed(1))
    labels[0], labels[3, 1:], labels[6, 0] = -100, -100, -100
    return model, inputs, labels


def fisher_of_tokens(model: nn.Module, inputs: Tensor, labels: Tensor, layer: str, kind: str) -> Tensor:
    """Sum over samples of outer products of the sample's gradients, over the number of tokens that count."""
    total: Tensor | int = 0
    parameters = list(model.get_submodule(layer).parameters())
    for x, y in zip(inputs, labels, strict=True):
        log_p = model(x[None])[0].log_softmax(-1)
        counted = [t for t in range(len(y)) if y[t] != -100]
        if kind == "exact":
            losses = [
                -(log_p[t, c] / 2).exp().detach() * log_p[t, c] for t in counted for c in range(log_p.shape[1])
            ]
        else:
            losses = [-torch.stack([log_p[t, y[t]] for t in counted]).sum()] if counted else []
        for loss in losses:
            weight, bias = torch.autograd.grad(loss, parameters, retain_graph=True)
            vector = torch.cat([weight, bias[:, None]], dim=1).reshape(-1)
            total = total + torch.outer(vector, vector)
    assert isinstance(total, Tensor)
    return total / int((labels != -100).sum())


@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical"])
@pytest.mark.parametrize("classes", ["last", "axis 1"])
def test_ignored_positions_do_not_count(kind_of_fisher: Any, classes: str) -> None:
    model, inputs, labels = tagged()
    wrapped = nn.Sequential(model, Transposed() if classes == "axis 1" else nn.Identity())
    loader = batched((inputs, labels))
    blocks = fisher.exact_blocks(wrapped, loader, fisher=kind_of_fisher)
    for layer in ("body", "head"):
        expected = fisher_of_tokens(model, inputs, labels, layer, kind_of_fisher)
        assert_close(blocks[f"0.{layer}"].to_dense(), expected)
    assert blocks.metadata["terms"] == int((labels != -100).sum())
    assert blocks.metadata["samples"] == 14
    corrected = fisher.estimate(wrapped, loader, fisher=kind_of_fisher)
    assert_close(corrected.trace(), blocks.trace())
    restricted = fisher.estimate(wrapped, loader, fisher=kind_of_fisher, method="tkfac")
    assert_close(restricted.trace(), blocks.trace())


@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical"])
def test_an_ignored_target_does_not_count_however_certain_the_prediction(kind_of_fisher: Any) -> None:
    model, (x, y) = seeded(lambda: nn.Linear(5, 3)), vectors(1)[0]
    x, y = x.clone(), y.clone()
    x[0], y[0] = 1e4 * x[0], -100
    assert float(model(x[:1]).detach().softmax(-1).max()) == 1.0
    found = fisher.exact_blocks(model, [(x, y)], fisher=kind_of_fisher)
    expected = fisher.exact_blocks(model, [(x[1:], y[1:])], fisher=kind_of_fisher)
    assert_close(found[""].to_dense(), expected[""].to_dense())


def test_a_batch_of_ignored_targets_alone_does_not_count() -> None:
    model, loader = mlp(), vectors(2)
    ignored = (loader[1][0], torch.full_like(loader[1][1], -100))
    for call in (fisher.estimate, fisher.exact_blocks):
        found, expected = call(model, [loader[0], ignored]), call(model, loader[:1])
        assert found.metadata["terms"] == 6
        for layer in expected:
            assert_close(found[layer].to_dense(), expected[layer].to_dense())


# -- kinds of batches ----------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_inputs_alone_are_enough_for_the_exact_fisher(method: type[NaturalGradient], likelihood: str) -> None:
    case = case_of("conv2d", True)
    targets = case.labels if likelihood == "categorical" else targets_of(likelihood, "conv2d")
    settings: dict[str, Any] = {"method": name_of(method), "likelihood": likelihood}
    expected = fisher.estimate(case.model, batched((case.inputs, targets)), **settings)
    found = fisher.estimate(case.model, case.inputs.split(list(UNEQUAL)), **settings)
    for layer, block in expected.items():
        assert_close(found[layer].to_dense(), block.to_dense())


def test_inputs_alone_are_enough_for_drawn_labels() -> None:
    model, loader = mlp(), vectors(3)
    expected = fisher.exact_blocks(model, loader, fisher="sampled")
    found = fisher.exact_blocks(model, [x for x, _ in loader], fisher="sampled")
    for layer, block in expected.items():
        assert torch.equal(found[layer].to_dense(), block.to_dense())


def test_inputs_alone_are_enough_where_the_axis_of_classes_is_named() -> None:
    model, inputs, labels = tagged()
    expected = fisher.exact_blocks(model, batched((inputs, labels.clamp_min(0))))
    found = fisher.exact_blocks(model, inputs.split(list(UNEQUAL)), likelihood=Categorical(class_dim=-1))
    for layer, block in expected.items():
        assert_close(found[layer].to_dense(), block.to_dense())


def test_lists_serve_as_pairs() -> None:
    model, loader = mlp(), vectors(2)
    found, expected = (fisher.exact_blocks(model, batches) for batches in (map_to_lists(loader), loader))
    assert_close(found["0"].to_dense(), expected["0"].to_dense())


def map_to_lists(loader: list[Batch]) -> list[list[Tensor]]:
    return [list(batch) for batch in loader]


def test_a_data_loader_serves() -> None:
    x, y = vectors(1, samples=14)[0]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4, shuffle=True)
    found, expected = fisher.estimate(mlp(), loader), fisher.estimate(mlp(), [(x, y)])
    assert_close(found["0"].to_dense(), expected["0"].to_dense())
    assert (found.metadata["samples"], found.metadata["terms"]) == (14, 14)


def test_a_generator_serves_where_one_pass_is_enough() -> None:
    loader = vectors(2)
    for method in ("kfac", "tkfac"):
        found = fisher.estimate(mlp(), iter(loader), method=method)
        assert_close(found["0"].to_dense(), fisher.estimate(mlp(), loader, method=method)["0"].to_dense())
    assert_close(
        fisher.exact_blocks(mlp(), (batch for batch in loader))["0"].to_dense(),
        fisher.exact_blocks(mlp(), loader)["0"].to_dense(),
    )


class Keywords(nn.Module):
    """Takes keywords; returns what its `returns` makes of logits and loss."""

    def __init__(self, returns: Callable[[Tensor, Tensor | None], Any]) -> None:
        super().__init__()
        self.net, self.returns = mlp(), returns

    def forward(self, *, pixels: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.net(pixels)
        return self.returns(logits, None if labels is None else F.cross_entropy(logits, labels))


RETURNS: dict[str, Callable[[Tensor, Tensor | None], Any]] = {
    "logits alone": lambda logits, loss: logits,
    "an object": lambda logits, loss: SimpleNamespace(logits=logits, loss=loss),
    "a dict": lambda logits, loss: {"loss": loss, "logits": logits},
}


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("labelled", [True, False])
def test_dicts_are_the_keywords_of_the_model(returns: str, labelled: bool) -> None:
    loader = vectors(3)
    expected = fisher.exact_blocks(mlp(), loader)
    dicts = [{"pixels": x, "labels": y} if labelled else {"pixels": x} for x, y in loader]
    found = fisher.exact_blocks(Keywords(RETURNS[returns]), dicts)
    assert list(found) == ["net.0", "net.2"]
    for layer, block in expected.items():
        assert_close(found[f"net.{layer}"].to_dense(), block.to_dense())


@pytest.mark.parametrize("returns", ["an object", "a dict"])
def test_the_models_own_loss_of_a_dict_gives_the_empirical_fisher(returns: str) -> None:
    loader = vectors(3)
    expected = fisher.exact_blocks(mlp(), loader, fisher="empirical")
    dicts = [{"pixels": x, "labels": y} for x, y in loader]
    found = fisher.exact_blocks(Keywords(RETURNS[returns]), dicts, fisher="empirical")
    for layer, block in expected.items():
        assert_close(found[f"net.{layer}"].to_dense(), block.to_dense())


@pytest.mark.parametrize("returns", ["an object", "a dict"])
def test_labels_that_the_models_own_loss_ignores_do_not_count(returns: str) -> None:
    (x, y), ignored = vectors(1)[0], [1, 4]
    labels = y.clone()
    labels[ignored] = -100
    found = fisher.exact_blocks(Keywords(RETURNS[returns]), [{"pixels": x, "labels": labels}])
    kept = [n for n in range(len(x)) if n not in ignored]
    expected = fisher.exact_blocks(mlp(), [(x[kept], y[kept])])
    assert found.metadata["terms"] == len(kept)
    for layer, block in expected.items():
        assert_close(found[f"net.{layer}"].to_dense(), block.to_dense())


@pytest.mark.every_pair
@every_method
@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical", "sampled"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_the_users_own_takes_batches_of_any_kind(
    method: type[NaturalGradient], kind_of_fisher: Any, reduction: Any
) -> None:
    loader = vectors(3)
    strange = [{"x": x, "meta": ("image", y)} for x, y in loader]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["meta"][1], reduction=reduction)

    settings: dict[str, Any] = {
        "method": name_of(method),
        "fisher": kind_of_fisher,
        "loss_reduction": reduction,
    }
    found = fisher.estimate(mlp(), strange, loss=loss, **settings)
    expected = fisher.estimate(mlp(), loader, **settings)
    for layer, block in expected.items():
        assert_close(found[layer].to_dense(), block.to_dense())


def test_a_loss_of_the_users_own_need_not_reach_every_layer() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.unused = mlp(), nn.Linear(2, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    found = fisher.exact_blocks(
        Half(), vectors(2), loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    )
    assert list(found) == ["net.0", "net.2"]
    assert_close(found["net.0"].to_dense(), fisher.exact_blocks(mlp(), vectors(2))["0"].to_dense())


@every_call
def test_layers_that_are_frozen_have_no_block_and_the_others_have_theirs(call: str) -> None:
    model, loader = mlp(), vectors(2)
    expected = CALLS[call](model, loader, layers=["2"])
    model[0].requires_grad_(False)
    found = CALLS[call](model, loader)
    if call == "compare":
        assert [row.plain() for row in found.rows] == [row.plain() for row in expected.rows]
    else:
        assert list(found) == ["2"]
        assert_close(found["2"].to_dense(), expected["2"].to_dense())


def test_layers_that_are_frozen_are_no_trouble_to_a_loss_of_the_users_own() -> None:
    model, loader = mlp(), vectors(2)
    expected = fisher.exact_blocks(model, loader)
    model[0].requires_grad_(False)
    found = fisher.exact_blocks(model, loader, loss=lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))
    assert list(found) == ["2"]
    assert_close(found["2"].to_dense(), expected["2"].to_dense())


# -- axes, layers, modules -----------------------------------------------------------------------------


class SequenceFirst(nn.Module):
    """Logits [T, N, C] from inputs [T, N, d], where positions see one another."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden + hidden.mean(0, keepdim=True))  # type: ignore[no-any-return]


class SamplesFirst(nn.Module):
    """The same network for [N, T, d]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("batch_dim", [1, -2])
@pytest.mark.parametrize(
    ("kind_of_fisher", "labelled"),
    [("exact", True), ("exact", False), ("empirical", True)],
    ids=["exact", "exact, inputs alone", "empirical"],
)
def test_samples_may_be_another_axis_of_the_outputs(
    batch_dim: int, kind_of_fisher: Any, labelled: bool
) -> None:
    model = seeded(SequenceFirst)
    inputs = normal(3, 14, 4)
    labels = torch.randint(5, (3, 14), generator=torch.Generator().manual_seed(1))
    labels[0, 2], labels[:, 7] = (-100, -100) if labelled else (0, 0)
    pairs = zip(inputs.split(list(UNEQUAL), dim=1), labels.split(list(UNEQUAL), dim=1), strict=True)
    blocks = fisher.exact_blocks(
        model,
        [pair if labelled else pair[0] for pair in pairs],
        fisher=kind_of_fisher,
        batch_dim=batch_dim,
        likelihood=Categorical(class_dim=-1),
    )
    outer = SamplesFirst(model)
    for layer, block in blocks.items():
        expected = fisher_of_tokens(outer, inputs.transpose(0, 1), labels.T, f"inner.{layer}", kind_of_fisher)
        assert_close(block.to_dense(), expected)


def test_samples_may_be_the_last_axis_of_a_matrix() -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).T  # type: ignore[no-any-return]

    expected = fisher.exact_blocks(mlp(), vectors(2), fisher="empirical")
    for axis in (1, -1):
        found = fisher.exact_blocks(Columns(), vectors(2), fisher="empirical", batch_dim=axis)
        assert_close(found["net.0"].to_dense(), expected["0"].to_dense())


def test_outputs_are_picked_from_what_the_model_returns() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, self.net(x)

    found = fisher.exact_blocks(Two(), vectors(2), outputs=lambda returned: returned[1], fisher="empirical")
    expected = fisher.exact_blocks(mlp(), vectors(2), fisher="empirical")
    assert_close(found["net.0"].to_dense(), expected["0"].to_dense())


@every_call
@pytest.mark.parametrize("layers", [["head"], "head", iter(["head"])], ids=["list", "name", "iterator"])
def test_layers_can_be_named(call: str, layers: Any) -> None:
    case = case_of("conv2d", True)
    loader = batched((case.inputs, case.labels))
    if not isinstance(layers, str | list):
        layers = iter(["head"])
    everything, found = CALLS[call](case.model, loader), CALLS[call](case.model, loader, layers=layers)
    if call == "compare":
        expected = [row.plain() for row in everything.rows if row.layer == "head"]
        assert [row.plain() for row in found.rows] == expected
    else:
        assert list(found) == ["head"]
        assert_close(found["head"].to_dense(), everything["head"].to_dense())


def test_blocks_are_in_the_order_of_the_model_whatever_the_order_of_their_names() -> None:
    case = case_of("conv2d", True)
    blocks = fisher.estimate(case.model, [(case.inputs, case.labels)], layers=["head", "layer"])
    assert list(blocks) == ["layer", "head"]
    assert list(blocks.parameters) == [name for name, _ in case.model.named_parameters()]


def test_a_layer_can_be_the_whole_model() -> None:
    model = seeded(lambda: nn.Linear(5, 3))
    blocks = fisher.estimate(model, vectors(2))
    assert blocks.parameters == {"weight": (3, 5), "bias": (3,)}


class Tied(nn.Module):
    """Two modules with the same parameters, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(hidden) + self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical"])
def test_tied_and_reused_modules_are_one_block_of_summed_gradients(kind_of_fisher: Any) -> None:
    model, inputs = seeded(Tied), normal(14, 4)
    labels = torch.randint(3, (14,), generator=torch.Generator().manual_seed(1))
    loader = batched((inputs, labels))
    blocks = fisher.exact_blocks(model, loader, fisher=kind_of_fisher)
    assert list(blocks) == ["first", "head"]
    approximations = {
        method: fisher.estimate(model, loader, fisher=kind_of_fisher, method=method)
        for method in ("tkfac", "tekfac")
    }

    class OneToken(nn.Module):
        """The labels as sequences of one token, for the loop over autograd's gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[:, None]  # type: ignore[no-any-return]

    for layer, block in blocks.items():
        dense = fisher_of_tokens(OneToken(), inputs, labels[:, None], f"inner.{layer}", kind_of_fisher)
        assert_close(block.to_dense(), dense)
        d_out, d_in = block.matrix_shape
        n_phi, n_psi = oracle.partial_traces(dense, d_out, d_in)
        assert_close(approximations["tkfac"][layer].to_dense(), torch.kron(n_psi, n_phi) / dense.trace())
        corrected = approximations["tekfac"][layer]
        q_out, q_in = corrected.basis.vectors_out[0], corrected.basis.vectors_in[0]
        assert_close(corrected.to_dense(), oracle.eigen_corrected(dense, q_out.contiguous(), q_in.contiguous()))


# -- how it was made -----------------------------------------------------------------------------------


class Counted:
    """A loader that knows how often its batches were taken."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches, self.taken = batches, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.taken += 1
            yield batch


@pytest.mark.parametrize(
    ("method", "passes"), [("kfac", 1), ("tkfac", 1), ("ekfac", 2), ("tekfac", 2), ("exact", 1)]
)
def test_the_data_is_read_once_or_for_a_corrected_diagonal_twice(method: str, passes: int) -> None:
    loader = Counted(vectors(3))
    if method == "exact":
        fisher.exact_blocks(mlp(), loader)
    else:
        fisher.estimate(mlp(), loader, method=method)
    assert loader.taken == 3 * passes


def test_the_metadata_tell_how_blocks_were_made() -> None:
    model = mlp()
    blocks = fisher.estimate(model, vectors(2), method="TKFAC", fisher="sampled", seed=4)
    assert {"method": "TKFAC", "sharing": "exact", "fisher": "sampled", "seed": 4}.items() <= dict(
        blocks.metadata
    ).items()
    assert (blocks.metadata["samples"], blocks.metadata["terms"]) == (12, 12)
    other = fisher.exact_blocks(model, vectors(2))
    assert other.metadata["method"] == "exact"
    assert other.metadata["model"] == blocks.metadata["model"]
    with torch.no_grad():
        model[0].bias += 1e-9
    assert fisher.exact_blocks(model, vectors(2)).metadata["model"] != blocks.metadata["model"]


def test_float32_models_get_float32_blocks_from_sums_in_float64() -> None:
    model = mlp(dtype=torch.float32)
    loader = vectors(3, dtype=torch.float32)
    doubles = [(x.double(), y) for x, y in loader]
    twin = copy.deepcopy(model).double()
    for call in (fisher.estimate, fisher.exact_blocks):
        single, double = call(model, loader), call(twin, doubles)
        for layer, block in single.items():
            assert block.dtype == torch.float32
            assert_close(block.to_dense(), double[layer].to_dense(), rtol=1e-5)


# -- what is counted -----------------------------------------------------------------------------------


class Branches(nn.Module):
    """A layer that only batches with a positive first number use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if x[0, 0] > 0 else out


@every_call
def test_a_layer_unused_in_some_batches_has_the_same_block_whether_it_is_alone_or_not(call: str) -> None:
    model, loader = seeded(Branches), []
    for index, (x, y) in enumerate(vectors(4)):
        x = x.clone()
        x[0, 0] = 1.0 if index % 2 else -1.0
        loader.append((x, y))
    everything = fisher.exact_blocks(model, loader)["sometimes"]
    alone = fisher.exact_blocks(model, loader, layers=["sometimes"])["sometimes"]
    assert_close(alone.to_dense(), everything.to_dense())
    choices: list[Any] = [{}, {"layers": ["sometimes"]}]
    drawn = [fisher.estimate(model, loader, fisher="sampled", **only)["sometimes"] for only in choices]
    assert_close(drawn[0].to_dense(), drawn[1].to_dense())
    model.always.requires_grad_(False)  # then some batches reach nothing that is trained
    frozen = fisher.exact_blocks(model, loader, layers=["sometimes"])["sometimes"]
    assert_close(frozen.to_dense(), everything.to_dense())
    used = fisher.exact_blocks(model, loader[1::2])["sometimes"]
    assert_close(alone.to_dense(), used.to_dense() / 2)  # half of the samples do not reach it


def test_an_empty_batch_changes_nothing() -> None:
    model, loader = seeded(lambda: nn.Linear(5, 3)), vectors(2)
    empty = (loader[0][0][:0], loader[0][1][:0])
    assert_same(fisher.estimate(model, [*loader, empty]), fisher.estimate(model, loader))


def assert_same(ours: Any, theirs: Any) -> None:
    for name in theirs:
        assert_close(ours[name].to_dense(), theirs[name].to_dense())


def test_numbers_that_are_not_finite_in_unused_data_do_no_harm() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.layer(x.masked_fill(mask.isinf(), 0.0))
            return out

    model, (x, y) = seeded(Net), vectors(1)[0]
    mask = torch.zeros_like(x)
    mask[:, 0] = -torch.inf
    blocks = fisher.estimate(model, [((x, mask), y)])
    assert blocks["layer"].trace() > 0


def test_a_model_of_several_inputs_takes_them_from_a_tuple() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Bilinear(5, 5, 3), nn.Linear(3, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(a, b))
            return out

    x, y = vectors(1)[0]
    assert list(fisher.estimate(seeded(Net), [((x, x), y)])) == ["last"]


def test_predictions_may_be_computed_from_what_the_model_returns() -> None:
    model, loader = seeded(lambda: nn.Linear(5, 4)), vectors(2)
    blocks = fisher.exact_blocks(model, loader, outputs=lambda returned: returned[:, :3])
    narrow = seeded(lambda: nn.Linear(5, 3))
    with torch.no_grad():
        narrow.weight.copy_(model.weight[:3])
        narrow.bias.copy_(model.bias[:3])
    expected = fisher.exact_blocks(narrow, loader)[""].to_dense()
    assert_close(blocks[""].to_dense()[: len(expected), : len(expected)], expected)


def test_with_drawn_labels_the_order_must_be_the_same_in_both_passes() -> None:
    class Shuffled:
        def __init__(self) -> None:
            self.readings = 0

        def __iter__(self) -> Iterator[Batch]:
            self.readings += 1
            return iter(vectors(3)[:: 1 if self.readings % 2 else -1])

    model = seeded(lambda: nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"another order.*fisher='sampled'.*does not shuffle"):
        fisher.estimate(model, Shuffled(), fisher="sampled")
    assert_same(fisher.estimate(model, Shuffled()), fisher.estimate(model, vectors(3)))


def test_pairs_that_were_put_together_anew_are_other_data() -> None:
    class Repaired:
        def __init__(self) -> None:
            self.readings = 0

        def __iter__(self) -> Iterator[Batch]:
            self.readings += 1
            return iter([(x, y.flip(0) if self.readings % 2 else y) for x, y in vectors(3)])

    with pytest.raises(ValueError, match="other data"):
        fisher.estimate(seeded(lambda: nn.Linear(5, 3)), Repaired())


def test_what_has_no_block_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(
        lambda: nn.Sequential(nn.Embedding(5, 6, max_norm=1.0), nn.PReLU(2), nn.Flatten(), nn.Linear(12, 2))
    )
    with caplog.at_level("INFO", logger="tekfac"):
        blocks = fisher.estimate(model, [(torch.tensor([[0, 1], [2, 3]]), torch.zeros(2).long())])
    assert list(blocks) == ["3"]
    assert "No Fisher block of '0.weight': max_norm" in caplog.text
    assert "The blocks cover 45% of the parameters. Without: 0.weight, 1.weight." in caplog.text


def test_a_transformer_layer_has_blocks_of_all_its_parameters(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0)
    model = seeded(lambda: nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)))
    with caplog.at_level("INFO", logger="tekfac"):
        blocks = fisher.estimate(model, [(normal(4, 2, 6), torch.zeros(4).long())])
    assert not caplog.records
    assert blocks.parameters == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_very_many_columns_are_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(lambda: nn.Linear(2, 1001))
    fisher.estimate(model, [(normal(1, 2), torch.zeros(1).long())] * 2, method="kfac")
    assert caplog.text.count("1001 for each batch") == 1


def test_a_batch_is_empty_only_if_all_of_it_is() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, past: Tensor, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out

    loader = [{"past": torch.zeros(0), "x": normal(4, 5, seed=seed)} for seed in range(3)]
    assert fisher.estimate(seeded(Net), loader).metadata["samples"] == 12


def test_with_drawn_labels_the_batches_must_be_the_same_in_both_passes() -> None:
    class Rebatched:
        def __init__(self) -> None:
            self.readings = 0

        def __iter__(self) -> Iterator[Batch]:
            self.readings += 1
            x, y = (torch.cat(parts) for parts in zip(*vectors(3), strict=True))
            size = 6 if self.readings % 2 else 9
            return iter(list(zip(x.split(size), y.split(size), strict=True)))

    with pytest.raises(ValueError, match="another order"):
        fisher.estimate(seeded(lambda: nn.Linear(5, 3)), Rebatched(), fisher="sampled")


@pytest.mark.parametrize("kind_of_fisher", ["sampled", "exact", "empirical"])
def test_the_loss_of_a_trained_network_tells_its_likelihood(kind_of_fisher: Any) -> None:
    """Most of its labels are certain, to rounding."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    nn.init.normal_(model.weight, std=12.0)
    x = torch.randn(64, 5)
    data = [(x, model(x).argmax(1))]
    found = fisher.estimate(
        model, data, fisher=kind_of_fisher, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    )
    told = fisher.estimate(model, data, fisher=kind_of_fisher, likelihood="categorical")
    for name, block in found.items():
        assert torch.allclose(block.to_dense(), told[name].to_dense(), rtol=1e-4)
