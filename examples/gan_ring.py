"""A GAN on a ring of eight Gaussians: two networks, two optimizers, each with a loss of the other's making.

One network makes points out of noise, the other one tells them from points of the data. The first one's loss
is taken of what the second one says of its points, and belongs to no likelihood; the second one's is a binary
cross-entropy. Both optimizers have a momentum of 0.5, as is usual for adversaries.

Run: python examples/gan_ring.py (ten seconds)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from beside_adam import Comparison, Make, compare, mean_of_last

STEPS, BATCH, WIDTH, NOISE, SPREAD, MOMENTUM = 600, 128, 64, 8, 0.05, 0.5
MADE, EVERY = 500, 20


def ring(count: int) -> Tensor:
    """Points [N, 2] around eight centres on the unit circle."""
    angles = torch.randint(8, (count,)) * (2 * math.pi / 8)
    return torch.stack([angles.cos(), angles.sin()], 1) + SPREAD * torch.randn(count, 2)


def network(inputs: int, outputs: int) -> nn.Module:
    """Three layers."""
    return nn.Sequential(
        *(nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2)),
        *(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)),
        nn.Linear(WIDTH, outputs),
    )


def distance(made: Tensor, real: Tensor) -> float:
    """The energy distance of two samples, which is zero only for the same distribution."""
    between, inside = torch.cdist(made, real).mean(), [torch.cdist(x, x).mean() for x in (made, real)]
    return (2 * between - inside[0] - inside[1]).item()


def train(make: Make, seed: int) -> float:
    """The energy distance between made points and real ones, over the last third of the training."""
    torch.manual_seed(seed)
    maker, judge = network(NOISE, 2), network(2, 1)
    of_judge, of_maker = make(judge), make(maker)
    yes, no = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
    distances = []
    for step in range(1, STEPS + 1):
        of_judge.zero_grad()
        points = torch.cat([ring(BATCH), maker(torch.randn(BATCH, NOISE)).detach()])
        binary_cross_entropy_with_logits(judge(points), torch.cat([yes, no])).backward()
        of_judge.step()
        of_maker.zero_grad()
        binary_cross_entropy_with_logits(judge(maker(torch.randn(BATCH, NOISE))), yes).backward()
        of_maker.step()
        if step % EVERY == 0:
            with torch.no_grad():
                distances.append(distance(maker(torch.randn(MADE, NOISE)), ring(MADE)))
    return mean_of_last(distances, 1 / 3)


def main() -> Comparison:
    """Train with TEKFAC and with Adam, and print what came out."""
    what = f"the energy distance to the data in the last third of {STEPS} steps"
    return compare(train, what, momentum=MOMENTUM)


if __name__ == "__main__":
    main()
