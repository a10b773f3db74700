"""Promise: the examples run, compute what their formulas say, and show what they claim to show."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tekfac import fisher

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
METHODS = ("KFAC", "EKFAC", "TKFAC", "TEKFAC")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


influence, laplace = example("influence"), example("laplace")


# -- influence -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def influence_tables() -> Any:
    return influence.main(["--quick"])


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "exact blocks"])
def test_influence_predicts_what_leaving_images_out_does(influence_tables: Any, method: str) -> None:
    table = influence_tables["groups"]
    for column in ("correlation", "rank correlation"):
        assert table[method][column][0] > 0.5
        assert table[method][column][0] > table["dot product"][column][0] + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "exact blocks"])
@pytest.mark.parametrize("table", ["labels 0.001", "labels 0.0001"])
def test_influence_finds_wrong_labels(influence_tables: Any, method: str, table: str) -> None:
    scores = influence_tables[table]
    assert scores[method]["found in the top 10%"][0] > 0.6  # 0.1 by chance
    assert scores[method]["AUROC"][0] > 0.93  # 0.5 by chance
    assert scores[method]["AUROC"][0] > scores["gradient norm"]["AUROC"][0] - 0.01


def test_gradients_of_images_have_the_gradient_of_the_mean_loss_as_mean() -> None:
    images, labels = (part[:20] for part in influence.digits())
    model = influence.network(seed=0)
    cross_entropy(model(images), labels).backward()
    gradients = influence.gradients_of(model, images, labels)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].mean(0), parameter.grad)


def test_training_ends_in_a_minimum_of_the_penalised_loss() -> None:
    images, labels = (part[:100] for part in influence.digits())
    model = influence.network(seed=0)
    influence.train(model, images, labels, 1e-2)
    squares = sum(parameter.square().sum() for parameter in model.parameters())
    model.zero_grad()
    (cross_entropy(model(images), labels) + 0.5e-2 * squares).backward()
    assert max(float(parameter.grad.abs().max()) for parameter in model.parameters()) < 1e-6


# -- Laplace ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def laplace_tables() -> Any:
    (tables,) = laplace.main(["--quick"])
    return tables


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "exact blocks"])
def test_the_evidence_is_finite_and_has_its_maximum_inside_the_grid(laplace_tables: Any, method: str) -> None:
    row = laplace_tables["evidence"][method]
    assert math.isfinite(row["log evidence / N"])
    ends = laplace.PRIOR_PRECISIONS[0], laplace.PRIOR_PRECISIONS[-1]
    assert math.log10(ends[0]) < row["log10 tau"] < math.log10(ends[1])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_posterior_costs_little_on_test_images_and_gains_beyond_them(
    laplace_tables: Any, method: str
) -> None:
    network, row = laplace_tables["evidence"]["MAP"], laplace_tables["evidence"][method]
    assert row["NLL, test"] < network["NLL, test"] + 0.25
    assert row["accuracy"] > network["accuracy"] - 0.02
    assert row["NLL, test 60°"] < 0.8 * network["NLL, test 60°"]
    assert row["AUROC"] > network["AUROC"]


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "exact blocks"])
def test_with_validation_images_the_posterior_costs_nothing(laplace_tables: Any, method: str) -> None:
    network, row = laplace_tables["validation"]["MAP"], laplace_tables["validation"][method]
    assert row["NLL, test"] < network["NLL, test"] + 0.02
    assert row["accuracy"] > network["accuracy"] - 0.01


@pytest.fixture(scope="module")
def small() -> Any:
    """A posterior in float64, its matrix (N F + tau I), and the linearised network of a few images."""
    train = laplace.Images(*(part[:60] for part in laplace.digits(0)["train"]))
    model = laplace.trained_network(train, seed=0, epochs=3).double()
    train = laplace.Images(train.inputs.double(), train.labels)
    posterior = laplace.Posterior(fisher.estimate(model, [train], method="tekfac"), 60, 2.0)
    matrix = 60 * posterior.blocks.to_dense() + 2.0 * torch.eye(posterior.blocks.size)
    return posterior, matrix, laplace.linearised(model, train.inputs[:5])


def test_log_evidence_is_that_of_the_dense_matrix(small: Any) -> None:
    posterior, matrix, _ = small
    expected = -7.0 - 2.0 / 2 * 3.0 + len(matrix) / 2 * math.log(2.0) - float(torch.logdet(matrix)) / 2
    assert posterior.log_evidence(-7.0, 3.0) == pytest.approx(expected, rel=1e-9)


def test_variances_are_those_of_the_dense_matrix_and_positive(small: Any) -> None:
    posterior, matrix, network = small
    jacobian = posterior.blocks.to_vector(network.jacobian)
    jacobian = jacobian - jacobian.mean(1, keepdim=True)
    expected = (jacobian @ torch.linalg.inv(matrix) * jacobian).sum(-1)
    variances = posterior.variances(network)
    assert bool((variances > 0).all())
    torch.testing.assert_close(variances, expected)


def test_probabilities_are_averages_over_the_posterior(small: Any) -> None:
    posterior, matrix, network = small
    jacobian = posterior.blocks.to_vector(network.jacobian)
    covariances = jacobian @ torch.linalg.inv(matrix) @ jacobian.mT  # [N, C, C]
    outputs = torch.distributions.MultivariateNormal(network.outputs, covariances).sample((20_000,))
    torch.testing.assert_close(
        posterior.probabilities(network, 5000), outputs.softmax(-1).mean(0), atol=0.02, rtol=0
    )
