"""What `tekfac.fisher` cannot do is refused with a message that names it and says what would work."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac import fisher
from tekfac.curvature.blocks.block import Block
from tekfac.curvature.blocks.dense import DenseBlock
from tekfac.curvature.blocks.gram import GramBlock
from tekfac.likelihoods import Categorical, OutputShapeError
from training import Batch, cnn, images, mlp, vectors

CALLS: dict[str, Callable[..., Any]] = {
    "estimate": fisher.estimate,
    "exact_blocks": fisher.exact_blocks,
    "compare": fisher.compare,
}
every_call = pytest.mark.parametrize("call", CALLS)


# -- names and values ----------------------------------------------------------------------------------


@every_call
def test_an_unknown_layer_is_refused_with_those_there_are(call: str) -> None:
    with pytest.raises(ValueError, match=r"No layer 'fc1'.*'0', '2'"):
        CALLS[call](mlp(), vectors(1), layers=["0", "fc1"])


@every_call
def test_a_layer_without_a_block_is_refused_with_the_reason(call: str) -> None:
    slopes = cnn()
    slopes[2] = nn.PReLU(3).double()
    with pytest.raises(ValueError, match=r"No layer '2' with a Fisher block.*'0', '1', '4'"):
        CALLS[call](slopes, images(1), layers=["2"])
    bounded = nn.Sequential(nn.Embedding(4, 3, max_norm=1.0), nn.Linear(3, 2)).double()
    with pytest.raises(ValueError, match=r"No layer '0' with a Fisher block: max_norm changes the weight.*'1'"):
        CALLS[call](bounded, [(torch.tensor([0, 3]), torch.tensor([0, 1]))], layers=["0"])
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match=r"No layer '0' with a Fisher block.*'2'"):
        CALLS[call](model, vectors(1), layers=["0"])
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)).double()
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"No layer '0'.*shared with Linear '1', which has another bias.*'2'"):
        CALLS[call](tied, vectors(1, d_in=3, classes=2), layers=["0"])


@every_call
def test_no_layers_at_all_are_refused(call: str) -> None:
    with pytest.raises(ValueError, match="layers"):
        CALLS[call](mlp(), vectors(1), layers=[])


@every_call
def test_a_model_without_a_supported_layer_is_refused_with_what_is_supported(call: str) -> None:
    model = nn.Sequential(nn.EmbeddingBag(4, 3), nn.PReLU(3))
    supported = r"nn\.Linear.*nn\.Conv2d.*nn\.Embedding, .*nn\.LayerNorm"
    with pytest.raises(ValueError, match=rf"no layer with a Fisher block in Sequential.*{supported}"):
        CALLS[call](model, vectors(1))


@every_call
def test_what_is_no_model_is_refused(call: str) -> None:
    with pytest.raises(TypeError, match=r"Expected a model \(nn\.Module\), got generator"):
        CALLS[call](mlp().parameters(), vectors(1))


@pytest.mark.parametrize("name", ["adam", "", "kfca:reduce"])
def test_an_unknown_method_is_refused_with_those_there_are(name: str) -> None:
    method = name.partition(":")[0]
    for attempt in (
        lambda: fisher.estimate(mlp(), vectors(1), method=name),
        lambda: fisher.compare(mlp(), vectors(1), approximations=["kfac", name]),
    ):
        with pytest.raises(ValueError, match=rf"Unknown method: '{method}'.*kfac, ekfac, tkfac, tekfac"):
            attempt()


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
@pytest.mark.parametrize("sharing", ["exact", "nonsense"])
def test_an_unknown_sharing_is_refused_with_those_of_the_method(method: str, sharing: str) -> None:
    message = rf"Unknown sharing: '{sharing}'.*expand, reduce for {method.upper()}"
    for attempt in (
        lambda: fisher.estimate(mlp(), vectors(1), method=method, sharing=sharing),
        lambda: fisher.estimate(mlp(), vectors(1), method=f"{method}:{sharing}"),
        lambda: fisher.compare(mlp(), vectors(1), approximations=[f"{method}:{sharing}"]),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()


def test_two_sharings_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'reduce'.*'expand'|'expand'.*'reduce'"):
        fisher.estimate(mlp(), vectors(1), method="kfac:reduce", sharing="expand")


@every_call
@pytest.mark.parametrize("key", ["fisher", "likelihood", "loss_reduction"])
def test_an_unknown_choice_is_refused_with_those_there_are(call: str, key: str) -> None:
    choices = {
        "fisher": "sampled, empirical, exact",
        "likelihood": "categorical, bernoulli, gaussian",
        "loss_reduction": "mean, batchmean, sum",
    }[key]
    with pytest.raises(ValueError, match=f"Unknown {key}: 'nonsense'.*{choices}"):
        CALLS[call](mlp(), vectors(1), **{key: "nonsense"})


@every_call
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory_budget", -1),
        ("memory_budget", 1.5),
        ("memory_budget", True),
        ("seed", -1),
        ("seed", 0.5),
        ("seed", None),
        ("batch_dim", 0.5),
        ("batch_dim", "samples"),
        ("batch_dim", 2),  # of outputs with two axes
    ],
)
def test_a_number_that_does_not_fit_is_refused_by_its_name_and_value(call: str, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key) as error:
        CALLS[call](mlp(), vectors(1), **{key: value})
    assert repr(value) in str(error.value)


@every_call
def test_an_unknown_keyword_is_refused_with_the_nearest_there_is(call: str) -> None:
    with pytest.raises(TypeError, match=rf"fisher\.{call}.*'likelyhood'.*Did you mean 'likelihood'\?"):
        CALLS[call](mlp(), vectors(1), likelyhood="gaussian")
    with pytest.raises(TypeError, match=r"'nonsense'.*It takes.*fisher, likelihood, loss_reduction.*layers"):
        CALLS[call](mlp(), vectors(1), nonsense=1)


@pytest.mark.parametrize(
    ("call", "keyword", "nearest"),
    [
        ("estimate", "metod", "method"),
        ("estimate", "sharin", "sharing"),
        ("estimate", "chekpoint", "checkpoint"),
        ("exact_blocks", "limits", "limit"),
        ("compare", "aproximations", "approximations"),
        ("compare", "probe", "probes"),
        ("compare", "exact_memmory", "exact_memory"),
    ],
)
def test_the_nearest_keyword_may_be_one_of_the_functions_own(call: str, keyword: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=rf"'{keyword}'.*Did you mean '{nearest}'\?"):
        CALLS[call](mlp(), vectors(1), **{keyword: 1})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("damping", 0.0, "positive number, or None"),
        ("damping", -1.0, "positive number, or None"),
        ("damping", math.nan, "positive number, or None"),
        ("damping", math.inf, "positive number, or None"),
        ("probes", 7, "at least 8"),
        ("confidence", 0.0, "between 0 and 1"),
        ("confidence", 1.0, "between 0 and 1"),
        ("confidence", 95, "between 0 and 1"),
        ("exact_memory", -1, "exact_memory"),
    ],
)
def test_a_setting_of_a_comparison_out_of_range_is_refused(key: str, value: float, expected: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid {key}") as error:
        fisher.compare(mlp(), vectors(1), **{key: value})  # type: ignore[arg-type]
    assert repr(value) in str(error.value)
    assert expected in str(error.value)


@pytest.mark.parametrize("names", [[], ["kfac", "KFAC"], ["kfac", "kfac:expand"]], ids=str)
def test_no_approximation_or_the_same_one_twice_is_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"Invalid approximations.*at least one method, each once"):
        fisher.compare(mlp(), vectors(1), approximations=names)


def test_a_single_approximation_need_not_be_in_a_list() -> None:
    """As one layer need not be."""
    found = fisher.compare(mlp(), vectors(1), approximations="kfac", layers="0")
    assert [(row.layer, row.approximation) for row in found.rows] == [("0", "KFAC")]


# -- loaders -------------------------------------------------------------------------------------------


@every_call
@pytest.mark.parametrize(
    "loader", [[], [(torch.zeros(0, 5), torch.zeros(0).long())]], ids=["list", "empty batch"]
)
def test_an_empty_loader_is_refused(call: str, loader: Any) -> None:
    with pytest.raises(ValueError, match=r"loader is empty.*at least one"):
        CALLS[call](mlp(), loader)


@pytest.mark.parametrize(
    ("call", "settings"),
    [("estimate", {"method": "ekfac"}), ("estimate", {"method": "tekfac"}), ("compare", {})],
)
def test_a_generator_is_refused_where_two_passes_are_needed(call: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"read 2 times.*generator.*only once.*DataLoader or a list"):
        CALLS[call](mlp(), (batch for batch in vectors(2)), **settings)


class Changing:
    """A loader that gives other batches each time it is read."""

    def __init__(self, *readings: Sequence[Batch]) -> None:
        self.readings = list(readings)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.readings.pop(0) if len(self.readings) > 1 else self.readings[0])


@pytest.mark.parametrize("call", ["estimate", "compare"])
def test_a_loader_that_gives_less_in_the_second_pass_is_refused_with_both_counts(call: str) -> None:
    loader = Changing(vectors(3), vectors(2))
    with pytest.raises(ValueError, match=r"other data.*12 samples, 18 before.*same data in every pass"):
        CALLS[call](mlp(), loader)


@pytest.mark.parametrize("call", ["estimate", "compare"])
def test_a_loader_that_is_empty_in_the_second_pass_is_refused(call: str) -> None:
    with pytest.raises(ValueError, match=r"loader is empty|same data in every pass"):
        CALLS[call](mlp(), Changing(vectors(3), []))


@pytest.mark.parametrize("call", ["estimate", "compare"])
def test_a_loader_that_gives_other_data_in_the_second_pass_is_refused(call: str) -> None:
    """As many samples, but augmented anew: the diagonal would be that of another data set."""
    with pytest.raises(ValueError, match="same data in every pass"):
        CALLS[call](mlp(), Changing(vectors(3), vectors(3, seed=2)))


@every_call
def test_a_batch_of_a_kind_that_is_not_known_is_refused_with_those_that_are(call: str) -> None:
    x, y = vectors(1)[0]
    with pytest.raises(ValueError, match=r"tuple of 3.*\(inputs, targets\).*loss=lambda"):
        CALLS[call](mlp(), [(x, y, y)])


@every_call
@pytest.mark.parametrize("batch", ["inputs alone", "dict"])
def test_the_empirical_fisher_without_targets_is_refused(call: str, batch: str) -> None:
    x = vectors(1)[0][0]
    with pytest.raises(ValueError, match=r"fisher='empirical' needs targets.*\(inputs, targets\).*loss="):
        CALLS[call](mlp(), [x if batch == "inputs alone" else {"input": x}], fisher="empirical")


@every_call
def test_targets_that_are_all_ignored_are_refused(call: str) -> None:
    x, y = vectors(1)[0]
    with pytest.raises(ValueError, match=r"No layer saw anything.*all targets ignored"):
        CALLS[call](mlp(), [(x, torch.full_like(y, -100))])


@every_call
def test_a_model_whose_layers_are_all_frozen_is_refused_with_the_reason(call: str) -> None:
    with pytest.raises(ValueError, match=r"requires_grad"):
        CALLS[call](mlp().requires_grad_(False), vectors(1))


@every_call
def test_inference_mode_is_no_trouble_or_is_named(call: str) -> None:
    model, loader = mlp(), vectors(1)
    with torch.inference_mode():
        try:
            CALLS[call](model, loader)
        except (ValueError, RuntimeError) as error:
            assert "inference" in str(error)  # noqa: PT017 - either will do


@every_call
def test_a_loss_that_does_not_call_the_model_itself_is_refused_with_that_reason(call: str) -> None:
    with pytest.raises(ValueError, match=r"No layer saw anything.*model\(x\)"):
        CALLS[call](
            mlp(), vectors(1), loss=lambda model, batch: F.cross_entropy(model.forward(batch[0]), batch[1])
        )


# -- outputs -------------------------------------------------------------------------------------------


@every_call
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_outputs_that_are_not_finite_are_refused_with_the_number_of_the_batch(call: str, value: float) -> None:
    loader = vectors(3)
    loader[1] = (loader[1][0].clone(), loader[1][1])
    loader[1][0][2, 3] = value
    with pytest.raises(ValueError, match=r"Batch 1 of the data.*not finite"):
        CALLS[call](nn.Sequential(nn.Linear(5, 3)).double(), loader)


@every_call
def test_parameters_that_are_not_finite_are_refused(call: str) -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"Batch 0 of the data.*not finite"):
        CALLS[call](model, vectors(1))


@every_call
def test_gradients_that_are_not_finite_are_refused_though_the_outputs_are(call: str) -> None:
    """The root of 0 has no derivative; what is summed up must not become NaN in silence."""

    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
            nn.init.zeros_(self.first.weight)
            nn.init.zeros_(self.first.bias)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).abs().sqrt() + 1)  # type: ignore[no-any-return]

    model = Rooted()
    assert bool(torch.isfinite(model(vectors(1)[0][0])).all())
    with pytest.raises(ValueError, match="not finite"):
        CALLS[call](model, vectors(1))


@every_call
def test_targets_of_a_shape_that_does_not_fit_are_refused_with_both_shapes(call: str) -> None:
    x = vectors(1)[0][0]
    for likelihood in ("gaussian", "bernoulli"):
        with pytest.raises(OutputShapeError, match=r"targets of shape \[6\].*outputs of shape \[6, 3\]"):
            CALLS[call](mlp(), [(x, torch.zeros(6))], likelihood=likelihood)


@every_call
def test_classes_whose_axis_is_not_told_by_targets_are_refused_with_the_way_out(call: str) -> None:
    model = nn.Sequential(nn.Linear(5, 3)).double()
    sequences = torch.zeros(4, 2, 5, dtype=torch.float64)
    with pytest.raises(OutputShapeError, match=r"\[4, 2, 3\].*no targets.*Categorical\(class_dim=\.\.\.\)"):
        CALLS[call](model, [sequences])
    assert CALLS[call](model, [sequences], likelihood=Categorical(class_dim=-1))


@every_call
def test_a_likelihood_that_does_not_tell_its_loss_is_refused_with_the_way_out(call: str) -> None:
    def sampled_loss(outputs: Tensor, generator: torch.Generator) -> Tensor:
        return outputs.square().sum(1)

    with pytest.raises(NotImplementedError, match=r"does not tell its loss.*loss=lambda model, batch"):
        CALLS[call](mlp(), vectors(1), likelihood=sampled_loss, fisher="sampled")


# -- sizes ---------------------------------------------------------------------------------------------


def test_a_block_too_large_to_be_formed_is_refused_with_its_size_and_the_way_out() -> None:
    for block in (
        fisher.estimate(mlp(), vectors(1))["0"],
        fisher.exact_blocks(mlp(), vectors(1))["0"],
        GramBlock(fisher.estimate(mlp(), vectors(1))["0"].shape, torch.ones(1, 2, 24).double(), 2),
    ):
        with pytest.raises(
            ValueError, match=r"layer '0' has 24 rows.*GiB.*matvec, solve.*to_dense\(limit=24\)"
        ):
            block.to_dense(limit=23)
        assert block.to_dense(limit=24).shape == (24, 24)


def test_an_exact_block_too_large_is_refused_by_name_if_it_was_asked_for() -> None:
    with pytest.raises(ValueError, match=r"'0' has 24 rows, the limit is 20.*compare.*estimate.*limit="):
        fisher.exact_blocks(mlp(), vectors(1), limit=20, layers=["0", "2"])


def test_exact_blocks_that_are_all_too_large_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'0' has 24 rows, '2' has 15 rows, the limit is 10"):
        fisher.exact_blocks(mlp(), vectors(1), limit=10)


def test_an_exact_block_too_large_is_left_out_and_named_in_the_log_if_all_were_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocks = fisher.exact_blocks(mlp(), vectors(1), limit=20)
    assert list(blocks) == ["2"]
    assert "No exact block of '0' (24 rows): the limit is 20 rows." in caplog.text


# -- blocks --------------------------------------------------------------------------------------------


def blocks() -> list[Block]:
    estimated, exact = fisher.estimate(mlp(), vectors(1))["0"], fisher.exact_blocks(mlp(), vectors(1))["0"]
    return [estimated, exact, GramBlock(exact.shape, torch.ones(1, 2, 24).double(), 2)]


@pytest.mark.parametrize("operation", ["matvec", "solve", "sqrt_matvec", "inv_sqrt_matvec", "from_matrix"])
@pytest.mark.parametrize("shape", [(4, 5), (6, 4), (24,), (3, 4, 5), ()], ids=str)
def test_a_matrix_of_another_shape_is_refused_with_the_one_that_fits(
    operation: str, shape: tuple[int, ...]
) -> None:
    for block in blocks():
        damping = [0.1] if operation in ("solve", "sqrt_matvec", "inv_sqrt_matvec") else []
        with pytest.raises(
            ValueError, match=r"layer '0'.*\[\.\.\., 4, 6\].*bias as last column.*to_matrix"
        ) as error:
            getattr(block, operation)(torch.zeros(shape, dtype=torch.float64), *damping)
        assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize("operation", ["solve", "sqrt_matvec", "inv_sqrt_matvec", "logdet"])
@pytest.mark.parametrize("damping", [-1e-3, math.nan, math.inf, "0.1", True, None], ids=repr)
def test_a_damping_that_is_no_number_from_zero_on_is_refused(operation: str, damping: Any) -> None:
    for block in blocks():
        arguments = [] if operation == "logdet" else [torch.zeros(4, 6, dtype=torch.float64)]
        with pytest.raises(ValueError, match=r"Invalid damping.*not negative") as error:
            getattr(block, operation)(*arguments, damping)
        assert repr(damping) in str(error.value)


def test_a_singular_block_without_damping_is_refused_with_its_layer_eigenvalues_and_a_damping() -> None:
    block = DenseBlock(fisher.estimate(mlp(), vectors(1))["0"].shape, torch.ones(1, 24, 24).double())
    with pytest.raises(ValueError, match=r"layer '0' is singular.*from 0 to 24.*damping > 0.*here 1,"):
        block.solve(torch.zeros(4, 6))


# -- optional packages ---------------------------------------------------------------------------------


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)


NEEDS: dict[str, Callable[[Path], Any]] = {
    "scipy": lambda path: fisher.estimate(mlp(), vectors(1)).linear_operator(),
    "safetensors": lambda path: fisher.save(fisher.estimate(mlp(), vectors(1)), path / "blocks.safetensors"),
    "rich": lambda path: fisher.estimate(mlp(), vectors(1), progress=True),
}


@pytest.mark.parametrize("package", NEEDS)
def test_a_package_that_is_not_there_is_named_with_the_extra_that_brings_it(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without(package, monkeypatch)
    with pytest.raises(ImportError, match=rf"needs {package}.*pip install 'tekfac\[fisher\]'"):
        NEEDS[package](tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_safetensors_is_refused_before_the_data_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without("safetensors", monkeypatch)

    class Unread:
        def __iter__(self) -> Iterator[Batch]:
            pytest.fail("the data was read")

    with pytest.raises(ImportError, match=r"tekfac\[fisher\]"):
        fisher.estimate(mlp(), Unread(), method="tkfac", checkpoint=tmp_path / "survey.safetensors")


@pytest.mark.parametrize("package", ["scipy", "safetensors", "rich", "matplotlib", "sklearn"])
def test_everything_else_works_without_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(package, monkeypatch)
    model, loader = mlp(), vectors(1)
    assert fisher.compare(model, loader).rows
    found = fisher.estimate(model, loader)
    assert found.solve(dict(model.named_parameters()), damping=0.1)


# -- targets -------------------------------------------------------------------------------------------


@every_call
@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (torch.randn(6, 3).double(), r"no class probabilities.*likelihood='gaussian'"),
        (torch.rand(6, 3).double(), r"no class probabilities.*add up"),
        (torch.zeros(6).double(), r"shape \[6\] and type torch\.float64 for 3 classes"),
        (torch.zeros(6, 2).long(), r"shape \[6, 2\].*class indices of shape \[6\]"),
        (torch.full((6,), 7), r"the class 7\. Expected 0 to 2, or -100"),
        (torch.zeros(6).numpy(), r"targets of type ndarray\. Expected a tensor"),
    ],
    ids=["real", "no probabilities", "float indices", "one axis too many", "class too large", "numpy"],
)
def test_targets_that_are_none_are_refused(call: str, targets: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CALLS[call](mlp(), [(vectors(1)[0][0], targets)])


@every_call
def test_what_gives_no_batches_is_refused(call: str) -> None:
    x, y = vectors(1)[0]
    for loader in (x, torch.utils.data.TensorDataset(x, y), 3):
        with pytest.raises(TypeError, match=r"Expected batches"):
            CALLS[call](mlp(), loader)


@every_call
@pytest.mark.parametrize(
    "pair",
    [
        (torch.randn(4, 5).double(), torch.randn(4, 5).double()),
        (torch.randn(4, 5).double(), torch.zeros(4).long()),
        [torch.randn(4, 5).double(), torch.zeros(4).long()],
        [torch.randn(4, 5).double(), torch.zeros(4, 5).long()],
        ((torch.randn(4, 5).double(), torch.randn(4, 5).double()), torch.zeros(4).long()),
    ],
    ids=["alike", "as a tuple", "as a list", "as a list, of one shape", "of several inputs"],
)
def test_a_pair_of_inputs_and_targets_is_not_taken_for_two_batches(call: str, pair: Any) -> None:
    with pytest.raises(TypeError, match=r"one batch.*Expected batches: wrap it in a list: \[\(X, Y\)\]"):
        CALLS[call](mlp(), pair)


@every_call
def test_a_dict_is_not_taken_for_batches(call: str) -> None:
    with pytest.raises(TypeError, match=r"a dict, as loader.*wrap it in a list: \[batch\]"):
        CALLS[call](mlp(), {"input": vectors(1)[0][0]})


@every_call
def test_two_batches_are_taken_as_such(call: str) -> None:
    """Of inputs alone, in a list or marked as such, or with their targets in whatever holds them."""
    first, second = vectors(2)
    for loader in ([first[0], second[0]], ((first[0],), (second[0],)), (first, second), [first, second]):
        assert CALLS[call](mlp(), loader).metadata["samples"] == 12


@every_call
def test_the_empirical_fisher_of_a_loss_that_calls_the_model_twice_is_refused(call: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(torch.cat([model(x[:3]), model(x[3:])]), y)

    with pytest.raises(ValueError, match=r"calls the model 2 times.*may do so once"):
        CALLS[call](mlp(), vectors(2), loss=loss, fisher="empirical")
    CALLS[call](mlp(), vectors(2), loss=loss, fisher="exact")


# -- several predictions -------------------------------------------------------------------------------


class Two(nn.Module):
    """Three classes and a number, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.cls, self.box = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 1)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        return {"cls": self.cls(hidden), "box": self.box(hidden)[:, 0]}


INPUTS, CLASSES = vectors(1)[0]
NUMBERS = INPUTS[:, 0]
MIXED: dict[str, Any] = {"likelihood": {"cls": "categorical", "box": "gaussian"}}


@every_call
@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (
            CLASSES,
            r"a tensor of targets for several predictions, 'cls', 'box': there are none for 'cls', 'box'",
        ),
        (
            {"cls": CLASSES},
            r"targets named 'cls', for several.*there are none for 'box'\. Expected a tensor for each",
        ),
        ({"cls": CLASSES, "boxes": NUMBERS}, r"none for 'box', and there is no prediction 'boxes'.*outputs="),
        ((CLASSES, NUMBERS), r"targets named '0', '1'.*none for 'cls', 'box'.*like what the model returned"),
        ({"cls": CLASSES, "box": NUMBERS.numpy()}, r"there are none for 'box'\. Expected a tensor"),
        (
            {"cls": CLASSES, "box": NUMBERS[:, None]},
            r"prediction 'box': .*shape \[6, 1\] for outputs of shape \[6\]",
        ),
        (
            {"cls": CLASSES + 7, "box": NUMBERS},
            r"Of the prediction 'cls': .*got the class 8.*likelihood=\{'cls': ",
        ),
        ("none", r"targets of type str, without any tensor, for several"),
    ],
    ids=["one tensor", "one missing", "wrong name", "tuple", "no tensor", "wrong shape", "wrong class", "text"],
)
def test_targets_that_do_not_fit_the_predictions_are_refused_by_name(
    call: str, targets: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        CALLS[call](Two(), [(INPUTS, targets)], **MIXED)


@every_call
def test_a_prediction_whose_likelihood_does_not_fit_is_named(call: str) -> None:
    data = [(INPUTS, {"cls": CLASSES, "box": NUMBERS})]
    with pytest.raises(
        ValueError, match=r"Of the prediction 'box': .*shape \[6\].*likelihood=\{'box': \.\.\.\}"
    ):
        CALLS[call](Two(), data)
    with pytest.raises(ValueError, match=r"likelihood= names 'boxes', but .* are 'cls', 'box'"):
        CALLS[call](Two(), data, likelihood={"boxes": "gaussian"})
    with pytest.raises(ValueError, match=r"Unknown likelihood: 'poisson'"):
        CALLS[call](Two(), data, likelihood={"box": "poisson"})


@every_call
@pytest.mark.parametrize(
    "likelihood", ["auto", "gaussian", {"box": "gaussian"}, {"cls": "auto", "box": "gaussian"}]
)
def test_without_targets_every_prediction_needs_a_named_likelihood(call: str, likelihood: Any) -> None:
    missing = "'cls'" if isinstance(likelihood, dict) else "'cls', 'box'"
    with pytest.raises(
        ValueError,
        match=rf"'cls', 'box', and there are no targets.*likelihood=\{{'cls': .*nothing is said of {missing}\.",
    ):
        CALLS[call](Two(), [INPUTS], likelihood=likelihood)


@every_call
def test_a_prediction_that_another_is_made_of_is_refused_by_name(call: str) -> None:
    class Chain(Two):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            cls = self.cls(torch.tanh(self.body(x)))
            return {"cls": cls, "box": cls.sum(1)}

    with pytest.raises(
        ValueError, match=r"Batch 0 of the data: the prediction 'cls' has no Fisher of its own.*outputs="
    ):
        CALLS[call](Chain(), [(INPUTS, {"cls": CLASSES, "box": NUMBERS})], **MIXED)


@every_call
@pytest.mark.parametrize("targets", [{"cls": CLASSES}, [CLASSES, NUMBERS]], ids=["dict", "list"])
def test_inputs_with_several_targets_are_not_taken_for_two_batches(call: str, targets: Any) -> None:
    with pytest.raises(TypeError, match=r"one batch.*wrap it in a list: \[\(X, Y\)\]"):
        CALLS[call](Two(), (INPUTS, targets), **MIXED)


# -- losses that do not tell ---------------------------------------------------------------------------


@every_call
@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_a_loss_of_no_known_likelihood_is_refused_with_what_to_do(call: str, kind: str) -> None:
    def hinge(model: nn.Module, batch: Batch) -> Tensor:
        return F.multi_margin_loss(model(batch[0]), batch[1])

    def both(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out["cls"], batch[1]) + out["box"].abs().mean()

    said = r"Batch 0 of the data: the loss{} belongs to no likelihood.*{} has no labels.*{}.*fisher='empirical'"
    data = vectors(1, samples=12)
    with pytest.raises(ValueError, match=said.format("", f"fisher={kind!r}", r"likelihood=\.\.\.")):
        CALLS[call](mlp(), data, loss=hinge, fisher=kind)
    with pytest.raises(
        ValueError,
        match=said.format(" of the prediction 'box'", f"fisher={kind!r}", r"likelihood=\{'box': \.\.\.\}"),
    ):
        CALLS[call](Two(), data, loss=both, fisher=kind)
    assert CALLS[call](mlp(), data, loss=hinge, fisher=kind, likelihood="categorical")
    assert CALLS[call](Two(), data, loss=both, fisher=kind, likelihood={"box": "gaussian"})


@every_call
@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_a_batch_that_does_not_tell_the_likelihood_is_refused_with_what_to_do(call: str, kind: str) -> None:
    def ignored(model: nn.Module, batch: Batch) -> Tensor:
        return 0.0 * F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(
        ValueError, match=r"Batch 0 of the data: the loss does not tell its likelihood.*larger batch"
    ):
        CALLS[call](mlp(), vectors(1), loss=ignored, fisher=kind)


@every_call
def test_a_loss_that_is_another_one_in_a_later_batch_is_refused_by_both(call: str) -> None:
    def changing(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y) if y.is_floating_point() else F.cross_entropy(model(x), y)

    data = [*vectors(1), (INPUTS, INPUTS[:, :3])]
    with pytest.raises(
        ValueError,
        match=r"Batch 1 of the data: the loss is that of a gaussian.*was that of a categorical.*likelihood=",
    ):
        CALLS[call](mlp(), data, loss=changing)
