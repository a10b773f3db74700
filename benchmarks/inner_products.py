"""What the inner arithmetic of a refresh takes, and what was tried instead of it.

Decompositions beside a warm-started step of orthogonal iteration, by QR and as `track_basis` does it, and the
product that tells whether a basis still does; per-sample gradients of convolutions by unfolding, by a backward
pass of the weight for each, and by a grouped convolution; and samples of a batch in a few sums beside the
weight's gradient in the backward pass. One thread, medians. The command

    python benchmarks/inner_products.py --out docs/results/inner-products.md

writes the page.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from provenance import provenance
from tekfac.capture.selection import IN_A_SUM
from tekfac.curvature.symmetric import Along, iterated
from tekfac.layers.batch import Sums
from tekfac.layers.inventory import take_inventory
from tekfac.layers.kinds.convolution import PatchRows

SIZES = (64, 129, 288, 513, 576, 768, 1152)
CONVOLUTIONS = ((3, 16, 32), (16, 16, 32), (32, 32, 16), (64, 64, 8), (512, 512, 4), (512, 512, 2))
SAMPLES, BATCH, COUNT = 16, 128, 16


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
    ways: Mapping[str, Callable[[Tensor, Tensor], object]] = {
        "eigh": lambda matrix, _: torch.linalg.eigh(matrix),
        "by QR": lambda matrix, basis: torch.linalg.qr(matrix @ basis),
        "tracked": tracked,
        "product": torch.matmul,
    }
    quicker = [name for name in ways if name != "eigh"]
    lines = [
        f"| dimensions | {' | '.join(ways)} | {' | '.join(f'{name} ÷ eigh' for name in quicker)} |",
        "|---:" * (1 + len(ways) + len(quicker)) + "|",
    ]
    for size in SIZES:
        rows = torch.randn(2 * size, size) * torch.logspace(0, -2, size)
        before, more = rows.T @ rows, torch.randn(8, size) * torch.logspace(0, -2, size)
        basis = torch.linalg.eigh(before)[1]
        matrix = before + more.T @ more
        taken = {
            name: milliseconds(lambda way=way, matrix=matrix, basis=basis: way(matrix, basis))
            for name, way in ways.items()
        }
        cells = [f"{value:.2f}" for value in taken.values()]
        cells += [f"{taken[name] / taken['eigh']:.2f}" for name in quicker]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    return lines


def tracked(matrix: Tensor, basis: Tensor) -> Tensor:
    """One step of orthogonal iteration and the eigenvalues along it, as a refresh takes it."""
    vectors = iterated(basis[None], Along.of(matrix[None], basis[None]))
    assert vectors is not None, "the basis has turned too far"
    return Along.of(matrix[None], vectors).values


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


def sums() -> list[str]:
    """A table by the shape of a 3 x 3 convolution."""
    heads = [f"all in {COUNT} sums", f"{IN_A_SUM * COUNT} of them in {COUNT} sums"]
    lines = [
        f"| channels, edge | the weight's gradient | {' | '.join(heads)} | ratios |",
        "|---:|---:|---:|---:|---:|",
    ]
    for c_in, c_out, edge in CONVOLUTIONS:
        module = nn.Conv2d(c_in, c_out, 3, padding=1, bias=False)
        layer = take_inventory(module, []).layers[""]
        a, u = torch.randn(BATCH, c_in, edge, edge), torch.randn(1, BATCH, c_out, edge, edge)
        form, signs = PatchRows(module), torch.randint(0, 2, (BATCH,)) * 2 - 1
        ways = (Sums.of_all(signs, COUNT), Sums.of_some(signs, BATCH // IN_A_SUM, range(0, 4 * COUNT, 4)))
        whole = milliseconds(lambda form=form, layer=layer, a=a, u=u: form.gradient(layer.shape, a, u), 5)
        taken = [
            milliseconds(lambda form=form, layer=layer, a=a, u=u, way=way: way.of(layer, form, a, u), 5)
            for way in ways
        ]
        cells = [f"{value:.2f}" for value in (whole, *taken)]
        cells.append(", ".join(f"{value / whole:.2f}" for value in taken))
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
    parts += [f"## {BATCH} samples", "\n".join(sums()), "Milliseconds, 3 × 3 kernels."]
    text = "\n\n".join([*parts, provenance([0]), ""])
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
