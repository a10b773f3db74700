"""`tekfac bench`: what a step costs beside one of SGD, in time, memory and multiplications."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TypeVar

from tekfac.cli.parsing import add_out, pair, positive
from tekfac.lab.bench.contestants import ALL, Contestant
from tekfac.lab.bench.networks import NETWORKS
from tekfac.lab.bench.running import Wish
from tekfac.lab.bench.running import run as run_wish
from tekfac.lab.report import require_reports

T = TypeVar("T")

CONTESTANTS = "sgd,adamw,kfac@10,tekfac@10,tekfac@50,soap@10,muon"
QUICK_CONTESTANTS = "sgd,adamw,kfac@2,tekfac@2,soap@2,muon"
SMALL = ("mlp", "cnn", "gpt", "resnet20-he")
ROUNDS, QUICK_ROUNDS = 3, 2

DESCRIPTION = """\
What a step of an optimizer costs beside one of SGD with momentum: contestants take turns, a step each.
Outcome are tables, a figure and all numbers, in a folder to which other networks can be added.

  tekfac bench                                   four networks, seven contestants
  tekfac bench --networks vgg16 --contestants sgd,kfac@50,tekfac@50 --rounds 2 --out bench
  tekfac bench --contestants "tekfac@10,tekfac@10,fisher=empirical" --threads 1 2
  tekfac bench --growth                          cost by width, batch and length of sequences

A contestant is NAME, or NAME@N for one that measures every N steps, and may be followed by KEY=VALUE of its
keywords. SGD always runs. SOAP and Shampoo come with tekfac[bench]; what is not installed is left out.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    what = parser.add_argument_group("what is measured")
    told = f"of {', '.join(NETWORKS)} (default: {' '.join(SMALL)}; with --growth none)"
    what.add_argument("--networks", nargs="+", choices=list(NETWORKS), metavar="NAME", help=told)
    told = f"of {', '.join(ALL)} (default: {CONTESTANTS}; with --quick {QUICK_CONTESTANTS})"
    what.add_argument("--contestants", metavar="NAME[@N],...", help=told)
    what.add_argument("--growth", action="store_true", help="how costs grow with width, batch and sequences")
    what.add_argument(
        "--no-memory", action="store_true", help="leave out the memory, which takes more processes"
    )
    how = parser.add_argument_group("how")
    told = "numbers of threads, each in processes of its own (default: 1)"
    how.add_argument("--threads", nargs="+", type=positive, default=[1], metavar="N", help=told)
    told = f"each of whole cycles of all contestants (default: {ROUNDS}; with --quick {QUICK_ROUNDS})"
    how.add_argument("--rounds", type=positive, help=told)
    how.add_argument("--warmup", type=positive, default=3, help="steps before them, the first included")
    told = "steps whose memory is measured (default: the first and a whole cycle)"
    how.add_argument("--memory-steps", type=positive, help=told)
    how.add_argument("--seed", type=int, default=0, help="of weights, data and drawn labels")
    told = "the first steps of a run, when averages still change much, instead of late ones"
    how.add_argument("--early", action="store_true", help=told)
    how.add_argument("--quick", action="store_true", help="tiny networks: to see that all works")
    add_out(how, "bench")
    how.add_argument("--quiet", action="store_true", help="say nothing meanwhile")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, write and print."""
    require_reports()
    listed = QUICK_CONTESTANTS if options.quick else CONTESTANTS
    run_wish(
        Wish(
            networks=_distinct("networks", options.networks or (() if options.growth else SMALL)),
            contestants=contestants(options.contestants or listed),
            threads=_distinct("threads", options.threads),
            rounds=options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS),
            warmup=options.warmup,
            memory=not options.no_memory,
            memory_steps=options.memory_steps,
            growth=options.growth,
            seed=options.seed,
            early=options.early,
            quick=options.quick,
            out=options.out,
            command=options.command_line,
            quiet=options.quiet,
        )
    )


def contestants(text: str) -> list[Contestant]:
    """Those that a list names: `tekfac@10,fisher=empirical,sgd` are two of them.

    Raises:
        ValueError: for what is no such list, or an unknown name.
    """
    found: list[Contestant] = []
    for part in (part.strip() for part in text.split(",")):
        if "=" in part:
            if not found:
                raise ValueError(
                    f"Invalid --contestants: {text!r}. The option {part!r} stands before any name; write it "
                    "behind the contestant that it is for, as in tekfac@10,fisher=empirical."
                )
            key, value = pair(part)
            last = found.pop()
            found.append(Contestant(last.name, last.every, {**last.options, key: value}))
        else:
            found.append(_contestant(text, part))
    return found


def _contestant(text: str, part: str) -> Contestant:
    name, at, every = part.partition("@")
    if not name or (at and not every.isdecimal()):
        raise ValueError(
            f"Invalid --contestants: {text!r}. Cannot read {part!r}; expected names as in sgd,tekfac@10, where "
            "10 is the number of steps between measurements."
        )
    return Contestant(name.lower(), int(every) if at else None)


def _distinct(name: str, values: Sequence[T]) -> tuple[T, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"Invalid --{name}: {' '.join(map(str, values))}. Expected different ones.")
    return tuple(values)
