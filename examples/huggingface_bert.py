"""Hugging Face's Trainer with a small BERT: the optimizer is made from the model and passed in.

The model starts from random weights and learns to tell from which module of Python's standard library a line
is, byte by byte. Lines are padded to the longest of their batch; the attention mask tells TEKFAC, too, which
positions are real. The Trainer makes its own schedule, saves and loads the optimizer with its checkpoints, and
restores the order of the data and the state of dropout: a resumed run ends with the same weights, bit for bit.

Run: python examples/huggingface_bert.py (fifteen seconds), or with two processes, each with its part of
every batch, torchrun --nproc-per-node 2 examples/huggingface_bert.py FOLDER, one for checkpoints that both see
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from tekfac import TEKFAC

MODULES = ("_pydecimal", "encodings.aliases", "html.entities", "turtle")
STEPS, BATCH, LENGTH, CLS, SEP, PAD = 80, 32, 40, 1, 2, 0

# Both are tuned by the loss that is printed: SGD over lr = 0.003, 0.01, 0.03, 0.1, 0.3 and 1; TEKFAC over
# lr = 0.001, 0.003, 0.01, 0.03 and 0.1.
OPTIMIZERS = {
    "TEKFAC": lambda model: TEKFAC(model, lr=0.01, seed=0),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


def lines() -> list[dict[str, Any]]:
    """Lines of code as bytes, each with the number of its module: the same number of lines from each."""
    found = []
    for label, name in enumerate(MODULES):
        source = inspect.getsource(importlib.import_module(name))
        kept = [line.strip() for line in source.splitlines() if len(line.strip()) > 15 and line.isascii()]
        for line in kept[:400]:
            ids = [CLS, *line.encode()[: LENGTH - 2], SEP]
            found.append({"input_ids": tensor(ids), "labels": label})
    return found


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch: ids [N, T], the mask that is 1 where there is a byte, and labels."""
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True, padding_value=PAD)
    labels = tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def make_trainer(name: str, folder: Path, **more: Any) -> Trainer:
    """A Trainer with an untrained BERT; `more` are further TrainingArguments."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=128,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
            num_labels=len(MODULES),
            initializer_range=0.1,
        )
    )
    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "save_steps": STEPS // 2,
        "lr_scheduler_type": "linear",
        "seed": 0,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    trainer = Trainer(
        model,
        TrainingArguments(str(folder), **{**arguments, **more}),
        train_dataset=lines(),
        eval_dataset=lines(),
        data_collator=padded,
        optimizers=(OPTIMIZERS[name](model), None),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def loss_of(trainer: Trainer) -> float:
    """The loss over all lines, without dropout."""
    return float(trainer.evaluate()["eval_loss"])


def main(shared: str | None = None) -> tuple[Trainer, Trainer, Trainer]:
    """Train with both, resume TEKFAC, and say what came out. Gives the three trainers."""
    disable_progress_bar()
    with contextlib.nullcontext(shared) if shared else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sgd, tekfac = make_trainer("SGD", folder / "sgd"), make_trainer("TEKFAC", folder / "tekfac")
        resumed = make_trainer("TEKFAC", folder / "resumed")
        sgd.train()
        tekfac.train()
        resumed.train(resume_from_checkpoint=str(folder / "tekfac" / f"checkpoint-{STEPS // 2}"))
    pairs = zip(tekfac.model.parameters(), resumed.model.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    losses = loss_of(tekfac), loss_of(sgd)  # of all processes together
    if tekfac.is_world_process_zero():
        print(f"Loss after {STEPS} steps: TEKFAC {losses[0]:.4f}, SGD {losses[1]:.4f}")
        print(f"Resumed from the checkpoint of step {STEPS // 2}: {'the same' if same else 'other'} weights")
    return tekfac, sgd, resumed


if __name__ == "__main__":
    main(*sys.argv[1:])
