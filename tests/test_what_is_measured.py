"""Promise: what is measured is the training pass, whatever else the loop does with the model."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, log_softmax, mse_loss, nll_loss
from torch.utils.checkpoint import checkpoint

from dense import assert_close, dense_block, measured, statistics
from tekfac import KFAC, TEKFAC, TKFAC
from tekfac.likelihoods import OutputShapeError

F64 = torch.float64


def net(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def data(samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 5, dtype=F64, generator=generator)
    return x, torch.randint(3, (samples,), generator=generator)


def plain_block(fisher: str = "empirical") -> Tensor:
    x, y = data()
    return dense_block(
        measured(TKFAC, net(), x, lambda out: cross_entropy(out, y), fisher=fisher).curvature["0"]
    )


def test_gradients_by_the_input_alone_are_not_measured() -> None:
    """Adversarial examples and gradient penalties run passes of their own before the one that trains."""
    x, y = data()
    model = net()
    optimizer = TKFAC.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, fisher="empirical")
    optimizer.zero_grad()
    for _ in range(3):
        delta = torch.zeros_like(x, requires_grad=True)
        torch.autograd.grad(cross_entropy(model(x + delta), y), delta)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert_close(dense_block(statistics(optimizer)["0"]), plain_block())


def test_gradients_collected_by_autograd_grad_are_measured() -> None:
    x, y = data()
    model = net()
    optimizer = TKFAC.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, fisher="empirical")
    parameters = list(model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(cross_entropy(model(x), y), parameters), strict=True):
        p.grad = g
    optimizer.step()
    assert_close(dense_block(statistics(optimizer)["0"]), plain_block())


def test_a_hook_of_the_user_that_replaces_the_output_comes_after_ours() -> None:
    x, y = data()
    model, plain = net(), net()
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    optimizer = measured(TKFAC, model, x, lambda out: cross_entropy(out, y), fisher="empirical")

    class Doubled(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return 2 * z

    plain.insert(1, Doubled())
    expected = measured(TKFAC, plain, x, lambda out: cross_entropy(out, y), fisher="empirical")
    assert_close(dense_block(statistics(optimizer)["0"]), dense_block(statistics(expected)["0"]))


def test_two_optimizers_on_one_model_do_not_take_each_others_vectors() -> None:
    x, y = data()
    model = net()
    first = TKFAC.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, fisher="sampled")
    second = TKFAC.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, fisher="empirical")
    cross_entropy(model(x), y).backward()
    first.step()
    second.step()
    assert_close(dense_block(statistics(second)["0"]), plain_block())


def test_a_model_that_calls_itself_is_one_forward_pass() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: Tensor, inner: bool = False) -> Tensor:
            return self.body(x) if inner else 1.0 * self(x, inner=True)

    x, y = data()
    optimizer = measured(TKFAC, Recursive(), x, lambda out: cross_entropy(out, y), fisher="empirical")
    assert_close(dense_block(statistics(optimizer)["body.0"]), plain_block())


def test_an_exception_in_the_forward_pass_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.fail = True

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x)
            if self.fail:
                raise KeyError("data")
            return out

    x, y = data()
    model = Fails()
    optimizer = TKFAC.natural(model, lr=1e-30, momentum=0.0, damping=1e-3, fisher="empirical")
    with pytest.raises(KeyError):
        model(x)
    model.body(x)  # a call outside of the model's own forward pass
    model.fail = False
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert_close(dense_block(statistics(optimizer)["body.0"]), plain_block())


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_an_empty_batch_is_nothing_to_measure(likelihood: str) -> None:
    model = net()
    optimizer = TKFAC.natural(model, damping=1e-3, likelihood=likelihood)
    model(torch.zeros(0, 5, dtype=F64)).sum().backward()
    optimizer.step()
    assert not statistics(optimizer)
    assert optimizer.skipped_steps == 0


def test_reentrant_checkpoints_are_refused_with_the_way_out() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.body = nn.Linear(5, 5).double(), net()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.body, self.below(x), use_reentrant=True)
            return out

    x, y = data()
    model = Checkpointed()
    watching = TKFAC.natural(model, damping=1e-3)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        cross_entropy(model(x), y).backward()
    assert not statistics(watching)


def test_an_input_changed_in_place_inside_a_checkpoint_is_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

        def segment(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            z = self.second(h)
            h += z
            return h

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.segment, x, use_reentrant=False)
            return out

    x, y = data()
    model = Overwritten()
    optimizer = TKFAC.natural(model, damping=1e-3)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert "second" not in statistics(optimizer)
    assert "'second' was changed in place" in caplog.text


def test_statistics_do_not_lose_precision_inside_autocast() -> None:
    x, y = data()
    model = net().float()
    optimizer = TEKFAC.natural(model, damping=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cross_entropy(model(x.float()), y).backward()
        optimizer.step()
    block = statistics(optimizer)["0"]
    assert {t.dtype for t in (*block.moments.values, *block.basis, block.rescaling)} == {torch.float32}


def test_a_single_class_is_refused() -> None:
    x, _ = data()
    model = net(outputs=1)
    watching = TEKFAC.natural(model, likelihood="categorical")
    with pytest.raises(OutputShapeError, match="likelihood='bernoulli'"):
        model(x)
    assert not statistics(watching)


def test_a_loss_that_is_no_cross_entropy_is_doubted_once(caplog: pytest.LogCaptureFixture) -> None:
    x, _ = data()
    model = net()
    optimizer = TEKFAC.natural(model, factors_every=1, likelihood="categorical")
    for _ in range(3):
        optimizer.zero_grad()
        mse_loss(model(x), torch.ones(len(x), 3, dtype=F64)).backward()
        optimizer.step()
    assert caplog.text.count("Is likelihood='categorical' right") == 1


def test_log_probabilities_are_as_good_as_logits(caplog: pytest.LogCaptureFixture) -> None:
    x, y = data()
    model = nn.Sequential(*net(), nn.LogSoftmax(dim=1))
    with caplog.at_level(logging.WARNING, "tekfac"):
        optimizer = measured(TKFAC, model, x, lambda out: nll_loss(out, y), fisher="exact")
    assert not caplog.text
    assert_close(dense_block(statistics(optimizer)["0"]), plain_block("exact"))
    assert_close(log_softmax(torch.ones(1, 3, dtype=F64), 1).exp().sum(), 1.0)


@pytest.mark.parametrize("kind", ["bernoulli", "categorical"])
def test_certain_predictions_are_not_taken_for_ignored_targets(kind: str) -> None:
    """In float32 a logit of 200 has no gradient left; its term still counts in the mean."""
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[200.0, 0.0], [0.0, 0.0]]))
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    targets = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]])
    loss = binary_cross_entropy_with_logits if kind == "bernoulli" else cross_entropy
    optimizer = measured(KFAC, model, x, lambda z: loss(z, targets), likelihood=kind, fisher="exact")
    # Bernoulli: p (1 - p) / 8 terms of the five outputs at 0.5. Categorical: trace of diag(p) - p p^T of the
    # one sample at (0.5, 0.5), / 4 terms.
    expected = 5 / 32 if kind == "bernoulli" else 1 / 8
    assert_close(statistics(optimizer)[""].basis.values_out[0].sum(), expected, rtol=1e-5)


def test_sequence_first_outputs_are_told_by_batch_dim() -> None:
    class Causal(nn.Module):
        """Tokens interact: each output sees all earlier tokens of its sample."""

        def __init__(self, sequence_first: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
            self.time = 0 if sequence_first else 1

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x).tanh().cumsum(self.time))
            return out

    x, y = torch.randn(2, 6, 5, dtype=F64), torch.randint(3, (2, 6))

    def loss(logits: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), y.flatten())

    def transposed_loss(logits: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), y.T.flatten())

    right = measured(TKFAC, Causal(False), x, loss, fisher="exact")
    xt = x.transpose(0, 1).contiguous()
    told = measured(TKFAC, Causal(True), xt, transposed_loss, fisher="exact", batch_dim=1)
    for name in ("first", "last"):
        assert_close(dense_block(statistics(told)[name]), dense_block(statistics(right)[name]))


def test_sequence_first_outputs_that_are_not_told_are_doubted(caplog: pytest.LogCaptureFixture) -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x).tanh().cumsum(0))
            return out

    x, y = torch.randn(6, 2, 5, dtype=F64), torch.randint(3, (12,))
    measured(TKFAC, Causal(), x, lambda z: cross_entropy(z.flatten(0, 1), y))
    assert "batch_dim" in caplog.text
    with pytest.raises(OutputShapeError, match="batch_dim"):
        measured(TKFAC, Causal(), x, lambda z: cross_entropy(z.flatten(0, 1), y), fisher="exact")
