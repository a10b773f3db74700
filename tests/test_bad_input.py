"""What cannot work is refused at once, with a message that names it and says what would."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC, explain
from tekfac.damping import BesideConvolutions, Factored, Tikhonov, TraceBased
from tekfac.likelihoods import Categorical, Gaussian, OutputShapeError
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, backward, cnn, everything, images, mlp, saved_curvature, train, vectors

NAN, INFINITY = float("nan"), float("inf")

BAD_NUMBERS = {
    "lr": [0.0, -1e-3, NAN, INFINITY, "0.1"],
    "momentum": [-0.1, 1.0, NAN, "0.9"],
    "weight_decay": [-0.1, NAN, INFINITY],
    "damping": [0.0, -1.0, NAN, INFINITY, "trace", True],
    "trace_floor": [0.0, -1.0, NAN],
    "factor_decay": [-0.1, 1.0, 1.5, NAN],
    "rescaling_decay": [-0.1, 1.0, NAN],
    "factors_every": [0, -1, 1.5, True],
    "basis_every": [0, -1, 2.0],
    "power": [0.0, -1.0, 1.5, NAN, "0.5"],
    "kl_clip": [0.0, -1.0, NAN],
    "first_order_lr": [0.0, -1.0, NAN],
    "memory_budget": [0, -5],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in BAD_NUMBERS.items() for v in values])
def test_a_number_out_of_range_is_refused_by_its_name_and_value(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key) as error:
        TEKFAC(mlp(), **{key: value})
    assert repr(value) in str(error.value)
    assert "Expected" in str(error.value)


@pytest.mark.parametrize("value", [0, "50"])
def test_an_interval_of_theta_out_of_range_is_refused_by_its_name_and_value(value: Any) -> None:
    with pytest.raises(ValueError, match=f"rescaling_every: {value!r}. Expected"):
        TEKFAC.natural(mlp(), rescaling_every=value)


CHOICES = {
    "fisher": "sampled, empirical, exact",
    "likelihood": "categorical, bernoulli, gaussian",
    "sharing": "exact, expand, reduce",
    "averaging": "moments, factors",
    "beta": "add, scale, scale_all, convolution",
    "loss_reduction": "mean, batchmean, sum",
    "rescaling": "measured, moving",
    "momentum_at": "before, after",
    "decay_per": "step, update",
    "first_order_step": "adamw, sgd",
}


@pytest.mark.parametrize("key", CHOICES)
def test_an_unknown_choice_is_refused_with_those_there_are(key: str) -> None:
    with pytest.raises(ValueError, match=f"Unknown {key}: 'nonsense'.*{CHOICES[key]}"):
        TEKFAC(mlp(), **{key: "nonsense"})  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_keyword_is_refused_with_the_nearest_there_is(method: type[NaturalGradient]) -> None:
    with pytest.raises(TypeError, match=r"'factors_evry'.*Did you mean 'factors_every'"):
        method(mlp(), factors_evry=10)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="method"):
        method(mlp(), method="SKFAC")  # type: ignore[call-arg]


@pytest.mark.parametrize("method", METHODS)
def test_parameters_instead_of_the_model_are_refused(method: type[NaturalGradient]) -> None:
    with pytest.raises(TypeError, match=rf"Write {method.__name__}\(model"):
        method(mlp().parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_a_model_without_a_supported_layer_is_refused_with_what_is_supported(
    method: type[NaturalGradient],
) -> None:
    model = nn.Sequential(nn.EmbeddingBag(4, 3), nn.PReLU(3))
    supported = r"nn\.Linear.*nn\.Conv2d.*nn\.Embedding, .*nn\.LayerNorm.*SGD.*tekfac\.register_layer"
    with pytest.raises(ValueError, match=rf"{method.__name__} found no layer.*{supported}"):
        method(model)


@pytest.mark.parametrize("method", METHODS)
def test_a_model_of_an_embedding_and_a_norm_alone_is_not_refused(method: type[NaturalGradient]) -> None:
    """Layers of every kind count, not only matrices."""
    model = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3)).double()
    optimizer = method(model, damping=0.1, precondition_norms=True)
    train(model, optimizer, [(torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 2, 2]))])
    assert set(optimizer.curvature) == {"0", "1"}


@pytest.mark.parametrize("chosen", [["0", "2"], [nn.Linear], nn.Linear], ids=["names", "types", "one type"])
def test_a_model_whose_layers_are_all_left_to_first_order_is_refused_with_the_reason(chosen: Any) -> None:
    with pytest.raises(ValueError, match=r"0\.weight: left to first order on request"):
        TEKFAC(mlp(), first_order=chosen)


def test_a_lazy_layer_that_has_not_seen_data_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'0'.*LazyLinear.*forward pass"):
        TEKFAC(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("shape", [(), (6,)])
def test_logits_without_an_axis_of_classes_are_refused_with_the_shapes_that_fit(
    shape: tuple[int, ...],
) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)[:, 0]
            return out if shape else out.sum()

    model = Odd().double()
    optimizer = TEKFAC(model, likelihood="categorical")
    with pytest.raises(OutputShapeError, match=r"\[N, C\].*likelihood='bernoulli'") as error:
        model(vectors(1)[0][0])
    assert str(list(shape)) in str(error.value)
    assert optimizer.num_steps == 0


def test_a_class_axis_that_is_not_there_is_refused() -> None:
    model = mlp()
    optimizer = TEKFAC(model, likelihood=Categorical(class_dim=2))
    with pytest.raises(OutputShapeError, match=r"class_dim=2.*\[6, 3\]"):
        model(vectors(1)[0][0])
    assert optimizer.num_steps == 0


def test_a_loss_that_does_not_tell_the_class_axis_is_refused_with_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Unflatten(1, (2, 2))).double()
    optimizer = TEKFAC(model, likelihood="categorical")
    with pytest.raises(OutputShapeError, match=r"Categorical\(class_dim=\.\.\.\)"):
        model(vectors(1)[0][0]).square().sum().backward()
    assert optimizer.num_steps == 0


def test_an_output_without_logits_is_refused_with_its_keys() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"scores": self.layer(x).tolist(), "features": None}

    model = Keyed().double()
    optimizer = TEKFAC.natural(model)
    with pytest.raises(OutputShapeError, match=r"\['scores', 'features'\].*outputs="):
        model(vectors(1)[0][0])
    assert optimizer.num_steps == 0


def test_a_training_run_goes_on_after_a_refused_pass() -> None:
    """A refused forward pass leaves nothing behind that the next one stumbles over."""
    model, twin = mlp(), mlp()
    settings: dict[str, Any] = {"lr": 0.05, "seed": 0, "likelihood": "categorical"}
    optimizer, other = (TEKFAC(m, **settings) for m in (model, twin))
    with pytest.raises(OutputShapeError):
        model(vectors(1)[0][0][0])  # one unbatched sample
    train(model, optimizer, vectors(2))
    train(twin, other, vectors(2))
    assert_identical(everything(model, optimizer), everything(twin, other))


def test_the_exact_fisher_of_a_callable_likelihood_is_refused() -> None:
    def sampled_loss(outputs: Tensor, generator: torch.Generator) -> Tensor:
        return outputs.sum(1)

    model = mlp()
    with pytest.raises(ValueError, match="fisher='exact'"):  # noqa: PT012 - at once or at the first pass
        optimizer = TEKFAC(model, likelihood=sampled_loss, fisher="exact")
        train(model, optimizer, vectors(1))


def test_a_callable_that_gives_losses_of_the_wrong_length_is_refused() -> None:
    model = mlp()
    optimizer = TEKFAC(model, likelihood=lambda outputs, generator: outputs.sum(1)[:2])
    with pytest.raises(OutputShapeError, match=r"\[2\].*6 samples"):
        backward(model, vectors(1)[0])
    assert optimizer.num_steps == 0


def test_damping_rules_check_their_own_values() -> None:
    for build in (
        lambda: Tikhonov(0.0),
        lambda: Factored(-1.0),
        lambda: TraceBased(0.0),
        lambda: BesideConvolutions(damping=NAN),
        lambda: Gaussian(variance=0.0),
    ):
        with pytest.raises(ValueError, match="Expected a positive"):
            build()  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="'pi' or 'equal'"):
        Factored(split="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale_all"):
        BesideConvolutions(reading="R2")  # type: ignore[arg-type]


def test_a_damping_rule_that_was_not_made_an_instance_is_refused() -> None:
    with pytest.raises(ValueError, match="damping"):
        TEKFAC(mlp(), damping=TraceBased)  # type: ignore[arg-type]


def test_a_likelihood_that_was_not_made_an_instance_is_refused() -> None:
    with pytest.raises(ValueError, match="likelihood"):
        TEKFAC(mlp(), likelihood=Categorical)


@pytest.mark.parametrize("method", [EKFAC, TEKFAC])
def test_factored_damping_is_refused_where_there_is_no_product_and_nothing_is_moved(
    method: type[NaturalGradient],
) -> None:
    model = mlp()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="Factored damping"):  # noqa: PT012 - at once or at the first step
        optimizer = method(model, damping=Factored())
        train(model, optimizer, vectors(1))
    assert_identical({n: p.detach() for n, p in model.named_parameters()}, before)


def test_a_damping_rule_that_cannot_be_used_changes_nothing_and_can_be_put_right() -> None:
    """The batch of the failed step is measured once, not twice."""
    model, twin = mlp(), mlp()
    optimizer, other = (TEKFAC(m, lr=0.05, seed=0, damping=0.1, factors_every=1) for m in (model, twin))
    first, second = vectors(2)
    train(model, optimizer, [first])
    before = everything(model, optimizer)
    optimizer.param_groups[0]["damping"] = Factored()
    optimizer.zero_grad()
    backward(model, second)
    with pytest.raises(ValueError, match="Factored damping"):
        optimizer.step()
    assert_identical(everything(model, optimizer)["model"], before["model"])
    after = saved_curvature(everything(model, optimizer)["optimizer"])
    assert_identical(after, saved_curvature(before["optimizer"]))
    optimizer.param_groups[0]["damping"] = 0.1
    optimizer.step()
    train(twin, other, [first, second])
    assert_identical(everything(model, optimizer), everything(twin, other))


def test_a_rule_for_networks_with_convolutions_is_refused_in_one_without() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="at least one preconditioned convolution"):
        train(model, TKFAC(model, damping=BesideConvolutions()), vectors(1))


def test_an_optimizer_cannot_be_pickled_or_copied_and_says_what_can() -> None:
    optimizer = KFAC(mlp())
    for attempt in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match=r"state_dict\(\)"):
            attempt(optimizer)  # type: ignore[operator]


def test_rows_that_cannot_be_told_apart_by_sample_are_refused_where_it_matters() -> None:
    class Flattened(nn.Module):
        """Logits of all tokens of all samples in one axis."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(5, 3)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.reshape(2, 3, 5)).flatten(0, 1)
            return out[:5]

    (x, y) = vectors(1)[0]
    model = Flattened()
    optimizer = TEKFAC(model, fisher="empirical")
    F.cross_entropy(model(x), y[:5]).backward()
    with pytest.raises(OutputShapeError, match=r"layer 'layer'.*fisher='sampled'"):
        optimizer.step()
    assert optimizer.num_steps == 0
    sampled = Flattened()
    train(sampled, TEKFAC(sampled, fisher="sampled"), [(x, y[:5])])


def test_integers_of_numpy_are_intervals_too() -> None:
    numpy = pytest.importorskip("numpy")
    model = cnn()
    train(model, TEKFAC(model, factors_every=numpy.int64(2), lr=numpy.float64(0.01)), images(1))


def test_a_model_without_data_is_refused_and_works_once_it_has_some() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"TEKFAC needs a model with data; 4 of its parameters \(0\.weight"):
        TEKFAC(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = TEKFAC(model)
    train(model, optimizer, vectors(2, dtype=torch.float32))
    assert set(optimizer.curvature) == {"0", "2"}


def test_explaining_needs_no_data() -> None:
    with torch.device("meta"):
        model = nn.Linear(5, 4)
    assert len(explain(model, file=None).layers) == 1


@pytest.mark.parametrize("lr", [NAN, INFINITY, -INFINITY])
def test_a_learning_rate_that_a_schedule_has_spoilt_is_named_and_moves_nothing(lr: float) -> None:
    model = mlp()
    optimizer = TEKFAC(model, param_groups=[{"params": [model[0]], "lr": 0.1}])
    optimizer.param_groups[1]["lr"] = lr
    before = copy.deepcopy(model.state_dict())
    x, y = vectors(1)[0]
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match=rf"param_groups\[1\]\['lr'\] is {lr!r}"):
        optimizer.step()
    assert_identical(model.state_dict(), before)
    optimizer.param_groups[1]["lr"] = 0.1
    optimizer.step()
    assert optimizer.num_steps == 1
