"""Six optimizers on scikit-learn's digits: a small CNN and an MLP, three seeds.

    python benchmarks/digits.py                 the comparison (`make demo`)
    python benchmarks/digits.py --tune          how the learning rates in it were chosen
    python benchmarks/digits.py --report FILE   the comparison, also written to a file

Every optimizer has the learning rate that did best of five (`--tune`: after the same number of epochs, on
images held back from the training set, with a seed that the comparison does not use).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median, stdev

from torch import nn
from torch.optim import SGD, Adam, Optimizer

from provenance import provenance
from tekfac import EKFAC, KFAC, TEKFAC, TKFAC
from tekfac.fisher.digits import data as images_and_labels
from training import Curve, Data, cnn, mlp, train

EPOCHS, BATCH_SIZE, SEEDS, TUNING_SEED, TARGET = 15, 64, (0, 1, 2), 100, 0.95

NETWORKS: dict[str, Callable[[], nn.Module]] = {"CNN": lambda: cnn(1, 10, 8), "MLP": lambda: mlp(64, 10)}

# The four natural-gradient methods have the same settings: statistics every 10 of the 330 steps, and steps
# kept within a small change of the predictions.
OPTIMIZERS: dict[str, Callable[[nn.Module, float], Optimizer]] = {
    "SGDM": lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9),
    "Adam": lambda model, lr: Adam(model.parameters(), lr=lr),
    "KFAC": lambda model, lr: KFAC(model, lr=lr, kl_clip=1e-3, factors_every=10, basis_every=10),
    "EKFAC": lambda model, lr: EKFAC(
        model, lr=lr, kl_clip=1e-3, factors_every=10, basis_every=10, rescaling_every=10
    ),
    "TKFAC": lambda model, lr: TKFAC(model, lr=lr, kl_clip=1e-3, factors_every=10, basis_every=10),
    "TEKFAC": lambda model, lr: TEKFAC(
        model, lr=lr, kl_clip=1e-3, factors_every=10, basis_every=10, rescaling_every=10
    ),
}

GRIDS = {
    "SGDM": (0.01, 0.03, 0.1, 0.3, 1.0),
    "Adam": (0.001, 0.003, 0.01, 0.03, 0.1),
    "KFAC": (0.0003, 0.001, 0.003, 0.01, 0.03),
    "EKFAC": (0.0003, 0.001, 0.003, 0.01, 0.03),
    "TKFAC": (0.0003, 0.001, 0.003, 0.01, 0.03),
    "TEKFAC": (0.0003, 0.001, 0.003, 0.01, 0.03),
}

LEARNING_RATES = {
    "CNN": {"SGDM": 0.03, "Adam": 0.003, "KFAC": 0.003, "EKFAC": 0.001, "TKFAC": 0.001, "TEKFAC": 0.001},
    "MLP": {"SGDM": 0.3, "Adam": 0.03, "KFAC": 0.01, "EKFAC": 0.003, "TKFAC": 0.01, "TEKFAC": 0.003},
}


def digits() -> Data:
    """1,437 training and 360 test images, [N, 1, 8, 8] in 0..1, in an order fixed once and for all."""
    images, labels = images_and_labels()
    return Data(images[360:], labels[360:], images[:360], labels[:360])


def run(network: str, optimizer: str, lr: float, data: Data, seed: int) -> Curve:
    """One training run."""
    return train(
        NETWORKS[network],
        lambda model: OPTIMIZERS[optimizer](model, lr),
        data,
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        seed=seed,
    )


def compare(data: Data) -> list[list[str]]:
    """The table's rows: every network with every optimizer."""
    rows = []
    for network in NETWORKS:
        for name in OPTIMIZERS:
            lr = LEARNING_RATES[network][name]
            curves = [run(network, name, lr, data, seed) for seed in SEEDS]
            rows.append([network, name, f"{lr:g}", *summary(curves, len(data.images) // BATCH_SIZE)])
            print_row(rows[-1])
    return rows


def summary(curves: list[Curve], steps_per_epoch: int) -> list[str]:
    """Accuracy and loss after the first and the last epoch, epochs to the target, milliseconds per step."""

    def spread(values: list[float], digits: int) -> str:
        return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"

    reached = [curve.epochs_to(TARGET) for curve in curves]
    steps = EPOCHS * steps_per_epoch
    return [
        spread([100 * curve.accuracy[0] for curve in curves], 1),
        spread([100 * curve.accuracy[-1] for curve in curves], 1),
        spread([curve.loss[-1] for curve in curves], 4),
        "never" if None in reached else f"{median(r for r in reached if r):g}",
        f"{1000 * median(curve.seconds[-1] for curve in curves) / steps:.1f}",
    ]


HEADER = [
    "network",
    "optimizer",
    "lr",
    "accuracy % after 1 epoch",
    f"after {EPOCHS}",
    "training loss",
    f"epochs to {100 * TARGET:g}%",
    "ms / step",
]
WIDTHS = [7, 9, 6, 24, 12, 17, 13, 9]


def print_row(cells: list[str]) -> None:
    """One line of the table on the terminal."""
    print("  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)), flush=True)


def tune(data: Data) -> None:
    """The learning rate with the highest accuracy, as a mean over epochs, on held-back images."""
    held_back = 287
    split = Data(
        data.images[held_back:], data.labels[held_back:], data.images[:held_back], data.labels[:held_back]
    )
    for network in NETWORKS:
        for name in OPTIMIZERS:
            scores = {}
            for lr in GRIDS[name]:
                curve = run(network, name, lr, split, TUNING_SEED)
                scores[lr] = (mean(curve.accuracy), curve.accuracy[-1])
            best = max(scores, key=lambda lr: scores[lr])
            told = ", ".join(f"{lr:g}: {100 * m:.1f}/{100 * last:.1f}" for lr, (m, last) in scores.items())
            print(f"{network} {name}: {best:g}   (mean/last accuracy by lr: {told})", flush=True)


def main() -> None:
    """Compare, or tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="choose the learning rates")
    parser.add_argument("--report", type=Path, help="write the table to this file, too")
    arguments = parser.parse_args()
    data = digits()
    if arguments.tune:
        tune(data)
        return
    made_by = provenance(SEEDS)
    print_row(HEADER)
    rows = compare(data)
    if arguments.report:
        lines = ["| " + " | ".join(cells) + " |" for cells in [HEADER, ["---"] * len(HEADER), *rows]]
        arguments.report.write_text(
            "# Digits: six optimizers, two networks\n\n"
            f"scikit-learn's digits, {EPOCHS} epochs, batch {BATCH_SIZE}, cosine schedule; mean ± standard "
            f"deviation over {len(SEEDS)} seeds; every optimizer at the best of five learning rates "
            "(`--tune`). Milliseconds per step are medians over the seeds; timings of such short steps are "
            "noisy.\n\n" + "\n".join(lines) + "\n\n" + made_by + "\n"
        )


if __name__ == "__main__":
    main()
