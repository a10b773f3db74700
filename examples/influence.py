"""Influence functions on scikit-learn's digits: what training images do to predictions, and wrong labels.

A network is trained to a minimum w of a mean loss with an L2 penalty, 1/N sum_n loss_n(w) + lambda/2 |w|^2.
Without image n the minimum would be elsewhere. To first order, with H the Hessian of the mean loss and g_n the
gradient of loss_n, the loss of a test image would grow by

    influence(n, test) = 1/N g_test^T (H + lambda I)^-1 g_n        (Koh and Liang 2017)

and without a group of images by the sum over them. H is replaced by the Fisher F, which for a classifier is
its Gauss-Newton part, and F by the blocks of `tekfac.fisher`. The damping is not tuned: it is the lambda of
the training. Beside the four methods the tables have the exact blocks, which say what better approximations
of the blocks could gain, and the dot product of gradients, which uses no curvature at all.

 1. Groups. The training images are split into groups, and the network is trained again, from w, without each
    of them. The growth of the loss of each test image that is predicted is compared with the one that is
    seen: by the correlation over all test images and groups, and by the rank correlation over the groups,
    which is averaged over the test images.
 2. Labels. A tenth of the labels is made wrong, and the network is trained on them. The images are ranked by
    their influence on their own loss, g_n^T (F + lambda I)^-1 g_n, and, for comparison, by |g_n| or loss_n
    alone. A second lambda, ten times smaller, lets the network learn more of the wrong labels by heart.

What comes out: with curvature the predicted effects of groups are clearly related to those that are seen,
without it they hardly are; the four methods are alike, and the exact blocks are better. Wrong labels are found
by all scores nearly alike: influence is a little ahead of the gradient norm, but hardly ahead of the loss.

Run: python examples/influence.py (half a minute; --quick for a small version)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import mean, stdev

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cosine_similarity, cross_entropy, one_hot

from tekfac import fisher

METHODS = ("kfac", "ekfac", "tkfac", "tekfac")
NUM_TEST, HIDDEN, WRONG = 360, 16, 0.1

Table = dict[str, dict[str, list[float]]]
"""Scores, columns, and the numbers that are averaged."""


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 64] in 0..1 and labels, in an order fixed once and for all."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images)[order] / 16, torch.tensor(labels)[order]


def network(seed: int) -> nn.Module:
    """Smooth and in float64, so that a minimum can be found to many digits."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10)).double()


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    l2: float,
    *,
    kept: float | Tensor = 1.0,
    tolerance: float = 1e-6,
) -> None:
    """To the nearest minimum, by L-BFGS.

    Args:
        model: the network; what it starts from matters.
        images: all of them.
        labels: of the images.
        l2: lambda.
        kept: 0 for images that are left out, 1 for the others, [N]; 1/N remains what it is.
        tolerance: of the gradient.
    """
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=1000,
        tolerance_grad=tolerance,
        tolerance_change=0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = cross_entropy(model(images), labels, reduction="none")
        squares = torch.stack([parameter.square().sum() for parameter in model.parameters()])
        objective = (kept * losses).mean() + l2 / 2 * squares.sum()
        objective.backward()
        return objective

    optimizer.step(closure)


def losses_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of each image, [N]."""
    with torch.no_grad():
        return cross_entropy(model(images), labels, reduction="none")


def gradients_of(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The gradient of each image's loss, by the name of the parameter, [N, *shape]."""

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, parameters, (image[None],)), label[None])

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, images, labels)


def fishers(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, fisher.BlockDiagonal[fisher.Block]]:
    """The Fisher blocks of the network on its training images, in five ways."""
    data = [(images, labels)]
    approximations = {name.upper(): fisher.estimate(model, data, method=name) for name in METHODS}
    return {**approximations, "exact blocks": fisher.exact_blocks(model, data)}


def vectors(gradients: Mapping[str, Tensor]) -> Tensor:
    """Gradients [N, *shape] of all parameters as rows, [N, P]."""
    return torch.cat([part.flatten(1) for part in gradients.values()], dim=1)


def correlation(x: Tensor, y: Tensor) -> float:
    """Along the last axis; the mean over the others."""
    x, y = (part - part.mean(-1, keepdim=True) for part in (x.double(), y.double()))
    return float(cosine_similarity(x, y, dim=-1).mean())


def groups(data: tuple[Tensor, Tensor], size: int, num_groups: int, l2: float) -> Table:
    """Predicted against seen effects of leaving groups out; see 1. above."""
    images, labels = (part[NUM_TEST:][:size] for part in data)
    test_images, test_labels = (part[:NUM_TEST] for part in data)
    model = network(seed=0)
    train(model, images, labels, l2)
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = losses_of(model, test_images, test_labels)
    member = one_hot(torch.arange(size) % num_groups).T.double()  # [groups, N]
    of_images = gradients_of(model, images, labels)
    of_groups = {name: torch.tensordot(member, part, 1) / size for name, part in of_images.items()}
    of_tests = vectors(gradients_of(model, test_images, test_labels))
    blocks = fishers(model, images, labels)
    predicted = {name: of_tests @ vectors(own.solve(of_groups, l2)).T for name, own in blocks.items()}
    predicted["dot product"] = of_tests @ vectors(of_groups).T  # [test images, groups]
    seen = torch.empty_like(predicted["dot product"])
    for group, left_out in enumerate(member):
        model.load_state_dict(trained)
        train(model, images, labels, l2, kept=1 - left_out)
        seen[:, group] = losses_of(model, test_images, test_labels) - losses
    table = {}
    for name, effects in predicted.items():
        table[name] = {
            "correlation": [correlation(effects.flatten(), seen.flatten())],
            "rank correlation": [correlation(effects.argsort().argsort(), seen.argsort().argsort())],
        }
    return table


def wrong_labels(data: tuple[Tensor, Tensor], size: int, l2: float, seeds: int) -> Table:
    """How well each score tells wrong labels from right ones; see 2. above."""
    images, labels = (part[NUM_TEST:][:size] for part in data)
    table: Table = {}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        wrong = torch.randperm(size, generator=generator) < WRONG * size
        others = (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10
        given = torch.where(wrong, others, labels)
        model = network(seed)
        train(model, images, given, l2, tolerance=1e-5)
        own = gradients_of(model, images, given)
        scores = {
            name: blocks.inner(own, blocks.solve(own, l2))
            for name, blocks in fishers(model, images, given).items()
        }
        scores |= {"gradient norm": vectors(own).norm(dim=1), "loss": losses_of(model, images, given)}
        for name, score in scores.items():
            found = wrong[score.topk(int(wrong.sum())).indices].double().mean()
            row = table.setdefault(name, {"found in the top 10%": [], "AUROC": []})
            row["found in the top 10%"].append(float(found))
            row["AUROC"].append(float(roc_auc_score(wrong, score)))
    return table


def show(title: str, table: Table) -> None:
    """Print means, and standard deviations where there is more than one number."""
    print(f"\n{title}\n{'':14}" + "".join(f"{column:>24}" for column in next(iter(table.values()))))
    for name, row in table.items():
        cells = [f"{mean(x):.3f}" + (f" ± {stdev(x):.3f}" if len(x) > 1 else "") for x in row.values()]
        print(f"{name:14}" + "".join(f"{cell:>24}" for cell in cells))


def main(arguments: Sequence[str] | None = None) -> dict[str, Table]:
    """Make the tables, print and return them."""
    parser = argparse.ArgumentParser(description="Influence functions on digits.")
    parser.add_argument("--quick", action="store_true", help="fewer images, groups and seeds")
    quick = parser.parse_args(arguments).quick
    data = digits()
    size, num_groups, seeds = (300, 8, 1) if quick else (len(data[0]) - NUM_TEST, 20, 3)
    tables = {"groups": groups(data, size, num_groups, l2=1e-3)}
    show(f"Leaving out {num_groups} groups of {size // num_groups} images, lambda 0.001", tables["groups"])
    for l2 in (1e-3, 1e-4):
        tables[f"labels {l2:g}"] = wrong_labels(data, size, l2, seeds)
        show(f"{WRONG:.0%} of {size} labels wrong, {seeds} seed(s), lambda {l2:g}", tables[f"labels {l2:g}"])
    return tables


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
