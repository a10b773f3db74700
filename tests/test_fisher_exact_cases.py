"""Where theory says that an approximation is exact, `fisher.estimate` equals `fisher.exact_blocks`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, every_method, normal, relative_error, seeded, sharings
from layer_kinds import Pool, every_bias, fisher_of, groups_of, make_case, random_rows
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC, fisher
from tekfac.optim.natural_gradient import NaturalGradient

every_sharing = pytest.mark.parametrize(("method", "sharing"), [(m, s) for m in METHODS for s in sharings(m)])
OF_POSITIONS = [(KFAC, "expand"), (EKFAC, "expand"), (TKFAC, "exact"), (TEKFAC, "exact")]
OF_POOLING = [(KFAC, "reduce"), (EKFAC, "reduce"), (TKFAC, "exact"), (TEKFAC, "exact")]


def estimate(
    method: type[NaturalGradient], model: nn.Module, loader: Sequence[Any], sharing: str, **settings: Any
) -> fisher.BlockDiagonal[fisher.KroneckerBlock]:
    return fisher.estimate(model, loader, method=method.__name__, sharing=sharing, **settings)


def assert_exact(
    method: type[NaturalGradient], model: nn.Module, loader: Sequence[Any], sharing: str, **settings: Any
) -> None:
    """Every layer's block, as a matrix, is the exact one; the comparison says so, too."""
    approximations = estimate(method, model, loader, sharing, **settings)
    exact = fisher.exact_blocks(model, loader, **settings)
    assert list(approximations) == list(exact)
    for layer, block in exact.items():
        assert block.trace() > 0
        assert_close(approximations[layer].to_dense(), block.to_dense())
    comparison = fisher.compare(model, loader, approximations=[f"{method.__name__}:{sharing}"], **settings)
    for row in comparison.rows:
        assert row.error.value < 1e-7  # of |F|^2 - |S|^2, where F is looked at by a Gram matrix
        assert_close(row.trace_ratio, 1.0)


def error_of(
    method: type[NaturalGradient], model: nn.Module, loader: Sequence[Any], sharing: str, **settings: Any
) -> dict[str, float]:
    approximations = estimate(method, model, loader, sharing, **settings)
    exact = fisher.exact_blocks(model, loader, **settings)
    return {n: relative_error(approximations[n].to_dense(), block.to_dense()) for n, block in exact.items()}


# -- rows of one's own choice --------------------------------------------------------------------------


class Given:
    """A linear layer whose samples have inputs a [N, T, d_in] and output gradients u [N, T, d_out]."""

    def __init__(self, a: Tensor, u: Tensor) -> None:
        self.model = seeded(lambda: nn.Linear(a.shape[-1], u.shape[-1], bias=False))
        sizes = (2, len(a) - 2) if len(a) > 2 else (len(a),)
        self.loader = list(zip(a.split(sizes), u.split(sizes), strict=True))
        self.settings: dict[str, Any] = {
            "fisher": "empirical",
            "likelihood": "gaussian",
            "loss_reduction": "sum",
            "loss": lambda model, batch: (batch[1] * model(batch[0])).sum(),
        }
        gradients = torch.einsum("nto,nti->noi", u, a)
        self.dense = oracle.exact_fisher(gradients)

    def assert_exact(self, method: type[NaturalGradient], sharing: str) -> None:
        exact = fisher.exact_blocks(self.model, self.loader, **self.settings)
        assert_close(exact[""].to_dense(), self.dense)
        assert_exact(method, self.model, self.loader, sharing, **self.settings)

    def error(self, method: type[NaturalGradient], sharing: str) -> float:
        return error_of(method, self.model, self.loader, sharing, **self.settings)[""]


def rows(**sizes: int) -> tuple[Tensor, Tensor]:
    found = random_rows(**sizes)
    return found.a[0], found.u[0, 0]


# -- 17: one sample ------------------------------------------------------------------------------------

SINGLE_POSITION: dict[str, Callable[[bool], tuple[oracle.Layer, tuple[int, ...]]]] = {
    "linear": lambda bias: (nn.Linear(4, 3, bias=bias), (4,)),
    "sequence of one": lambda bias: (nn.Linear(4, 3, bias=bias), (1, 4)),
    "conv1d": lambda bias: (nn.Conv1d(2, 3, 3, bias=bias), (2, 3)),
    "conv2d": lambda bias: (nn.Conv2d(2, 3, 2, bias=bias), (2, 2, 2)),
    "conv3d": lambda bias: (nn.Conv3d(1, 2, 2, bias=bias), (1, 2, 2, 2)),
    "grouped": lambda bias: (nn.Conv2d(4, 4, 2, groups=2, bias=bias), (4, 2, 2)),
    "depthwise": lambda bias: (nn.Conv2d(3, 6, (2, 1), groups=3, bias=bias), (3, 2, 1)),
}


@pytest.mark.every_pair
@every_sharing
@every_bias
@pytest.mark.parametrize("kind", SINGLE_POSITION)
def test_one_sample_at_one_position(method: type[NaturalGradient], sharing: str, bias: bool, kind: str) -> None:
    case = make_case(*SINGLE_POSITION[kind](bias), samples=1, seed=1)
    loader = [(case.inputs, case.labels)]
    exact = fisher.exact_blocks(case.model, loader, fisher="empirical")
    for layer, block in exact.items():
        samples = oracle.per_sample(case.model, F.cross_entropy, case.inputs, case.labels, layer)
        expected = torch.block_diag(*(fisher_of(samples, group) for group in groups_of(samples)))
        assert_close(block.to_dense(), expected)
    assert_exact(method, case.model, loader, sharing, fisher="empirical")


@every_method
def test_one_sample_with_a_drawn_label(method: type[NaturalGradient]) -> None:
    case = make_case(nn.Linear(4, 3), (4,), samples=1)
    for seed in range(3):
        assert_exact(method, case.model, [case.inputs], sharings(method)[0], fisher="sampled", seed=seed)


@every_method
def test_two_samples_are_not_exact(method: type[NaturalGradient]) -> None:
    case = make_case(nn.Linear(4, 3), (4,), samples=2, seed=1)
    error = error_of(method, case.model, [(case.inputs, case.labels)], sharings(method)[0], fisher="empirical")[
        "layer"
    ]
    assert error > 1e-3


# -- 18: exactly Kronecker -----------------------------------------------------------------------------


@every_sharing
def test_the_same_input_with_different_labels(method: type[NaturalGradient], sharing: str) -> None:
    case = make_case(nn.Linear(4, 3), (4,), samples=9)
    inputs = case.inputs[:1].expand_as(case.inputs).contiguous()
    labels = torch.arange(9) % 3
    loader = [(inputs[:4], labels[:4]), (inputs[4:], labels[4:])]
    assert_exact(method, case.model, loader, sharing, fisher="empirical")


@every_sharing
def test_constant_inputs(method: type[NaturalGradient], sharing: str) -> None:
    a, u = rows()
    Given(a[:1].expand_as(a), u).assert_exact(method, sharing)


@every_sharing
def test_constant_output_gradients(method: type[NaturalGradient], sharing: str) -> None:
    a, u = rows()
    Given(a, u[:1].expand_as(u)).assert_exact(method, sharing)


@every_sharing
def test_every_input_with_every_output_gradient(method: type[NaturalGradient], sharing: str) -> None:
    a, u = rows()
    pairs = list(itertools.product(range(9), range(9)))
    Given(a[[i for i, _ in pairs]], u[[j for _, j in pairs]]).assert_exact(method, sharing)


@every_sharing
@every_bias
def test_the_same_prediction_everywhere(method: type[NaturalGradient], sharing: str, bias: bool) -> None:
    """Softmax regression before its first step: the output Fisher is diag(p) - p p^T for every sample."""
    model = nn.Linear(4, 3, bias=bias).double()
    nn.init.zeros_(model.weight)
    if bias:
        nn.init.constant_(model.bias, 0.5)
    p = torch.full((3,), 1 / 3, dtype=torch.float64)
    inputs = normal(14, 4)
    a = torch.cat([inputs, torch.ones(14, 1, dtype=torch.float64)], dim=1) if bias else inputs
    expected = torch.kron(torch.diag(p) - torch.outer(p, p), a.T @ a / 14)
    loader = list(inputs.split((5, 1, 8)))
    assert_close(fisher.exact_blocks(model, loader)[""].to_dense(), expected)
    assert_exact(method, model, loader, sharing)


@every_method
@pytest.mark.parametrize("positions", [1, 3])
def test_any_kronecker_block(method: type[NaturalGradient], positions: int) -> None:
    """Columns of a square root of Phi with columns of one of Psi, the same at every position."""
    roots_in, roots_out = normal(4, 4), normal(3, 3, seed=1)
    pairs = list(itertools.product(range(4), range(3)))
    shares = torch.tensor([1.0] if positions == 1 else [0.2, 0.7, 0.1], dtype=torch.float64)
    a = torch.stack([roots_in.T[i].expand(positions, 4) for i, _ in pairs])
    u = torch.stack([torch.outer(shares, roots_out.T[j]) for _, j in pairs])
    given = Given(a, u)
    assert_close(given.dense, torch.kron(roots_out @ roots_out.T, roots_in @ roots_in.T) / 12)
    given.assert_exact(method, "reduce")
    if method in (TKFAC, TEKFAC):
        given.assert_exact(method, "exact")
    if positions > 1 and method in (KFAC, TKFAC):
        assert given.error(method, "expand") > 0.1


def test_constant_norms_make_kfac_and_tkfac_equal_but_not_exact() -> None:
    a, u = rows()
    given = Given(a / a.norm(dim=-1, keepdim=True), u / u.norm(dim=-1, keepdim=True))
    one, other = (
        estimate(method, given.model, given.loader, sharing, **given.settings)[""].to_dense()
        for method, sharing in ((KFAC, "expand"), (TKFAC, "exact"))
    )
    assert_close(one, other)
    assert given.error(TKFAC, "exact") > 0.01


# -- one side of the block has a single coordinate -----------------------------------------------------


@pytest.mark.every_pair
@pytest.mark.parametrize("method", [TKFAC, TEKFAC])
@every_bias
@pytest.mark.parametrize("kind", ["linear", "sequence", "conv2d", "depthwise"])
def test_a_single_output_loses_nothing_in_its_partial_traces(
    method: type[NaturalGradient], bias: bool, kind: str
) -> None:
    """For [1, d_in] the trace over the outputs is F itself; a depthwise convolution is so many of these."""
    layer, shape = {
        "linear": (nn.Linear(4, 1, bias=bias), (4,)),
        "sequence": (nn.Linear(4, 1, bias=bias), (3, 4)),
        "conv2d": (nn.Conv2d(2, 1, 2, bias=bias), (2, 3, 3)),
        "depthwise": (nn.Conv2d(3, 3, 2, groups=3, bias=bias), (3, 3, 3)),
    }[kind]
    case = make_case(layer, shape)
    loader = [(case.inputs[:5], case.labels[:5]), (case.inputs[5:], case.labels[5:])]
    for settings in ({"fisher": "exact"}, {"fisher": "empirical"}):
        assert_exact(method, case.model, loader, "exact", layers=["layer"], **settings)
        plain = KFAC if method is TKFAC else EKFAC
        assert error_of(plain, case.model, loader, "expand", layers=["layer"], **settings)["layer"] > 1e-3


@pytest.mark.parametrize("method", [TKFAC, TEKFAC])
def test_a_single_input_loses_nothing_in_its_partial_traces(method: type[NaturalGradient]) -> None:
    case = make_case(nn.Conv1d(1, 3, 1, bias=False), (1, 4))
    loader = [(case.inputs, case.labels)]
    assert_exact(method, case.model, loader, "exact", layers=["layer"])


# -- 19, 20: deep linear networks ----------------------------------------------------------------------

LINEAR_NETWORKS: dict[str, Callable[[bool], tuple[nn.Module, tuple[int, ...]]]] = {
    "linear": lambda bias: (
        nn.Sequential(*(nn.Linear(*sizes, bias=bias) for sizes in ((3, 4), (4, 3), (3, 2)))),
        (3,),
    ),
    "sequence": lambda bias: (
        nn.Sequential(*(nn.Linear(*sizes, bias=bias) for sizes in ((3, 4), (4, 3), (3, 2)))),
        (3, 3),
    ),
    "1x1 convolution": lambda bias: (
        nn.Sequential(*(nn.Conv2d(*sizes, 1, bias=bias) for sizes in ((2, 3), (3, 4), (4, 2)))),
        (2, 2, 2),
    ),
    "grouped 1x1 convolution": lambda bias: (
        nn.Sequential(*(nn.Conv1d(*sizes, 1, groups=2, bias=bias) for sizes in ((2, 4), (4, 4), (4, 2)))),
        (2, 3),
    ),
}
SQUARE_LOSS: dict[str, Any] = {"likelihood": "gaussian", "loss_reduction": "batchmean"}


@pytest.mark.every_pair
@pytest.mark.parametrize("network", LINEAR_NETWORKS)
@every_bias
@pytest.mark.parametrize(("method", "sharing"), OF_POSITIONS)
def test_deep_linear_networks_with_a_loss_at_every_position(
    network: str, bias: bool, method: type[NaturalGradient], sharing: str
) -> None:
    model, shape = LINEAR_NETWORKS[network](bias)
    model = seeded(lambda: model.apply(lambda m: getattr(m, "reset_parameters", lambda: None)()))
    loader = list(normal(5, *shape).split((2, 3)))
    exact = fisher.exact_blocks(model, loader, **SQUARE_LOSS)
    for layer, block in exact.items():
        samples = oracle.per_column(oracle.gaussian_column, model, torch.cat(loader), layer)
        expected = torch.block_diag(*(fisher_of(samples, group) for group in groups_of(samples)))
        assert_close(block.to_dense(), expected)
    assert_exact(method, model, loader, sharing, **SQUARE_LOSS)


@pytest.mark.parametrize(("method", "sharing"), OF_POSITIONS)
def test_deep_linear_networks_whose_loss_is_a_mean_over_the_outputs(
    method: type[NaturalGradient], sharing: str
) -> None:
    model, shape = LINEAR_NETWORKS["sequence"](True)
    loader = list(normal(5, *shape).split((2, 3)))
    assert_exact(method, model.double(), loader, sharing, likelihood="gaussian")


@pytest.mark.every_pair
@every_bias
@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("place", [2, 3], ids=["pool in the middle", "pool at the end"])
@pytest.mark.parametrize(("method", "sharing"), OF_POOLING)
def test_deep_linear_networks_with_pooling(
    bias: bool, how: str, place: int, method: type[NaturalGradient], sharing: str
) -> None:
    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(*sizes, bias=bias) for sizes in ((3, 4), (4, 3), (3, 2))]
        layers.insert(place, Pool(how))
        return nn.Sequential(*layers)

    model, loader = seeded(build), list(normal(5, 3, 3).split((2, 3)))
    assert_exact(method, model, loader, sharing, **SQUARE_LOSS)
    if method is KFAC:  # expand must differ where there are positions: a slip by T would show
        for layer, error in error_of(KFAC, model, loader, "expand", **SQUARE_LOSS).items():
            assert error > 0.05 if int(layer) < place else error < 1e-10


@every_bias
@pytest.mark.parametrize(
    ("method", "sharing"),
    [
        (KFAC, "reduce"),
        (EKFAC, "reduce"),
        (TKFAC, "exact"),
        (TKFAC, "reduce"),
        (TEKFAC, "exact"),
        (TEKFAC, "reduce"),
    ],
)
def test_the_last_convolution_before_a_sum_over_its_positions(
    bias: bool, method: type[NaturalGradient], sharing: str
) -> None:
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.ReLU(inplace=True), nn.Conv2d(2, 3, 2, bias=bias), Pool("sum", True)
        )
    )
    loader = list(normal(5, 1, 4, 4).split((2, 3)))
    assert_exact(method, model, loader, sharing, layers=["2"], **SQUARE_LOSS)
    if method in (KFAC, TKFAC):
        errors = error_of(method, model, loader, "expand", layers=["2"], **SQUARE_LOSS)
        assert errors["2"] > 0.05


# -- 22: not exact, but known --------------------------------------------------------------------------


@every_bias
@pytest.mark.parametrize("kind", ["sequence", "conv2d"])
def test_the_error_of_tkfac_for_one_sample_at_several_positions(bias: bool, kind: str) -> None:
    layer, shape = {
        "sequence": (nn.Linear(4, 3, bias=bias), (5, 4)),
        "conv2d": (nn.Conv2d(2, 3, 2, bias=bias), (2, 3, 3)),
    }[kind]
    case = make_case(layer, shape, samples=1, seed=2)
    row = fisher.compare(
        case.model, [(case.inputs, case.labels)], approximations=["tkfac"], fisher="empirical", layers=["layer"]
    ).rows[0]
    samples = oracle.per_sample(case.model, F.cross_entropy, case.inputs, case.labels, "layer")
    s2, s4, s6 = (torch.linalg.svdvals(samples.gradients[0, 0]).pow(power).sum() for power in (2, 4, 6))
    assert_close(row.squared_error.value, s2**2 - 2 * s6 / s2 + (s4 / s2) ** 2)
