"""Which reading of beta should be the default? Decided on CIFAR-10.

The paper "expands the FIM of the fully connected layers by a factor of beta", the largest damping of the
convolutions; damping.py has the readings of that sentence. This trains a small CNN (three convolutions,
two fully connected layers) on part of CIFAR-10 with every reading, several learning rates and seeds, and
writes the table of docs/results/beta-readings.md:

    python benchmarks/beta_readings.py --data-dir DIR --report docs/results/beta-readings.md

DIR holds CIFAR-10's python batches (data_batch_1 ... test_batch).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import torch

from provenance import provenance
from tekfac.damping import BETA_READINGS, BetaReading
from tekfac.lab import recipes
from tekfac.lab.config import RunConfig
from tekfac.lab.training import train

SETTINGS: tuple[tuple[float, float | None], ...] = ((1e-3, None), (1e-2, None), (1e-1, 1e-3))
METHODS = ("TKFAC", "TEKFAC")


def main() -> None:
    """Train every combination and print, and perhaps write, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--images", type=int, default=10_000, help="how many of the training images")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made_by = provenance(arguments.seeds)
    task = RunConfig(
        data="cifar10",
        data_dir=str(arguments.data_dir),
        train_samples=arguments.images,
        augment=False,
        model="cnn",
        epochs=arguments.epochs,
        schedule="cosine",
    )
    rows = [row(name, reading, task, arguments.seeds) for name in METHODS for reading in BETA_READINGS]
    header = ["method", "beta"] + [
        f"lr {lr:g}" + (f", kl_clip {clip:g}" if clip else "") for lr, clip in SETTINGS
    ]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])
    text = (
        "# Which reading of beta\n\n"
        "[The readings](../mathematics.md#5-damping) of how fully connected layers beside convolutions are "
        "damped. "
        f"Test accuracy in % (mean ± standard deviation over {len(arguments.seeds)} seeds) after "
        f"{arguments.epochs} epochs on {arguments.images:,} images of CIFAR-10, batch 128, cosine schedule, "
        f"small CNN with batch norm; everything else at its default.\n\n"
        f"{table}\n\n{made_by}\n"
    )
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


def row(name: str, reading: BetaReading, task: RunConfig, seeds: list[int]) -> list[str]:
    """One line of the table: a reading under every setting."""
    cells = [name, reading]
    for lr, clip in SETTINGS:
        own = {"lr": lr, "options.beta": reading, "options.kl_clip": clip}
        point = {"optimizer": name.lower(), **recipes.naturally(name.lower(), 50), **own}
        config = recipes.config(task, point)
        accuracies = [100 * final_accuracy(replace(config, seed=seed)) for seed in seeds]
        cells.append(f"{mean(accuracies):.1f} ± {stdev(accuracies):.1f}")
        print(name, reading, f"lr={lr:g} kl_clip={clip}", cells[-1], flush=True)
    return cells


def final_accuracy(config: RunConfig) -> float:
    """Test accuracy after the last epoch of a run that leaves nothing behind."""
    with tempfile.TemporaryDirectory() as folder:
        return float(train(config, Path(folder))["test_accuracy"])


if __name__ == "__main__":
    main()
