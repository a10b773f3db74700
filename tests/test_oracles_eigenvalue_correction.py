"""Oracles 11-16: Theta is the diagonal of the true block in the basis, and the best one there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import assert_close, dense_block, measured, relative_error, sharings
from layer_kinds import (
    Case,
    RowBatch,
    as_samples,
    captured,
    case_of,
    every_bias,
    every_kind,
    fisher_of,
    groups_of,
    random_basis,
    random_rows,
    samples_of,
    step_of,
)
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC, methods
from tekfac.curvature.eigenbasis import Eigenbasis, Turn
from tekfac.curvature.factors import FactorRule, plain_expand, plain_reduce
from tekfac.curvature.precondition import precondition
from tekfac.curvature.rescaling import (
    CONTRACTIONS,
    cheapest,
    product_of_eigenvalues,
    second_moments,
    squares_by_pairs,
    squares_gradient_first,
    squares_project_first,
)
from tekfac.layers.contractions import (
    TRAFFIC,
    Sizes,
    gradient_first_cost,
    project_first_cost,
    sizes_of,
)
from tekfac.layers.rows import Rows
from tekfac.optim.natural_gradient import NaturalGradient

BUDGET = 2**20
both_fishers = pytest.mark.parametrize("fisher", ["empirical", "exact"])
corrected_and_sharing = pytest.mark.parametrize(
    ("method", "base", "sharing"),
    [(method, base, s) for method, base in ((EKFAC, KFAC), (TEKFAC, TKFAC)) for s in sharings(method)],
)


def dense_theta(fisher: Tensor, basis: Eigenbasis, group: int) -> Tensor:
    """diag(Q^T F Q) with the library's Q."""
    return oracle.theta(fisher, basis.vectors_out[group].contiguous(), basis.vectors_in[group].contiguous())


# -- 11: Theta -----------------------------------------------------------------------------------------


@pytest.mark.every_pair
@every_kind
@every_bias
@pytest.mark.parametrize(
    ("method", "sharing"), [(method, s) for method in (EKFAC, TEKFAC) for s in sharings(method)]
)
@both_fishers
def test_11_theta_is_the_diagonal_of_the_true_block(
    kind: str, bias: bool, method: type[NaturalGradient], sharing: str, fisher: str
) -> None:
    case, samples = case_of(kind, bias), samples_of(kind, bias, fisher)
    optimizer = measured(method, case.model, case.inputs, case.loss, fisher=fisher, sharing=sharing)
    curvature = optimizer.curvature["layer"]
    assert (curvature.rescaling >= 0).all()
    for group in groups_of(samples):
        block = fisher_of(samples, group)
        assert_close(curvature.rescaling[group], dense_theta(block, curvature.basis, group))
        assert_close(curvature.rescaling[group].sum(), block.trace())


@pytest.mark.every_pair
@every_kind
@every_bias
@pytest.mark.parametrize("budget", [1, BUDGET])
def test_11_theta_in_any_basis(kind: str, bias: bool, budget: int) -> None:
    case, samples = case_of(kind, bias), samples_of(kind, bias)
    batches = captured(case.model, case.inputs, case.loss)["layer"]
    shape = batches[0].shape
    basis = random_basis(shape.d_in, shape.d_out, shape.groups)
    theta = second_moments(batches, basis, budget)
    assert (theta >= 0).all()
    for group in groups_of(samples):
        block = fisher_of(samples, group)
        assert_close(theta[group], dense_theta(block, basis, group))
        assert_close(theta[group].sum(), block.trace())


@pytest.mark.parametrize("positions", [1, 2, 7])
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_11_all_contractions_agree(positions: int, columns: int, groups: int) -> None:
    rows = random_rows(columns, groups, samples=6, positions=positions)
    samples, basis = as_samples(rows), random_basis(4, 3, groups)
    expected = torch.stack([dense_theta(fisher_of(samples, g), basis, g) for g in range(groups)])
    for contraction in CONTRACTIONS:
        assert_close(contraction.squares(rows, basis) / 6, expected)


@pytest.mark.parametrize(
    ("positions", "d_in", "d_out", "cheaper"),
    [(1024, 576, 64, "gradient"), (256, 1152, 128, "gradient"), (64, 2304, 256, "project")],
)
def test_11_costs_are_those_of_the_reference(positions: int, d_in: int, d_out: int, cheaper: str) -> None:
    """But for what it takes to write down the gradients, which both do."""
    project = positions * d_in**2 + positions * d_out**2 + positions * d_in * d_out
    gradient = positions * d_in * d_out + d_in * d_out * (d_in + d_out)
    sizes = Sizes(positions, d_in, d_out, 1, d_in, d_out)
    written = sizes.traffic * d_in * d_out
    assert sizes.traffic == TRAFFIC
    assert project_first_cost(sizes) == project + written
    assert gradient_first_cost(sizes) == gradient + written
    assert cheaper == ("project" if project < gradient else "gradient")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (Sizes(1, 65, 10, 1, 65, 10), squares_by_pairs),
        (Sizes(4, 4608, 512, 1, 576, 512), squares_by_pairs),
        (Sizes(16, 4608, 512, 1, 576, 512), squares_project_first),
        (Sizes(16, 4608, 512, 10, 576, 512), squares_by_pairs),  # whose cost knows no columns
        (Sizes(1024, 144, 16, 1, 144, 16), squares_gradient_first),
    ],
)
def test_11_the_cheapest_contraction_is_taken(
    sizes: Sizes, expected: Callable[[Rows, Eigenbasis], Tensor]
) -> None:
    assert cheapest(sizes).squares is expected


@pytest.mark.parametrize("positions", [1, 2, 7, 40])
def test_11_theta_is_taken_by_the_cheapest_contraction(positions: int) -> None:
    rows, basis = random_rows(positions=positions), random_basis(4, 3)
    theta = second_moments([RowBatch(rows)], basis, BUDGET)
    assert torch.equal(theta, cheapest(sizes_of(rows)).squares(rows, basis) / rows.a.shape[1])


# -- 12: Pythagoras ------------------------------------------------------------------------------------


@pytest.mark.every_pair
@every_kind
@every_bias
@corrected_and_sharing
def test_12_correction_takes_away_exactly_the_diagonal_error(
    kind: str, bias: bool, method: type[NaturalGradient], base: type[NaturalGradient], sharing: str
) -> None:
    case, samples = case_of(kind, bias), samples_of(kind, bias)
    settings = {"fisher": "empirical", "sharing": sharing}
    corrected = measured(method, case.model, case.inputs, case.loss, **settings).curvature["layer"]
    plain = measured(base, case.model, case.inputs, case.loss, **settings).curvature["layer"]
    generator = torch.Generator().manual_seed(0)
    for group in groups_of(samples):
        block, theta = fisher_of(samples, group), corrected.rescaling[group]
        least = (block - dense_block(corrected, group)).square().sum()
        assert_close(least, block.square().sum() - theta.square().sum())
        error = (block - dense_block(plain, group)).square().sum()
        product = product_of_eigenvalues(corrected.basis)[group]
        assert_close(error - least, (product - theta).square().sum())
        assert least <= error
        diagonal = torch.randn(theta.shape, generator=generator, dtype=torch.float64)
        other = dense_block(
            corrected, group, corrected.rescaling.index_copy(0, torch.tensor([group]), diagonal[None])
        )
        assert_close((block - other).square().sum(), least + (diagonal - theta).square().sum())


# -- 13: the basis is all that tells EKFAC and TEKFAC apart --------------------------------------------


@pytest.mark.every_pair
@every_kind
@every_bias
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_13_tekfac_with_plain_factors_is_ekfac(kind: str, bias: bool, sharing: str) -> None:
    """A and U in the place of N_Phi and N_Psi, normalised as those are."""

    class Overwritten(NaturalGradient):
        method = replace(
            methods.TEKFAC,
            factors=FactorRule(
                "overwritten", {"expand": plain_expand, "reduce": plain_reduce}, trace_restricted=True
            ),
        )

    overwritten, ekfac = case_of(kind, bias), case_of(kind, bias)
    settings = {"sharing": sharing, "damping": 0.05}
    _, expected = step_of(EKFAC, ekfac, **settings)
    _, actual = step_of(Overwritten, overwritten, **settings)
    assert_close(actual["layer"], expected["layer"])


# -- 14: a change of basis -----------------------------------------------------------------------------


@every_kind
@every_bias
def test_14_rotated_theta_is_the_held_approximation_in_the_new_basis(kind: str, bias: bool) -> None:
    case = case_of(kind, bias)
    optimizer = measured(TEKFAC, case.model, case.inputs, case.loss, fisher="empirical")
    held = optimizer.curvature["layer"]
    groups, d_out, d_in = held.rescaling.shape
    new = random_basis(d_in, d_out, groups)
    turned = Turn.of(held.basis, new).diagonal(held.rescaling)
    assert (turned >= 0).all()
    assert_close(turned.sum((1, 2)), held.rescaling.sum((1, 2)))
    for group in range(groups):
        assert_close(turned[group], dense_theta(dense_block(held, group), new, group))


def test_14_permuted_and_flipped_eigenvectors_change_nothing() -> None:
    case = case_of("conv1d", True)
    optimizer = measured(TEKFAC, case.model, case.inputs, case.loss, fisher="empirical")
    held, gradient, damping = optimizer.curvature["layer"], case.to_matrix("layer"), 0.01
    generator = torch.Generator().manual_seed(0)

    def shuffled(q: Tensor) -> Tensor:
        size = q.shape[-1]
        signs = 1.0 - 2.0 * torch.randint(2, (size,), generator=generator, dtype=torch.float64)
        return q[..., torch.randperm(size, generator=generator)] * signs

    new = held.basis._replace(
        vectors_in=shuffled(held.basis.vectors_in), vectors_out=shuffled(held.basis.vectors_out)
    )
    turned = Turn.of(held.basis, new).diagonal(held.rescaling)
    assert relative_error(turned, held.rescaling) > 0.1  # the table itself is shuffled
    assert_close(
        precondition(gradient, new, turned + damping),
        precondition(gradient, held.basis, held.rescaling + damping),
    )


# -- 15: dead inputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dead"), [("linear", (slice(None), 1)), ("sequence", (..., 2)), ("conv2d", (slice(None), 0))]
)
@every_bias
@pytest.mark.parametrize("method", [TEKFAC, EKFAC])
def test_15_dead_inputs_have_no_second_moment(
    kind: str, dead: tuple[object, ...], bias: bool, method: type[NaturalGradient]
) -> None:
    case = case_of(kind, bias)
    case.inputs[dead] = 0.0
    curvature = measured(method, case.model, case.inputs, case.loss, fisher="empirical").curvature["layer"]
    number = 6 if kind == "conv2d" else 1  # a whole channel of patches
    values, size = curvature.basis.values_in[0], curvature.basis.values_in.max()
    assert (values[:number] < 1e-14 * size).all()
    assert values[number] > 1e-8 * size
    theta = curvature.rescaling[0]
    assert (theta[:, :number] < 1e-14 * theta.max()).all()
    assert (theta[:, number:].sum(0) > 0).all()


# -- 16: all label draws -------------------------------------------------------------------------------


def tiny_case(bias: bool) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(2, 3, bias=bias), nn.Tanh(), nn.Linear(3, 3, bias=bias)).double()
        return Case(model, torch.randn(3, 2, dtype=torch.float64), torch.tensor([0, 1, 2]))


@every_bias
@pytest.mark.parametrize("layer", ["0", "2"])
def test_16_squared_gradient_is_unbiased_over_all_label_draws(bias: bool, layer: str) -> None:
    """E_y[B (Q^T g Q)^2] and E_y[Theta of drawn labels] are Theta of the exact Fisher."""
    case = tiny_case(bias)
    curvature = measured(TEKFAC, case.model, case.inputs, case.loss, fisher="exact").curvature[layer]
    basis = curvature.basis
    with torch.no_grad():
        probabilities = case.model(case.inputs).softmax(-1)
    squares, drawn_theta = torch.zeros_like(curvature.rescaling), torch.zeros_like(curvature.rescaling)
    for draw in itertools.product(range(3), repeat=3):
        labels = torch.tensor(draw)
        weight = math.prod(float(probabilities[n, label]) for n, label in enumerate(draw))
        batches = captured(
            case.model,
            case.inputs,
            lambda logits, labels=labels: F.cross_entropy(logits, labels),
            fisher="sampled",
            likelihood=lambda logits, _, labels=labels: F.cross_entropy(logits, labels, reduction="none"),
        )[layer]
        squares += weight * 3 * basis.project(case.to_matrix(layer)).square()
        drawn_theta += weight * second_moments(batches, basis, BUDGET)
    assert_close(squares, curvature.rescaling)
    assert_close(drawn_theta, curvature.rescaling)
