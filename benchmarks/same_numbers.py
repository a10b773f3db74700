"""Whether a change of the code left every number as it was: parameters after 60 steps, bit for bit.

    python benchmarks/same_numbers.py save before.pt    # with the code before the change
    python benchmarks/same_numbers.py check before.pt   # with the code after it, on the same machine

All four methods train a CNN, a small transformer and an LSTM, at their defaults, with the paper's settings,
with frequent measurements, and with each kind of Fisher. Only names that users import are used, so that the
same file runs with both versions. Bits may differ between machines: compare on the one that saved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tekfac

STEPS = 60
CLASSES = 5
OFTEN = {"factors_every": 7, "basis_every": 10}


class Transformer(nn.Module):
    """Embeddings, one block of attention and feed-forward layers, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 12)
        self.places = nn.Embedding(6, 12)
        self.block = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.1, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T] -> [N, T, C]."""
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        out: Tensor = self.head(self.block(hidden))
        return out


class Recurrent(nn.Module):
    """An LSTM of two layers, and a projection of its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 9, num_layers=2, batch_first=True)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, 7] -> [N, C]."""
        outputs, _ = self.lstm(x)
        out: Tensor = self.head(outputs[:, -1])
        return out


def cnn() -> nn.Module:
    """Two convolutions, one of them in groups, a batch norm and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 8, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, CLASSES),
    )


def inputs(network: str) -> tuple[Tensor, Tensor]:
    """A batch for the network."""
    if network == "cnn":
        return torch.randn(16, 2, 8, 8), torch.randint(CLASSES, (16,))
    if network == "transformer":
        return torch.randint(17, (8, 6)), torch.randint(CLASSES, (8, 6))
    return torch.randn(8, 5, 7), torch.randint(CLASSES, (8,))


NETWORKS = {"cnn": cnn, "transformer": Transformer, "lstm": Recurrent}


def cases() -> Iterator[tuple[str, str, type[Any], dict[str, Any] | None]]:
    """Title, network, optimizer, and keywords; None for the paper's settings."""
    for network in NETWORKS:
        for optimizer in (tekfac.KFAC, tekfac.EKFAC, tekfac.TKFAC, tekfac.TEKFAC):
            corrected = {"rescaling_every": 3} if optimizer in (tekfac.EKFAC, tekfac.TEKFAC) else {}
            variants: dict[str, dict[str, Any] | None] = {
                "default": {},
                "paper": None,
                "often": {**OFTEN, **corrected, "kl_clip": 1e-3, "weight_decay": 0.01},
                "empirical": {**OFTEN, **corrected, "fisher": "empirical"},
                "exact": {**OFTEN, **corrected, "fisher": "exact", "sharing": "expand"},
            }
            for variant, keywords in variants.items():
                yield f"{network} {optimizer.__name__} {variant}", network, optimizer, keywords


def trained(network: str, make: type[Any], keywords: dict[str, Any] | None) -> dict[str, Tensor]:
    """The parameters and buffers after the steps."""
    torch.manual_seed(0)
    model = NETWORKS[network]()
    optimizer = make.paper(model) if keywords is None else make.natural(model, **keywords)
    for _ in range(STEPS):
        x, y = inputs(network)
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def main() -> int:
    """Save the numbers, or compare them with saved ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("save", "check"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {title: trained(*case) for title, *case in cases()}
    if options.action == "save":
        torch.save(found, options.file)
        print(f"{len(found)} runs of {STEPS} steps saved.")
        return 0
    saved = torch.load(options.file, weights_only=True)
    differing = [
        title
        for title, state in found.items()
        if state.keys() != saved[title].keys()
        or not all(torch.equal(value, saved[title][name]) for name, value in state.items())
    ]
    print(f"{len(found)} runs of {STEPS} steps: {len(found) - len(differing)} equal bit for bit.")
    for title in differing:
        print(f"differs: {title}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
