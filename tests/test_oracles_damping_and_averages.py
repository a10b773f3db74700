"""Oracles 25-29: damping rules, symmetries of the damped step, and running averages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import (
    assert_close,
    dense_block,
    dense_factors,
    every_method,
    gradient_step,
    measured,
    normal,
    relative_error,
    statistics,
)
from layer_kinds import (
    KINDS,
    Case,
    RowBatch,
    assert_diagonalises,
    case_of,
    every_bias,
    expected_block,
    expected_factors,
    fisher_of,
    groups_of,
    identity,
    own_sharing,
    random_orthogonal,
    random_rows,
    samples_of,
    step_of,
)
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC
from tekfac.curvature.averages import Average
from tekfac.curvature.layer_curvature import Due, LayerCurvature, Recipe, refreshed
from tekfac.curvature.precondition import precondition
from tekfac.damping import DEFAULT_DAMPING, Factored, Spectrum, TraceBased, factored, trace_damping
from tekfac.layers.rows import Rows
from tekfac.optim.natural_gradient import NaturalGradient

CONVOLUTIONS = ("conv1d", "conv2d", "conv2d same", "conv3d", "grouped", "grouped 1d", "depthwise")
every_convolution = pytest.mark.parametrize("kind", CONVOLUTIONS)


# -- 25: factored damping ------------------------------------------------------------------------------


def factored_block(inputs: Tensor, outputs: Tensor, on_inputs: Tensor, on_outputs: Tensor) -> Tensor:
    return torch.kron(outputs + on_outputs * identity(len(outputs)), inputs + on_inputs * identity(len(inputs)))


@pytest.mark.parametrize("kind", KINDS)
@every_bias
def test_25_factored_damping_is_its_four_terms(kind: str, bias: bool) -> None:
    case, samples, damping = case_of(kind, bias), samples_of(kind, bias), 0.03
    curvature = statistics(measured(KFAC, case.model, case.inputs, case.loss, fisher="empirical"))["layer"]
    spectrum = Spectrum(curvature.basis, is_convolution=False)
    denominators = Factored(damping).denominators(spectrum, [spectrum])
    for group in groups_of(samples):
        _, inputs, outputs = expected_factors(KFAC, samples, "expand", group)
        eye_in, eye_out = identity(len(inputs)), identity(len(outputs))
        pi = (inputs.trace() / len(inputs) / (outputs.trace() / len(outputs))).sqrt()
        on_inputs, on_outputs = pi * damping**0.5, damping**0.5 / pi
        assert float(on_inputs * on_outputs) == pytest.approx(damping, rel=1e-12)
        terms = (
            torch.kron(outputs, inputs)
            + on_outputs * torch.kron(eye_out, inputs)
            + on_inputs * torch.kron(outputs, eye_in)
            + damping * torch.kron(eye_out, eye_in)
        )
        assert_close(dense_block(curvature, group, denominators), terms)
        assert_close(factored_block(inputs, outputs, on_inputs, on_outputs), terms)


@pytest.mark.parametrize("kind", ["linear", "sequence", "conv2d", "depthwise"])
def test_25_pi_of_three_other_implementations(kind: str) -> None:
    case, samples, damping = case_of(kind, True), samples_of(kind, True), 0.03
    curvature = measured(
        KFAC, case.model, case.inputs, case.loss, fisher="empirical", damping=Factored(damping)
    ).curvature["layer"]
    spectrum = Spectrum(curvature.basis, is_convolution=False)
    denominators = factored(spectrum, torch.tensor(damping, dtype=torch.float64), "pi")
    positions = samples.a.shape[2]
    for group in groups_of(samples):
        block = dense_block(curvature, group, denominators)
        _, inputs, outputs = expected_factors(KFAC, samples, "expand", group)
        d_in, d_out = len(inputs), len(outputs)
        # EKFAC-pytorch: `pi` is our pi squared
        pi = (inputs.trace() * d_out) / (outputs.trace() * d_in)
        assert_close(factored_block(inputs, outputs, (damping * pi).sqrt(), (damping / pi).sqrt()), block)
        # kfac-jax: factors normalised by their mean eigenvalues, damping by the product of those
        mean_in, mean_out = inputs.trace() / d_in, outputs.trace() / d_out
        root = (damping / (mean_in * mean_out)).sqrt()
        scaled = factored_block(inputs / mean_in, outputs / mean_out, root, root)
        assert_close(mean_in * mean_out * scaled, block)
        # tensorflow/kfac: T times (mean, mean), with the damping divided by T before it is split
        mean_u = outputs / positions
        pi = ((inputs.trace() / d_in) / (mean_u.trace() / d_out)).sqrt()
        root = torch.tensor((damping / positions) ** 0.5, dtype=torch.float64)
        assert_close(positions * factored_block(inputs, mean_u, root * pi, root / pi), block)


@pytest.mark.parametrize("kind", ["linear", "sequence", "conv1d", "grouped"])
@every_bias
def test_25_equal_split_of_tkfac(kind: str, bias: bool) -> None:
    """sqrt(sigma) Phi + sqrt(lambda) I and its partner, as one step."""
    case, samples, damping = case_of(kind, bias), samples_of(kind, bias), 0.03
    _, moved = step_of(TKFAC, case, damping=Factored(damping, split="equal"))
    root = torch.tensor(damping**0.5, dtype=torch.float64)
    for group in groups_of(samples):
        sigma, phi, psi = expected_factors(TKFAC, samples, "exact", group)
        block = factored_block(sigma.sqrt() * phi, sigma.sqrt() * psi, root, root)
        other = sigma * factored_block(phi, psi, root / sigma.sqrt(), root / sigma.sqrt())
        assert_close(block, other)
        expected = oracle.damped_solve(block, 0.0, case.to_matrix("layer")[group])
        assert_close(moved["layer"][group], expected)


# -- 26: trace-based damping ---------------------------------------------------------------------------


def trace_lambda(block: Tensor, floor: float) -> float:
    return max(float(block.trace()), floor) / len(block)


@pytest.mark.every_pair
@every_convolution
@every_bias
@pytest.mark.parametrize("method", [TKFAC, TEKFAC])
@pytest.mark.parametrize("floor", [1e-4, 1e3])
def test_26_convolutions_are_damped_by_their_trace(
    kind: str, bias: bool, method: type[NaturalGradient], floor: float
) -> None:
    """The method's own rule, each group with a trace of its own; the floor passive and active."""
    case, samples = case_of(kind, bias), samples_of(kind, bias)
    optimizer, moved = step_of(method, case, damping=None, trace_floor=floor)
    for group in groups_of(samples):
        curvature = statistics(optimizer)["layer"]
        block = expected_block(method, samples, "exact", curvature, group)
        damping = trace_lambda(block, floor)
        size = curvature.rescaling[group].numel()
        own_mean = float(curvature.rescaling[group].mean())
        assert damping == pytest.approx(max(own_mean, floor / size), rel=1e-10)
        expected = oracle.damped_solve(block, damping, case.to_matrix("layer")[group])
        assert_close(moved["layer"][group], expected)
        assert (damping > float(block.trace()) / size) == (floor == 1e3)


def test_26_trace_damping_of_each_block() -> None:
    theta = torch.tensor([[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.01], [0.0, 0.01]]], dtype=torch.float64)
    assert trace_damping(theta, floor=0.1).flatten().tolist() == [3.0, 0.025]


@every_convolution
@every_bias
def test_26_pi_split_of_the_trace_is_each_factors_mean_eigenvalue(kind: str, bias: bool) -> None:
    case, samples = case_of(kind, bias), samples_of(kind, bias)
    _, moved = step_of(TKFAC, case, damping=TraceBased(floor=1e-9, factored=True))
    for group in groups_of(samples):
        sigma, phi, psi = expected_factors(TKFAC, samples, "exact", group)
        block = sigma * torch.kron(psi + identity(len(psi)) / len(psi), phi + identity(len(phi)) / len(phi))
        expected = oracle.damped_solve(block, 0.0, case.to_matrix("layer")[group])
        assert_close(moved["layer"][group], expected)


@pytest.mark.every_pair
@pytest.mark.parametrize("kind", ["conv2d", "depthwise"])
@pytest.mark.parametrize("method", [TKFAC, TEKFAC])
@pytest.mark.parametrize("reading", ["add", "scale", "scale_all", "convolution"])
def test_26_fully_connected_layers_beside_convolutions(
    kind: str, method: type[NaturalGradient], reading: str
) -> None:
    """R3 Theta + beta, R1 beta Theta + lambda, R2 beta (Theta + lambda), or the convolutions' rule."""
    floor, case = 1e-4, case_of(kind, True)
    optimizer, moved = step_of(method, case, damping=None, trace_floor=floor, beta=reading)
    samples = {layer: samples_of(kind, True, layer=layer) for layer in ("layer", "head")}

    def block(layer: str, group: int = 0) -> Tensor:
        return expected_block(method, samples[layer], "exact", statistics(optimizer)[layer], group)

    beta = max(trace_lambda(block("layer", group), floor) for group in groups_of(samples["layer"]))
    head, eye = block("head"), identity(len(block("head")))
    damped = {
        "add": head + beta * eye,
        "scale": beta * head + DEFAULT_DAMPING * eye,
        "scale_all": beta * (head + DEFAULT_DAMPING * eye),
        "convolution": head + trace_lambda(head, floor) * eye,
    }[reading]
    expected = oracle.damped_solve(damped, 0.0, case.to_matrix("head")[0])
    assert_close(moved["head"][0], expected)


def test_26_beta_is_the_largest_of_all_groups_of_all_convolutions() -> None:
    """Three convolutions, the largest trace in the second group of the second; a head beside them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv1d(2, 2, 2),
            nn.Tanh(),
            nn.Conv1d(2, 4, 2, groups=2, bias=False),
            nn.Tanh(),
            nn.Conv1d(4, 2, 2),
            nn.Flatten(),
            nn.Linear(6, 3),
        ).double()
    with torch.no_grad():
        model[4].weight[:, 2:] *= 20  # what the second group gives matters most
        model[4].weight[:, :2] *= 5
    case, floor = Case(model, normal(9, 2, 6), torch.arange(9) % 3), 1e-6
    samples = {
        layer: oracle.per_sample(model, F.cross_entropy, case.inputs, case.labels, layer) for layer in "0246"
    }
    optimizer, moved = step_of(TEKFAC, case, damping=None, trace_floor=floor, beta="add")
    dampings = {
        (layer, group): trace_lambda(
            expected_block(TEKFAC, samples[layer], "exact", statistics(optimizer)[layer], group), floor
        )
        for layer in "024"
        for group in groups_of(samples[layer])
    }
    assert max(dampings, key=lambda key: dampings[key]) == ("2", 1)
    head = expected_block(TEKFAC, samples["6"], "exact", statistics(optimizer)["6"], 0)
    expected = oracle.damped_solve(head, max(dampings.values()), case.to_matrix("6")[0])
    assert_close(moved["6"][0], expected)


@every_method
def test_26_own_damping_without_convolutions(method: type[NaturalGradient]) -> None:
    """A default lambda: split by pi (KFAC), equally (TKFAC), or added to Theta."""
    case, samples = case_of("linear", True), samples_of("linear", True)
    optimizer, moved = step_of(method, case, damping=None)
    root = torch.tensor(DEFAULT_DAMPING**0.5, dtype=torch.float64)
    if method in (EKFAC, TEKFAC):
        block = expected_block(method, samples, own_sharing(method), statistics(optimizer)["layer"], 0)
        block = block + DEFAULT_DAMPING * identity(len(block))
    else:
        scale, inputs, outputs = expected_factors(method, samples, own_sharing(method), 0)
        inputs, outputs = scale.sqrt() * inputs, scale.sqrt() * outputs
        pi = (inputs.trace() / len(inputs) / (outputs.trace() / len(outputs))).sqrt()
        pi = pi if method is KFAC else torch.ones_like(pi)
        block = factored_block(inputs, outputs, root * pi, root / pi)
    expected = oracle.damped_solve(block, 0.0, case.to_matrix("layer")[0])
    assert_close(moved["layer"][0], expected)


# -- 27: scaling the loss, and very large damping ------------------------------------------------------


def steps_under_scaling(
    kind: str, method: type[NaturalGradient], beta: str, floor: float, factor: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The step, and the step with the loss times c and the floor times c^2."""
    case, scaled = case_of(kind, True), case_of(kind, True)
    _, plain = step_of(method, case, damping=None, trace_floor=floor, beta=beta)
    _, after = step_of(
        method,
        scaled,
        loss=lambda logits: factor * scaled.loss(logits),
        damping=None,
        trace_floor=floor * factor**2,
        beta=beta,
    )
    return plain, after


@pytest.mark.every_pair
@every_convolution
@pytest.mark.parametrize("method", [TKFAC, TEKFAC])
@pytest.mark.parametrize("floor", [1e-4, 1e3])
@pytest.mark.parametrize("beta", ["add", "convolution"])
def test_27_steps_scale_inversely_with_the_loss(
    kind: str, method: type[NaturalGradient], floor: float, beta: str
) -> None:
    plain, scaled = steps_under_scaling(kind, method, beta, floor, factor=3.7)
    for layer in ("layer", "head"):
        assert_close(scaled[layer], plain[layer] / 3.7)


@pytest.mark.parametrize("beta", ["scale", "scale_all"])
def test_27_other_readings_of_beta_change_the_proportion(beta: str) -> None:
    plain, scaled = steps_under_scaling("conv2d", TEKFAC, beta, 1e-4, factor=3.7)
    assert_close(scaled["layer"], plain["layer"] / 3.7)
    assert relative_error(scaled["head"], plain["head"] / 3.7) > 0.1


@pytest.mark.parametrize("kind", KINDS)
@every_method
def test_27_large_damping_is_the_gradient(kind: str, method: type[NaturalGradient]) -> None:
    case = case_of(kind, True)
    optimizer = measured(method, case.model, case.inputs, case.loss, fisher="empirical")
    curvature, gradient = statistics(optimizer)["layer"], case.to_matrix("layer")
    size = float(curvature.rescaling.max())
    for damping in (1e3 * size, 1e6 * size, 1e9 * size):
        step = precondition(gradient, curvature.basis, curvature.rescaling + damping)
        assert relative_error(damping * step, gradient) < 10 * size / damping


@every_method
def test_27_a_real_step_with_large_damping(method: type[NaturalGradient]) -> None:
    case, damping = case_of("conv2d", True), 1e6
    _, moved = step_of(method, case, damping=damping)
    for layer in ("layer", "head"):
        assert relative_error(damping * moved[layer], case.to_matrix(layer)) < 1e-5


# -- 28: rotations -------------------------------------------------------------------------------------


def recipe_of(method: type[NaturalGradient], sharing: str | None = None) -> Recipe:
    return Recipe(
        factors=method.method.factors,
        rescaling=method.method.rescaling,
        sharing=sharing or own_sharing(method),
        factor_decay=0.9,
        rescaling_decay=0.8,
        averaging="moments",
        memory_budget=2**20,
    )


EVERYTHING = Due(factors=True, basis=True, rescaling=True)


@every_method
@pytest.mark.parametrize("positions", [1, 3])
def test_28_rotated_rows_rotate_the_step(method: type[NaturalGradient], positions: int) -> None:
    """Also of the bias's coordinate, which a network cannot rotate."""
    rows, gradient, damping = random_rows(groups=2, samples=12, positions=positions), normal(2, 3, 4), 0.7
    turn_in, turn_out = random_orthogonal(4, 1, groups=2), random_orthogonal(3, 2, groups=2)
    turned = Rows(rows.a @ turn_in.mT[:, None], rows.u @ turn_out.mT[None, :, None])

    def step(of: Rows, gradient: Tensor) -> Tensor:
        curvature = refreshed(None, [RowBatch(of)], EVERYTHING, recipe_of(method))
        return precondition(gradient, curvature.basis, curvature.rescaling + damping)

    expected = turn_out @ step(rows, gradient) @ turn_in.mT
    assert_close(step(turned, turn_out @ gradient @ turn_in.mT), expected)


@every_method
@pytest.mark.parametrize("positions", [0, 4])
def test_28_a_rotated_network_takes_the_rotated_step(method: type[NaturalGradient], positions: int) -> None:
    """W -> R_out W R_in^T between rotated inputs and a rotated next layer: the same function."""
    turn_in, turn_out = random_orthogonal(4, 1)[0], random_orthogonal(3, 2)[0]
    shape = (positions, 4) if positions else (4,)
    inputs, labels = normal(12, *shape), torch.arange(12) % 2

    def moved(turn_in: Tensor, turn_out: Tensor) -> Tensor:
        model = nn.Sequential(
            nn.Linear(4, 3, bias=False),
            nn.Linear(3, 2, bias=False),
            nn.Flatten(),
            nn.Linear(2 * (positions or 1), 2),
        ).double()
        with torch.no_grad():
            model[0].weight.copy_(turn_out @ normal(3, 4, seed=1) @ turn_in.T)
            model[1].weight.copy_(normal(2, 3, seed=2) @ turn_out.T)
            model[3].weight.copy_(normal(2, 2 * (positions or 1), seed=3))
            model[3].bias.zero_()
        case = Case(model, inputs @ turn_in.T, labels)
        return step_of(method, case, damping=0.2)[1]["0"][0]

    assert_close(moved(turn_in, turn_out), turn_out @ moved(identity(4), identity(3)) @ turn_in.T)


# -- 29: running averages ------------------------------------------------------------------------------


def average_of(values: list[Tensor], decay: float) -> Tensor:
    average = Average.of((values[0],))
    for value in values[1:]:
        average = average.updated((value,), decay)
    return average.values[0]


def debiased(values: list[Tensor], decay: float) -> Tensor:
    """The exponential average that starts at zero, divided by 1 - decay^k."""
    total = torch.zeros_like(values[0])
    for value in values:
        total = decay * total + (1 - decay) * value
    return total / (1 - decay ** len(values))


VALUES = [normal(3, 3, seed=seed) for seed in range(6)]


def test_29_one_update_is_the_value() -> None:
    assert torch.equal(average_of(VALUES[:1], 0.95), VALUES[0])


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_29_equal_values_are_their_own_average(decay: float) -> None:
    assert_close(average_of([VALUES[0]] * 5, decay), VALUES[0])


def test_29_decay_zero_is_the_last_value() -> None:
    assert torch.equal(average_of(VALUES, 0.0), VALUES[-1])


def test_29_decay_one_is_the_arithmetic_mean() -> None:
    assert_close(average_of(VALUES, 1.0), torch.stack(VALUES).mean(0))


@pytest.mark.parametrize("decay", [0.05, 0.5, 0.95])
def test_29_weighted_form_is_the_debiased_average(decay: float) -> None:
    for k in range(1, len(VALUES) + 1):
        assert_close(average_of(VALUES[:k], decay), debiased(VALUES[:k], decay))


def test_29_the_papers_literal_form_is_decay_one_minus_beta() -> None:
    """X <- beta X_new + (1 - beta) X_old, beta = 0.95, is a decay of 0.05."""
    total = torch.zeros_like(VALUES[0])
    for value in VALUES:
        total = 0.95 * value + (1 - 0.95) * total
    assert_close(average_of(VALUES, 0.05), total / (1 - 0.05 ** len(VALUES)))


class Run:
    """A training run that refreshes everything at every step, and what the oracle sees of each step."""

    def __init__(self, method: type[NaturalGradient], kind: str, bias: bool, **settings: object) -> None:
        self.case = case_of(kind, bias)
        self.samples: list[oracle.Samples] = []
        self.optimizer = method.natural(
            self.case.model,
            lr=0.3,
            momentum=0.5,
            damping=0.1,
            fisher="empirical",
            factors_every=1,
            basis_every=1,
            statistics_samples=None,
            **settings,
        )

    def step(self, part: slice) -> LayerCurvature:
        """One step on a part of the data, at parameters that have moved since the last."""
        case = Case(self.case.model, self.case.inputs[part], self.case.labels[part])
        self.samples.append(oracle.per_sample(case.model, F.cross_entropy, case.inputs, case.labels, "layer"))
        gradient_step(self.optimizer, case.model, case.loss, case.inputs)
        return statistics(self.optimizer)["layer"]


PARTS = (slice(0, 5), slice(4, 12), slice(10, 14), slice(2, 9))


def weighted_mean(values: list[Tensor], decay: float) -> Tensor:
    """sum b^(k-i) x_i / sum b^(k-i), written out."""
    weights = [decay ** (len(values) - 1 - i) for i in range(len(values))]
    return sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)


@pytest.mark.parametrize("kind", ["linear", "sequence", "conv2d", "grouped"])
@every_bias
def test_29_tkfac_averages_partial_traces(kind: str, bias: bool) -> None:
    """tr N_Phi = tr N_Psi = sigma after any history, and the factors are normalised when read."""
    decay = 0.8
    run = Run(TKFAC, kind, bias, factor_decay=decay)
    for part in PARTS:
        curvature = run.step(part)
        moments = curvature.moments.values
        d_out, d_in = run.samples[0].gradients.shape[2:]
        for group in groups_of(run.samples[0]):
            blocks = [fisher_of(samples, group) for samples in run.samples]
            mean = weighted_mean(blocks, decay)
            n_phi, n_psi = oracle.partial_traces(mean, d_out, d_in)
            assert_close(moments.input[group], n_phi)
            assert_close(moments.output[group], n_psi)
            assert_close(moments.scale[group], mean.trace())
            assert_close(moments.input[group].trace(), moments.scale[group])
            assert_close(moments.output[group].trace(), moments.scale[group])
            expected = torch.kron(n_psi, n_phi) / mean.trace()
            assert_close(dense_block(curvature, group), expected)


@pytest.mark.parametrize("kind", ["linear", "sequence", "conv2d", "grouped"])
@every_bias
def test_29_kfac_averages_both_factors(kind: str, bias: bool) -> None:
    decay = 0.8
    run = Run(KFAC, kind, bias, factor_decay=decay)
    for part in PARTS:
        curvature = run.step(part)
        for group in groups_of(run.samples[0]):
            factors = [expected_factors(KFAC, samples, "expand", group) for samples in run.samples]
            inputs = weighted_mean([f.inputs for f in factors], decay)
            outputs = weighted_mean([f.outputs for f in factors], decay)
            assert_close(dense_block(curvature, group), torch.kron(outputs, inputs))


@pytest.mark.parametrize("kind", ["linear", "conv2d", "grouped"])
def test_29_the_papers_averages_are_of_unit_trace(kind: str) -> None:
    """averaging="factors": Phi, Psi and sigma each averaged, so batches weigh alike; not the same."""
    decay = 0.8
    run = Run(TKFAC, kind, True, factor_decay=decay, averaging="factors")
    for part in PARTS:
        curvature = run.step(part)
    for group in groups_of(run.samples[0]):
        factors = [expected_factors(TKFAC, samples, "exact", group) for samples in run.samples]
        phi, psi, sigma = dense_factors(curvature, group)
        assert_close(phi, weighted_mean([f.inputs for f in factors], decay))
        assert_close(psi, weighted_mean([f.outputs for f in factors], decay))
        assert_close(sigma, weighted_mean([f.scale for f in factors], decay))
        assert_close(phi.trace(), 1.0)
        assert_close(psi.trace(), 1.0)
        blocks = [fisher_of(samples, group) for samples in run.samples]
        n_phi, _ = oracle.partial_traces(weighted_mean(blocks, decay), len(psi), len(phi))
        assert relative_error(phi, n_phi / n_phi.trace()) > 1e-3


@pytest.mark.every_pair
@pytest.mark.parametrize("kind", ["linear", "sequence", "conv1d", "conv2d", "conv3d", "grouped"])
@every_bias
@pytest.mark.parametrize("method", [EKFAC, TEKFAC])
def test_29_theta_is_rotated_then_averaged(kind: str, bias: bool, method: type[NaturalGradient]) -> None:
    """sum Theta is the average of tr F_k across all changes of basis, and Theta itself is right."""
    decay = 0.7
    run = Run(method, kind, bias, factor_decay=0.9, rescaling_decay=decay, rescaling_every=1)
    held: dict[int, Tensor] = {}
    weight, bases = 0.0, []
    for part in PARTS:
        curvature = run.step(part)
        bases.append(curvature.basis)
        weight = decay * weight + 1
        for group in groups_of(run.samples[0]):
            q_out = curvature.basis.vectors_out[group].contiguous()
            q_in = curvature.basis.vectors_in[group].contiguous()
            factors = [expected_factors(method, samples, own_sharing(method), group) for samples in run.samples]
            if method is EKFAC:
                assert_diagonalises(q_in, weighted_mean([f.inputs for f in factors], 0.9))
                assert_diagonalises(q_out, weighted_mean([f.outputs for f in factors], 0.9))
            new = oracle.theta(fisher_of(run.samples[-1], group), q_out, q_in)
            old = oracle.theta(held[group], q_out, q_in) if group in held else new
            expected = old + (new - old) / weight
            assert_close(curvature.rescaling[group], expected)
            traces = [fisher_of(samples, group).trace() for samples in run.samples]
            assert_close(curvature.rescaling[group].sum(), weighted_mean(traces, decay))
            held[group] = dense_block(curvature, group)
    assert relative_error(bases[0].vectors_in, bases[1].vectors_in) > 1e-3  # the basis did move


@every_method
def test_29_refreshing_with_the_same_batch_changes_nothing(method: type[NaturalGradient]) -> None:
    batches, recipe = [RowBatch(random_rows(groups=2, positions=2))], recipe_of(method)
    once = refreshed(None, batches, EVERYTHING, recipe)
    again = once
    for _ in range(3):
        again = refreshed(again, batches, EVERYTHING, recipe)
    for group in range(2):
        assert_close(dense_block(again, group), dense_block(once, group))
