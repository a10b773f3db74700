"""Hugging Face's Trainer with a small GPT-2: the optimizer is made from the model and passed in.

The model starts from random weights and learns the source of Python's `email` package, byte by byte. Its
layers are transformers' own `Conv1D`, and its head shares its weight with the embedding; TEKFAC preconditions
both. The Trainer accumulates batches and clips gradients as for any other optimizer.

Run: python examples/huggingface_gpt2.py (fifteen seconds), or with two processes, each with its part of
every batch, torchrun --nproc-per-node 2 examples/huggingface_gpt2.py FOLDER, one for checkpoints that both see
"""

from __future__ import annotations

import contextlib
import email
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from tekfac import TEKFAC

STEPS, MICRO_BATCH, LENGTH = 80, 8, 48

# Both are tuned by the loss that is printed: SGD over lr = 0.003, 0.01, 0.03, 0.1, 0.3 and 1; TEKFAC over
# lr = 0.001, 0.003, 0.01, 0.03 and 0.1.
OPTIMIZERS = {
    "TEKFAC": lambda model: TEKFAC(model, lr=0.01, seed=0),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
}


def texts() -> list[dict[str, Any]]:
    """Pieces of LENGTH bytes; the model itself compares each byte with the prediction from those before."""
    files = sorted(Path(email.__file__).parent.glob("*.py"))
    text = "".join(path.read_text("utf-8") for path in files).encode("ascii", "replace")[: 512 * LENGTH]
    pieces = torch.tensor(list(text)).split(LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def make_trainer(name: str, folder: Path, **more: Any) -> Trainer:
    """A Trainer with an untrained GPT-2; `more` are further TrainingArguments."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=128,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            initializer_range=0.1,
        )
    )
    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "save_steps": STEPS // 2,
        "lr_scheduler_type": "cosine",
        "seed": 0,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    trainer = Trainer(
        model,
        TrainingArguments(str(folder), **{**arguments, **more}),
        train_dataset=texts(),
        eval_dataset=texts(),
        optimizers=(OPTIMIZERS[name](model), None),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def loss_of(trainer: Trainer) -> float:
    """The loss over all pieces, without dropout."""
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
