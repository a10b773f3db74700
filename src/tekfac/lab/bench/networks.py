"""The networks of the benchmark by name, each with its batches, in which curvature changes as in real ones.

What a refresh costs depends on how much the curvature has changed since the last, and that on the data: images
are noise with the spectrum of photographs, labelled by what is in them; text is the standard library's own.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac.lab import models
from tekfac.lab.gpt import GPT

Batch = tuple[Tensor, Tensor]

BATCHES = 12
"""Different ones, which the steps go through in turn."""

SYMBOLS = "symbols"
"""The one network whose inputs are no images."""


@dataclass(frozen=True)
class Network:
    """A network and its batches.

    Attributes:
        model: a name of lab/models.py, or SYMBOLS for the GPT.
        batch: samples of a step.
        shape: of one sample: channels and edges of an image, or the number of symbols of a sequence.
        classes: of the labels; for the GPT the number of symbols.
        options: of the model.
    """

    model: str
    batch: int
    shape: tuple[int, ...]
    classes: int = 10
    options: Mapping[str, int] = field(default_factory=dict)

    def make(self, seed: int = 0) -> nn.Module:
        """The network with the weights of a seed, in training mode."""
        torch.manual_seed(seed)
        if self.model == SYMBOLS:
            return GPT(self.classes, context=self.shape[0], **self.options)
        channels, size, _ = self.shape
        return models.build(
            self.model, channels=channels, classes=self.classes, size=size, options=self.options
        )

    def batches(self, seed: int = 0) -> list[Batch]:
        """Inputs and labels from a seed."""
        generator = torch.Generator().manual_seed(seed)
        return [self._batch(generator) for _ in range(BATCHES)]

    def _batch(self, generator: torch.Generator) -> Batch:
        if self.model == SYMBOLS:
            text = _text() % self.classes
            starts = torch.randint(len(text) - self.shape[0], (self.batch, 1), generator=generator)
            pieces = text[starts + torch.arange(self.shape[0] + 1)]
            return pieces[:, :-1], pieces[:, 1:]
        images = _like_photographs(torch.randn(self.batch, *self.shape, generator=generator))
        return images, images.flatten(1)[:, : self.classes].argmax(1)

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "model": self.model,
            "batch": self.batch,
            "shape": list(self.shape),
            "classes": self.classes,
            "options": dict(self.options),
        }


@cache
def _text() -> Tensor:
    """Some source files of the standard library, byte by byte."""
    sources = [Path(inspect.getfile(module)).read_bytes() for module in (argparse, ast, inspect, typing)]
    return torch.tensor(list(b"".join(sources)))


def _like_photographs(noise: Tensor) -> Tensor:
    """Noise [..., H, W] with an amplitude that falls as 1 / frequency; of variance 1."""
    height, width = noise.shape[-2:]
    frequency = (torch.fft.rfftfreq(width) ** 2 + torch.fft.fftfreq(height)[:, None] ** 2).sqrt()
    images = torch.fft.irfft2(torch.fft.rfft2(noise) / (frequency + 1 / width), s=(height, width))
    return images / images.std()  # type: ignore[no-any-return]


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy of outputs [..., C] for labels [...]."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten())


IMAGE, DIGIT = (3, 32, 32), (1, 8, 8)

NETWORKS: Mapping[str, Network] = {
    "mlp": Network("mlp", 128, DIGIT),
    "cnn": Network("cnn", 64, DIGIT),
    "gpt": Network(SYMBOLS, 8, (128,), 100, {"width": 128, "depth": 4, "heads": 4}),
    "resnet20-he": Network("resnet20-he", 128, IMAGE),
    "resnet20": Network("resnet20", 128, IMAGE),
    "vgg16": Network("vgg16", 128, IMAGE),
}
"""The real ones."""

TINY: Mapping[str, Network] = {
    "mlp": Network("mlp", 8, DIGIT, options={"width": 8}),
    "cnn": Network("cnn", 4, DIGIT, options={"width": 2}),
    "gpt": Network(SYMBOLS, 2, (6,), 11, {"width": 8, "depth": 1, "heads": 2}),
    "resnet20-he": Network("resnet20-he", 4, (3, 8, 8), options={"width": 2, "depth": 8}),
    "resnet20": Network("resnet20", 4, (3, 8, 8), options={"width": 2, "depth": 8}),
    "vgg16": Network("vgg16", 4, (3, 8, 8), options={"width": 2}),
}
"""The same in tiny, to see that all works."""


def network(name: str, *, quick: bool) -> Network:
    """The network of that name, or its tiny version."""
    return (TINY if quick else NETWORKS)[name]
