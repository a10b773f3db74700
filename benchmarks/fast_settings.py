"""What the quick ways to the curvature cost in accuracy: nothing, if differences are within the seeds' spread.

TEKFAC is trained with curvature measured on each sample, every eigenbasis decomposed at every refresh and all
layers refreshed at once ("exact"), with the quick ways that are the default ("fast": sums of samples, and turns
where they cost nothing), and with single ones of them, or others that have to be asked for. There are two
tasks: half of He's ResNet20 on 10,000 images of CIFAR-10, six epochs; a small GPT on the standard library's
sources, 300 steps.

The command

    python benchmarks/fast_settings.py --data-dir DIR --out docs/results/fast-settings.md

needs CIFAR-10 in DIR (see `tekfac data`); without --data-dir it trains the GPT alone.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F

import tekfac
from char_gpt import Task, standard_library, windows
from provenance import provenance
from tekfac.lab.config import RunConfig
from tekfac.lab.gpt import GPT
from tekfac.lab.training import train

EVERY_TEN = dict.fromkeys(("factors_every", "basis_every", "rescaling_every"), 10)
EXACT: Mapping[str, Any] = {"statistics_samples": None, "track_basis": False, "turns": False}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "exact": EXACT,
    "fast": {},
    "tracked bases": {**EXACT, "track_basis": True},
    "turns": {**EXACT, "turns": True},
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "images": {"lr": 0.1, "kl_clip": 1e-3, "damping": 1e-2, "fisher": "sampled", **EVERY_TEN},
    "text": {"lr": 0.03, "kl_clip": 3e-5, "damping": 3e-3, "fisher": "empirical", **EVERY_TEN},
}
TRIED: Mapping[str, Sequence[str]] = {"images": tuple(VARIANTS)[:-1], "text": tuple(VARIANTS)}
"""Turns ask for the empirical Fisher, and images have drawn labels."""

MEASURES: Mapping[str, Mapping[str, str]] = {
    "images": {"result": "test accuracy, %", "training loss": "training loss, last epoch"},
    "text": {"result": "validation loss"},
}
STEPS, WARMUP = 300, 15
EPOCHS, IMAGES, WIDTH = 6, 10_000, 8


def train_on_text(options: Mapping[str, Any], seed: int) -> dict[str, float]:
    """The validation loss after STEPS steps: a linear start, then a cosine down to a tenth."""
    task, text = Task(), standard_library()
    torch.manual_seed(seed)
    model = GPT(text.symbols, context=task.context, width=task.width, depth=task.depth, heads=task.heads)
    optimizer = tekfac.TEKFAC(model, seed=seed, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * min(1, step / STEPS))),
    )
    batches = torch.Generator().manual_seed(1000 + seed)
    start = time.perf_counter()
    for _ in range(STEPS):
        x, y = windows(text.training, task.batch, task.context, batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - start
    x, y = windows(text.validation, task.windows, task.context, torch.Generator().manual_seed(7))
    with torch.no_grad():
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    return {"result": float(loss), "seconds": seconds, "skipped": optimizer.skipped_steps}


def train_on_images(options: Mapping[str, Any], seed: int, data_dir: str) -> dict[str, float]:
    """The test accuracy after EPOCHS epochs, by the lab: a cosine down to 0."""
    own = {key: value for key, value in options.items() if key not in ("lr", "optimizer")}
    config = RunConfig(
        data="cifar10",
        data_dir=data_dir,
        allow_partial=True,
        train_samples=IMAGES,
        model="resnet20-he",
        model_options={"width": WIDTH},
        optimizer="tekfac",
        lr=options["lr"],
        options=own,
        epochs=EPOCHS,
        schedule="cosine",
        seed=seed,
        threads=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = train(config, Path(folder))
    return {
        "result": 100 * result["test_accuracy"],
        "training loss": result["train_loss"],
        "seconds": result["seconds"],
        "skipped": 0,
    }


def run_one(task: str, options: Mapping[str, Any], seed: int, data_dir: str | None) -> dict[str, float]:
    """One run, in this process."""
    torch.set_num_threads(1)
    whole = {**SETTINGS[task], **options}
    return train_on_text(whole, seed) if task == "text" else train_on_images(whole, seed, str(data_dir))


def run_in_a_process(
    task: str, options: Mapping[str, Any], seed: int, data_dir: str | None
) -> dict[str, float]:
    """The same in a process of its own."""
    job = json.dumps({"task": task, "options": options, "seed": seed, "data_dir": data_dir})
    command = [sys.executable, __file__, "--one", job]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{task}, {options}, seed {seed}: {found}", flush=True)
    return found


def page(results: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]], seeds: Sequence[int]) -> str:
    """The results as Markdown."""
    lines = ["# Quick ways to the curvature, and accuracy", "", (__doc__ or "").split("\n\n")[1], ""]
    for task, by_variant in results.items():
        lines += [f"## {task.capitalize()}", "", f"Settings of all: `{json.dumps(SETTINGS[task])}`.", ""]
        for measure, words in MEASURES[task].items():
            lines += table(words, {name: [one[measure] for one in found] for name, found in by_variant.items()})
    return "\n".join([*lines, provenance(seeds), ""])


def table(words: str, by_variant: Mapping[str, Sequence[float]]) -> list[str]:
    """One measure of all variants; differences from "exact" are of the same seeds."""
    lines = [f"| {words} | mean | standard deviation | each seed | against exact |", "|---|---:|---:|---|---:|"]
    exact = by_variant["exact"]
    for variant, found in by_variant.items():
        each = ", ".join(f"{value:.3f}" for value in found)
        gaps = [own - other for own, other in zip(found, exact, strict=True)]
        gap = "–" if found is exact else f"{mean(gaps):+.3f} ± {stdev(gaps) / math.sqrt(len(gaps)):.3f}"
        lines.append(f"| {variant} | {mean(found):.3f} | {stdev(found):.3f} | {each} | {gap} |")
    return [*lines, ""]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", help="where CIFAR-10 lies")
    parser.add_argument("--out", type=Path, help="the page to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tasks", nargs="+", choices=list(SETTINGS), default=None)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(run_one(**json.loads(given.one))))
        return
    tasks = given.tasks or (["text"] if given.data_dir is None else list(SETTINGS))
    jobs = [(task, name, seed) for seed in given.seeds for task in tasks for name in TRIED[task]]
    with ThreadPoolExecutor(given.processes) as pool:
        found = list(
            pool.map(lambda job: run_in_a_process(job[0], VARIANTS[job[1]], job[2], given.data_dir), jobs)
        )
    results: dict[str, dict[str, list[dict[str, float]]]] = {
        task: {name: [] for name in TRIED[task]} for task in tasks
    }
    for (task, name, _), result in zip(jobs, found, strict=True):
        results[task][name].append(result)
    text = page(results, given.seeds)
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
