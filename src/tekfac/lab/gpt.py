"""A small GPT: a transformer that predicts the next of some symbols at every position."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention to what came before, then a layer on each position; norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, width] -> the same."""
        split = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [N, heads, T, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Embeddings of symbols and positions, blocks, a norm and a head of its own."""

    def __init__(self, symbols: int, *, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))  # of a residual branch
                nn.init.normal_(parameter, std=0.05 / math.sqrt(2 * depth) if last else 0.05)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, symbols: Tensor) -> Tensor:
        """[N, T] -> logits [N, T, symbols]."""
        places = torch.arange(symbols.shape[1], device=symbols.device).expand_as(symbols)
        x = self.symbol(symbols) + self.position(places)
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]
