"""Promise: unusual models, and unusual ways to call them, are measured rightly or left alone with a word."""

from __future__ import annotations

import logging
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense import METHODS, assert_close, every_method
from tekfac import TEKFAC, fisher
from tekfac.optim.natural_gradient import NaturalGradient
from training import mlp, train, vectors

EVERY_STEP = {"factors_every": 1, "basis_every": 1}


def step(model: nn.Module, optimizer: NaturalGradient, *inputs: Any, classes: int = 3) -> None:
    optimizer.zero_grad()
    outputs = model(*inputs)
    F.cross_entropy(outputs, torch.arange(len(outputs)) % classes).backward()
    optimizer.step()


# -- models that change ----------------------------------------------------------------------------------


@every_method
def test_a_head_that_is_replaced_is_preconditioned_once_it_is_given_to_the_optimizer(
    method: type[NaturalGradient],
) -> None:
    model = mlp()
    optimizer = method.natural(model, **EVERY_STEP)
    train(model, optimizer, vectors(2))
    body, old = optimizer.curvature["0"].rescaling.clone(), optimizer.curvature["2"]
    model[2] = nn.Linear(4, 3).double()
    optimizer.add_param_group({"params": model[2].parameters()})
    assert list(optimizer.curvature) == ["0"]
    assert torch.equal(optimizer.curvature["0"].rescaling, body)
    train(model, optimizer, vectors(1))
    assert list(optimizer.curvature) == ["0", "2"]
    assert not torch.equal(optimizer.curvature["2"].rescaling, old.rescaling)


def test_parameters_that_the_model_got_and_the_optimizer_was_not_given_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, **EVERY_STEP)
    model[2] = nn.Linear(4, 3).double()
    train(model, optimizer, vectors(3))
    told = [record.message for record in caplog.records if "does not train" in record.message]
    assert len(told) == 1
    assert "2.weight, 2.bias" in told[0]
    assert "add_param_group" in told[0]


def test_a_layer_that_stays_frozen_is_not_waited_for() -> None:
    model = mlp(sizes=(5, 4, 4, 3))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = TEKFAC.natural(model, factors_every=1000, basis_every=1000, rescaling_every=1000)
    train(model, optimizer, vectors(2))
    model[2].requires_grad_(True)
    armed = []
    for batch in vectors(8):
        armed.append(optimizer._capture.armed)
        train(model, optimizer, [batch])
    assert set(optimizer.curvature) == {"2", "4"}
    assert sum(armed) <= 2
    assert not optimizer._capture.armed


def test_freezing_and_unfreezing_again_and_again_changes_nothing_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the discriminator of a GAN is, in turns with the generator."""
    caplog.set_level(logging.INFO, "tekfac")

    def run(toggle: bool) -> tuple[nn.Module, list[str]]:
        caplog.clear()
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3))
        torch.manual_seed(0)
        model = model.double()
        for parameter in model.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        optimizer = TEKFAC.natural(model, seed=0, **EVERY_STEP)
        for x, y in vectors(6):
            if toggle:
                model.requires_grad_(False)
                inputs = x.clone().requires_grad_()
                model(inputs).sum().backward()  # what a generator would do with it
                model.requires_grad_(True)
            train(model, optimizer, [(x, y)])
        return model, [record.message for record in caplog.records]

    (plain, expected), (toggled, told) = run(False), run(True)
    assert told == expected
    for a, b in zip(plain.parameters(), toggled.parameters(), strict=True):
        assert_close(a.detach(), b.detach(), 1e-6)


def test_training_only_biases_of_a_model_that_was_whole_goes_on_by_first_order() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.PReLU()).double()
    optimizer = TEKFAC.natural(model, momentum=0.0, lr=0.25)
    step(model, optimizer, torch.randn(6, 5, dtype=torch.float64))
    model[0].weight.requires_grad_(False)
    for _ in range(2):  # the second step knows
        before = model[0].bias.detach().clone()
        step(model, optimizer, torch.randn(6, 5, dtype=torch.float64))
    assert model[0].bias.grad is not None
    torch.testing.assert_close(model[0].bias.detach(), before - 0.25 * model[0].bias.grad)


# -- inputs that are unusual -----------------------------------------------------------------------------


class Shared(nn.Module):
    """A layer of rows [T, d] that all samples share, as positions may be."""

    def __init__(self, rows: int, samples: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(rows, 4))
        self.layer, self.head = nn.Linear(4, 3), nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        mixed = x @ self.layer(self.rows)
        out: Tensor = self.head(mixed)
        return out


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "samples"), [(6, 4), (8, 4), (12, 8), (7, 4)])
def test_rows_that_all_samples_share_have_an_unbiased_fisher(rows: int, samples: int) -> None:
    """The gradients of all samples arrive as one sum; over drawn labels its square has the right mean."""
    torch.manual_seed(rows)
    model = Shared(rows, samples)
    x = torch.randn(samples, rows, dtype=torch.float64)
    exact = 0.0
    logits = model(x)
    probabilities = logits.softmax(-1).detach()
    for n in range(samples):
        for label in range(2):
            loss = F.cross_entropy(logits[n : n + 1], torch.tensor([label]))
            gradient = torch.autograd.grad(loss, list(model.layer.parameters()), retain_graph=True)
            exact += float(probabilities[n, label] * sum(g.square().sum() for g in gradient)) / samples
    draws = []
    for seed in range(300):
        optimizer = TEKFAC.natural(model, lr=1e-30, seed=seed)
        step(model, optimizer, x, classes=2)
        draws.append(optimizer.curvature["layer"].trace())
    measured = torch.tensor(draws)
    error = float(measured.std()) / len(draws) ** 0.5
    assert abs(float(measured.mean()) - exact) < 4 * error


class Positions(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape
        self.tokens, self.places = nn.Embedding(7, 4), nn.Embedding(6, 4)
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.places(places if self.shape == "[T]" else places[None])
        out: Tensor = self.head(self.mix(x).tanh().mean(1))
        return out


@pytest.mark.parametrize("samples", [3, 4, 6])
@pytest.mark.parametrize("shape", ["[T]", "[1, T]"])
def test_positions_that_are_looked_up_once_are_measured_with_drawn_labels(
    shape: str, samples: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = Positions(shape)
    optimizer = TEKFAC.natural(model, **EVERY_STEP)
    for _ in range(3):
        step(model, optimizer, torch.randint(7, (samples, 6)))
    assert set(optimizer.curvature) == {"tokens", "places", "mix", "head"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", ["empirical", "exact"])
@pytest.mark.parametrize("samples", [3, 4, 6])
@pytest.mark.parametrize("shape", ["[T]", "[1, T]"])
def test_with_other_fishers_they_are_left_out_with_a_word(
    shape: str, samples: int, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Positions(shape)
    optimizer = TEKFAC.natural(model, fisher=kind, **EVERY_STEP)
    start = model.places.weight.detach().clone()
    for _ in range(2):
        step(model, optimizer, torch.randint(7, (samples, 6)))
    assert set(optimizer.curvature) == {"tokens", "mix", "head"}
    assert len([r for r in caplog.records if "'places' is applied once for all samples" in r.message]) == 1
    assert not torch.equal(start, model.places.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_may_be_32_bit_numbers(tied: bool) -> None:
    def run(dtype: torch.dtype) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)).double()
        if tied:
            model[1].weight = model[0].weight
        optimizer = TEKFAC.natural(model, seed=0)
        step(model, optimizer, torch.arange(5).to(dtype), classes=5)
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(torch.int32), run(torch.int64), strict=True))


class Experts(nn.Module):
    """Two experts, of which one may get no row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out = out.index_put((chosen.nonzero()[:, 0],), self.first(x[chosen]))
        out = out.index_put(((~chosen).nonzero()[:, 0],), self.second(x[~chosen]))
        scores: Tensor = self.head(out)
        return scores


@every_method
def test_an_expert_that_gets_no_row_waits_for_one(method: type[NaturalGradient]) -> None:
    model = Experts()
    optimizer = method.natural(model, **EVERY_STEP)
    x = torch.randn(6, 4, dtype=torch.float64)
    step(model, optimizer, x, torch.ones(6, dtype=torch.bool))
    assert set(optimizer.curvature) == {"first", "head"}
    step(model, optimizer, x, torch.arange(6) % 2 == 0)
    assert set(optimizer.curvature) == {"first", "second", "head"}


def test_an_instance_norm_of_a_single_image_is_measured_as_of_a_batch_of_one() -> None:
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(3, affine=True).double()
    image = torch.randn(3, 4, 4, dtype=torch.float64)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(x)
            return out.reshape(1, -1)

    model = Model()
    batches = [(image, torch.tensor([5]))]
    single = fisher.exact_blocks(model, batches, fisher="empirical")["norm"].to_dense()
    together = fisher.exact_blocks(model, [(image[None], torch.tensor([5]))], fisher="empirical")[
        "norm"
    ].to_dense()
    assert single.any()
    assert_close(single, together)


def test_a_state_of_a_recurrent_layer_may_be_a_named_tuple() -> None:
    State = namedtuple("State", ["h", "c"])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            zeros = x.new_zeros(1, len(x), 3)
            out: Tensor = self.head(self.memory(x, State(zeros, zeros))[0][:, -1])
            return out

    model = Model()
    optimizer = TEKFAC.natural(model)
    step(model, optimizer, torch.randn(5, 6, 4))
    assert set(optimizer.curvature) == {"memory.ih_l0", "memory.hh_l0", "head"}


def test_frozen_projections_of_attention_are_not_measured() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.attention(x, x, x)[0].mean(1))
            return out

    model = Model()
    model.attention.in_proj_weight.requires_grad_(False)
    assert model.attention.in_proj_bias is not None
    model.attention.in_proj_bias.requires_grad_(False)
    optimizer = TEKFAC.natural(model, **EVERY_STEP)
    step(model, optimizer, torch.randn(5, 6, 4))
    assert set(optimizer.curvature) == {"attention.out_proj", "head"}


def test_complex_parameters_are_left_to_first_order_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.waves, self.head = nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.waves(x.to(torch.complex64)).abs())
            return out

    model = Model()
    optimizer = TEKFAC.natural(model)
    step(model, optimizer, torch.randn(5, 4))
    assert list(optimizer.curvature) == ["head"]
    assert "'waves.weight'" in caplog.text
    assert "no real numbers" in caplog.text


# -- what goes wrong in the end --------------------------------------------------------------------------


@every_method
def test_a_state_of_other_forms_or_another_precision_is_refused_by_name(method: type[NaturalGradient]) -> None:
    def made(**settings: Any) -> NaturalGradient:
        return method.natural(mlp(dtype=torch.float32), **settings)

    optimizer = made()
    train(optimizer._model_layers.model, optimizer, vectors(1, dtype=torch.float32))
    state = optimizer.state_dict()
    for other in (
        {"max_dim": 3},
        {"max_dim": 3, "large_dims": "diagonal"},
        {"curvature_dtype": torch.float64},
    ):
        with pytest.raises(ValueError, match=r"layer '0' keeps its sides as .*same max_dim, large_dims, curv"):
            made(**other).load_state_dict(state)
    made().load_state_dict(state)


def test_a_run_that_has_diverged_is_told_what_to_do_and_then_seldom(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model)
    for x, y in vectors(30):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * torch.nan).backward()
        optimizer.step()
    told = [record.message for record in caplog.records if "skipped a step" in record.message]
    assert optimizer.skipped_steps == 30
    assert len(told) == 6  # the first five, and the tenth
    assert "lower lr or raise damping" in told[4]
    assert not any("raise damping" in message for message in [*told[:4], told[5]])
    train(model, optimizer, vectors(1))
    assert optimizer.num_steps == 1


@pytest.mark.parametrize("method", METHODS)
def test_one_convolution_does_not_change_the_damping_of_the_other_layers(method: type[NaturalGradient]) -> None:
    """As the patches of a vision transformer are one; the paper's rule, on request, does."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(36, 3)).double()
    optimizer = method.natural(model)
    step(model, optimizer, torch.randn(6, 1, 5, 5, dtype=torch.float64))
    alone = method.natural(nn.Sequential(nn.Linear(36, 3)).double())
    assert optimizer.param_groups[0]["damping"] == alone.param_groups[0]["damping"]
    if method.method.rescaling.measured:
        assert all(signal.damping == pytest.approx(1e-2) for signal in optimizer.signals().values())
