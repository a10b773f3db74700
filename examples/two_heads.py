"""Two predictions with a loss each: which digit it is, and where its ink is.

A network with a shared trunk and two heads learns scikit-learn's digits: the class, by its cross-entropy, and
the centre of mass of the ink, by its squared error. It returns a dict, and the two losses are added up. Which
likelihood belongs to which prediction is found from the losses.

Run: python examples/two_heads.py (five seconds)
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from beside_adam import Comparison, Make, compare

STEPS, BATCH = 200, 128


class TwoHeads(nn.Module):
    """Logits of the digits [N, 10] and the centre of mass [N, 2] of images [N, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.digit, self.centre = nn.Linear(64, 10), nn.Linear(64, 2)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Both, by name."""
        features = self.trunk(images)
        return {"digit": self.digit(features), "centre": self.centre(features)}


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """All 1797 images as vectors [N, 64], their labels [N], and where their ink is, in pixels [N, 2]."""
    raw = load_digits()
    ink = torch.tensor(raw.images, dtype=torch.float32) / 16
    pixels = torch.arange(8.0) - 3.5
    centres = torch.stack([ink.sum(2) @ pixels, ink.sum(1) @ pixels], 1) / ink.sum((1, 2))[:, None]
    return ink.flatten(1), torch.tensor(raw.target), centres


def train(make: Make, seed: int) -> float:
    """The loss of all images after the training."""
    torch.manual_seed(seed)
    model = TwoHeads()
    optimizer = make(model)
    images, labels, centres = digits()

    def loss_of(chosen: Tensor) -> Tensor:
        out = model(images[chosen])
        return cross_entropy(out["digit"], labels[chosen]) + mse_loss(out["centre"], centres[chosen])

    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(torch.randint(len(images), (BATCH,))).backward()
        optimizer.step()
    with torch.no_grad():
        return loss_of(torch.arange(len(images))).item()


def main() -> Comparison:
    """Train with TEKFAC and with Adam, and print what came out."""
    return compare(train, f"the loss after {STEPS} steps")


if __name__ == "__main__":
    main()
