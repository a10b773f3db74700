"""The sources of Python's own library, as text to learn from: it is on every machine."""

from __future__ import annotations

import sysconfig
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

MODULES = """
argparse ast calendar cmd codecs configparser contextlib copy csv dataclasses datetime difflib doctest enum
fileinput fractions ftplib functools getopt gettext glob heapq imaplib inspect ipaddress locale mailbox netrc
mimetypes numbers optparse os pdb pickle pickletools platform plistlib poplib pprint profile pstats pyclbr queue
random sched selectors shelve shlex shutil smtplib socket socketserver ssl statistics string subprocess tarfile
textwrap threading timeit tokenize trace traceback turtle typing uuid warnings wave webbrowser
"""
RARE = 100
"""Characters that are met less often become one symbol."""


class Text(NamedTuple):
    """Characters as numbers; the last tenth of every module is kept back, half of it to tune on.

    Attributes:
        training: int64 [characters] of each module.
        tuning: likewise.
        test: likewise.
        symbols: how many different ones there are.
    """

    training: Sequence[Tensor]
    tuning: Sequence[Tensor]
    test: Sequence[Tensor]
    symbols: int


@cache
def standard_library() -> Text:
    """The sources of those modules of the list that this Python has."""
    files = [Path(sysconfig.get_path("stdlib")) / f"{name}.py" for name in MODULES.split()]
    sources = [file.read_text(encoding="utf-8") for file in files if file.exists()]
    whole = "".join(sources)
    common = sorted(letter for letter, count in Counter(whole).items() if count >= RARE)
    number = {letter: place for place, letter in enumerate(common, start=1)}

    def part(start: int, end: int) -> list[Tensor]:
        """From so many twentieths of every module to so many."""
        pieces = (source[len(source) * start // 20 : len(source) * end // 20] for source in sources)
        return [torch.tensor([number.get(letter, 0) for letter in piece]) for piece in pieces]

    return Text(part(0, 18), part(18, 19), part(19, 20), len(common) + 1)


def windows(text: Tensor, count: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of a text, int64 [count, context], and the same one character further on."""
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    pieces = text[starts + torch.arange(context + 1)]
    return pieces[:, :-1], pieces[:, 1:]
