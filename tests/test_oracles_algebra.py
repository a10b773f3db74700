"""Oracles 1-4: Kronecker algebra, capture, scaling of the statistics, and the damped solve."""

from __future__ import annotations

from collections.abc import Callable

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
    gradient_step,
    measured,
    normal,
    sharings,
    statistics,
)
from layer_kinds import (
    SAMPLES,
    all_rows,
    assert_blocks_agree,
    captured,
    case_of,
    every_bias,
    every_kind,
    expected_block,
    expected_factors,
    fisher_of,
    groups_of,
    identity,
    own_sharing,
    random_basis,
    samples_of,
    step_of,
)
from tekfac import KFAC, TEKFAC, TKFAC
from tekfac.curvature.eigenbasis import decompose
from tekfac.curvature.factors import KroneckerFactors
from tekfac.curvature.precondition import precondition
from tekfac.curvature.rescaling import product_of_eigenvalues
from tekfac.damping import Factored
from tekfac.layers.inventory import take_inventory
from tekfac.optim.natural_gradient import NaturalGradient

method_and_sharing = pytest.mark.parametrize(
    ("method", "sharing"), [(method, sharing) for method in METHODS for sharing in sharings(method)]
)


# -- 1: Kronecker products -----------------------------------------------------------------------------


def test_01_projections_are_kronecker_products_in_both_vectorisations() -> None:
    basis, x = random_basis(d_in=4, d_out=3), normal(3, 4)
    q_in, q_out = basis.vectors_in[0].contiguous(), basis.vectors_out[0].contiguous()
    projected, back = basis.project(x[None])[0], basis.unproject(x[None])[0]
    by_rows, by_columns = torch.kron(q_out, q_in), torch.kron(q_in, q_out)
    assert_close(projected.reshape(-1), by_rows.T @ x.reshape(-1))
    assert_close(projected.T.reshape(-1), by_columns.T @ x.T.reshape(-1))
    assert_close(back.reshape(-1), by_rows @ x.reshape(-1))
    assert_close(back.T.reshape(-1), by_columns @ x.T.reshape(-1))


def test_01_precondition_is_the_same_solve_in_both_vectorisations() -> None:
    groups, d_in, d_out, damping = 2, 4, 3, 0.1
    roots = normal(groups, d_in, d_in), normal(groups, d_out, d_out, seed=1)
    inputs, outputs = (root @ root.mT for root in roots)
    scale, gradient = torch.tensor([0.7, 3.0], dtype=torch.float64), normal(groups, d_out, d_in, seed=2)
    basis = decompose(KroneckerFactors(inputs, outputs, scale))
    actual = precondition(gradient, basis, product_of_eigenvalues(basis) + damping)
    for g in range(groups):
        by_rows = scale[g] * torch.kron(outputs[g], inputs[g])
        by_columns = scale[g] * torch.kron(inputs[g], outputs[g])
        assert_close(actual[g], oracle.damped_solve(by_rows, damping, gradient[g]))
        assert_close(actual[g].T, oracle.damped_solve(by_columns, damping, gradient[g].T))


# -- 2: capture ----------------------------------------------------------------------------------------


@every_kind
@every_bias
def test_02_captured_rows_give_the_per_sample_gradients(kind: str, bias: bool) -> None:
    case = case_of(kind, bias)
    batches = captured(case.model, case.inputs, case.loss)
    for layer in ("layer", "head"):
        samples = samples_of(kind, bias, layer=layer)
        (batch,) = batches[layer]
        rows = all_rows(batch)
        assert (*rows.u.shape, rows.a.shape[-1]) == (*batch.shape[:4], batch.shape.d_out, batch.shape.d_in)
        assert batch.num_terms == SAMPLES
        assert_close(rows.a.transpose(0, 1), samples.a)
        assert_close(rows.u[0].transpose(0, 1), samples.u)
        gradients = rows.per_sample_gradients()[0]
        assert_close(gradients.transpose(0, 1), samples.gradients)
        assert_close(gradients.mean(1), case.to_matrix(layer))


@every_kind
@every_bias
def test_02_rows_times_weights_are_the_layer(kind: str, bias: bool) -> None:
    case = case_of(kind, bias)
    module, layer = case.model.get_submodule("layer"), take_inventory(case.model, []).layers["layer"]
    weights = layer.to_matrix(layer.weight, layer.bias).detach()
    assert_close(weights, case.to_matrix("layer", "data"))
    for part, parameter in zip(layer.from_matrix(weights), layer.parameters, strict=True):
        assert torch.equal(part, parameter)
    outputs = module(case.inputs).detach()[None]  # as one column
    form = layer.uses[0].kind.form(module)
    a, u = form.rows(layer.shape, case.inputs, outputs)
    assert_close(torch.einsum("goi,kgnti->kgnto", weights, a), u)


@every_kind
@every_bias
def test_02_exact_columns_give_the_expected_fisher(kind: str, bias: bool) -> None:
    case, samples = case_of(kind, bias), samples_of(kind, bias, "exact")
    (batch,) = captured(case.model, case.inputs, case.loss, fisher="exact")["layer"]
    gradients = all_rows(batch).per_sample_gradients()  # [K, G, N, d_out, d_in]
    for group in groups_of(samples):
        vectors = gradients[:, group].flatten(0, 1).flatten(1)
        assert_close(vectors.T @ vectors / SAMPLES, fisher_of(samples, group))


# -- 3: the scale of the statistics --------------------------------------------------------------------


def summed(mean_loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda logits: len(logits) * mean_loss(logits)


@pytest.mark.every_pair
@every_kind
@every_method
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_03_mean_and_sum_of_losses_give_the_same_statistics(
    kind: str, method: type[NaturalGradient], fisher: str
) -> None:
    case = case_of(kind, True)
    by_sum = measured(method, case.model, case.inputs, summed(case.loss), fisher=fisher, loss_reduction="sum")
    assert_blocks_agree(
        method,
        samples_of(kind, True, fisher),
        own_sharing(method),
        statistics(by_sum)["layer"],
    )
    by_mean = measured(method, case.model, case.inputs, case.loss, fisher=fisher, loss_reduction="mean")
    for layer in ("layer", "head"):
        for actual, expected in zip(
            statistics(by_sum)[layer].moments.values, statistics(by_mean)[layer].moments.values, strict=True
        ):
            assert_close(actual, expected)


@pytest.mark.every_pair
@every_kind
@method_and_sharing
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_03_chunks_permutations_and_micro_batches_change_nothing(
    kind: str, method: type[NaturalGradient], sharing: str, fisher: str
) -> None:
    case, settings = case_of(kind, True), {"fisher": fisher, "sharing": sharing}
    whole = statistics(measured(method, case.model, case.inputs, case.loss, **settings))["layer"]
    chunked = measured(method, case.model, case.inputs, case.loss, memory_budget=1, **settings)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))
    permuted = measured(
        method,
        case.model,
        case.inputs[order],
        lambda logits: F.cross_entropy(logits, case.labels[order]),
        **settings,
    )
    split = method.natural(case.model, lr=1e-30, momentum=0.0, damping=1e-3, **settings)
    split.zero_grad()
    for part in order.split([3, SAMPLES - 4, 1]):
        loss = F.cross_entropy(case.model(case.inputs[part]), case.labels[part])
        # The empirical Fisher needs losses that add up to the mean; the exact one does not depend on them.
        (loss * len(part) / SAMPLES if fisher == "empirical" else loss).backward()
    split.step()
    for optimizer in (chunked, permuted, split):
        other = statistics(optimizer)["layer"]
        for actual, expected in zip(other.moments.values, whole.moments.values, strict=True):
            assert_close(actual, expected)
        for group in range(len(whole.rescaling)):
            assert_close(dense_block(other, group), dense_block(whole, group))


@pytest.mark.parametrize(("loss_reduction", "terms"), [("mean", 4 * 3), ("batchmean", 4)])
@every_method
def test_03_every_position_with_a_label_is_a_term(
    method: type[NaturalGradient], loss_reduction: str, terms: int
) -> None:
    """The Fisher is divided by what the loss is: tokens (mean), or sequences (batchmean)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    inputs, labels = normal(4, 3, 2), torch.arange(12).reshape(4, 3) % 2
    optimizer = measured(
        method,
        model,
        inputs,
        lambda logits: F.cross_entropy(logits.mT, labels, reduction="sum") / terms,
        fisher="exact",
        loss_reduction=loss_reduction,
    )
    for layer in ("0", "2"):
        samples = oracle.per_column(oracle.softmax_column, model, inputs, layer)
        share = (4 / terms) ** 0.5  # the oracle divides by the 4 sequences
        scaled = oracle.Samples(share * samples.gradients, samples.a, share * samples.u)
        assert_blocks_agree(method, scaled, own_sharing(method), statistics(optimizer)[layer])


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_03_ignored_positions_count_nowhere(fisher: str, sharing: str) -> None:
    """They are dropped from A as from U, and from what both are divided by."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    inputs, labels = normal(5, 3, 2), torch.arange(15).reshape(5, 3) % 2
    kept = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    labels[~kept] = -100
    optimizer = measured(
        KFAC, model, inputs, lambda logits: F.cross_entropy(logits.mT, labels), fisher=fisher, sharing=sharing
    )
    terms = int(kept.sum())
    for layer in ("0", "2"):
        columns = []
        for column in range(6 if fisher == "exact" else 1):

            def loss(logits: Tensor, label: Tensor, column: int = column) -> Tensor:
                if fisher == "empirical":
                    return F.cross_entropy(logits.mT, label, reduction="sum")
                return oracle.softmax_column(column)(logits, label) * (label[0, column // 2] >= 0)

            columns.append(oracle.per_sample(model, loss, inputs, labels, layer))
        a = columns[0].a[:, 0]
        if sharing == "expand":
            rows_in = a[kept]
            rows_out = torch.cat([samples.u[:, 0][kept] for samples in columns])
        else:
            rows_in = torch.stack([a[n, kept[n]].mean(0) for n in range(4)])  # the last has none
            rows_out = torch.cat([samples.u[:, 0].sum(1) for samples in columns])
        expected = torch.kron(rows_out.T @ rows_out / terms, rows_in.T @ rows_in / len(rows_in))
        assert_close(dense_block(statistics(optimizer)[layer]), expected)


# -- 4: preconditioning is the damped solve ------------------------------------------------------------


@pytest.mark.every_pair
@every_kind
@every_bias
@method_and_sharing
def test_04_a_step_is_the_dense_solve(
    kind: str, bias: bool, method: type[NaturalGradient], sharing: str
) -> None:
    for damping in (1e-3, 1.0):
        case = case_of(kind, bias)
        optimizer, moved = step_of(method, case, sharing=sharing, damping=damping)
        for layer in ("layer", "head"):
            samples, gradient = samples_of(kind, bias, layer=layer), case.to_matrix(layer)
            for group in groups_of(samples):
                block = expected_block(method, samples, sharing, statistics(optimizer)[layer], group)
                assert_close(moved[layer][group], oracle.damped_solve(block, damping, gradient[group]))


@pytest.mark.every_pair
@every_kind
@every_bias
@pytest.mark.parametrize(
    ("method", "sharing"), [(method, sharing) for method in (KFAC, TKFAC) for sharing in sharings(method)]
)
def test_04_a_step_with_factored_damping_is_the_dense_solve(
    kind: str, bias: bool, method: type[NaturalGradient], sharing: str
) -> None:
    damping = 0.02
    case, samples = case_of(kind, bias), samples_of(kind, bias)
    _, moved = step_of(method, case, sharing=sharing, damping=Factored(damping))
    gradient = case.to_matrix("layer")
    for group in groups_of(samples):
        scale, inputs, outputs = expected_factors(method, samples, sharing, group)
        inputs, outputs = scale.sqrt() * inputs, scale.sqrt() * outputs
        pi = ((inputs.trace() / len(inputs)) / (outputs.trace() / len(outputs))).sqrt()
        block = torch.kron(
            outputs + damping**0.5 / pi * identity(len(outputs)),
            inputs + pi * damping**0.5 * identity(len(inputs)),
        )
        assert_close(moved["layer"][group], oracle.damped_solve(block, 0.0, gradient[group]))


@every_method
def test_04_hardly_any_damping(method: type[NaturalGradient]) -> None:
    """Below 1e-8 of the block's own size the solve loses digits: rtol 1e-8."""
    case, samples = case_of("linear", True), samples_of("linear", True)
    damping = 1e-9 * float(fisher_of(samples).norm())
    optimizer, moved = step_of(method, case, damping=damping)
    block = expected_block(method, samples, "expand", statistics(optimizer)["layer"], 0)
    expected = oracle.damped_solve(block, damping, case.to_matrix("layer")[0])
    assert_close(moved["layer"][0], expected, rtol=1e-8)


def test_04_the_first_momentum_buffer_is_the_solve_too() -> None:
    case, samples = case_of("conv2d", True), samples_of("conv2d", True)
    optimizer = TEKFAC.natural(case.model, lr=0.5, momentum=0.9, damping=0.1, fisher="empirical")
    gradient_step(optimizer, case.model, case.loss, case.inputs)
    weight = case.model.get_submodule("layer").weight
    block = expected_block(TEKFAC, samples, "exact", statistics(optimizer)["layer"], 0)
    solution = oracle.damped_solve(block, 0.1, case.to_matrix("layer")[0])
    buffer = optimizer.state[weight]["momentum_buffer"]
    assert_close(buffer, solution[:, :-1].reshape(weight.shape))
