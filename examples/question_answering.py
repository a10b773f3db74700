"""Question answering by a small BERT: two predictions, start and end, and the model's own loss.

Each text is a row of random tokens, two of which are marks; the answer is what stands between them. Hugging
Face's `BertForQuestionAnswering` starts from random weights, as transformers initialises them, and is asked for
the first and the last token of the answer. It returns the logits of both, and its loss, the mean of two
cross-entropies over positions.

Run: python examples/question_answering.py (fifteen seconds)
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import BertConfig, BertForQuestionAnswering

from beside_adam import Comparison, Make, compare, mean_of_last

STEPS, BATCH, LENGTH, WORDS, OPEN, CLOSE = 150, 48, 12, 14, 14, 15


def texts(count: int) -> dict[str, Tensor]:
    """Tokens [N, T] with a mark before and one behind the answer, and where the answer starts and ends [N]."""
    ids = torch.randint(WORDS, (count, LENGTH))
    places = torch.rand(count, LENGTH // 2).topk(2).indices.sort().values * 2
    before, behind = places.T
    rows = torch.arange(count)
    ids[rows, before], ids[rows, behind] = OPEN, CLOSE
    return {"input_ids": ids, "start_positions": before + 1, "end_positions": behind - 1}


def train(make: Make, seed: int) -> float:
    """The mean loss of the last tenth of the steps; every text is new."""
    torch.manual_seed(seed)
    model = BertForQuestionAnswering(
        BertConfig(
            vocab_size=WORDS + 2,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
    )
    optimizer = make(model)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**texts(BATCH)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return mean_of_last(losses, 0.1)


def main() -> Comparison:
    """Train with TEKFAC and with Adam, and print what came out."""
    return compare(train, f"the loss in the last tenth of {STEPS} steps")


if __name__ == "__main__":
    main()
