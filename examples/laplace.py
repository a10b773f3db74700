"""A Laplace approximation on scikit-learn's digits: how sure a network should be, also of what it never saw.

Training with weight decay finds the most probable weights w, given N images and a Gaussian prior of precision
tau. Around them the posterior is about a Gaussian, whose covariance comes from the Fisher F of one image:

    p(weights | data) ~ Normal(w, (N F + tau I)^-1),        (N F + tau I)^-1 = 1/N (F + tau/N I)^-1

This is what the blocks of `tekfac.fisher` solve for, with the damping tau/N. They give three things.

    samples     w + 1/sqrt(N) (F + tau/N I)^(-1/2) z, with white noise z        inv_sqrt_matvec
    variances   diag(J (N F + tau I)^-1 J^T) of outputs with the Jacobian J     solve
    evidence    log p(data | tau) ~ log p(data | w) - tau/2 |w|^2 + P/2 log tau - 1/2 log det(N F + tau I)
                for a network of P parameters                                   logdet

Predictions are those of the network made linear in its weights, softmax(f(x, w) + J (sample - w)), averaged
over samples (Immer et al. 2021). The prior precision is chosen from a grid, after the training (Daxberger et
al. 2021), in two ways: by the evidence, which needs no further data, and by the likelihood of validation
images. All parameters need a block; those of a batch norm would have none.

The network learns the digits 0 to 7. The tables have the negative log-likelihood (NLL) of test images, as they
are and turned by 30 and 60 degrees; the accuracy and the expected calibration error (ECE); and how well 8 and
9, which the network never saw, are told from the test images: the AUROC of the largest probability, and that
of the variance of the outputs (less their mean over the classes, which the softmax does not see). MAP is the
network itself; the exact blocks say what better approximations of the blocks would change.

What comes out: of images like those it learned from, the network is as sure as it should be, and validation
images, being of that kind, ask for next to no uncertainty. The evidence asks for more. It makes predictions
for such images too modest, those for turned images far better, and unseen digits easier to tell by their
largest probability. The variance of the outputs is a poor sign of them: mostly it is smaller there, an AUROC
below one half. The predictions of the four methods hardly differ; the exact blocks make them more modest still.

Run: python examples/laplace.py (half a minute; --quick for a small version)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, nll_loss

from tekfac import fisher

METHODS = ("kfac", "ekfac", "tkfac", "tekfac")
CLASSES, WEIGHT_DECAY, BINS, ANGLES = 8, 5e-4, 15, (30, 60)
PRIOR_PRECISIONS = [10 ** (power / 2) for power in range(-4, 13)]  # 0.01 to 1,000,000

Blocks = fisher.BlockDiagonal[fisher.Block]
Column = dict[str, float]
"""What a table says of one method."""


class Images(NamedTuple):
    """Images [N, 1, 8, 8] in 0..1, and their labels."""

    inputs: Tensor
    labels: Tensor


class Linearised(NamedTuple):
    """Outputs [N, C] of a network, and their Jacobian, by the name of the parameter, [N, C, *shape]."""

    outputs: Tensor
    jacobian: dict[str, Tensor]


class Posterior(NamedTuple):
    """Normal(w, (N F + tau I)^-1).

    Attributes:
        blocks: F.
        num_images: N.
        tau: the prior precision.
    """

    blocks: Blocks
    num_images: int
    tau: float

    def log_evidence(self, log_likelihood: float, squares: float) -> float:
        """log p(data | tau), from the log-likelihood of the training images and |w|^2."""
        size = self.blocks.size
        logdet = size * math.log(self.num_images) + self.blocks.logdet(self.tau / self.num_images)
        return log_likelihood - self.tau / 2 * squares + size / 2 * math.log(self.tau) - logdet / 2

    def probabilities(self, network: Linearised, samples: int) -> Tensor:
        """Of each class, averaged over samples of the weights, [N, C]."""
        generator = torch.Generator().manual_seed(0)
        noise = self.blocks.white_noise(samples, generator=generator)
        steps = self.blocks.to_vector(self.blocks.inv_sqrt_matvec(noise, self.tau / self.num_images))
        changes = self.blocks.to_vector(network.jacobian) @ steps.T  # [N, C, samples]
        return (network.outputs[..., None] + changes / math.sqrt(self.num_images)).softmax(1).mean(-1)

    def variances(self, network: Linearised) -> Tensor:
        """Of the outputs less their mean over the classes, [N, C]."""
        centred = {name: part - part.mean(1, keepdim=True) for name, part in network.jacobian.items()}
        solved = self.blocks.solve(centred, self.tau / self.num_images)
        return self.blocks.inner(centred, solved) / self.num_images


def digits(seed: int) -> dict[str, Images]:
    """The data, split by chance: half of the digits 0 to 7 for training, a tenth for validation."""
    raw = load_digits()
    inputs, labels = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16, torch.tensor(raw.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    inputs, labels = inputs[order], labels[order]
    seen = labels < CLASSES
    half, tenth = int(seen.sum()) // 2, int(seen.sum()) // 10
    slices = {"train": slice(half), "validation": slice(half, half + tenth), "test": slice(half + tenth, None)}
    data = {name: Images(inputs[seen][own], labels[seen][own]) for name, own in slices.items()}
    turned = {f"test {angle}°": rotated(data["test"], math.radians(angle)) for angle in ANGLES}
    return {**data, **turned, "unseen": Images(inputs[~seen], labels[~seen])}


def rotated(images: Images, angle: float) -> Images:
    """The same images, turned."""
    rotation = torch.tensor([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0]])
    rotations = rotation.expand(len(images.labels), 2, 3)
    grid = affine_grid(rotations, list(images.inputs.shape), align_corners=False)
    return Images(grid_sample(images.inputs, grid, align_corners=False), images.labels)


def trained_network(data: Images, seed: int, epochs: int) -> nn.Module:
    """A small convolutional network, trained by Adam with weight decay."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.inputs)).split(64):
            optimizer.zero_grad()
            cross_entropy(model(data.inputs[batch]), data.labels[batch]).backward()
            optimizer.step()
        schedule.step()
    return model


def linearised(model: nn.Module, inputs: Tensor) -> Linearised:
    """The network around its weights. With many more of them, `torch.func.jvp` gives J times a sample."""

    def outputs(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(model, parameters, (image[None],))[0]

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        return Linearised(model(inputs), vmap(jacrev(outputs), in_dims=(None, 0))(parameters, inputs))


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """The mean gap between confidence and accuracy, over bins of equal width."""
    confidence, predicted = probabilities.max(1)
    gaps = (predicted == labels).double() - confidence.double()
    bins = (confidence * BINS).long().clamp_max(BINS - 1)
    return float(torch.zeros(BINS).double().index_add_(0, bins, gaps).abs().sum()) / len(labels)


def auroc(test: Tensor, unseen: Tensor) -> float:
    """Of scores that should be higher for images of digits that were never seen."""
    return float(roc_auc_score([False] * len(test) + [True] * len(unseen), torch.cat([test, unseen])))


def scores(data: dict[str, Images], probabilities: dict[str, Tensor]) -> Column:
    """What the tables say of the probabilities [N, C] of each part of the data."""
    tests = [part for part in data if part.startswith("test")]
    right = probabilities["test"].argmax(1) == data["test"].labels
    confidences = {part: own.max(1).values for part, own in probabilities.items()}
    return {
        **{f"NLL, {part}": float(nll_loss(probabilities[part].log(), data[part].labels)) for part in tests},
        "accuracy": float(right.double().mean()),
        "ECE": calibration_error(probabilities["test"], data["test"].labels),
        "AUROC": auroc(-confidences["test"], -confidences["unseen"]),
    }


def run(seed: int, epochs: int, samples: int) -> dict[str, dict[str, Column]]:
    """One split and one network: the columns of both tables."""
    data = digits(seed)
    train = data.pop("train")
    model = trained_network(train, seed, epochs)
    fishers: dict[str, Blocks] = {m.upper(): fisher.estimate(model, [train], method=m) for m in METHODS}
    fishers["exact blocks"] = fisher.exact_blocks(model, [train])
    networks = {part: linearised(model, images.inputs) for part, images in data.items()}
    with torch.no_grad():
        log_likelihood = -float(cross_entropy(model(train.inputs), train.labels, reduction="sum"))
        squares = sum(float(parameter.square().sum()) for parameter in model.parameters())
    plain = scores(data, {part: network.outputs.softmax(1) for part, network in networks.items()})
    tables = {"evidence": {"MAP": plain}, "validation": {"MAP": plain}}
    for name, blocks in fishers.items():
        posteriors = {tau: Posterior(blocks, len(train.inputs), tau) for tau in PRIOR_PRECISIONS}
        evidence = {tau: own.log_evidence(log_likelihood, squares) for tau, own in posteriors.items()}
        held_back = {tau: own.probabilities(networks["validation"], samples) for tau, own in posteriors.items()}
        fit = {tau: -float(nll_loss(own.log(), data["validation"].labels)) for tau, own in held_back.items()}
        for way, quality in {"evidence": evidence, "validation": fit}.items():
            best = posteriors[max(quality, key=quality.__getitem__)]
            probabilities = {part: best.probabilities(own, samples) for part, own in networks.items()}
            variances = [best.variances(networks[part]).mean(1) for part in ("test", "unseen")]
            tables[way][name] = {
                **scores(data, probabilities),
                "AUROC of variance": auroc(*variances),
                "log10 tau": math.log10(best.tau),
            }
        tables["evidence"][name]["log evidence / N"] = max(evidence.values()) / len(train.inputs)
    return tables


def show(title: str, tables: Sequence[dict[str, Column]]) -> None:
    """Print means over the tables, with standard deviations if there are several."""
    print(f"\n{title}\n{'':18}" + "".join(f"{method:>16}" for method in tables[0]))
    for row in tables[0]["TEKFAC"]:
        numbers = [[table[name][row] for table in tables if row in table[name]] for name in tables[0]]
        means = [f"{mean(own):.3f}" if own else "" for own in numbers]
        spreads = [f" ± {stdev(own):.3f}" if len(own) > 1 else "" for own in numbers]
        print(f"{row:18}" + "".join(f"{m + s:>16}" for m, s in zip(means, spreads, strict=True)))


def main(arguments: Sequence[str] | None = None) -> list[dict[str, dict[str, Column]]]:
    """Make the tables and print them; returns those of each seed."""
    parser = argparse.ArgumentParser(description="Laplace approximations on digits.")
    parser.add_argument("--quick", action="store_true", help="fewer epochs, samples and seeds")
    quick = parser.parse_args(arguments).quick
    epochs, samples, seeds = (20, 50, 1) if quick else (60, 100, 3)
    runs = [run(seed, epochs, samples) for seed in range(seeds)]
    for way in ("evidence", "validation"):
        show(f"Prior precision by {way}, {seeds} seed(s)", [tables[way] for tables in runs])
    return runs


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
