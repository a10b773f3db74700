"""The Fisher blocks of He's ResNet20 on the whole training set of CIFAR-10: memory, and going on after a crash.

    python benchmarks/fisher_cifar10.py --data-dir DIR --report docs/results/fisher-cifar10.md

The network is trained for an epoch. Its TEKFAC blocks are then estimated three times, each in a process of its
own: on a tenth of the images, on all of them, and once more on all of them by a process that is killed in the
middle of the first pass over the data, started again, killed in the middle of the second, and started again.
The last two results must be equal bit by bit, and the peak of memory must not grow with the number of images.
DIR holds CIFAR-10's python batches.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from provenance import provenance
from tekfac import fisher
from tekfac.lab import data as lab_data
from tekfac.lab.models import resnet20_he

METHOD, FISHER, BATCH, SEED = "tekfac", "sampled", 128, 0


class Batches:
    """Images kept as bytes, turned into numbers batch by batch, in order."""

    def __init__(self, folder: Path, images: int) -> None:
        data = lab_data.load("cifar10", folder)
        self._batches = lab_data.Batches(
            data.train.part(images),
            mean=data.mean,
            std=data.std,
            batch_size=BATCH,
            seed=SEED,
            augment=False,
            shuffle=False,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches.epoch(0)


def main() -> None:
    """Run the three estimates and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        estimate(arguments.data_dir, arguments.images, arguments.worker)
        return
    made_by = provenance([SEED])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        torch.save(trained(arguments.data_dir), folder / "network.pt")
        part = run(arguments, folder, "part", arguments.images // 10, interrupted=False)
        whole = run(arguments, folder, "whole", arguments.images, interrupted=False)
        resumed = run(arguments, folder, "resumed", arguments.images, interrupted=True)
        blocks = fisher.load(folder / "whole.safetensors")
        same = identical(blocks, fisher.load(folder / "resumed.safetensors"))
    print(text := report(made_by, blocks, part, whole, resumed, same))
    if arguments.report:
        arguments.report.write_text(text)
    if not same:
        raise SystemExit("The resumed estimate differs from the uninterrupted one.")


def trained(folder: Path) -> dict[str, Tensor]:
    """ResNet20 after one epoch of SGD."""
    torch.manual_seed(SEED)
    model = resnet20_he(3, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for images, labels in Batches(folder, 50_000):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.state_dict()


def estimate(data: Path, images: int, where: Path) -> None:
    """What a process does: estimate, save, and note its peak of memory."""
    model = resnet20_he(3, 10)
    model.load_state_dict(torch.load(where.parent / "network.pt", weights_only=True))
    start = time.perf_counter()
    blocks = fisher.estimate(
        model,
        Batches(data, images),
        method=METHOD,
        fisher=FISHER,
        checkpoint=where.with_suffix(".unfinished"),
        checkpoint_seconds=5,
        seed=SEED,
    )
    seconds = time.perf_counter() - start
    fisher.save(blocks, where.with_suffix(".safetensors"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    where.with_suffix(".json").write_text(json.dumps({"images": images, "seconds": seconds, "peak": peak}))


def run(
    arguments: argparse.Namespace, folder: Path, name: str, images: int, *, interrupted: bool
) -> dict[str, Any]:
    """Estimate in a process of its own; one that is to be interrupted is killed once in each pass."""
    where = folder / name
    command = [sys.executable, __file__, "--data-dir", str(arguments.data_dir)]
    command += ["--images", str(images), "--worker", str(where)]
    kills = []
    for title in ("factors", "second moments") if interrupted else ():
        with subprocess.Popen(command) as process:
            while process.poll() is None and not half_done(where.with_suffix(".unfinished"), title, images):
                time.sleep(0.2)
            if process.poll() is not None:
                raise SystemExit(f"The process ended before it could be killed in the pass for the {title}.")
            process.send_signal(signal.SIGKILL)
        kills.append(f"{title}: batch {batches_done(where.with_suffix('.unfinished'), title)}")
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(where.with_suffix(".json").read_text())
    return {**found, "kills": kills}


def half_done(path: Path, title: str, images: int) -> bool:
    """Whether what was written so far is beyond the middle of a pass."""
    return batches_done(path, title) >= images // BATCH // 2


def batches_done(path: Path, title: str) -> int:
    """How many batches of a pass the file of an unfinished estimate has."""
    from safetensors import safe_open

    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as file:
        records = json.loads(file.metadata()["tekfac"])["records"]
    return int(records[title]["count"]["batches"]) if title in records else 0


def identical(ours: fisher.BlockDiagonal[Any], theirs: fisher.BlockDiagonal[Any]) -> bool:
    """Whether all tensors of all blocks are equal bit by bit."""

    def tensors(blocks: fisher.BlockDiagonal[Any]) -> list[Tensor]:
        return [tensor for block in blocks.values() for tensor in (*block.basis, block.rescaling)]

    pairs = zip(tensors(ours), tensors(theirs), strict=True)
    return list(ours) == list(theirs) and all(torch.equal(a, b) for a, b in pairs)


def report(
    made_by: str,
    blocks: fisher.BlockDiagonal[Any],
    part: dict[str, Any],
    whole: dict[str, Any],
    resumed: dict[str, Any],
    same: bool,
) -> str:
    """The page with the result."""
    rows = [
        ["images", "interrupted", "seconds (of the last process)", "peak of memory, MiB"],
        ["---"] * 4,
        *(
            [
                f"{found['images']:,}",
                "; ".join(found["kills"]) or "no",
                f"{found['seconds']:.0f}",
                f"{found['peak'] / 2**20:.0f}",
            ]
            for found in (part, whole, resumed)
        ),
    ]
    layers = [["layer", "parameters", "tr F", "largest eigenvalue", "λ = tr F / d"], ["---"] * 5]
    layers += [
        [
            f"`{name}`",
            f"{block.size:,}",
            f"{block.trace():.4g}",
            f"{float(block.eigenvalues()[-1]):.4g}",
            f"{block.trace() / block.size:.3g}",
        ]
        for name, block in blocks.items()
    ]

    def table(lines: list[list[str]]) -> str:
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)

    outcome = "gave the same result, bit by bit" if same else "GAVE ANOTHER RESULT"
    return (
        "# Fisher blocks on a whole data set\n\n"
        f"He's ResNet20 after an epoch of SGD; {METHOD.upper()} blocks of its {len(blocks)} layers over "
        f"CIFAR-10's training set with the {FISHER} Fisher: two passes over the data, batches of {BATCH}.\n\n"
        f"{table(rows)}\n\n"
        f"The process that was killed twice and started again {outcome}. The peak is that of the whole "
        "process: Python, torch, the estimate, and the images as bytes, 3 KiB each.\n\n"
        f"{table(layers)}\n\n{made_by}\n"
    )


if __name__ == "__main__":
    main()
