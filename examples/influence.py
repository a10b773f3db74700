"""Influence functions on scikit-learn's digits: what a training image does to a prediction, and wrong labels.

A network with the parameters w* minimises a mean loss with an L2 penalty,

    w* = argmin  1/N sum_n loss_n(w) + lambda/2 |w|^2

Without image n the minimum would be elsewhere. To first order, with H the Hessian of the mean loss and g_n
the gradient of loss_n at w*, the loss of a test image would change by

    influence(n, test) = 1/N g_test^T (H + lambda I)^-1 g_n        (Koh and Liang 2017)

which is the sum over its images for a group. H is replaced by the Fisher F, which for a classifier is the
Gauss-Newton part of H, and F by the blocks of `tekfac.fisher`. The damping is not tuned: it is the lambda of
the training. Beside the four methods the tables have the exact blocks, which say what a better approximation
of the blocks could gain, and the plain dot product of gradients, which is no curvature at all.

 1. Groups.  The training images are split into groups, and the network is trained again without each of them,
    from w* on. For each test image, the change of its loss that influence predicts is compared with the one
    that is seen: as a rank correlation over the groups, averaged over the test images, and as the slope of
    the line through the origin (seen on predicted), over all test images and groups.
 2. Labels.  One label in ten is made wrong, and the network trained on them. Images are ranked by their
    influence on their own loss, g_n^T (F + lambda I)^-1 g_n, or by |g_n| or loss_n alone. The table says how
    well this tells wrong labels from right ones.

Run:  python examples/influence.py            (about 40 s; --quick: a small version)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import mean

import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from tekfac.fisher import Block, BlockDiagonal, estimate, exact_blocks

METHODS = ("kfac", "ekfac", "tkfac", "tekfac")
L2 = 1e-3
WRONG = 0.1
TEST = 360

Table = dict[str, dict[str, float]]


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 64] in 0..1 and labels, in an order fixed once and for all."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images)[order] / 16, torch.tensor(labels)[order]


def network(hidden: int, seed: int) -> nn.Module:
    """A smooth one, in float64, so that a minimum can be found to many digits."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10)).double()


def train(model: nn.Module, images: Tensor, labels: Tensor, kept: Tensor | None = None) -> None:
    """To the minimum near by, with L-BFGS; images that are not kept count as if their loss were 0."""
    weights = torch.ones(len(images)) if kept is None else kept
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=1000,
        tolerance_grad=1e-6,
        tolerance_change=0,
        history_size=50,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = cross_entropy(model(images), labels, reduction="none")
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        objective: Tensor = (weights * losses).mean() + L2 / 2 * penalty
        objective.backward()
        return objective

    optimizer.step(closure)


def losses_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of each image, [N]."""
    with torch.no_grad():
        return cross_entropy(model(images), labels, reduction="none")


def gradients_of(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The gradient of each image's loss, by parameter name, [N, *shape]."""

    def loss(parameters: Mapping[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, dict(parameters), (image[None],)), label[None])

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, images, labels)


def curvatures(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, BlockDiagonal[Block]]:
    """The Fisher of the network on its training data, in five ways."""
    data = [(images, labels)]
    blocks: dict[str, BlockDiagonal[Block]] = {m.upper(): estimate(model, data, method=m) for m in METHODS}
    return {**blocks, "exact blocks": exact_blocks(model, data)}


def groups(data: tuple[Tensor, Tensor], size: int, hidden: int, num_groups: int) -> Table:
    """Predicted and seen effects of leaving groups of images out; see 1. above."""
    images, labels = (part[TEST : TEST + size] for part in data)
    test = (data[0][:TEST], data[1][:TEST])
    model = network(hidden, seed=0)
    train(model, images, labels)
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = losses_of(model, *test)
    blocks = curvatures(model, images, labels)
    member = torch.nn.functional.one_hot(torch.arange(size) % num_groups).double()  # [N, groups]
    of_test, of_training = gradients_of(model, *test), gradients_of(model, images, labels)
    of_groups = {name: torch.tensordot(member.T, part, 1) / size for name, part in of_training.items()}
    flat = next(iter(blocks.values())).to_vector
    predicted = {name: flat(of_test) @ flat(own.solve(of_groups, L2)).T for name, own in blocks.items()}
    predicted["dot product"] = flat(of_test) @ flat(of_groups).T
    seen = []
    for left_out in member.T:
        model.load_state_dict(trained)
        train(model, images, labels, 1 - left_out)
        seen.append(losses_of(model, *test) - before)
    actual = torch.stack(seen, dim=1)  # [test images, groups]
    return {
        name: {
            "rank correlation": mean(
                float(spearmanr(*pair).statistic) for pair in zip(own, actual, strict=True)
            ),
            "slope": float((own * actual).sum() / own.square().sum()),
        }
        for name, own in predicted.items()
    }


def wrong_labels(data: tuple[Tensor, Tensor], size: int, hidden: int, seed: int) -> Table:
    """How well each score finds labels that were made wrong; see 2. above."""
    images, labels = (part[TEST : TEST + size] for part in data)
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.zeros(size, dtype=torch.bool)
    wrong[torch.randperm(size, generator=generator)[: int(WRONG * size)]] = True
    shifted = (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10
    given = torch.where(wrong, shifted, labels)
    model = network(hidden, seed)
    train(model, images, given)
    blocks = curvatures(model, images, given)
    gradients = gradients_of(model, images, given)
    flat = next(iter(blocks.values())).to_vector
    scores = {
        name: (flat(gradients) * flat(own.solve(gradients, L2))).sum(1) for name, own in blocks.items()
    }
    scores |= {"gradient norm": flat(gradients).norm(dim=1), "loss": losses_of(model, images, given)}
    count = int(wrong.sum())
    return {
        name: {
            "found in top 10%": float(wrong[score.topk(count).indices].double().mean()),
            "AUROC": float(roc_auc_score(wrong, score)),
        }
        for name, score in scores.items()
    }


def averaged(tables: Sequence[Table]) -> Table:
    """The mean of each cell, and how far apart the runs are."""
    first = tables[0]
    return {
        row: {column: mean(table[row][column] for table in tables) for column in first[row]} for row in first
    }


def show(title: str, table: Table) -> None:
    """On the terminal."""
    columns = list(next(iter(table.values())))
    print(f"{title}\n\n{'':16}" + "".join(f"{column:>20}" for column in columns))
    for name, row in table.items():
        print(f"{name:16}" + "".join(f"{row[column]:20.3f}" for column in columns))
    print()


def main(arguments: Sequence[str] | None = None) -> dict[str, Table]:
    """Both tables, printed and returned."""
    parser = argparse.ArgumentParser(description="Influence functions on digits.")
    parser.add_argument("--quick", action="store_true", help="few images, a small network")
    quick = parser.parse_args(arguments).quick
    data = digits()
    size, hidden, num_groups, seeds = (400, 16, 10, 1) if quick else (len(data[0]) - TEST, 32, 30, 3)
    tables = {
        "groups": groups(data, size, hidden, num_groups),
        "labels": averaged([wrong_labels(data, size, hidden, seed) for seed in range(seeds)]),
    }
    show(f"Leaving out each of {num_groups} groups of {size} images, damping {L2:g}", tables["groups"])
    show(f"{WRONG:.0%} wrong labels, mean of {seeds} runs, damping {L2:g}", tables["labels"])
    return tables


if __name__ == "__main__":
    main()
