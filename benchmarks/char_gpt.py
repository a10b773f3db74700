"""A small GPT on the standard library's own sources: loss against steps and against time.

A transformer that predicts the next character is trained by AdamW, SGD with momentum, EKFAC and TEKFAC. Each is
tuned over the same number of settings, in short runs with a seed of their own; then it runs with the best of
them and three other seeds. All see the same batches; those of one seed take turns, a few steps each, so that a
busy moment of the machine hits all of them. The command

    python benchmarks/char_gpt.py --out docs/results/char-gpt

writes docs/results/char-gpt.md, and the curves and their figure into docs/results/char-gpt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tekfac
from provenance import provenance
from tekfac.fisher.figures import empty
from tekfac.lab.gpt import GPT
from tekfac.lab.report import drawing

MODULES = """
argparse ast calendar cmd codecs configparser contextlib copy csv dataclasses datetime difflib doctest enum
fileinput fractions ftplib functools getopt gettext glob heapq imaplib inspect ipaddress locale mailbox netrc
mimetypes numbers optparse os pdb pickle pickletools platform plistlib poplib pprint profile pstats pyclbr queue
random sched selectors shelve shlex shutil smtplib socket socketserver ssl statistics string subprocess tarfile
textwrap threading timeit tokenize trace traceback turtle typing uuid warnings wave webbrowser
"""
RARE = 100  # characters that are met less often become one symbol
DIVERGED = 99.0  # stands for a loss that is larger or not a number

Setting = Mapping[str, Any]
Tried = list[tuple[Setting, float]]
SHARED = dict.fromkeys(("factors_every", "basis_every", "rescaling_every"), 20)
NATURAL: Sequence[Setting] = [
    {"lr": 0.1, "kl_clip": 1e-4, "damping": 1e-2, "fisher": "empirical"},
    {"lr": 0.03, "kl_clip": 1e-4, "damping": 1e-2, "fisher": "empirical"},
    {"lr": 0.03, "kl_clip": 3e-5, "damping": 3e-3, "fisher": "empirical"},
    {"lr": 0.01, "kl_clip": 3e-5, "damping": 3e-3, "fisher": "empirical"},
    {"lr": 0.03, "kl_clip": 3e-5, "damping": 1e-2, "fisher": "sampled"},
]
GRIDS: Mapping[str, Sequence[Setting]] = {
    "AdamW": [{"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.01} for lr in (2e-3, 3e-3, 4e-3, 6e-3, 8e-3)],
    "SGD": [{"lr": lr, "momentum": 0.9} for lr in (0.03, 0.1, 0.2, 0.4, 0.8)],
    "EKFAC": NATURAL,
    "TEKFAC": NATURAL,
}
LOOKS = {"AdamW": "#009e73", "SGD": "#555555", "EKFAC": "#0072b2", "TEKFAC": "#d55e00"}


@dataclass(frozen=True)
class Task:
    """The network, the batches and the lengths of the runs."""

    context: int = 128
    batch: int = 32
    width: int = 64
    depth: int = 4
    heads: int = 4
    steps: int = 1000
    tuning_steps: int = 300
    warmup: float = 0.05
    turn: int = 25
    windows: int = 128
    seeds: tuple[int, ...] = (1, 2, 3)
    tuning_seed: int = 0


QUICK = Task(16, 4, 16, 1, 2, steps=12, tuning_steps=4, turn=4, windows=8, seeds=(1, 2))


class Text(NamedTuple):
    """Characters as numbers; the last tenth of every module is kept back, half of it to tune on."""

    training: Tensor
    tuning: Tensor
    validation: Tensor
    symbols: int
    modules: int
    digest: str


def standard_library() -> Text:
    """The sources of those modules of the list that this Python has."""
    files = [Path(sysconfig.get_path("stdlib")) / f"{name}.py" for name in MODULES.split()]
    sources = [file.read_text(encoding="utf-8") for file in files if file.exists()]
    whole = "".join(sources)
    common = sorted(letter for letter, count in Counter(whole).items() if count >= RARE)
    number = {letter: place for place, letter in enumerate(common, start=1)}

    def part(start: int, end: int) -> Tensor:
        """From so many twentieths of every module to so many."""
        pieces = (source[len(source) * start // 20 : len(source) * end // 20] for source in sources)
        return torch.tensor([number.get(letter, 0) for piece in pieces for letter in piece])

    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return Text(part(0, 18), part(18, 19), part(19, 20), len(common) + 1, len(sources), digest)


def windows(text: Tensor, count: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of the text, and the same one character further on."""
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    pieces = text[starts + torch.arange(context + 1)]
    return pieces[:, :-1], pieces[:, 1:]


@dataclass
class Run:
    """A training run that goes on by a few steps at a time."""

    name: str
    setting: Setting
    seed: int
    steps: int
    task: Task
    text: Text
    taken: list[float] = field(default_factory=list)
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(steps, seconds of training, validation loss)"""

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        task = self.task
        self.model = GPT(
            self.text.symbols, context=task.context, width=task.width, depth=task.depth, heads=task.heads
        )
        if self.name in ("AdamW", "SGD"):
            self.optimizer = getattr(torch.optim, self.name)(self.model.parameters(), **self.setting)
        else:
            self.optimizer = getattr(tekfac, self.name)(self.model, seed=self.seed, **SHARED, **self.setting)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._share_of_lr)
        self.batches = torch.Generator().manual_seed(1000 + self.seed)
        self._validate()

    def _share_of_lr(self, step: int) -> float:
        """A linear start, then a cosine down to a tenth."""
        progress = min(1.0, step / self.steps)
        rising = min(1.0, (step + 1) / max(1.0, self.task.warmup * self.steps))
        return rising * (0.55 + 0.45 * math.cos(math.pi * progress))

    def advance(self, steps: int) -> None:
        """Take some steps, then look at the validation loss; its time does not count."""
        for _ in range(min(steps, self.steps - len(self.taken))):
            x, y = windows(self.text.training, self.task.batch, self.task.context, self.batches)
            start = time.perf_counter()
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x).flatten(0, 1), y.flatten()).backward()
            self.optimizer.step()
            self.taken.append(time.perf_counter() - start)
            self.schedule.step()
        self._validate()

    @torch.no_grad()
    def _validate(self) -> None:
        generator = torch.Generator().manual_seed(0)
        text = self.text.tuning if self.seed == self.task.tuning_seed else self.text.validation
        x, y = windows(text, self.task.windows, self.task.context, generator)
        loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten()).item()
        self.curve.append((len(self.taken), sum(self.taken), loss if loss < DIVERGED else DIVERGED))

    @property
    def loss(self) -> float:
        """On held-back text, after the last step."""
        return self.curve[-1][2]


def tuned(name: str, grid: Sequence[Setting], task: Task, text: Text) -> Tried:
    """Every setting of an optimizer with its loss after a short run, the best first."""
    found: Tried = []
    for setting in grid:
        run = Run(name, setting, task.tuning_seed, task.tuning_steps, task, text)
        run.advance(task.tuning_steps)
        found.append((setting, run.loss))
        print(f"{name}, {in_words(setting)}: {run.loss:.4f}", flush=True)
    return sorted(found, key=lambda pair: pair[1])


def compared(best: Mapping[str, Setting], task: Task, text: Text) -> dict[str, list[Run]]:
    """A run of every optimizer and seed. Those of one seed take turns, in an order that goes round."""
    runs: dict[str, list[Run]] = {name: [] for name in best}
    for seed in task.seeds:
        racing = [Run(name, setting, seed, task.steps, task, text) for name, setting in best.items()]
        for turn in range(math.ceil(task.steps / task.turn)):
            for place in range(len(racing)):
                racing[(turn + place) % len(racing)].advance(task.turn)
        for run in racing:
            runs[run.name].append(run)
            print(f"{run.name}, seed {seed}: {run.loss:.4f} after {sum(run.taken):.1f} s", flush=True)
    return runs


def in_words(setting: Setting) -> str:
    """`lr 0.1, kl_clip 0.001`."""
    return ", ".join(f"{key} {value}" for key, value in setting.items())


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation."""
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def reached(runs: Sequence[Run], rivals: Sequence[Run]) -> list[tuple[int, float, float]]:
    """Where each run was first seen at or below the last loss of the rival with its seed; some may never be."""
    pairs = zip(runs, rivals, strict=True)
    firsts = (next((point for point in run.curve if point[2] <= rival.loss), None) for run, rival in pairs)
    return [point for point in firsts if point is not None]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def verdict(runs: Mapping[str, Sequence[Run]]) -> str:
    """Who is ahead at the last step, and who was first at AdamW's last loss, by steps and by the clock."""
    last = {name: mean(run.loss for run in of) for name, of in runs.items()}
    order = ", then ".join(f"{name} ({last[name]:.3f})" for name in sorted(last, key=lambda name: last[name]))
    points = {name: reached(of, runs["AdamW"]) for name, of in runs.items()}
    there = {name: found for name, found in points.items() if len(found) == len(runs[name])}
    by_steps, by_clock = (min(there, key=lambda name: mean(p[unit] for p in there[name])) for unit in (0, 1))
    first = f"First, on average, at AdamW's last loss: {by_steps} by steps, {by_clock} by the clock."
    return f"By validation loss after the last step: {order}. {first}"


def draw(runs: Mapping[str, Sequence[Run]], file: Path) -> None:
    """Mean and range of the validation loss over the seeds, against steps and against seconds."""
    with drawing.style():
        page = empty(2.8)
        panels = page.subplots(1, 2, sharey=True)
        for name, of in runs.items():
            points = [list(zip(*at, strict=True)) for at in zip(*(run.curve for run in of), strict=True)]
            low, middle, high = ([f(losses) for _, _, losses in points] for f in (min, mean, max))
            for panel, axis in zip(panels, (0, 1), strict=True):
                x = [mean(point[axis]) for point in points]
                panel.plot(x, middle, color=LOOKS[name], label=name)
                panel.fill_between(x, low, high, color=LOOKS[name], alpha=0.2, lw=0)
        panels[0].set(xlabel="steps", ylabel="validation loss, nats per character")
        panels[1].set(xlabel="seconds of training")
        lowest = min(run.loss for of in runs.values() for run in of)
        panels[0].set_ylim(lowest - 0.05, lowest + 1.5)
        drawing.legend(page, *panels[0].get_legend_handles_labels())
        page.savefig(file, dpi=160)


PAGE = """# A small GPT on the standard library's sources

{verdict}

![Validation loss against steps and against seconds]({figure})

A transformer ({task.depth} blocks of width {task.width}, {task.heads} heads, context {task.context}, {size:,}
parameters) predicts the next character of {text.modules} modules of Python's standard library ({letters:,}
characters, {text.symbols} symbols, SHA-256 `{text.digest}…`); the last tenth of each is held back. Batches of
{task.batch} windows, the same for all. The learning rate rises for {task.warmup:.0%} of the steps, then follows
a cosine down to a tenth; where the KL clip acts, it sets the length of a step instead. EKFAC and TEKFAC
precondition every layer, embeddings and norms included, and measure every {every} steps. Runs of one seed took
turns of {task.turn} steps; looking at the loss in between, on {task.windows} windows, is not in the times.

Validation loss in nats per character after so many steps, mean ± standard deviation over the seeds:

{losses}

Steps and seconds until the loss was first seen where AdamW's ends with the same seed; milliseconds per step, as
the mean of a run (median over seeds, smallest and largest in brackets); the median step (without curvature):

{times}

## Tuning

Each had as many settings, {task.tuning_steps} steps of each with another seed, judged on the other half of the
held-back text; the best went on. The lists were drawn up after other short runs, most of smaller networks, with
the same seed and on all of the held-back text: about ninety of EKFAC and TEKFAC, twenty of AdamW (for which the
scale of the first weights was chosen, too) and four of SGD. Ours were thus looked into more closely.

{settings}

{made_by}
"""


def report(runs: Mapping[str, Sequence[Run]], tuning: Mapping[str, Tried], **values: Any) -> str:
    """The page of the result."""
    adamw, text = runs["AdamW"], values["text"]
    places = [round(share * (len(adamw[0].curve) - 1)) for share in (0.1, 0.25, 0.5, 0.75, 1)]
    losses, times, settings = [], [], []
    for name, of in runs.items():
        losses.append([name, *(spread([run.curve[place][2] for run in of], 3) for place in places)])
        points, whole = reached(of, adamw), [1000 * mean(run.taken) for run in of]
        units = [f"{len(points)} of {len(of)} runs got there"] * 2
        if len(points) == len(of):
            units = [spread([p[0] for p in points], 0), spread([p[1] for p in points], 1)]
        per_step = f"{median(whole):.1f} ({min(whole):.1f} to {max(whole):.1f})"
        times.append([name, *units, per_step, f"{1000 * median(s for run in of for s in run.taken):.1f}"])
        settings += [[name, in_words(setting), f"{loss:.3f}"] for setting, loss in tuning[name]]
    return PAGE.format(
        verdict=verdict(runs),
        size=sum(parameter.numel() for parameter in adamw[0].model.parameters()),
        letters=len(text.training) + len(text.tuning) + len(text.validation),
        losses=table(["", *(str(adamw[0].curve[place][0]) for place in places)], losses),
        times=table(["", "steps", "seconds", "ms per step", "median step"], times),
        every=SHARED["factors_every"],
        settings=table(["", "setting", "loss"], settings),
        **values,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, train, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the curves; the page is OUT.md")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny network, few steps: to see that all works")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    task, text = (QUICK if given.quick else Task()), standard_library()
    made_by = provenance([task.tuning_seed, *task.seeds])
    tuning = {name: tuned(name, grid[:2] if given.quick else grid, task, text) for name, grid in GRIDS.items()}
    runs = compared({name: tried[0][0] for name, tried in tuning.items()}, task, text)
    given.out.mkdir(parents=True, exist_ok=True)
    points = {name: {run.seed: run.curve for run in of} for name, of in runs.items()}
    (given.out / "curves.json").write_text(json.dumps(points).replace("]], ", "]],\n") + "\n")
    draw(runs, given.out / "curves.png")
    shown = {"text": text, "task": task, "figure": f"{given.out.name}/curves.png", "made_by": made_by}
    page = report(runs, tuning, **shown)
    given.out.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
