"""A long run: whether memory and the time of a step stay what they are.

    python benchmarks/soak.py --report docs/results/soak.md

Trains a small CNN on batches of noise for 30,000 steps, as `TEKFAC(model)` is and with labels drawn anew, and
notes, ten times in between, how much memory the process has resident and how long the steps of that tenth
took. One thread. Steps measure more often at first, and then every fiftieth: means are of the whole tenth,
medians of its plain steps mostly.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F

from provenance import provenance
from tekfac import TEKFAC
from tekfac.lab import models

SEED = 0
STEPS, TENTHS = 30_000, 10
BATCHES = 50
VARIANTS: dict[str, dict[str, Any]] = {"as it is": {}, 'fisher="sampled"': {"fisher": "sampled"}}
STATUS = Path("/proc/self/status")


def main() -> None:
    """Run, print and perhaps write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    text = page({name: soaked(settings, arguments.steps) for name, settings in VARIANTS.items()})
    text = f"{text}\n{provenance([SEED])}\n"
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


def soaked(settings: dict[str, Any], steps: int) -> list[tuple[float, float, float]]:
    """Of every tenth of the run: MiB resident at its end, mean and median milliseconds of its steps."""
    torch.manual_seed(SEED)
    model = models.build("cnn", channels=1, classes=10, size=8, options={"width": 4})
    optimizer = TEKFAC(model, lr=1e-3, seed=SEED, **settings)
    batches = [(torch.randn(16, 1, 8, 8), torch.randint(10, (16,))) for _ in range(BATCHES)]
    found = []
    for _ in range(TENTHS):
        taken = []
        for step in range(steps // TENTHS):
            x, y = batches[step % BATCHES]
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            taken.append(1e3 * (time.perf_counter() - start))
        gc.collect()
        found.append((resident(), mean(taken), median(taken)))
    if optimizer.skipped_steps or optimizer.num_steps != steps // TENTHS * TENTHS:
        raise RuntimeError(f"{optimizer.skipped_steps} steps were skipped. Expected none.")
    return found


def resident() -> float:
    """MiB of this process that are in memory."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def page(runs: dict[str, list[tuple[float, float, float]]]) -> str:
    """All of it as Markdown."""
    lines = ["# A long run", "", (__doc__ or "").partition("\n\n    ")[2].partition("\n\n")[2]]
    for name, tenths in runs.items():
        first, second, last = tenths[0], tenths[1], tenths[-1]
        lines += [
            f"## {name}",
            "",
            f"| tenth | {' | '.join(str(number + 1) for number in range(len(tenths)))} |",
            "|---|" + "---:|" * len(tenths),
            f"| MiB resident | {' | '.join(f'{own[0]:.1f}' for own in tenths)} |",
            f"| mean, ms | {' | '.join(f'{own[1]:.3f}' for own in tenths)} |",
            f"| median, ms | {' | '.join(f'{own[2]:.3f}' for own in tenths)} |",
            "",
            f"Memory grows by {last[0] - first[0]:.1f} MiB from the end of the first tenth on. The median step "
            f"of the last tenth takes {last[2] / first[2]:.3f} of the first's, the mean step "
            f"{last[1] / second[1]:.3f} of the second's.",
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
