"""What the inner arithmetic of a refresh takes, and what was tried instead of it.

Decompositions beside a warm-started QR step and the product that tells whether a basis still does; per-sample
gradients of convolutions by unfolding, by one backward pass of the weight per sample, and by a grouped
convolution. One thread, medians. The command

    python benchmarks/inner_products.py --out docs/results/inner-products.md

writes the page.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from provenance import provenance

SIZES = (64, 129, 288, 513, 576, 768, 1152)
CONVOLUTIONS = ((3, 16, 32), (16, 16, 32), (32, 32, 16), (64, 64, 8), (512, 512, 4), (512, 512, 2))
SAMPLES = 16


def milliseconds(work: Callable[[], object], repeats: int = 9) -> float:
    """The median time of some work, after a first time that does not count."""
    work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1e3 * median(taken)


def decompositions() -> list[str]:
    """A table by the size of a side."""
    lines = [
        "| dimensions | eigh | QR step | product | QR ÷ eigh | product ÷ eigh |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for size in SIZES:
        rows = torch.randn(2 * size, size) * torch.logspace(0, -2, size)
        matrix = rows.T @ rows
        basis = torch.linalg.eigh(matrix)[1]
        eigh = milliseconds(lambda matrix=matrix: torch.linalg.eigh(matrix))
        step = milliseconds(lambda matrix=matrix, basis=basis: torch.linalg.qr(matrix @ basis))
        product = milliseconds(lambda matrix=matrix, basis=basis: matrix @ basis)
        cells = (f"{eigh:.2f}", f"{step:.2f}", f"{product:.3f}", f"{step / eigh:.2f}", f"{product / eigh:.2f}")
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return lines


def by_unfolding(a: Tensor, u: Tensor) -> Tensor:
    """All patches, then a batched product."""
    return torch.bmm(u.flatten(2), F.unfold(a, 3, padding=1).mT)


def one_by_one(a: Tensor, u: Tensor) -> list[Tensor]:
    """The weight's gradient of every sample by itself."""
    shape = (u.shape[1], a.shape[1], 3, 3)
    return [torch.nn.grad.conv2d_weight(a[i : i + 1], shape, u[i : i + 1], padding=1) for i in range(len(a))]


def by_groups(a: Tensor, u: Tensor) -> Tensor:
    """Inputs convolved with output gradients, a group for every sample."""
    samples, channels = u.shape[:2]
    kernels = u.reshape(samples * channels, 1, *u.shape[2:])
    return F.conv2d(a.transpose(0, 1), kernels, groups=samples, padding=1)


def gradients() -> list[str]:
    """A table by the shape of a 3 x 3 convolution."""
    ways = {"unfolding": by_unfolding, "one by one": one_by_one, "grouped": by_groups}
    lines = [f"| channels, edge | {' | '.join(ways)} |", "|---:|---:|---:|---:|"]
    for c_in, c_out, edge in CONVOLUTIONS:
        a, u = torch.randn(SAMPLES, c_in, edge, edge), torch.randn(SAMPLES, c_out, edge, edge)
        cells = (f"{milliseconds(lambda way=way, a=a, u=u: way(a, u), 5):.2f}" for way in ways.values())
        lines.append(f"| {c_in} → {c_out}, {edge} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the page to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts = [
        "# The inner arithmetic of a refresh",
        (__doc__ or "").split("\n\n")[1].rsplit(" The command", 1)[0],
    ]
    parts += ["## One side", "\n".join(decompositions()), "Milliseconds, float32."]
    parts += [f"## Gradients of {SAMPLES} samples", "\n".join(gradients()), "Milliseconds, 3 × 3 kernels."]
    text = "\n\n".join([*parts, provenance([0]), ""])
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
