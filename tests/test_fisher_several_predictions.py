"""Over data, too, the Fisher of several predictions is the sum of theirs, and losses tell what they are."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, dense_block, measured, normal, oracle_block, seeded
from several_heads import (
    ANSWERS,
    BOXES,
    CLASSES,
    KINDS,
    TERMS,
    Heads,
    N,
    empirical_samples,
    exact_block,
    exact_samples,
    layers,
)
from tekfac import fisher
from tekfac.likelihoods import Gaussian, Unknown
from tekfac.optim.natural_gradient import NaturalGradient
from training import mlp, vectors

ALL = ("cls", "yes", "box")
X = normal(N, 5)
TARGETS = {"cls": CLASSES, "yes": ANSWERS.double(), "box": BOXES}
LIKELIHOODS: dict[str, Any] = {"cls": "categorical", "yes": "bernoulli", "box": Gaussian(0.5)}
UNEQUAL = (4, 1, 2)

every_method = pytest.mark.parametrize("method", METHODS)
by_targets_or_loss = pytest.mark.parametrize("given", ["targets", "loss"])


def heads(names: tuple[str, ...] = ALL, *, shared: bool = True) -> nn.Module:
    return seeded(lambda: Heads(names, shared=shared).double())


def batches(
    names: tuple[str, ...] = ALL, sizes: tuple[int, ...] = UNEQUAL
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    parts = {name: TARGETS[name].split(list(sizes)) for name in names}
    return [(x, {name: own[i] for name, own in parts.items()}) for i, x in enumerate(X.split(list(sizes)))]


def loss_of(weights: dict[str, float]) -> Callable[[nn.Module, Any], Tensor]:
    """As a training loop has it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        out = model(x)
        own = {
            "cls": lambda: F.cross_entropy(out["cls"], y["cls"]),
            "yes": lambda: F.binary_cross_entropy_with_logits(out["yes"], y["yes"]),
            "box": lambda: F.mse_loss(out["box"], y["box"]),
        }
        return torch.stack([weight * own[name]() for name, weight in weights.items()]).sum()

    return loss


def settings(given: str, names: tuple[str, ...] = ALL) -> dict[str, Any]:
    """By the targets, each with its likelihood; or by a loss that tells."""
    if given == "loss":
        return {"loss": loss_of(dict.fromkeys(names, 1.0))}
    return {"likelihood": {name: LIKELIHOODS[name] for name in names}}


def name_of(method: type[NaturalGradient]) -> str:
    return method.__name__.lower()


def assert_blocks(blocks: Any, method: type[NaturalGradient], samples: Callable[[str], oracle.Samples]) -> None:
    """Every block is the oracle's: re-scaled in the basis that was found, which may be turned."""
    for layer, block in blocks.items():
        of_layer = samples(layer)
        if method.method.rescaling.measured:
            q_out, q_in = block.basis.vectors_out[0].contiguous(), block.basis.vectors_in[0].contiguous()
            exact = oracle.exact_fisher(of_layer.gradients[:, 0])
            assert_close(block.to_dense(), oracle.eigen_corrected(exact, q_out, q_in))
        else:
            sharing = "exact" if "exact" in method.method.factors.sharings else "expand"
            assert_close(dense_block(block), oracle_block(method, of_layer, sharing))


# -- against the oracle ----------------------------------------------------------------------------------


@by_targets_or_loss
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("names", [("cls", "box"), ALL], ids="+".join)
@every_method
def test_the_exact_fisher_is_the_sum_over_predictions(
    method: type[NaturalGradient], names: tuple[str, ...], shared: bool, given: str
) -> None:
    model, ones = heads(names, shared=shared), dict.fromkeys(names, 1.0)
    blocks = fisher.estimate(model, batches(names), method=name_of(method), **settings(given, names))
    assert list(blocks) == layers(model)
    assert_blocks(blocks, method, lambda layer: exact_samples(model, X, layer, ones))
    for layer, block in fisher.exact_blocks(model, batches(names), **settings(given, names)).items():
        assert_close(block.to_dense(), exact_block(model, dict.fromkeys(names, X), layer))


@by_targets_or_loss
@pytest.mark.parametrize("shared", [True, False])
@every_method
def test_the_empirical_fisher_is_that_of_all_losses_together(
    method: type[NaturalGradient], shared: bool, given: str
) -> None:
    model, ones = heads(shared=shared), dict.fromkeys(ALL, 1.0)
    blocks = fisher.estimate(model, batches(), method=name_of(method), fisher="empirical", **settings(given))
    assert_blocks(blocks, method, lambda layer: empirical_samples(model, X, layer, ones))
    for layer, block in fisher.exact_blocks(model, batches(), fisher="empirical", **settings(given)).items():
        expected = oracle.exact_fisher(empirical_samples(model, X, layer, ones).gradients[:, 0])
        assert_close(block.to_dense(), expected)
    assert blocks.metadata["terms"] == TERMS["box"]


@by_targets_or_loss
@every_method
def test_drawn_labels_are_those_of_an_optimizer_and_the_same_in_both_passes(
    method: type[NaturalGradient], given: str
) -> None:
    model = heads()
    (batch,) = batches(sizes=(N,))
    blocks = fisher.estimate(
        model, [batch], method=name_of(method), fisher="sampled", seed=3, **settings(given)
    )
    loss = loss_of(dict.fromkeys(ALL, 1.0))
    optimizer = measured(
        method,
        model,
        X,
        lambda out: loss(lambda _: out, batch),
        fisher="sampled",
        seed=3,  # type: ignore[arg-type]
    )
    for layer, block in blocks.items():
        assert_close(block.to_dense(), optimizer.curvature[layer].to_dense(), rtol=1e-12)
    comparison = fisher.compare(model, batches(), fisher="sampled", seed=3, **settings(given))
    for row in comparison.rows:
        assert row.approximation == "KFAC" or row.trace_ratio == pytest.approx(1.0, abs=1e-12)


def test_batches_may_train_different_predictions() -> None:
    """Each counts where it is trained; gradients as they come by have one Fisher all the same."""
    model, data, terms = heads(("cls", "box")), batches(("cls", "box"), (4, 3)), (4, 4 * 3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return loss_of({"cls" if len(batch[0]) == 4 else "box": 1.0})(model, batch)

    exact = fisher.exact_blocks(model, data, loss=loss)
    assert exact.metadata["terms"] == {"box": terms[1], "cls": terms[0]}
    for layer, block in exact.items():
        assert_close(block.to_dense(), exact_block(model, {"cls": X[:4], "box": X[4:]}, layer))
    empirical = fisher.exact_blocks(model, data, loss=loss, fisher="empirical")
    of_cls = oracle.per_sample(
        model, lambda z, y: F.cross_entropy(z["cls"], y), X[:4], CLASSES[:4], "trunks.all"
    )
    of_box = oracle.per_sample(model, lambda z, y: 4 * F.mse_loss(z["box"], y), X[4:], BOXES[4:], "trunks.all")
    gradients = torch.cat([of_cls.gradients, of_box.gradients])[:, 0]
    expected = oracle.exact_fisher(gradients) * N / sum(terms)
    assert_close(empirical["trunks.all"].to_dense(), expected)


def masked() -> tuple[list[Any], dict[str, Tensor]]:
    """Batches of which one has nearly all of the classes that are ignored; and the inputs that count."""
    ignored = torch.tensor([1, 2, 3, 6])
    classes = CLASSES.index_fill(0, ignored, -100)
    data = batches()
    for (_, targets), own in zip(data, classes.split(list(UNEQUAL)), strict=True):
        targets["cls"] = own
    return data, {"cls": X[classes != -100], "yes": X, "box": X}


@by_targets_or_loss
def test_every_prediction_has_terms_of_its_own_however_data_are_batched(given: str) -> None:
    model, (data, inputs) = heads(), masked()
    exact = fisher.exact_blocks(model, data, **settings(given))
    assert exact.metadata["terms"] == {"box": 4 * N, "cls": 3, "yes": 2 * N}
    assert exact.metadata["samples"] == N
    tkfac, tekfac = (fisher.estimate(model, data, method=m, **settings(given)) for m in ("tkfac", "tekfac"))
    for layer, block in exact.items():
        dense = exact_block(model, inputs, layer)
        assert_close(block.to_dense(), dense)
        n_phi, n_psi = oracle.partial_traces(dense / dense.trace(), *block.matrix_shape[-2:])
        assert_close(tkfac[layer].to_dense(), dense.trace() * torch.kron(n_psi, n_phi))
        basis = (
            tekfac[layer].basis.vectors_out[0].contiguous(),
            tekfac[layer].basis.vectors_in[0].contiguous(),
        )
        assert_close(tekfac[layer].to_dense(), oracle.eigen_corrected(dense, *basis))


@every_method
def test_losses_are_weighed_as_their_gradients_tell(method: type[NaturalGradient]) -> None:
    names = ("cls", "yes")
    model, loss = heads(names), loss_of({"cls": 3e4, "yes": 12e4})
    blocks = fisher.estimate(model, batches(names), method=name_of(method), loss=loss)
    weights = {"cls": 0.25, "yes": 1.0}
    assert blocks.metadata["weights"] == pytest.approx(weights)
    assert_blocks(blocks, method, lambda layer: exact_samples(model, X, layer, weights))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_without_a_loss_every_prediction_weighs_the_same(dtype: torch.dtype) -> None:
    model, names = heads().to(dtype), ("cls", "yes", "box")
    data = [(x.to(dtype), {**y, "yes": y["yes"].to(dtype), "box": y["box"].to(dtype)}) for x, y in batches()]
    blocks = fisher.estimate(model, data, likelihood=LIKELIHOODS)
    assert blocks.metadata["weights"] == dict.fromkeys(sorted(names), 1.0)


# -- comparisons -----------------------------------------------------------------------------------------


def mean_gradient(model: nn.Module, data: list[Any], layer: str) -> Tensor:
    """Of the sum of the mean losses over all data, as a matrix with the bias last."""
    out = model(X)
    classes = torch.cat([y["cls"] for _, y in data])
    loss = F.cross_entropy(out["cls"], classes) + F.mse_loss(out["box"], BOXES)
    loss = loss + F.binary_cross_entropy_with_logits(out["yes"], TARGETS["yes"])
    module = model.get_submodule(layer)
    weight, bias = torch.autograd.grad(loss, [module.weight, module.bias])  # type: ignore[list-item]
    return torch.cat([weight, bias[:, None]], 1)


def test_a_comparison_has_the_errors_and_angles_of_dense_matrices() -> None:
    model, (data, inputs) = heads(), masked()
    comparison = fisher.compare(model, data, likelihood=LIKELIHOODS)
    estimates = {m: fisher.estimate(model, data, method=m, likelihood=LIKELIHOODS) for m in ("kfac", "tekfac")}
    for method, layer in itertools.product(estimates, layers(model)):
        row, block = comparison.row(layer, method), estimates[method][layer].to_dense()
        dense, gradient = exact_block(model, inputs, layer), mean_gradient(model, data, layer)
        assert abs(row.error.value - float((block - dense).norm() / dense.norm())) < 1e-10
        ours, exact = (oracle.damped_solve(own, row.damping, gradient) for own in (block, dense))
        assert row.cosine is not None
        assert_close(row.cosine, (ours * exact).sum() / (ours.norm() * exact.norm()))


def test_rows_and_probes_say_what_the_matrix_says() -> None:
    model, layer, weights = heads(("cls", "yes")), "trunks.all", {"cls": 1.0, "yes": 0.5}
    data = batches(("cls", "yes"), (1, 1, 5))[:2]
    whole = fisher.exact_blocks(model, data, loss=loss_of(weights))[layer]
    by_rows, by_probes = (
        fisher.compare(model, data, loss=loss_of(weights), layers=layer, exact_memory=memory, probes=500)
        for memory in (2**30, 0)
    )
    truth, estimate = by_rows.truths[layer], by_probes.truths[layer]
    assert (truth.way, estimate.way) == ("Gram matrix", "probes")
    assert_close(truth.trace, whole.trace())
    assert_close(truth.squared_norm.value, whole.frobenius_norm() ** 2)
    assert_close(estimate.trace, whole.trace())
    assert estimate.squared_norm.value == pytest.approx(truth.squared_norm.value, rel=0.1)


# -- what is taken ---------------------------------------------------------------------------------------


@dataclass
class Found:
    scores: Tensor
    box: Tensor


RETURNS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Tensor, Tensor], Any], tuple[str, str]]] = {
    "tuple": (lambda a, b: (a, b), lambda a, b: (a, b), ("0", "1")),
    "list": (lambda a, b: [a, b], lambda a, b: (a, b), ("0", "1")),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda a, b: {"b": b, "a": a}, ("a", "b")),
    "nested": (lambda a, b: {"a": (a,), "b": {"c": b}}, lambda a, b: {"b": {"c": b}, "a": [a]}, ("a.0", "b.c")),
    "dataclass": (Found, lambda a, b: {"scores": a, "box": b}, ("scores", "box")),
}


class Wrapped(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.wrap = heads(("cls", "box")), wrap

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        return self.wrap(out["cls"], out["box"])


@pytest.mark.parametrize("kind", RETURNS)
def test_targets_are_like_what_the_model_returns(kind: str) -> None:
    wrap, arranged, (first, second) = RETURNS[kind]
    names = ("cls", "box")
    data = [(x, arranged(y["cls"], y["box"])) for x, y in batches(names)]
    blocks = fisher.exact_blocks(Wrapped(wrap), data, likelihood={second: Gaussian(0.5)})
    expected = fisher.exact_blocks(heads(names), batches(names), **settings("targets", names))
    assert blocks.metadata["likelihood"] == {
        first: "categorical",
        second: "Gaussian(variance=0.5, masked=False)",
    }
    for layer, block in expected.items():
        assert_close(blocks[f"inner.{layer}"].to_dense(), block.to_dense())


def test_inputs_alone_are_enough_where_likelihoods_are_named() -> None:
    model = heads()
    blocks = fisher.exact_blocks(model, [x for x, _ in batches()], likelihood=LIKELIHOODS)
    for layer, block in blocks.items():
        assert_close(block.to_dense(), exact_block(model, dict.fromkeys(ALL, X), layer))
    comparison = fisher.compare(model, [x for x, _ in batches()], likelihood=LIKELIHOODS)
    assert all(row.cosine is None for row in comparison.rows)


@by_targets_or_loss
@pytest.mark.parametrize("kind", ["exact", "sampled", "empirical"])
def test_some_layers_are_measured_as_among_all(kind: Any, given: str) -> None:
    """Whatever leads to them: terms and weights are those of all predictions."""
    how = settings(given) if given == "targets" else {"loss": loss_of({"cls": 4.0, "yes": 1.0, "box": 1.0})}
    whole, one = (
        fisher.exact_blocks(heads(), batches(), fisher=kind, layers=n, **how) for n in (None, "heads.yes")
    )
    assert one.metadata["terms"] == whole.metadata["terms"]
    assert list(one) == ["heads.yes"]
    assert_close(one["heads.yes"].to_dense(), whole["heads.yes"].to_dense())
    comparison = fisher.compare(heads(), batches(), fisher=kind, layers="heads.yes", **how)
    assert_close(comparison.truths["heads.yes"].trace, whole["heads.yes"].trace())


def test_what_depends_on_no_parameter_needs_no_targets() -> None:
    model = Wrapped(lambda a, b: (a, b.detach()))
    blocks = fisher.exact_blocks(model, [(x, y["cls"]) for x, y in batches()])
    assert blocks.metadata["terms"] == N
    assert list(blocks) == ["inner.trunks.all", "inner.heads.cls"]


def test_the_models_own_loss_of_a_dict_is_of_all_its_predictions() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = heads(("cls", "yes"))

        def forward(self, x: Tensor, cls: Tensor, yes: Tensor) -> dict[str, Tensor]:
            out = self.inner(x)
            loss = F.cross_entropy(out["cls"], cls) + F.binary_cross_entropy_with_logits(out["yes"], yes)
            return {"loss": loss, **out}

    names = ("cls", "yes")
    blocks = fisher.exact_blocks(WithLoss(), [{"x": x, **y} for x, y in batches(names)])
    for layer, block in fisher.exact_blocks(heads(names), batches(names), **settings("targets", names)).items():
        assert_close(blocks[f"inner.{layer}"].to_dense(), block.to_dense())


def test_a_precision_that_was_changed_last_is_no_hindrance() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(dtype=torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.float()).double()  # type: ignore[no-any-return]

    for kind in ("exact", "empirical"):
        blocks = fisher.exact_blocks(Cast(), vectors(2), fisher=kind)  # type: ignore[arg-type]
        expected = fisher.exact_blocks(mlp(), vectors(2), fisher=kind)  # type: ignore[arg-type]
        for layer, block in expected.items():
            assert_close(blocks[f"inner.{layer}"].to_dense().double(), block.to_dense(), rtol=1e-4)


# -- the likelihood of a loss ----------------------------------------------------------------------------


def of(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: loss(model(batch[0]), batch[1])


NUMBERS = [(x, normal(len(x), 3, seed=9)) for x, _ in vectors(2)]


@pytest.mark.parametrize("kind", ["exact", "sampled", "empirical"])
def test_a_regression_with_its_loss_has_the_fisher_of_a_gaussian(kind: Any) -> None:
    found = fisher.estimate(mlp(), NUMBERS, fisher=kind, loss=of(F.mse_loss))
    expected = fisher.estimate(mlp(), NUMBERS, fisher=kind, likelihood=Gaussian(0.5))
    assert found.metadata["likelihood"] == "Gaussian(variance=0.5, masked=True)"
    for layer, block in expected.items():
        assert_close(found[layer].to_dense(), block.to_dense())


def test_without_a_loss_the_default_is_categorical_and_a_regression_is_not_taken_for_one() -> None:
    assert fisher.estimate(mlp(), vectors(1)).metadata["likelihood"] == "categorical"
    assert fisher.estimate(mlp(), [vectors(1)[0][0]]).metadata["likelihood"] == "categorical"
    with pytest.raises(ValueError, match=r"no class probabilities.*likelihood='gaussian'"):
        fisher.estimate(mlp(), NUMBERS)


def test_it_is_said_once_whatever_the_passes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tekfac"):
        fisher.compare(mlp(), NUMBERS, loss=of(F.mse_loss))
    assert caplog.text.count("The loss is that of a gaussian likelihood") == 1


def hinge(z: Tensor, y: Tensor) -> Tensor:
    return F.multi_margin_loss(z, y)


def test_a_loss_of_no_known_likelihood_has_an_empirical_fisher() -> None:
    model, data = mlp(), vectors(1, samples=12)
    blocks = fisher.exact_blocks(model, data, fisher="empirical", loss=of(hinge))
    assert blocks.metadata["likelihood"] == str(Unknown())
    for layer, block in blocks.items():
        samples = oracle.per_sample(model, hinge, *data[0], layer)
        assert_close(block.to_dense(), oracle.exact_fisher(samples.gradients[:, 0]))


def test_the_empirical_fisher_takes_all_that_comes_by_as_the_optimizers_do() -> None:
    """Of a loss that goes other ways than through predictions, too; here of a model that returns it alone."""

    class LossAlone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

    blocks = fisher.exact_blocks(LossAlone(), vectors(2), fisher="empirical", loss=lambda model, b: model(*b))
    for layer, block in fisher.exact_blocks(mlp(), vectors(2), fisher="empirical").items():
        assert_close(blocks[f"net.{layer}"].to_dense(), block.to_dense())


# -- what is kept ----------------------------------------------------------------------------------------


@by_targets_or_loss
def test_blocks_come_back_with_their_likelihoods_in_words(given: str, tmp_path: Path) -> None:
    blocks = fisher.estimate(heads(), batches(), **settings(given))
    fisher.save(blocks, tmp_path / "blocks.safetensors")
    loaded = fisher.load(tmp_path / "blocks.safetensors")
    assert loaded.metadata == blocks.metadata
    words = {
        "box": f"Gaussian(variance=0.5, masked={given == 'loss'})",
        "cls": "categorical" if given == "targets" else "Categorical(class_dim=1)",
        "yes": "bernoulli",
    }
    assert loaded.metadata["likelihood"] == words
    assert {name: kind for name, kind in KINDS.items() if kind not in words[name].lower()} == {}
    assert loaded.metadata["terms"] == {"box": 4 * N, "cls": N, "yes": 2 * N}
    assert torch.equal(loaded.to_dense(), blocks.to_dense())


class StoppedError(Exception):
    """What a loader raises that is told to stop."""


class Loader:
    """Batches; after so many of them, over all passes, it breaks off."""

    def __init__(self, data: list[Any], stop: int | None = None) -> None:
        self.data, self.left = data, stop

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            if self.left is not None:
                if not self.left:
                    raise StoppedError
                self.left -= 1
            yield batch


def assert_resumed(
    make: Callable[[Loader, Path | None], Any], data: list[Any], passes: int, folder: Path
) -> None:
    whole = make(Loader(data), None)
    for stop in range(1, passes * len(data)):
        path = folder / f"{stop}.safetensors"
        with pytest.raises(StoppedError):
            make(Loader(data, stop), path)
        for _ in range(2):  # gone on with, and read
            blocks = make(Loader(data), path)
            assert blocks.metadata == whole.metadata
            assert torch.equal(blocks.to_dense(), whole.to_dense())


@by_targets_or_loss
@pytest.mark.parametrize(
    ("method", "kind"),
    [("kfac", "exact"), ("tekfac", "exact"), ("tekfac", "sampled"), ("tekfac", "empirical")],
)
def test_an_interrupted_estimate_gives_the_same_blocks(
    method: str, kind: Any, given: str, tmp_path: Path
) -> None:
    def make(loader: Loader, path: Path | None) -> Any:
        return fisher.estimate(
            heads(),
            loader,
            method=method,
            fisher=kind,
            checkpoint=path,
            checkpoint_seconds=0,
            **settings(given),
        )

    assert_resumed(make, batches(), 1 if method == "kfac" else 2, tmp_path)


def test_what_was_found_is_in_the_file(tmp_path: Path) -> None:
    """A single label, of a loss that only its gradient shows, tells nothing by itself."""

    def by_hand(z: Tensor, y: Tensor) -> Tensor:
        return -(z.exp() / z.exp().sum(1, keepdim=True)).gather(1, y[:, None]).log().mean()

    def make(loader: Loader, path: Path | None) -> Any:
        return fisher.estimate(mlp(), loader, loss=of(by_hand), checkpoint=path, checkpoint_seconds=0)

    x, y = vectors(1, samples=16)[0]
    assert_resumed(make, [(x[:14], y[:14]), (x[14:15], y[14:15]), (x[15:], y[15:])], 2, tmp_path)
    with pytest.raises(ValueError, match="does not tell its likelihood"):
        make(Loader([(x[14:15], y[14:15])]), None)
