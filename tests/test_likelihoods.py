"""What the outputs mean: classes wherever the logits are, ignored targets, yes or no, numbers, your own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from dense import METHODS, assert_close, dense_block, sharings, statistics
from tekfac import KFAC, TEKFAC
from tekfac.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, as_likelihood
from tekfac.optim.natural_gradient import NaturalGradient
from training import assert_identical, mlp, train, vectors

Column = Callable[[int], oracle.Loss]
IGNORED = -100


def class_columns(axis: int) -> Column:
    """Columns of the softmax Fisher with the classes at `axis`; targets hold 1 for terms that count."""

    def column(k: int) -> oracle.Loss:
        def loss(logits: Tensor, counted: Tensor) -> Tensor:
            classes = logits.shape[axis]
            log_p = logits.log_softmax(axis).movedim(axis, -1).reshape(-1)[k]
            return -(log_p / 2).exp().detach() * log_p * counted.reshape(-1)[k // classes]

        return loss

    return column


def bernoulli_columns(k: int) -> oracle.Loss:
    def loss(outputs: Tensor, counted: Tensor) -> Tensor:
        p = outputs.reshape(-1)[k].detach().sigmoid()
        return (p * (1 - p)).sqrt() * outputs.reshape(-1)[k] * counted.reshape(-1)[k]

    return loss


def gaussian_columns(variance: float) -> Column:
    return lambda k: lambda outputs, _: outputs.reshape(-1)[k] / variance**0.5


def dense_fisher(
    model: nn.Module, inputs: Tensor, counted: Tensor, layer: str, column: Column, terms: float
) -> Tensor:
    """Sum over samples and columns of vec(G) vec(G)^T, divided by the number of terms."""
    size = model(inputs[:1]).numel()
    gradients = torch.cat(
        [oracle.per_sample(model, column(k), inputs, counted, layer).gradients[:, 0] for k in range(size)]
    )
    return oracle.exact_fisher(gradients) * (len(gradients) / terms)


def assert_exact_fisher(
    model: nn.Module,
    inputs: Tensor,
    counted: Tensor,
    column: Column,
    loss: Callable[[Tensor], Tensor],
    **settings: Any,
) -> None:
    """TEKFAC's block of every layer is the dense Fisher, corrected in the basis of its partial traces."""
    terms = settings.pop("terms", float(counted.sum()))
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]
    expected = {layer: dense_fisher(model, inputs, counted, layer, column, terms) for layer in layers}
    optimizer = TEKFAC.natural(model, lr=1e-30, momentum=0.0, fisher="exact", damping=1e-3, **settings)
    optimizer.zero_grad()
    loss(model(inputs)).backward()
    optimizer.step()
    for layer in layers:
        block = statistics(optimizer)[layer]
        _, d_out, d_in = block.rescaling.shape
        n_phi, n_psi = oracle.partial_traces(expected[layer], d_out, d_in)
        assert_close(block.moments.values.input[0], n_phi)
        assert_close(block.moments.values.output[0], n_psi)
        q_out, q_in = block.basis.vectors_out[0], block.basis.vectors_in[0]
        assert_close(block.rescaling[0], oracle.theta(expected[layer], q_out.contiguous(), q_in.contiguous()))


def sequence_model() -> nn.Module:
    """[N, T, 2] -> [N, T, 3], with a layer that mixes the positions of a sample."""

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.body(x))
            out: Tensor = self.head(hidden + hidden.mean(1, keepdim=True))
            return out

    torch.manual_seed(0)
    return Sequence().double()


def conv1d_model() -> nn.Module:
    """[N, 2, L] -> [N, 3, L]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv1d(2, 3, 1)).double()


def conv2d_model() -> nn.Module:
    """[N, 1, 3, 2] -> [N, 3, 3, 2]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1)).double()


def classes_last(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.movedim(-1, 1), targets, ignore_index=IGNORED)


def classes_second(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=IGNORED)


LAYOUTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], int, Any]] = {
    # model, input shape, target shape, axis of the classes, loss
    "[N, C]": (lambda: mlp(), (4, 5), (4,), 1, classes_second),
    "[N, C, d1]": (conv1d_model, (4, 2, 4), (4, 4), 1, classes_second),
    "[N, C, d1] with as many positions as classes": (conv1d_model, (4, 2, 3), (4, 3), 1, classes_second),
    "[N, C, d1, d2]": (conv2d_model, (3, 1, 3, 2), (3, 3, 2), 1, classes_second),
    "[N, T, C]": (sequence_model, (4, 4, 2), (4, 4), 2, classes_last),
    "[N, T, C] with as many positions as classes": (sequence_model, (4, 3, 2), (4, 3), 2, classes_last),
    "[N, 1, C]": (sequence_model, (4, 1, 2), (4, 1), 2, classes_last),
}


@pytest.mark.parametrize("ignoring", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_class_logits_may_sit_at_any_of_the_usual_places(layout: str, ignoring: bool) -> None:
    build, in_shape, target_shape, axis, loss = LAYOUTS[layout]
    inputs = torch.randn(in_shape, dtype=torch.float64)
    targets = torch.randint(3, target_shape)
    if ignoring:
        targets[torch.rand(target_shape) < 0.4] = IGNORED
        targets.view(-1)[0], targets.view(-1)[-1] = IGNORED, 1
    counted = (targets != IGNORED).double()
    assert_exact_fisher(build(), inputs, counted, class_columns(axis), lambda z: loss(z, targets))


def test_the_axis_of_the_classes_can_be_named() -> None:
    inputs, targets = torch.randn(4, 3, 2, dtype=torch.float64), torch.randint(3, (4, 3))
    for class_dim in (-1, 2):
        assert_exact_fisher(
            sequence_model(),
            inputs,
            torch.ones(4, 3).double(),
            class_columns(2),
            lambda z: F.cross_entropy(z.movedim(-1, 1), targets) + 0.1 * z.square().mean(),
            likelihood=Categorical(class_dim=class_dim),
        )


def test_a_mask_on_the_losses_ignores_as_an_ignored_target_does() -> None:
    inputs, targets = torch.randn(4, 4, 2, dtype=torch.float64), torch.randint(3, (4, 4))
    mask = (torch.rand(4, 4) < 0.6).double()
    mask[0, 0], mask[1, 1] = 0, 1

    def masked(logits: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")
        return (losses * mask).sum() / mask.sum()

    assert_exact_fisher(sequence_model(), inputs, mask, class_columns(2), masked)


def test_with_a_mean_per_sample_the_samples_are_the_terms() -> None:
    inputs, targets = torch.randn(4, 3, 2, dtype=torch.float64), torch.randint(3, (4, 3))
    assert_exact_fisher(
        sequence_model(),
        inputs,
        torch.ones(4, 3).double(),
        class_columns(2),
        lambda z: F.cross_entropy(z.movedim(-1, 1), targets, reduction="sum") / 4,
        loss_reduction="batchmean",
        terms=4.0,
    )


KINDS = [(method, sharing) for method in METHODS for sharing in sharings(method)]


@pytest.mark.every_pair
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("model", ["mlp", "sequence", "conv"])
@pytest.mark.parametrize(("method", "sharing"), KINDS)
def test_samples_with_ignored_targets_might_as_well_not_be_there(
    method: type[NaturalGradient], sharing: str, model: str, fisher: Any
) -> None:
    class Pooled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mean(-1)  # type: ignore[no-any-return]

    builders: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
        "mlp": (mlp, (6, 5), False),
        "sequence": (sequence_model, (6, 3, 2), True),
        "conv": (lambda: Pooled(*conv1d_model().children()), (6, 2, 4), False),
    }
    build, shape, per_token = builders[model]
    inputs = torch.randn(shape, dtype=torch.float64)
    targets = torch.randint(3, shape[:2] if per_token else shape[:1])
    targets[torch.tensor([1, 4])] = IGNORED
    kept = torch.tensor([0, 2, 3, 5])
    loss = classes_last if per_token else classes_second
    blocks = []
    for rows in (torch.arange(6), kept):
        network = build()
        optimizer = method.natural(network, lr=1e-30, momentum=0.0, sharing=sharing, fisher=fisher)
        train(network, optimizer, [(inputs[rows], targets[rows])], loss)
        blocks.append([dense_block(block) for block in statistics(optimizer).values()])
    for with_ignored, without in zip(*blocks, strict=True):
        assert_close(with_ignored, without)


def test_a_batch_in_which_everything_is_ignored_is_no_measurement() -> None:
    model = mlp()
    optimizer = TEKFAC.natural(model, lr=0.05, factors_every=1, basis_every=1, rescaling_every=1)
    train(model, optimizer, vectors(1))
    before = dict(statistics(optimizer))
    x, y = vectors(1)[0]

    def nothing(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, torch.full_like(targets, IGNORED), reduction="sum")

    train(model, optimizer, [(x, y)], nothing)
    for name, block in statistics(optimizer).items():
        assert block.moments is before[name].moments
        assert block.theta is not None
        assert block.theta.weight == 1.0


def test_bernoulli_is_of_independent_logits() -> None:
    inputs, targets = torch.randn(4, 5, dtype=torch.float64), torch.randint(2, (4, 3)).double()
    assert_exact_fisher(
        mlp(),
        inputs,
        torch.ones(4, 3).double(),
        bernoulli_columns,
        lambda z: F.binary_cross_entropy_with_logits(z, targets),
        likelihood="bernoulli",
    )


def test_bernoulli_leaves_masked_outputs_out() -> None:
    inputs, targets = torch.randn(4, 5, dtype=torch.float64), torch.randint(2, (4, 3)).double()
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]).double()
    assert_exact_fisher(
        mlp(),
        inputs,
        mask,
        bernoulli_columns,
        lambda z: F.binary_cross_entropy_with_logits(z, targets, weight=mask, reduction="sum") / mask.sum(),
        likelihood="bernoulli",
    )


def test_a_single_yes_or_no_per_sample_may_come_without_an_axis() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(5, 3), nn.Linear(3, 1)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(self.body(x)))[:, 0]
            return out

    inputs, targets = torch.randn(4, 5, dtype=torch.float64), torch.randint(2, (4,)).double()
    assert_exact_fisher(
        Scalar(),
        inputs,
        torch.ones(4).double(),
        bernoulli_columns,
        lambda z: F.binary_cross_entropy_with_logits(z, targets),
        likelihood="bernoulli",
    )


@pytest.mark.parametrize(("likelihood", "variance"), [("gaussian", 1.0), (Gaussian(0.5), 0.5)])
def test_gaussian_is_of_independent_means(likelihood: Any, variance: float) -> None:
    inputs, targets = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    assert_exact_fisher(
        mlp(),
        inputs,
        torch.ones(4, 3).double(),
        gaussian_columns(variance),
        lambda z: F.mse_loss(z, targets),
        likelihood=likelihood,
    )


def test_a_perfect_prediction_still_counts_in_regression() -> None:
    inputs = torch.randn(4, 5, dtype=torch.float64)
    targets = mlp()(inputs).detach()
    targets[0] += 1
    assert_exact_fisher(
        mlp(),
        inputs,
        torch.ones(4, 3).double(),
        gaussian_columns(1.0),
        lambda z: F.mse_loss(z, targets),
        likelihood="gaussian",
    )


# -- drawing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian(0.7)])
def test_drawn_gradients_have_mean_zero_and_the_columns_as_covariance(likelihood: Likelihood) -> None:
    draws = 20_000
    outputs = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64).expand(draws, 3)
    prediction = likelihood.predict(outputs, torch.ones_like(outputs))
    drawn = prediction.sample(torch.Generator().manual_seed(0))
    columns = torch.stack([column[0] for column in prediction.columns()])
    assert float(drawn.mean(0).abs().max()) < 4 / draws**0.5
    assert float((drawn.T @ drawn / draws - columns.T @ columns).abs().max()) < 8 / draws**0.5


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "gaussian"])
def test_half_precision_outputs_are_drawn_from_and_come_back_in_half_precision(name: str) -> None:
    outputs = torch.randn(4, 3).to(torch.bfloat16)
    prediction = as_likelihood(name).predict(outputs, torch.ones_like(outputs))
    gradient = prediction.sample(torch.Generator().manual_seed(0))
    assert gradient.dtype == torch.bfloat16
    assert all(column.dtype == torch.bfloat16 for column in prediction.columns())


# -- the user's own ------------------------------------------------------------------------------------


def drawn_cross_entropy(outputs: Tensor, generator: torch.Generator) -> Tensor:
    """Class labels drawn from the prediction, one loss for each term; classes last."""
    logits = outputs.flatten(0, -2)
    labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
    return F.cross_entropy(logits, labels, reduction="none").reshape(outputs.shape[:-1])


def moments_with(likelihood: Any, model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    optimizer = TEKFAC.natural(model, lr=1e-30, likelihood=likelihood, seed=4)
    train(model, optimizer, [(inputs, targets)], classes_last)
    return [block.moments.values.input for block in statistics(optimizer).values()]


@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 2)])
def test_a_callable_that_draws_classes_is_the_categorical_likelihood(shape: tuple[int, ...]) -> None:
    """One number per term, whether a term is a sample or a token."""
    build = mlp if len(shape) == 2 else sequence_model
    inputs, targets = torch.randn(shape, dtype=torch.float64), torch.randint(3, shape[:-1])
    ours, theirs = (
        moments_with(which, build(), inputs, targets) for which in ("categorical", drawn_cross_entropy)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert_close(b, a)


def test_a_callable_may_give_one_number_for_the_batch() -> None:
    inputs, targets = torch.randn(4, 5, dtype=torch.float64), torch.randint(3, (4,))
    ours = moments_with("categorical", mlp(), inputs, targets)
    theirs = moments_with(lambda z, g: drawn_cross_entropy(z, g).sum(), mlp(), inputs, targets)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(b, a)


def test_a_callable_is_called_only_where_the_step_measures() -> None:
    steps = set()

    def noting(outputs: Tensor, generator: torch.Generator) -> Tensor:
        steps.add(optimizer.num_steps)
        return drawn_cross_entropy(outputs, generator)

    model = mlp()
    optimizer = KFAC.natural(model, lr=0.01, likelihood=noting, factors_every=2)
    train(model, optimizer, vectors(5))
    assert steps == {0, 2, 4}


def test_a_likelihood_class_of_the_users_own_is_taken() -> None:
    class Sharper(Categorical):
        """As Categorical, with another name."""

    first, second = (
        moments_with(which, mlp(), *(v.clone() for v in vectors(1)[0])) for which in (Sharper(), "categorical")
    )
    assert_identical(first, second)


@pytest.mark.parametrize("shape", [(6, 4), (6, 5, 4), (6, 4, 5)], ids=["[N, C]", "[N, T, C]", "[N, C, T]"])
@pytest.mark.parametrize("confidence", [8.0, 12.0, 16.0, 20.0, 40.0])
def test_a_network_that_has_learnt_everything_raises_no_doubt(
    shape: tuple[int, ...], confidence: float
) -> None:
    """Its gradients are of the size of rounding, and do not sum to zero over the classes."""
    axis = shape.index(4)
    labels = torch.randint(4, [size for size in shape if size != 4])
    logits = confidence * F.one_hot(labels, 4).movedim(-1, axis).float() + 0.1 * torch.randn(shape)
    logits.requires_grad_()
    F.cross_entropy(logits.movedim(axis, 1), labels).backward()
    assert logits.grad is not None
    prediction = Categorical().predict(logits.detach(), logits.grad)
    assert prediction.doubt is None
    assert (
        prediction.sample(torch.Generator()).sum(axis).abs().max() < 1e-6
    )  # the axis of the classes was found
