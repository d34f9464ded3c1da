"""A decoder-only language model in the style of GPT-2.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab: int = 8192
    max_length: int = 256
    layers: int = 6
    heads: int = 6
    width: int = 384
    dropout: float = 0.0
    tied: bool = True  # the output head shares the token embedding


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return F.dropout(y, self.dropout, self.training)


class FeedForward(nn.Module):
    """Linear to four times the width, GELU (tanh approximation), linear back."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        x = self.out(F.gelu(self.up(x), approximate="tanh"))
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    """A pre-LN transformer block: x + attention(LN(x)), then x + feedforward(LN(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.feedforward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.feedforward(self.norm2(x))
        return y


class GPT(nn.Module):
    """Token and position embeddings, pre-LN blocks, a final LayerNorm, a linear head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.max_length = config.max_length
        self.dropout = config.dropout
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.max_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        initialize(self, config.layers)
        if config.tied:
            self.head.weight = self.tokens.weight

    def logits(self, idx: Tensor) -> Tensor:
        """``idx`` [B, T] int64, T <= max_length -> logits [B, T, vocab]."""
        length = idx.shape[1]
        if length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens is longer than max_length={self.max_length}")
        x: Tensor = self.tokens(idx) + self.positions.weight[:length]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.head.weight)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """``idx``, ``targets`` [B, T] int64 -> mean cross entropy over tokens, a scalar."""
        return F.cross_entropy(self.logits(idx).flatten(0, 1), targets.flatten())


def initialize(model: nn.Module, layers: int) -> None:
    """GPT-2's initial weights: normal(0, 0.02), and ``1 / sqrt(2 * layers)`` of that for the ``out`` projections.

    The scale keeps the variance of the residual stream independent of depth.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        scale = 1 / math.sqrt(2 * layers) if name.endswith(".out") else 1.0
        nn.init.normal_(module.weight, std=0.02 * scale)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
