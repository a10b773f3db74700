"""Made-up run folders, as the trainer writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tekfac.methods import ALL

STEPS = 10
PARTS = {"data": 0.1, "forward": 0.2, "backward": 0.3, "curvature": 0.15, "update": 0.15}
"""Shares of the time; a tenth is left."""

METHODS = [method.name.lower() for method in ALL]


def config(**changes: Any) -> dict[str, Any]:
    """A whole configuration."""
    plain = {
        "name": "",
        "data": "digits",
        "data_dir": "data",
        "allow_partial": False,
        "train_samples": None,
        "test_samples": None,
        "held_back": 0,
        "augment": False,
        "image_size": 8,
        "model": "cnn",
        "model_options": {},
        "optimizer": "sgdm",
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "options": {},
        "epochs": 3,
        "batch_size": 128,
        "schedule": "step",
        "decay_every": 40,
        "decay_factor": 0.1,
        "seed": 0,
        "device": "cpu",
        "threads": 1,
        "workers": 0,
    }
    return plain | changes


def row(epoch: int, accuracy: float | None, train_loss: float | None, seconds: float) -> dict[str, Any]:
    """The line of one epoch; `seconds` is cumulative."""
    return {
        "epoch": epoch,
        "step": STEPS * epoch,
        "train_loss": train_loss,
        "train_accuracy": accuracy,
        "test_loss": train_loss,
        "test_accuracy": accuracy,
        "lr": 0.1,
        "seconds": seconds,
        **{part: share * seconds for part, share in PARTS.items()},
        "skipped_steps": 0,
    }


def write_run(
    folder: Path,
    accuracies: Sequence[float | None],
    *,
    losses: Sequence[float | None] | None = None,
    per_epoch: float = 1.0,
    status: str | None = "finished",
    layers: Sequence[str] = (),
    dampings: Sequence[float] | None = None,
    provenance: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a run with these test accuracies; `status` None leaves it unfinished."""
    folder.mkdir(parents=True)
    known = {
        "command": "tekfac train --config run.json",
        "commit": "0123abc",
        "machine": "a machine",
        "threads": 1,
        "device": "cpu",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "tekfac": "0.3.0"},
        "date": "2025-01-02T03:04:05",
    }
    described = {"format": 1, "config": config(**changes), "provenance": {**known, **(provenance or {})}}
    (folder / "run.json").write_text(json.dumps(described))
    losses = [1 / (epoch + 1) for epoch in range(len(accuracies))] if losses is None else losses
    rows = [
        row(epoch, accuracy, loss, per_epoch * epoch)
        for epoch, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True), start=1)
    ]
    (folder / "epochs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    measured = [
        {
            "epoch": one["epoch"],
            "step": one["step"],
            "layer": layer,
            "trace": (place + 1) / one["step"],
            "damping": 1e-3 * (place + 1) if dampings is None else dampings[place],
            "condition": None if place == 0 and one["epoch"] == 1 else 10.0 ** (place + 2) * one["epoch"],
            "staleness": 0,
            "failed_refreshes": 0,
        }
        for one in rows
        for place, layer in enumerate(layers)
    ]
    if measured:
        (folder / "curvature.jsonl").write_text("".join(json.dumps(one) + "\n" for one in measured))
    if status:
        (folder / "result.json").write_text(json.dumps({"status": status, "epochs": len(rows)}))
    return folder


def write_comparison(folder: Path, *, epochs: int = 12, seeds: int = 3, **changes: Any) -> Path:
    """Runs of six optimizers that learn at different speeds; the last seed of Adam diverges."""
    for place, optimizer in enumerate(["sgdm", "adam", *METHODS]):
        for seed in range(seeds):
            accuracies = [
                round(0.96 + 0.004 * place - 0.8 * math.exp(-epoch * (0.25 + 0.09 * place)) - 0.003 * seed, 4)
                for epoch in range(1, epochs + 1)
            ]
            losses: list[float | None] = [
                2.3 * math.exp(-epoch * (0.2 + 0.08 * place)) * (1 + 0.2 * seed)
                for epoch in range(1, epochs + 1)
            ]
            diverged = optimizer == "adam" and seed == seeds - 1
            kept = max(1, epochs // 2) if diverged else epochs
            write_run(
                folder / f"{optimizer}-{seed}",
                accuracies[:kept],
                losses=[*losses[: kept - 1], None] if diverged else losses,
                per_epoch=1.3 + 0.5 * place + 0.05 * seed,
                status="diverged" if diverged else "finished",
                layers=("conv1", "conv2", "classifier") if optimizer in METHODS else (),
                optimizer=optimizer,
                seed=seed,
                epochs=epochs,
                **changes,
            )
    return folder
