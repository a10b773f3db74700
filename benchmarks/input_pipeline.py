"""The input pipeline's share of a training step: He's ResNet20 on CIFAR-10, batches of 128, augmented.

    python benchmarks/input_pipeline.py --data-dir DIR --report docs/results/input-pipeline.md

One run trains for some steps with every optimizer in turn, several times over, without threads that prepare
batches ahead; the table has the median and the spread over the repeats.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from provenance import provenance
from tekfac.lab import recipes
from tekfac.lab.config import RunConfig
from tekfac.lab.run_folder import RunFolder
from tekfac.lab.training import train

OPTIMIZERS = ("sgdm", "adam", "tekfac")


def main() -> None:
    """Measure, print and perhaps write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    made_by = provenance([0])
    task = RunConfig(
        data="cifar10",
        data_dir=str(arguments.data_dir),
        model="resnet20-he",
        train_samples=128 * arguments.steps,
        test_samples=500,
        epochs=1,
    )
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in OPTIMIZERS}
    for _ in range(arguments.repeats):
        for name in OPTIMIZERS:
            found[name].append(measured(recipes.config(task, recipes.start(name)), arguments.steps))
    rows = [
        [name, spread([ms for ms, _ in values], 2), spread([100 * s for _, s in values], 2)]
        for name, values in found.items()
    ]
    header = ["optimizer", "input pipeline, ms per step", "share of the step, %"]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])
    text = (
        "# The input pipeline's share of a step\n\n"
        "He's ResNet20 on CIFAR-10, batch 128, random crops and flips, no threads that prepare batches ahead. "
        f"Median over {arguments.repeats} interleaved repeats of {arguments.steps} steps, smallest and "
        f"largest in brackets.\n\n{table}\n\n{made_by}\n"
    )
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


def measured(config: RunConfig, steps: int) -> tuple[float, float]:
    """Milliseconds of the input pipeline per step, and its share of the whole."""
    with tempfile.TemporaryDirectory() as folder:
        train(replace(config, threads=torch.get_num_threads()), Path(folder))
        last = RunFolder(Path(folder)).epochs()[-1]
    return 1000 * last.parts["data"] / steps, last.parts["data"] / last.seconds


def spread(values: list[float], digits: int) -> str:
    """Median, smallest and largest."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
