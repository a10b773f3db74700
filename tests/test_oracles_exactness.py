"""Oracles 17-24: where the approximations are exact, where they must not be, and what is no theorem."""

from __future__ import annotations

import itertools
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
    measured,
    normal,
    relative_error,
    seeded,
    sharings,
)
from layer_kinds import (
    KINDS,
    Pool,
    RowBatch,
    all_rows,
    as_samples,
    assert_blocks_agree,
    captured,
    case_of,
    every_bias,
    fisher_of,
    groups_of,
    make_case,
    random_rows,
    samples_of,
)
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC
from tekfac.curvature.layer_curvature import Due, LayerCurvature, Recipe, refreshed
from tekfac.layers.rows import Rows
from tekfac.likelihoods import Categorical, Gaussian
from tekfac.optim.natural_gradient import NaturalGradient


def curvature_of(method: type[NaturalGradient], rows: Rows, sharing: str | None = None) -> LayerCurvature:
    """What one batch of rows gives, without a network around it."""
    recipe = Recipe(
        factors=method.method.factors,
        rescaling=method.method.rescaling,
        sharing=sharing or sharings(method)[0],
        factor_decay=0.95,
        rescaling_decay=0.95,
        averaging="moments",
        memory_budget=2**20,
    )
    return refreshed(None, [RowBatch(rows)], Due(factors=True, basis=True, rescaling=True), recipe)


def block_of(method: type[NaturalGradient], rows: Rows, sharing: str | None = None) -> Tensor:
    return dense_block(curvature_of(method, rows, sharing))


# -- 17: one sample ------------------------------------------------------------------------------------


@pytest.mark.every_pair
@every_method
@every_bias
@pytest.mark.parametrize(
    "build",
    [
        lambda bias: (nn.Linear(4, 3, bias=bias), (4,)),
        lambda bias: (nn.Conv1d(2, 3, 3, bias=bias), (2, 3)),
        lambda bias: (nn.Conv2d(2, 3, 2, bias=bias), (2, 2, 2)),
        lambda bias: (nn.Conv3d(1, 2, 2, bias=bias), (1, 2, 2, 2)),
        lambda bias: (nn.Conv2d(4, 4, 2, groups=2, bias=bias), (4, 2, 2)),
        lambda bias: (nn.Conv2d(3, 6, (2, 1), groups=3, bias=bias), (3, 2, 1)),
    ],
    ids=["linear", "conv1d", "conv2d", "conv3d", "grouped", "depthwise"],
)
def test_17_one_sample_at_one_position_is_exact(
    method: type[NaturalGradient],
    bias: bool,
    build: Callable[[bool], tuple[oracle.Layer, tuple[int, ...]]],
) -> None:
    case = make_case(*build(bias), samples=1, seed=1)
    for sharing in sharings(method):
        optimizer = measured(method, case.model, case.inputs, case.loss, fisher="empirical", sharing=sharing)
        for layer in ("layer", "head"):
            samples = oracle.per_sample(case.model, F.cross_entropy, case.inputs, case.labels, layer)
            for group in groups_of(samples):
                assert_close(dense_block(optimizer.curvature[layer], group), fisher_of(samples, group))


# -- 18: exactly Kronecker -----------------------------------------------------------------------------


@every_method
def test_18_constant_inputs_of_a_network(method: type[NaturalGradient]) -> None:
    case = case_of("linear", True)
    inputs = case.inputs[:1].expand_as(case.inputs).contiguous()
    optimizer = measured(method, case.model, inputs, case.loss, fisher="empirical")
    for layer in ("layer", "head"):  # the same a, but other labels, hence other u
        samples = oracle.per_sample(case.model, F.cross_entropy, inputs, case.labels, layer)
        assert relative_error(samples.u[:1].expand_as(samples.u), samples.u) > 0.1
        assert_close(dense_block(optimizer.curvature[layer]), fisher_of(samples))


@every_method
@pytest.mark.parametrize("constant", ["a", "u", "both lists, every pair"])
def test_18_constant_or_paired_rows(method: type[NaturalGradient], constant: str) -> None:
    rows = random_rows()
    a, u = rows.a, rows.u
    if constant == "a":
        a = a[:, :1].expand_as(a)
    elif constant == "u":
        u = u[:, :, :1].expand_as(u)
    else:
        pairs = list(itertools.product(range(9), range(9)))
        a, u = a[:, [i for i, _ in pairs]], u[:, :, [j for _, j in pairs]]
    rows = Rows(a, u)
    assert_close(block_of(method, rows), fisher_of(as_samples(rows)))


def test_18_constant_norms_make_kfac_and_tkfac_equal_but_not_exact() -> None:
    rows = random_rows()
    rows = Rows(rows.a / rows.a.norm(dim=-1, keepdim=True), rows.u / rows.u.norm(dim=-1, keepdim=True))
    assert_close(block_of(TKFAC, rows), block_of(KFAC, rows))
    assert relative_error(block_of(TKFAC, rows), fisher_of(as_samples(rows))) > 0.01
    varied = random_rows()
    assert relative_error(block_of(TKFAC, varied), block_of(KFAC, varied)) > 0.01


@every_method
@pytest.mark.parametrize("positions", [1, 3])
def test_18_any_kronecker_block_is_found(method: type[NaturalGradient], positions: int) -> None:
    """Columns of a square root of Phi as samples, of Psi as back-propagated columns."""
    roots_in, roots_out = normal(4, 4), normal(3, 3, seed=1)
    a = roots_in.T[None, :, None, :].expand(1, 4, positions, 4)  # the same at every position
    u = roots_out.T[:, None, None, None, :].expand(3, 1, 4, 1, 3)
    shares = torch.tensor([1.0] if positions == 1 else [0.2, 0.7, 0.1], dtype=torch.float64)
    u = u * shares[:, None]  # that sum to one over the positions
    sharing = "reduce" if method in (KFAC, EKFAC) else "exact"
    block = torch.kron(roots_out @ roots_out.T, roots_in @ roots_in.T) / 4
    rows = Rows(a, u)
    assert_close(block_of(method, rows, sharing), block)
    if positions > 1 and method in (KFAC, TKFAC):
        assert relative_error(block_of(method, rows, "expand"), block) > 0.1


# -- 19, 20: deep linear networks ----------------------------------------------------------------------


def gauss_newton(
    method: type[NaturalGradient], model: nn.Module, inputs: Tensor, sharing: str
) -> NaturalGradient:
    """The exact Fisher of 1/2 |f - y|^2, summed over positions, mean over samples."""
    with torch.no_grad():
        targets = normal(*model(inputs).shape, seed=9)
    return measured(
        method,
        model,
        inputs,
        lambda f: 0.5 * (f - targets).square().sum() / len(f),
        fisher="exact",
        likelihood="gaussian",
        loss_reduction="batchmean",
        sharing=sharing,
    )


def ggn_block(model: nn.Module, inputs: Tensor, layer: str) -> Tensor:
    return fisher_of(oracle.per_column(oracle.gaussian_column, model, inputs, layer))


LINEAR_NETWORKS: dict[str, Callable[[bool], tuple[nn.Module, tuple[int, ...]]]] = {
    "linear": lambda bias: (
        nn.Sequential(*(nn.Linear(*sizes, bias=bias) for sizes in ((3, 4), (4, 3), (3, 2)))),
        (3, 3),
    ),
    "1x1 convolution": lambda bias: (
        nn.Sequential(*(nn.Conv2d(*sizes, 1, bias=bias) for sizes in ((2, 3), (3, 4), (4, 2)))),
        (2, 2, 2),
    ),
}


@pytest.mark.every_pair
@pytest.mark.parametrize("network", LINEAR_NETWORKS)
@every_bias
@pytest.mark.parametrize(
    ("method", "sharing"), [(KFAC, "expand"), (EKFAC, "expand"), (TKFAC, "exact"), (TEKFAC, "exact")]
)
def test_19_deep_linear_network_with_positions_is_exact(
    network: str, bias: bool, method: type[NaturalGradient], sharing: str
) -> None:
    model, shape = LINEAR_NETWORKS[network](bias)
    model = seeded(lambda: model.apply(lambda m: getattr(m, "reset_parameters", lambda: None)()))
    inputs = normal(5, *shape)
    optimizer = gauss_newton(method, model, inputs, sharing)
    for layer, curvature in optimizer.curvature.items():
        assert_close(dense_block(curvature), ggn_block(model, inputs, layer))
    assert len(optimizer.curvature) == 3


@pytest.mark.every_pair
@every_bias
@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("place", [2, 3], ids=["pool in the middle", "pool at the end"])
@pytest.mark.parametrize(
    ("method", "sharing"), [(KFAC, "reduce"), (EKFAC, "reduce"), (TKFAC, "exact"), (TEKFAC, "exact")]
)
def test_20_deep_linear_network_with_pooling_is_exact(
    bias: bool, how: str, place: int, method: type[NaturalGradient], sharing: str
) -> None:
    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(*sizes, bias=bias) for sizes in ((3, 4), (4, 3), (3, 2))]
        layers.insert(place, Pool(how))
        return nn.Sequential(*layers)

    model, inputs = seeded(build), normal(5, 3, 3)
    optimizer = gauss_newton(method, model, inputs, sharing)
    assert len(optimizer.curvature) == 3
    for layer, curvature in optimizer.curvature.items():
        assert_close(dense_block(curvature), ggn_block(model, inputs, layer))
    if method is KFAC:  # expand must differ where there are positions: a slip by T would show
        expand = gauss_newton(KFAC, model, inputs, "expand")
        for layer, curvature in expand.curvature.items():
            error = relative_error(dense_block(curvature), ggn_block(model, inputs, layer))
            assert error > 0.05 if int(layer) < place else error < 1e-10


@every_bias
def test_20_last_convolution_with_sum_pool(bias: bool) -> None:
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.ReLU(inplace=True), nn.Conv2d(2, 3, 2, bias=bias), Pool("sum", True)
        )
    )
    inputs = normal(4, 1, 4, 4)
    expected = ggn_block(model, inputs, "2")
    for method, sharing in ((KFAC, "reduce"), (TKFAC, "exact"), (TKFAC, "reduce")):
        optimizer = gauss_newton(method, model, inputs, sharing)
        assert_close(dense_block(optimizer.curvature["2"]), expected)
    expand = gauss_newton(KFAC, model, inputs, "expand")
    assert relative_error(dense_block(expand.curvature["2"]), expected) > 0.05


# -- 21: other forms of KFAC ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "linear"])
@every_bias
def test_21_kfac_in_its_other_forms(kind: str, bias: bool) -> None:
    case, samples = case_of(kind, bias), samples_of(kind, bias)
    positions = samples.a.shape[2]
    for sharing in ("expand", "reduce"):
        optimizer = measured(KFAC, case.model, case.inputs, case.loss, fisher="empirical", sharing=sharing)
        for group in groups_of(samples):
            a, u = samples.a[:, group], samples.u[:, group]
            if sharing == "expand":  # T times (mean, mean)
                inputs, outputs = a.flatten(0, 1), u.flatten(0, 1) * positions**0.5
            else:  # summed inputs, mean gradients
                inputs, outputs = a.sum(1), u.mean(1)
            expected = torch.kron(outputs.T @ outputs / len(outputs), inputs.T @ inputs / len(inputs))
            assert_close(dense_block(optimizer.curvature["layer"], group), expected)


# -- 22: one sample at several positions ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sequence", "conv1d", "conv2d", "conv3d", "depthwise"])
@every_bias
def test_22_error_of_tkfac_for_one_sample(kind: str, bias: bool) -> None:
    case = make_case(*KINDS[kind](bias), samples=1, seed=2)
    optimizer = measured(TKFAC, case.model, case.inputs, case.loss, fisher="empirical")
    samples = oracle.per_sample(case.model, F.cross_entropy, case.inputs, case.labels, "layer")
    for group in groups_of(samples):
        singular = torch.linalg.svdvals(samples.gradients[0, group])
        s2, s4, s6 = (singular.pow(power).sum() for power in (2, 4, 6))
        gap = fisher_of(samples, group) - dense_block(optimizer.curvature["layer"], group)
        assert_close(gap.square().sum(), s2**2 - 2 * s6 / s2 + (s4 / s2) ** 2)


# -- 23: softmax ---------------------------------------------------------------------------------------


def test_23_columns_of_the_output_fisher() -> None:
    logits = normal(4, 5)
    p = logits.softmax(-1)
    prediction = Categorical().predict(logits, gradient=p - F.one_hot(torch.arange(4), 5))
    columns = torch.stack(list(prediction.columns()))  # [K, N, C]
    for n in range(4):
        square_root = torch.diag(p[n].sqrt()) - torch.outer(p[n], p[n].sqrt())
        assert_close(columns[:, n].T @ columns[:, n], square_root @ square_root.T)
        assert_close(columns[:, n].T @ columns[:, n], torch.diag(p[n]) - torch.outer(p[n], p[n]))
        by_label = [p[n, y] * torch.outer(p[n] - e, p[n] - e) for y, e in enumerate(torch.eye(5).double())]
        assert_close(columns[:, n].T @ columns[:, n], torch.stack(by_label).sum(0))
        assert_close(columns[:, n].square().sum(), 1 - p[n].square().sum())
    drawn = prediction.sample(torch.Generator().manual_seed(0))
    assert_close((p - drawn).sum(-1), torch.ones(4).double())  # p minus a label
    assert_close((p - drawn).amax(-1), torch.ones(4).double())


def test_23_columns_of_a_gaussian() -> None:
    outputs = normal(3, 2)
    prediction = Gaussian(variance=0.25).predict(outputs, gradient=outputs)
    columns = torch.stack(list(prediction.columns()))
    for n in range(3):
        assert_close(columns[:, n].T @ columns[:, n], 4 * torch.eye(2).double())


@pytest.mark.every_pair
@pytest.mark.parametrize("kind", KINDS)
@every_bias
@pytest.mark.parametrize(
    ("method", "sharing"), [(method, sharing) for method in METHODS for sharing in sharings(method)]
)
def test_23_blocks_of_the_exact_fisher(
    kind: str, bias: bool, method: type[NaturalGradient], sharing: str
) -> None:
    """All columns at once, through the network, against one label at a time."""
    case = case_of(kind, bias)
    optimizer = measured(method, case.model, case.inputs, case.loss, fisher="exact", sharing=sharing)
    for layer in ("layer", "head"):
        assert_blocks_agree(method, samples_of(kind, bias, "exact", layer), sharing, optimizer.curvature[layer])


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_23_trace_of_the_logits_layer(kind: str) -> None:
    case = case_of(kind, True)
    optimizer = measured(TKFAC, case.model, case.inputs, case.loss, fisher="exact")
    with torch.no_grad():
        p = case.model(case.inputs).softmax(-1)
        features = case.model.get_submodule("activation")(case.model.get_submodule("layer")(case.inputs))
    norms = features.flatten(1).square().sum(1) + 1
    expected = (norms * (1 - p.square().sum(1))).mean()
    assert_close(optimizer.curvature["head"].basis.scale[0], expected)


# -- 24: another implementation's formula --------------------------------------------------------------


@every_bias
@pytest.mark.parametrize("stride", [1, 2])
def test_24_location_weighted_convolution(bias: bool, stride: int) -> None:
    """kfac-jax's Conv2DTNT: patch norms without unfolding, scale 1 / sqrt(tr N_1 tr N_2)."""
    conv = nn.Conv2d(2, 3, 3, stride=stride, padding=1, bias=bias)
    case = make_case(conv, (2, 5, 4))
    optimizer = measured(TKFAC, case.model, case.inputs, case.loss, fisher="empirical", sharing="expand")
    (batch,) = captured(case.model, case.inputs, case.loss)["layer"]
    rows = all_rows(batch)
    a, u = rows.a[0], rows.u[0, 0]
    ones = torch.ones(1, 2, 3, 3, dtype=torch.float64)
    norms_of_a = F.conv2d(case.inputs.square(), ones, stride=stride, padding=1).flatten(1) + bias
    assert_close(norms_of_a, a.square().sum(-1))
    n_in = torch.einsum("nt,nti,ntj->ij", u.square().sum(-1), a, a) / len(a)
    n_out = torch.einsum("nt,nti,ntj->ij", norms_of_a, u, u) / len(a)
    expected = torch.kron(n_out, n_in) / (n_in.trace() * n_out.trace()).sqrt()
    assert_close(dense_block(optimizer.curvature["layer"]), expected)


# -- what is no theorem --------------------------------------------------------------------------------


def frobenius_errors(blocks: dict[str, Tensor], fisher: Tensor) -> dict[str, float]:
    return {name: float((fisher - block).norm()) for name, block in blocks.items()}


def test_not_a_theorem_tkfac_may_be_further_from_the_fisher_than_kfac() -> None:
    """The counter-example of the reference, through a real forward and backward pass."""
    a = torch.tensor([[1.0, 0.0], [0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    u = torch.tensor([[1.0, 2.0], [0.0, 2.0], [-1.0, 2.0]], dtype=torch.float64)
    model = nn.Linear(2, 2, bias=False).double()

    def loss(outputs: Tensor) -> Tensor:  # each sample's output gradient is its row of u
        return (u * outputs).sum(1).mean()

    blocks = {
        method.__name__: dense_block(
            measured(
                method,
                model,
                a,
                loss,
                fisher="empirical",
                likelihood="gaussian",
                loss_reduction="batchmean",
            ).curvature[""]
        )
        for method in METHODS
    }
    fisher = oracle.shared_fisher(a[:, None], u[:, None])
    errors = frobenius_errors(blocks, fisher)
    assert round(errors["KFAC"], 4) == 0.3143
    assert round(errors["TKFAC"], 4) == 0.3810
    assert errors["EKFAC"] <= errors["KFAC"]
    assert errors["TEKFAC"] <= errors["TKFAC"]


def test_theorems_that_hold_on_random_rows() -> None:
    """Correction never hurts its own base; nothing is claimed between the two kinds of factors."""
    for seed in range(20):
        rows = random_rows(positions=1 + seed % 3, seed=seed)
        fisher = fisher_of(as_samples(rows))
        errors = frobenius_errors({m.__name__: block_of(m, rows) for m in METHODS}, fisher)
        assert errors["EKFAC"] <= errors["KFAC"]
        assert errors["TEKFAC"] <= errors["TKFAC"]
