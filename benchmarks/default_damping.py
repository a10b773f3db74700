"""Which damping should be the default of the trace-restricted methods? Decided on networks with a convolution.

The paper damps convolutions by their trace and everything beside them by the most damped convolution; here that
is damping=None. The other candidate treats every layer alike: 0.01, as in networks without convolutions. Three
networks on scikit-learn's digits, three seeds, everything else at its default or with a KL clip:

    python benchmarks/default_damping.py --report docs/results/default-damping.md
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tekfac
from provenance import provenance

STEPS, BATCH, SEEDS, CHANCE = 150, 64, (0, 1, 2), math.log(10)

SETTINGS: dict[str, dict[str, Any]] = {
    "TEKFAC.natural(model)": {},
    "lr=0.1, kl_clip=1e-3": {"lr": 0.1, "kl_clip": 1e-3},
}
RULES: dict[str, dict[str, Any]] = {"the paper's rule": {"damping": None}, "0.01 for every layer": {}}


class Patches(nn.Module):
    """A small vision transformer: a convolution makes the patches, everything else is linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 32, 2, stride=2)
        self.places = nn.Parameter(torch.zeros(16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Class logits, [N, 10]."""
        out: Tensor = self.head(self.encoder(self.embed(x).flatten(2).mT + self.places).mean(1))
        return out


def cnn(norm: bool) -> nn.Module:
    """Two convolutions and a linear layer."""
    layers: list[nn.Module] = []
    for channels, inputs in ((16, 1), (32, 16)):
        layers.append(nn.Conv2d(inputs, channels, 3, padding=1))
        layers += [nn.BatchNorm2d(channels)] if norm else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "CNN": lambda: cnn(norm=False),
    "CNN with batch norm": lambda: cnn(norm=True),
    "vision transformer": Patches,
}


def trained(method: str, network: str, settings: dict[str, Any], seed: int) -> tuple[float, float, int]:
    """The largest loss on the way, the mean of the last ten, and how many steps were skipped."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    optimizer = getattr(tekfac, method).natural(model, seed=seed, **settings)
    losses = []
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (BATCH,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    finite = [value if math.isfinite(value) else math.inf for value in losses]
    return max(finite), sum(finite[-10:]) / 10, optimizer.skipped_steps


def main() -> None:
    """Train every combination and print, and perhaps write, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Which damping by default",
        "",
        f"Training loss of small networks on scikit-learn's digits after {STEPS} steps, batches of {BATCH}: "
        f"the mean of the last ten steps, for seeds {', '.join(map(str, SEEDS))} (chance is {CHANCE:.2f}); in "
        "brackets the largest loss on the way, median of the seeds. EKFAC's rule is 0.01 for every layer, too.",
        "",
        "| network | settings | method | " + " | ".join(RULES) + " |",
        "|---|---|---|" + "---|" * len(RULES),
    ]
    for network in NETWORKS:
        for setting, keywords in SETTINGS.items():
            for method in ("TKFAC", "TEKFAC", "EKFAC"):
                cells = []
                for rule in RULES.values():
                    if method == "EKFAC" and rule:
                        cells.append("–")
                        continue
                    runs = [trained(method, network, keywords | rule, seed) for seed in SEEDS]
                    last = " / ".join(f"{run[1]:.2f}" for run in runs)
                    cells.append(f"{last} ({median(run[0] for run in runs):.3g})")
                lines.append(f"| {network} | `{setting}` | {method} | " + " | ".join(cells) + " |")
                print(lines[-1], flush=True)
    lines += ["", provenance(SEEDS)]
    if arguments.report is not None:
        arguments.report.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
