"""`fisher.compare` gives the numbers of dense matrices, however it looks at the exact blocks."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, oracle_block, sharings
from layer_kinds import KINDS, Case, case_of, fisher_of, groups_of, samples_of
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC, fisher
from tekfac.fisher.comparison_table import Interval, Row
from tekfac.fisher.exact_within_memory import student_quantile
from tekfac.optim.natural_gradient import NaturalGradient
from training import mlp, vectors

CASES = [(kind, True) for kind in KINDS] + [(kind, False) for kind in ("linear", "conv2d", "grouped")]
every_case = pytest.mark.parametrize(
    ("kind", "bias"), CASES, ids=[kind if bias else f"{kind}, no bias" for kind, bias in CASES]
)
SPECS = {f"{m.__name__.lower()}:{s}": (m, s) for m in METHODS for s in sharings(m)}
FEW = 4  # samples, so that gradients are fewer than parameters


def batched(inputs: Tensor, labels: Tensor, sizes: Sequence[int] = (5, 1, 8)) -> list[tuple[Tensor, Tensor]]:
    return list(zip(inputs.split(list(sizes)), labels.split(list(sizes)), strict=True))


def first(case: Case, count: int) -> Case:
    return Case(case.model, case.inputs[:count], case.labels[:count])


def block_diagonal(parts: Sequence[Tensor]) -> Tensor:
    return torch.block_diag(*parts)


class Counted:
    """A loader that knows how often it was read."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches, self.passes = batches, 0

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            self.passes += index == 0
            yield batch


# -- what dense matrices say ---------------------------------------------------------------------------


def dense_truth(case: Case, kind_of_fisher: str, layer: str) -> Tensor:
    """From autograd, one sample and label at a time."""
    if kind_of_fisher == "exact":
        samples = oracle.per_column(oracle.softmax_column, case.model, case.inputs, layer)
    else:
        samples = oracle.per_sample(case.model, F.cross_entropy, case.inputs, case.labels, layer)
    return block_diagonal([fisher_of(samples, group) for group in groups_of(samples)])


def dense_gradient(case: Case, layer: str) -> Tensor:
    case.model.zero_grad()
    case.loss(case.model(case.inputs)).backward()
    gradient = case.to_matrix(layer).flatten()
    case.model.zero_grad()
    return gradient


def assert_row_is_dense(
    row: Row, truth: Tensor, approximation: fisher.KroneckerBlock, gradient: Tensor
) -> None:
    """All numbers of a row but the cosine are sums over differences of two matrices."""
    dense, size = approximation.to_dense(), len(truth)
    assert row.parameters == size
    assert_close(row.trace_ratio, dense.trace() / truth.trace())
    assert_close(row.squared_norm.value, truth.square().sum())
    # where |F - F_hat|^2 is a difference of numbers as large as |F|^2, its digits are theirs
    assert abs(row.squared_error.value - float((dense - truth).square().sum())) < 1e-12 * float(
        truth.square().sum()
    )
    assert_close(row.error.value, (dense - truth).norm() / truth.norm())
    assert row.error.low == row.error.value == row.error.high
    assert row.squared_error.exact
    q = eigenvectors(approximation)
    apart = (q.T @ (dense - truth) @ q).diagonal()
    assert abs(row.excess - float(apart.square().sum())) < 1e-12 * float(truth.square().sum())
    assert_close(row.damping, truth.trace() / size)
    damping = row.damping * torch.eye(size, dtype=torch.float64)
    ours, theirs = (torch.linalg.solve(matrix + damping, gradient) for matrix in (dense, truth))
    assert row.cosine is not None
    assert row.angle is not None
    assert_close(row.cosine, ours @ theirs / (ours.norm() * theirs.norm()))
    assert row.angle == pytest.approx(math.degrees(math.acos(min(1.0, row.cosine))))


def eigenvectors(block: fisher.KroneckerBlock) -> Tensor:
    """Q = Q_out (x) Q_in of all groups, in columns."""
    pairs = zip(block.basis.vectors_out, block.basis.vectors_in, strict=True)
    return block_diagonal([torch.kron(out.contiguous(), inputs.contiguous()) for out, inputs in pairs])


@every_case
@pytest.mark.parametrize("way", ["matrix", "Gram matrix"])
def test_rows_are_those_of_dense_matrices(kind: str, bias: bool, way: str) -> None:
    """Many gradients are looked at as a matrix, few of them by their Gram matrix."""
    case = case_of(kind, bias)
    kind_of_fisher: Any = "exact" if way == "matrix" else "empirical"
    if way == "Gram matrix":
        case = first(case, FEW)
    loader = [(x, y) for x, y in zip(case.inputs.split(3), case.labels.split(3), strict=True)]
    comparison = fisher.compare(
        case.model, loader, fisher=kind_of_fisher, layers=["layer"], approximations=list(SPECS)
    )
    truth, gradient = dense_truth(case, kind_of_fisher, "layer"), dense_gradient(case, "layer")
    for (spec, (method, sharing)), row in zip(SPECS.items(), comparison.rows, strict=True):
        assert row.way == way
        blocks = fisher.estimate(case.model, loader, method=spec, fisher=kind_of_fisher, layers=["layer"])
        assert_row_is_dense(row, truth, blocks["layer"], gradient)
        assert row.approximation.startswith(method.__name__)
        assert (f"({sharing})" in row.approximation) != (sharing == default_sharing(method))


def default_sharing(method: type[NaturalGradient]) -> str:
    return "exact" if "exact" in sharings(method) else "expand"


@pytest.mark.parametrize("method", [KFAC, TKFAC])
def test_errors_are_those_of_the_oracles_blocks(method: type[NaturalGradient]) -> None:
    for kind in KINDS:
        case, samples = case_of(kind, True), samples_of(kind, True, "exact")
        specs = {spec: s for spec, (m, s) in SPECS.items() if m is method}
        rows = fisher.compare(
            case.model, batched(case.inputs, case.labels), approximations=list(specs), layers=["layer"]
        ).rows
        truth = dense_truth(case, "exact", "layer")
        for row, sharing in zip(rows, specs.values(), strict=True):
            parts = [oracle_block(method, samples, sharing, group) for group in groups_of(samples)]
            assert_close(row.error.value, (block_diagonal(parts) - truth).norm() / truth.norm())


@pytest.mark.parametrize("damping", [1e-3, 0.5])
@pytest.mark.parametrize("way", ["matrix", "Gram matrix"])
def test_the_cosine_is_taken_at_the_damping_that_was_asked_for(damping: float, way: str) -> None:
    case = case_of("conv2d", True) if way == "matrix" else first(case_of("conv2d", True), FEW)
    loader = [(case.inputs, case.labels)]
    comparison = fisher.compare(case.model, loader, damping=damping, layers=["layer"])
    truth, gradient = dense_truth(case, "exact", "layer"), dense_gradient(case, "layer")
    ridge = damping * torch.eye(len(truth), dtype=torch.float64)
    for method in METHODS:
        name = method.__name__
        row = comparison.row("layer", name)
        dense = fisher.estimate(case.model, loader, method=name, layers=["layer"])["layer"].to_dense()
        ours, theirs = (torch.linalg.solve(matrix + ridge, gradient) for matrix in (dense, truth))
        assert (row.damping, row.way) == (damping, way)
        assert row.cosine is not None
        assert_close(row.cosine, ours @ theirs / (ours.norm() * theirs.norm()))


# -- probes --------------------------------------------------------------------------------------------


@every_case
def test_probes_leave_everything_exact_but_the_norm(kind: str, bias: bool) -> None:
    case = case_of(kind, bias)
    loader = batched(case.inputs, case.labels)
    exact = fisher.compare(case.model, loader, layers=["layer"])
    probed = fisher.compare(case.model, loader, layers=["layer"], exact_memory=0, confidence=0.9999)
    for row, true in zip(probed.rows, exact.rows, strict=True):
        assert row.way == "probes"
        assert row.cosine is None
        assert row.angle is None
        assert_close(row.trace_ratio, true.trace_ratio)
        assert_close(row.damping, true.damping)
        assert abs(row.excess - true.excess) < 1e-12 * true.squared_norm.value
        # |F - F_hat|^2 - |F|^2 takes no probe
        known = true.squared_error.value - true.squared_norm.value
        assert abs(row.squared_error.value - row.squared_norm.value - known) < 1e-12 * true.squared_norm.value
        for interval, number in (
            (row.squared_norm, true.squared_norm.value),
            (row.squared_error, true.squared_error.value),
            (row.error, true.error.value),
        ):
            assert interval.low < interval.value < interval.high
            assert interval.low <= number <= interval.high


@pytest.mark.slow
def test_the_interval_of_probes_covers_the_true_error_as_often_as_it_says() -> None:
    case, seeds = case_of("linear", True), 200
    loader = [(case.inputs, case.labels)]
    truth = {row.approximation: row.error.value for row in fisher.compare(case.model, loader).rows[:4]}
    covered, centres = dict.fromkeys(truth, 0), dict.fromkeys(truth, 0.0)
    for seed in range(seeds):
        rows = fisher.compare(case.model, loader, layers=["layer"], exact_memory=0, seed=seed).rows
        for row in rows:
            covered[row.approximation] += row.error.low <= truth[row.approximation] <= row.error.high
            centres[row.approximation] += row.error.value / seeds
    for approximation, error in truth.items():
        assert 0.88 * seeds <= covered[approximation] < seeds
        assert centres[approximation] == pytest.approx(error, rel=0.02)


def test_more_probes_and_less_confidence_make_the_interval_narrower() -> None:
    case = case_of("conv2d", True)

    def width(**settings: Any) -> float:
        settings = {"exact_memory": 0, "layers": ["layer"], **settings}
        interval = fisher.compare(case.model, [(case.inputs, case.labels)], **settings).rows[0].error
        return interval.high - interval.low

    assert width(probes=512) < 0.6 * width(probes=64)
    assert width(confidence=0.5) < 0.6 * width(confidence=0.95)


def test_probes_of_an_exact_approximation_know_that_it_is_exact() -> None:
    """All estimates of |F|^2 agree where F_hat = F."""
    model = mlp(sizes=(4, 3))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)  # the same prediction everywhere
    (row,) = fisher.compare(model, vectors(2, d_in=4), approximations=["kfac"], exact_memory=0).rows
    assert row.way == "probes"
    assert row.error.high < 1e-6
    assert row.squared_norm.high - row.squared_norm.low < 1e-12 * row.squared_norm.value


def test_probes_are_those_of_the_seed() -> None:
    case = case_of("grouped", True)
    one, again, other = (
        fisher.compare(case.model, [(case.inputs, case.labels)], exact_memory=0, seed=seed)
        for seed in (1, 1, 2)
    )
    assert [row.plain() for row in one.rows] == [row.plain() for row in again.rows]
    assert one.rows[0].error != other.rows[0].error


# -- several passes ------------------------------------------------------------------------------------


def dense_bytes(d_out: int, d_in: int) -> int:
    """Four matrices in float64."""
    return 4 * 8 * (d_out * d_in) ** 2


@pytest.mark.parametrize("probed", [False, True], ids=["exact", "probes"])
def test_layers_that_do_not_fit_together_are_looked_at_one_after_the_other(probed: bool) -> None:
    model, batches = mlp(sizes=(3, 4, 3, 4, 3)), vectors(4, d_in=3)
    together, apart = Counted(batches), Counted(batches)
    everything = fisher.compare(model, together, exact_memory=1 if probed else 2**30)
    memory = 3 * 8 * 64 * 16 if probed else dense_bytes(4, 5)
    rows = fisher.compare(model, apart, exact_memory=0 if probed else memory).rows
    assert {row.way for row in rows} == {"probes" if probed else "matrix"}
    assert (together.passes, apart.passes) == ((5, 5) if probed else (2, 4 + 1))
    assert len(rows) == 16
    for row, expected in zip(rows, everything.rows, strict=True):
        for (key, found), value in zip(row.plain().items(), expected.plain().values(), strict=True):
            assert found == value or found == pytest.approx(value, rel=1e-8), key


def test_a_layer_too_large_for_the_memory_is_probed_and_the_others_are_not() -> None:
    model, loader = mlp(sizes=(9, 4, 3)), vectors(4, d_in=9)
    ways = {row.layer: row.way for row in fisher.compare(model, loader, exact_memory=dense_bytes(3, 5)).rows}
    assert ways == {"0": "probes", "2": "matrix"}


def test_the_number_of_passes_does_not_matter_to_a_float32_model() -> None:
    """The gradient is that of the mean loss in the last pass as in the first."""
    model, generator = mlp(sizes=(2,) * 17, dtype=torch.float32), torch.Generator().manual_seed(0)
    loader = [(torch.randn(2000, 2, generator=generator), torch.randint(2, (2000,), generator=generator))]
    settings: dict[str, Any] = {"fisher": "empirical", "approximations": ["tkfac"]}
    together = fisher.compare(model, loader, **settings)
    apart = fisher.compare(model, Counted(loader), exact_memory=dense_bytes(2, 3), **settings)
    assert {row.way for row in apart.rows} == {"matrix"}
    for row, expected in zip(apart.rows, together.rows, strict=True):
        assert row.cosine == pytest.approx(expected.cosine, rel=1e-4), row.layer


# -- theorems ------------------------------------------------------------------------------------------

BASES = [("kfac", "ekfac", s) for s in sharings(KFAC)] + [("tkfac", "tekfac", s) for s in sharings(TKFAC)]


@cache
def all_rows(kind: str, bias: bool, kind_of_fisher: Any) -> dict[tuple[str, str], Row]:
    case = case_of(kind, bias)
    comparison = fisher.compare(
        case.model,
        batched(case.inputs, case.labels),
        approximations=list(SPECS),
        fisher=kind_of_fisher,
        layers=["layer"],
    )
    return dict(zip(((s.partition(":")[0], s.partition(":")[2]) for s in SPECS), comparison.rows, strict=True))


@every_case
@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical"])
def test_correction_takes_exactly_the_excess_off_the_squared_error(
    kind: str, bias: bool, kind_of_fisher: str
) -> None:
    rows = all_rows(kind, bias, kind_of_fisher)
    for product, corrected, sharing in BASES:
        one, other = rows[product, sharing], rows[corrected, sharing]
        norm = one.squared_norm.value
        gained = one.squared_error.value - other.squared_error.value
        assert abs(gained - one.excess) < 1e-11 * max(norm, one.squared_error.value)
        assert other.excess < 1e-24 * norm
        assert other.squared_error.value <= one.squared_error.value * (1 + 1e-12)
        assert other.error.value <= one.error.value * (1 + 1e-12)


@every_case
@pytest.mark.parametrize("kind_of_fisher", ["exact", "empirical"])
def test_the_trace_is_kept_by_corrected_and_by_exactly_restricted_methods(
    kind: str, bias: bool, kind_of_fisher: str
) -> None:
    rows = all_rows(kind, bias, kind_of_fisher)
    kept = [
        ("tkfac", "exact"),
        *(("tekfac", s) for s in sharings(TEKFAC)),
        *(("ekfac", s) for s in sharings(EKFAC)),
    ]
    for key in kept:
        assert_close(rows[key].trace_ratio, 1.0)
    if kind != "linear":
        assert abs(rows["kfac", "expand"].trace_ratio - 1) > 1e-3
        assert abs(rows["tkfac", "reduce"].trace_ratio - 1) > 1e-3


def test_it_does_not_claim_that_tkfac_is_nearer_than_kfac() -> None:
    """The counter-example of the reference."""
    a = torch.tensor([[1.0, 0.0], [0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    u = torch.tensor([[1.0, 2.0], [0.0, 2.0], [-1.0, 2.0]], dtype=torch.float64)
    comparison = fisher.compare(
        nn.Linear(2, 2, bias=False).double(),
        [(a, u)],
        fisher="empirical",
        likelihood="gaussian",
        loss_reduction="batchmean",
        loss=lambda model, batch: (batch[1] * model(batch[0])).sum(1).mean(),
    )
    errors = {row.approximation: math.sqrt(row.squared_error.value) for row in comparison.rows}
    assert round(errors["KFAC"], 4) == 0.3143
    assert round(errors["TKFAC"], 4) == 0.3810


# -- which approximations ------------------------------------------------------------------------------


def test_rows_come_layer_by_layer_in_the_order_that_was_asked_for() -> None:
    case = case_of("conv2d", True)
    asked = ["tekfac", "kfac:reduce", "KFAC"]
    comparison = fisher.compare(case.model, [(case.inputs, case.labels)], approximations=asked)
    found = [(row.layer, row.approximation) for row in comparison.rows]
    assert found == list(itertools.product(["layer", "head"], ["TEKFAC", "KFAC (reduce)", "KFAC"]))
    reduced, expanded = (comparison.row("layer", name) for name in ("KFAC (reduce)", "kfac"))
    assert reduced.error.value != expanded.error.value
    assert comparison.row("head", "tekfac") is comparison.rows[3]
    with pytest.raises(KeyError, match=r"'head'.*'tkfac'.*TEKFAC, KFAC \(reduce\), KFAC"):
        comparison.row("head", "tkfac")
    text = str(comparison)
    assert all(
        name in text for name in ("layer", "head", "TEKFAC", "KFAC (reduce)", f"{reduced.error.value:.4f}")
    )


def test_another_sharing_is_that_of_an_estimate_with_that_sharing() -> None:
    case = case_of("conv2d", True)
    loader = [(case.inputs, case.labels)]
    row = fisher.compare(case.model, loader, approximations=["kfac:reduce"]).rows[0]
    block = fisher.estimate(case.model, loader, method="kfac", sharing="reduce")["layer"].to_dense()
    truth = dense_truth(case, "exact", "layer")
    assert_close(row.error.value, (block - truth).norm() / truth.norm())


@pytest.mark.parametrize("way", ["matrix", "Gram matrix"])
def test_spectra_are_the_eigenvalues_of_dense_matrices(way: str) -> None:
    case = case_of("grouped", True) if way == "matrix" else first(case_of("grouped", True), FEW)
    loader = [(case.inputs, case.labels)]
    kind_of_fisher: Any = "exact" if way == "matrix" else "empirical"
    settings: dict[str, Any] = {"fisher": kind_of_fisher, "layers": ["layer"]}
    comparison = fisher.compare(case.model, loader, spectra=True, **settings)
    values = comparison.truths["layer"].eigenvalues
    assert comparison.truths["layer"].way == way
    assert values is not None
    assert_close(values, torch.linalg.eigvalsh(dense_truth(case, kind_of_fisher, "layer")))
    for row in comparison.rows:
        block = fisher.estimate(case.model, loader, method=row.approximation, **settings)["layer"]
        assert row.diagonal is not None
        assert_close(row.diagonal.flip(0), torch.linalg.eigvalsh(block.to_dense()))
    plain = fisher.compare(case.model, loader, **settings)
    assert plain.truths["layer"].eigenvalues is None
    assert plain.rows[0].diagonal is None


# -- layers without a Fisher, and files ----------------------------------------------------------------


def unreached() -> nn.Module:
    """The gradient of every sample is 0 in the first layer."""
    model = mlp()
    nn.init.zeros_(model[2].weight)
    return model


@pytest.mark.parametrize("exact_memory", [2**30, 0], ids=["exact", "probes"])
def test_a_layer_that_no_gradient_reaches_has_no_ratios(exact_memory: int) -> None:
    comparison = fisher.compare(unreached(), vectors(2), exact_memory=exact_memory)
    for row in comparison.rows[:4]:
        assert math.isnan(row.trace_ratio)
        assert math.isnan(row.error.value)
        assert row.cosine is None
        assert row.squared_norm.value == row.squared_error.value == row.excess == 0
    for row in comparison.rows[4:]:
        assert math.isfinite(row.error.value)
    assert "nan" in str(comparison)


FILES: dict[str, dict[str, Any]] = {
    "exact": {},
    "probes": {"exact_memory": 0},
    "nothing to compare": {},
}


def saved(which: str) -> fisher.Comparison:
    model = unreached() if which == "nothing to compare" else mlp()
    return fisher.compare(model, vectors(2), approximations=["kfac:reduce", "tekfac"], **FILES[which])


@pytest.mark.parametrize("which", FILES)
def test_json_has_every_row_and_no_number_that_is_none(which: str, tmp_path: Path) -> None:
    comparison = saved(which)
    comparison.to_json(tmp_path / "table.json")

    def refuse(literal: str) -> float:
        raise AssertionError(f"{literal} is not JSON")

    read = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert read["metadata"] == dict(comparison.metadata)
    assert len(read["rows"]) == len(comparison.rows) == 4
    for found, row in zip(read["rows"], comparison.rows, strict=True):
        plain = row.plain()
        assert list(found) == list(plain)
        for key, value in plain.items():
            missing = isinstance(value, float) and not math.isfinite(value)
            assert found[key] == (None if missing else value)


@pytest.mark.parametrize("which", FILES)
def test_csv_has_every_row_to_the_last_digit(which: str, tmp_path: Path) -> None:
    comparison = saved(which)
    comparison.to_csv(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert len(read) == 4
    for found, row in zip(read, comparison.rows, strict=True):
        for key, value in row.plain().items():
            if isinstance(value, float):
                assert float(found[key]) == value or math.isnan(value)
            else:
                assert found[key] == ("" if value is None else str(value))


def test_the_metadata_tell_how_it_was_made() -> None:
    metadata = fisher.compare(mlp(), vectors(2), fisher="sampled", seed=3, probes=32).metadata
    assert metadata["samples"] == metadata["terms"] == 12
    assert (metadata["fisher"], metadata["seed"], metadata["probes"]) == ("sampled", 3, 32)
    assert metadata["confidence"] == 0.95


# -- what the numbers are of ---------------------------------------------------------------------------


def test_without_targets_there_is_no_gradient_and_no_angle() -> None:
    model = mlp(sizes=(5, 4, 3))
    with_targets = fisher.compare(model, vectors(2))
    without = fisher.compare(model, [x for x, _ in vectors(2)])
    assert all(row.cosine is not None for row in with_targets.rows)
    assert all(row.cosine is None and row.angle is None for row in without.rows)
    for row, expected in zip(without.rows, with_targets.rows, strict=True):
        assert row.error.value == pytest.approx(expected.error.value)


def test_a_float32_model_is_compared_as_in_float64() -> None:
    """By the Gram matrix, too: its norms and eigenvalues are taken in float64."""
    generator = torch.Generator().manual_seed(0)
    loader = [(torch.randn(60, 40, generator=generator), torch.randint(3, (60,), generator=generator))]
    single = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))
    double = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    double.load_state_dict(single.state_dict())
    ours = fisher.compare(single, loader, damping=1e-4)
    theirs = fisher.compare(double, [(x.double(), y) for x, y in loader], damping=1e-4)
    assert {row.way for row in ours.rows} == {"matrix", "Gram matrix"}
    for row, expected in zip(ours.rows, theirs.rows, strict=True):
        assert row.error.value == pytest.approx(expected.error.value, rel=1e-4)
        assert row.cosine == pytest.approx(expected.cosine, rel=1e-3)


def test_probes_in_several_passes_are_those_of_one() -> None:
    model, loader = mlp(sizes=(5, 4, 3)), vectors(2)
    together = fisher.compare(model, loader, exact_memory=0, probes=16)
    apart = fisher.compare(model, Counted(loader), exact_memory=0, probes=16, memory_budget=24 * 4 * 6 * 5)
    for row, expected in zip(apart.rows, together.rows, strict=True):
        assert row.way == "probes"
        assert tuple(row.error) == pytest.approx(tuple(expected.error))


def test_the_interval_of_a_quotient_holds_its_value() -> None:
    norm = Interval(1.0, 0.0, 3.0)
    row = fisher.compare(mlp(sizes=(5, 3)), vectors(1), approximations="kfac").rows[0]
    for known in (5.0, -0.5):
        squared = Interval(*(value + known for value in norm))
        error = replace(row, squared_norm=norm, squared_error=squared).error
        assert error.low <= error.value <= error.high


def test_the_quantile_of_few_probes_is_students() -> None:
    for degrees in (7, 15, 63, 500):
        for probability in (0.9, 0.975, 0.995):
            expected = float(scipy.stats.t.ppf(probability, degrees))
            assert student_quantile(probability, degrees) == pytest.approx(expected, rel=5e-3)


def test_samples_are_counted_along_their_own_axis() -> None:
    """Sequence first: [T, N, d]."""
    model = nn.Linear(4, 3).double()
    batch = torch.randn(7, 5, 4).double(), torch.randint(3, (7, 5))
    comparison = fisher.compare(model, [batch], batch_dim=1)
    assert comparison.metadata["samples"] == 5
    assert comparison.metadata["terms"] == 35
