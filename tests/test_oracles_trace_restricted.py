"""Oracles 5-10: the trace-restricted factors are the normalised partial traces of the block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
import tekfac.curvature.factors
from dense import assert_close, dense_block, dense_factors, measured, relative_error, statistics
from layer_kinds import (
    Case,
    RowBatch,
    all_rows,
    as_samples,
    captured,
    case_of,
    every_bias,
    every_kind,
    fisher_of,
    groups_of,
    make_case,
    random_basis,
    random_rows,
    samples_of,
)
from tekfac import KFAC, TEKFAC, TKFAC
from tekfac.curvature.factors import (
    PLAIN,
    TRACE_RESTRICTED,
    KroneckerFactors,
    MomentSums,
    exact_by_gradients,
    exact_by_grams,
    restricted_exact,
)
from tekfac.curvature.rescaling import second_moments
from tekfac.layers.contractions import Sizes, gradient_cost, gram_cost
from tekfac.layers.rows import Rows

BUDGET = 2**20
SHARINGS = ("exact", "expand", "reduce")
every_sharing = pytest.mark.parametrize("sharing", SHARINGS)
both_fishers = pytest.mark.parametrize("fisher", ["empirical", "exact"])


def trace_of_sharing(samples: oracle.Samples, group: int, sharing: str) -> Tensor:
    """The trace that the option keeps, by the norms of its own rows; no block is formed."""
    a, u = samples.a[:, group], samples.u[:, group]
    if sharing == "exact":
        return samples.gradients[:, group].square().sum((1, 2)).mean()
    if sharing == "expand":
        return (a.square().sum(-1) * u.square().sum(-1)).sum(1).mean()
    return (a.mean(1).square().sum(-1) * u.sum(1).square().sum(-1)).mean()


# -- 5: traces -----------------------------------------------------------------------------------------


@pytest.mark.every_pair
@every_kind
@every_bias
@every_sharing
@both_fishers
def test_05_the_trace_of_the_block_is_kept(kind: str, bias: bool, sharing: str, fisher: str) -> None:
    case, samples = case_of(kind, bias), samples_of(kind, bias, fisher)
    optimizer = measured(TKFAC, case.model, case.inputs, case.loss, fisher=fisher, sharing=sharing)
    curvature = statistics(optimizer)["layer"]
    for group in groups_of(samples):
        expected = trace_of_sharing(samples, group, sharing)
        phi, psi, sigma = dense_factors(curvature, group)
        assert_close(sigma, expected)
        assert_close(phi.trace(), 1.0)
        assert_close(psi.trace(), 1.0)
        assert_close(dense_block(curvature, group).trace(), expected)
        block = oracle.shared_fisher(samples.a[:, group], samples.u[:, group], sharing)
        assert_close(sigma, block.trace())
        if sharing == "exact":
            assert_close(sigma, fisher_of(samples, group).trace())


def test_05_the_choice_of_sharing_is_not_cosmetic() -> None:
    case = case_of("conv2d", True)
    exact, expand, reduced = (
        float(
            measured(TKFAC, case.model, case.inputs, case.loss, fisher="empirical", sharing=sharing)
            .curvature["layer"]
            .basis.scale
        )
        for sharing in SHARINGS
    )
    assert abs(expand / exact - 1) > 0.01
    assert abs(reduced / exact - 1) > 0.01


# -- 6: partial traces ---------------------------------------------------------------------------------


@pytest.mark.every_pair
@every_kind
@every_bias
@every_sharing
@both_fishers
def test_06_moments_are_partial_traces(kind: str, bias: bool, sharing: str, fisher: str) -> None:
    case, samples = case_of(kind, bias), samples_of(kind, bias, fisher)
    optimizer = measured(TKFAC, case.model, case.inputs, case.loss, fisher=fisher, sharing=sharing)
    moments = statistics(optimizer)["layer"].moments.values
    d_out, d_in = samples.gradients.shape[2:]
    for group in groups_of(samples):
        block = oracle.shared_fisher(samples.a[:, group], samples.u[:, group], sharing)
        view = block.reshape(d_out, d_in, d_out, d_in)
        assert_close(moments.input[group], torch.einsum("kikj->ij", view))
        assert_close(moments.output[group], torch.einsum("ikjk->ij", view))
        assert_close(moments.scale[group], block.trace())
        if sharing == "exact":
            gradients = samples.gradients[:, group]
            assert_close(moments.input[group], (gradients.mT @ gradients).mean(0))
            assert_close(moments.output[group], (gradients @ gradients.mT).mean(0))


@pytest.mark.parametrize("positions", [1, 2, 7])
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_06_gram_way_is_gradient_way(positions: int, columns: int, groups: int) -> None:
    rows = random_rows(columns, groups, samples=5, positions=positions)
    samples = as_samples(rows)
    for contraction in (exact_by_grams, exact_by_gradients, restricted_exact):
        sums = contraction(rows)
        assert sums.input_count is None  # divided by the number of terms, as the output moment
        for group in range(groups):
            n_phi, n_psi = oracle.partial_traces(fisher_of(samples, group), 3, 4)
            assert_close(sums.input[group] / 5, n_phi)
            assert_close(sums.output[group] / 5, n_psi)


@pytest.mark.parametrize(
    ("positions", "d_in", "d_out", "cheaper"),
    [
        (1024, 576, 64, "gradients"),
        (256, 1152, 128, "gradients"),
        (4, 4608, 512, "grams"),
        (1, 5, 3, "grams"),
    ],
)
def test_06_costs_are_those_of_the_reference(positions: int, d_in: int, d_out: int, cheaper: str) -> None:
    grams = positions * (d_in**2 + d_out**2) + 2 * positions**2 * (d_in + d_out)
    gradients = positions * d_in * d_out + d_in**2 * d_out + d_in * d_out**2
    sizes = Sizes(positions, d_in, d_out, 1, d_in, d_out)
    assert gram_cost(sizes) == grams
    assert gradient_cost(sizes) == gradients
    assert cheaper == ("grams" if grams < gradients else "gradients")


@pytest.mark.parametrize(("positions", "cheaper"), [(2, "exact_by_grams"), (40, "exact_by_gradients")])
def test_06_the_cheaper_way_is_taken(monkeypatch: pytest.MonkeyPatch, positions: int, cheaper: str) -> None:
    taken = []
    for name in ("exact_by_grams", "exact_by_gradients"):

        def contraction(rows: Rows, name: str = name) -> MomentSums:
            taken.append(name)
            return exact_by_gradients(rows)

        monkeypatch.setattr(tekfac.curvature.factors, name, contraction)
    restricted_exact(random_rows(positions=positions))
    assert taken == [cheaper]


def test_06_a_layer_without_gradient_has_flat_factors() -> None:
    rows = random_rows()
    moments = TRACE_RESTRICTED.measure([RowBatch(Rows(rows.a, 0 * rows.u))], "exact", BUDGET)
    factors = TRACE_RESTRICTED.read(moments)
    expected = oracle.tkfac(rows.a[0], 0 * rows.u[0, 0])
    assert factors.scale.item() == 0
    assert_close(factors.input[0], expected.inputs)
    assert_close(factors.output[0], expected.outputs)


# -- 7: KFAC's trace -----------------------------------------------------------------------------------


@every_bias
@pytest.mark.parametrize("layer", ["layer", "head"])
def test_07_trace_of_kfac_is_off_by_a_covariance(bias: bool, layer: str) -> None:
    case, samples = case_of("linear", bias), samples_of("linear", bias, layer=layer)
    optimizer = measured(KFAC, case.model, case.inputs, case.loss, fisher="empirical")
    a2, u2 = samples.a.square().sum((1, 2, 3)), samples.u.square().sum((1, 2, 3))
    covariance = ((a2 - a2.mean()) * (u2 - u2.mean())).mean()
    assert covariance.abs() > 1e-6 * fisher_of(samples).trace()
    expected = fisher_of(samples).trace() - covariance
    assert_close(dense_block(statistics(optimizer)[layer]).trace(), expected)


# -- 8: scaling ----------------------------------------------------------------------------------------


@every_sharing
@pytest.mark.parametrize("positions", [1, 3])
def test_08_scaling_moves_sigma_alone(sharing: str, positions: int) -> None:
    rows = random_rows(columns=2, groups=2, positions=positions)
    alpha, beta = 1.7, 0.3

    def factors(a: Tensor, u: Tensor) -> tekfac.curvature.factors.KroneckerFactors:
        return TRACE_RESTRICTED.read(TRACE_RESTRICTED.measure([RowBatch(Rows(a, u))], sharing, BUDGET))

    plain, scaled = factors(rows.a, rows.u), factors(alpha * rows.a, beta * rows.u)
    assert_close(scaled.scale, (alpha * beta) ** 2 * plain.scale)
    assert_close(scaled.input, plain.input)
    assert_close(scaled.output, plain.output)


@every_sharing
@pytest.mark.parametrize("kind", ["linear", "sequence", "conv1d", "conv2d", "conv3d", "depthwise"])
def test_08_scaling_a_network(kind: str, sharing: str) -> None:
    """Inputs times alpha under weights divided by alpha, and the loss times beta; no bias."""
    case, alpha, beta = case_of(kind, False), 1.7, 0.3
    settings = {"fisher": "empirical", "sharing": sharing}
    plain = statistics(measured(TKFAC, case.model, case.inputs, case.loss, **settings))["layer"]
    with torch.no_grad():
        case.model.get_submodule("layer").weight.div_(alpha)
    scaled = measured(
        TKFAC, case.model, alpha * case.inputs, lambda logits: beta * case.loss(logits), **settings
    ).curvature["layer"]
    for group in range(len(plain.rescaling)):
        phi, psi, sigma = dense_factors(plain, group)
        phi_scaled, psi_scaled, sigma_scaled = dense_factors(scaled, group)
        assert_close(sigma_scaled, (alpha * beta) ** 2 * sigma)
        assert_close(phi_scaled, phi)
        assert_close(psi_scaled, psi)


# -- 9: margins ----------------------------------------------------------------------------------------


@pytest.mark.every_pair
@every_kind
@every_bias
@both_fishers
def test_09_margins_of_theta(kind: str, bias: bool, fisher: str) -> None:
    case = case_of(kind, bias)
    optimizer = measured(TEKFAC, case.model, case.inputs, case.loss, fisher=fisher, sharing="exact")
    for curvature in statistics(optimizer).values():
        theta, basis = curvature.rescaling, curvature.basis
        assert_close(theta.sum(1), basis.scale[:, None] * basis.values_in)
        assert_close(theta.sum(2), basis.scale[:, None] * basis.values_out)
        # TKFAC's diagonal is the independent table with these margins
        tkfac = basis.scale[:, None, None] * basis.values_out[:, :, None] * basis.values_in[:, None, :]
        independent = theta.sum(2)[:, :, None] * theta.sum(1)[:, None, :]
        assert_close(tkfac, independent / theta.sum((1, 2))[:, None, None])


@every_kind
@every_bias
def test_09_margins_in_a_stale_basis(kind: str, bias: bool) -> None:
    case = case_of(kind, bias)
    batches = captured(case.model, case.inputs, case.loss)["layer"]
    shape = batches[0].shape
    basis = random_basis(shape.d_in, shape.d_out, shape.groups)
    theta = second_moments(batches, basis, BUDGET)
    moments = TRACE_RESTRICTED.measure(batches, "exact", BUDGET)
    q_in, q_out = basis.vectors_in, basis.vectors_out
    assert_close(theta.sum(1), (q_in.mT @ moments.input @ q_in).diagonal(dim1=1, dim2=2))
    assert_close(theta.sum(2), (q_out.mT @ moments.output @ q_out).diagonal(dim1=1, dim2=2))


# -- 10: the nearest product ---------------------------------------------------------------------------


def full_rank_case(positions: int) -> Case:
    shape = (2,) if positions == 1 else (positions, 2)
    return make_case(nn.Linear(2, 2), shape, samples=40, seed=positions)


@pytest.mark.parametrize("positions", [1, 3])
def test_10_no_product_has_a_smaller_divergence(positions: int) -> None:
    case = full_rank_case(positions)
    optimizer = measured(TKFAC, case.model, case.inputs, case.loss, fisher="empirical")
    phi, psi, sigma = dense_factors(statistics(optimizer)["layer"])
    samples = oracle.per_sample(case.model, nn.functional.cross_entropy, case.inputs, case.labels, "layer")
    fisher = fisher_of(samples)
    rho = fisher / fisher.trace()
    least = oracle.von_neumann_divergence(rho, torch.kron(psi, phi))
    generator = torch.Generator().manual_seed(0)
    for distance in (1e-4, 1e-2, 1.0):
        for _ in range(10):
            x, y = (torch.randn(n, n, generator=generator, dtype=torch.float64) for n in (len(phi), len(psi)))
            inputs, outputs = phi + distance * x @ x.T, psi + distance * y @ y.T
            other = torch.kron(outputs / outputs.trace(), inputs / inputs.trace())
            assert least < oracle.von_neumann_divergence(rho, other)

    def entropy(matrix: Tensor) -> Tensor:
        values = torch.linalg.eigvalsh(matrix)
        return -(values * values.log()).sum()

    assert_close(least, entropy(phi) + entropy(psi) - entropy(rho))  # the mutual information
    gap = fisher - dense_block(statistics(optimizer)["layer"])
    assert gap.norm() <= torch.linalg.eigvalsh(gap).abs().sum() <= sigma * (2 * least).sqrt()  # Pinsker


def test_10_kfac_normalised_has_a_larger_divergence() -> None:
    """The inequality is strict for KFAC's own factors, so it can fail."""
    case = full_rank_case(3)
    batches = captured(case.model, case.inputs, case.loss)["layer"]
    rho = fisher_of(as_samples(all_rows(batches[0])))
    rho = rho / rho.trace()

    def divergence(moments: KroneckerFactors) -> float:
        factors = TRACE_RESTRICTED.read(moments)  # to unit trace
        block = torch.kron(factors.output[0], factors.input[0])
        return float(oracle.von_neumann_divergence(rho, block))

    restricted = divergence(TRACE_RESTRICTED.measure(batches, "exact", BUDGET))
    plain = divergence(PLAIN.measure(batches, "expand", BUDGET))
    assert restricted < plain
    assert relative_error(torch.tensor(plain), torch.tensor(restricted)) > 1e-3
