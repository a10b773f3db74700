"""Tasks that no choice of a default was made on: for optimizers as they come, at a constant learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tekfac.common.extras import require
from tekfac.lab.contest.tasks import NATS, Batch, Kept, Task, Training, generator_of, scored
from tekfac.lab.contest.text import standard_library, windows
from tekfac.lab.data.digits import read_digits


def _table(seed: int, folder: Path | None) -> Training:
    """Is a tumour malignant: thirty measured numbers, by three linear layers."""
    raw = require("sklearn.datasets", "This task").load_breast_cancer()
    inputs, labels = torch.tensor(raw.data, dtype=torch.float32), torch.tensor(raw.target)
    inputs = (inputs - inputs.mean(dim=0)) / inputs.std(dim=0)
    widths = ((30, 64), (64, 64), (64, 2))
    return _of_arrays(inputs, labels, seed, widths, test=169, batch=32)


def _digits(seed: int, folder: Path | None) -> Training:
    """Handwritten digits by four linear layers, without norms."""
    images, labels = read_digits()
    widths = ((64, 128), (128, 128), (128, 64), (64, 10))
    return _of_arrays(images.flatten(1), labels, seed, widths, test=360, batch=64)


def _of_arrays(
    inputs: Tensor, labels: Tensor, seed: int, widths: tuple[tuple[int, int], ...], *, test: int, batch: int
) -> Training:
    """A multi-layer perceptron on rows; the first so many, in an order fixed once, are to test on."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, labels = inputs[order], labels[order]
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in widths:
        layers += [nn.Linear(before, after), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])

    def batch_of(step: int) -> Batch:
        chosen = torch.randint(test, len(inputs), (batch,), generator=generator_of(seed, step))
        return inputs[chosen], labels[chosen]

    def score(kept: Kept) -> float:
        return scored(model, (inputs[:test], labels[:test]), F.cross_entropy)

    return Training(model, batch_of, F.cross_entropy, score)


MASKED = 0.15
"""The share of characters that are hidden."""


class MaskedBert(nn.Module):
    """Hugging Face's BERT, small, with logits for every position."""

    def __init__(self, symbols: int, context: int) -> None:
        super().__init__()
        library = require("transformers", "This task")
        settings = library.BertConfig(
            vocab_size=symbols,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=context,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = library.BertForMaskedLM(settings)

    def forward(self, symbols: Tensor) -> Tensor:
        """[N, T] -> [N, T, symbols]."""
        return self.bert(input_ids=symbols).logits  # type: ignore[no-any-return]


def _bert(seed: int, folder: Path | None, *, context: int = 64, batch: int = 32) -> Training:
    """Hidden characters of source text, by a small BERT."""
    text = standard_library()
    parts = {"training": torch.cat(list(text.training)), "test": torch.cat(list(text.test))}
    hidden = text.symbols  # a symbol of its own
    torch.manual_seed(seed)
    model = MaskedBert(text.symbols + 1, context)

    def masked(part: str, count: int, generator: torch.Generator) -> Batch:
        symbols, _ = windows(parts[part], count, context, generator)
        is_hidden = torch.rand(symbols.shape, generator=generator) < MASKED
        return symbols.masked_fill(is_hidden, hidden), symbols.masked_fill(~is_hidden, -100)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def score(kept: Kept) -> float:
        return scored(model, masked("test", 250, generator_of(0, 0)), loss)

    return Training(model, lambda step: masked("training", batch, generator_of(seed, step)), loss, score)


def _as_it_comes(name: str, about: str, steps: int, prepare: Callable[[int, Path | None], Training]) -> Task:
    """With a learning rate that stays."""
    return Task(name, about, steps, NATS, prepare, warmup=0.0, final=1.0)


UNSEEN: Mapping[str, Task] = {
    task.name: task
    for task in (
        _as_it_comes("table", "a multi-layer perceptron on scikit-learn's table of tumours", 100, _table),
        _as_it_comes("bert", "a small BERT on hidden characters of source text", 600, _bert),
        _as_it_comes("digits", "a multi-layer perceptron without norms on digits", 400, _digits),
    )
}
"""By name."""
