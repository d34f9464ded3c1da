"""A bidirectional encoder trained to fill in masked tokens.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018 (arXiv:1810.04805); like RoBERTa
(arXiv:1907.11692) it has no segment embedding and no next-sentence loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""The target of a token that the loss does not look at."""


@dataclass(frozen=True)
class Config:
    vocab: int = 8192
    max_length: int = 256
    layers: int = 6
    heads: int = 6
    width: int = 384
    dropout: float = 0.0


class Attention(nn.Module):
    """Bidirectional multi-head self-attention that does not look at padding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x`` [B, T, width], ``mask`` [B, 1, 1, T] bool, true where a key is real -> [B, T, width]."""
        batch, length, _ = x.shape
        shape = (batch, length, self.heads, -1)
        q, k, v = (project(x).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Block(nn.Module):
    """A post-LN block: LN(x + attention(x)), then LN(x + feedforward(x)), GELU between the linear layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.norm1 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x`` [B, T, width], ``mask`` [B, 1, 1, T] bool -> [B, T, width]."""
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        y: Tensor = self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return y


class BERT(nn.Module):
    """Token and position embeddings, post-LN blocks, and the masked-LM head tied to the token embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.max_length = config.max_length
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.max_length, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.transform = nn.Linear(config.width, config.width)
        self.transform_norm = nn.LayerNorm(config.width)
        self.bias = nn.Parameter(torch.zeros(config.vocab))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def logits(self, idx: Tensor, mask: Tensor) -> Tensor:
        """``idx`` [B, T] int64, ``mask`` [B, T] bool, T <= max_length -> logits [B, T, vocab]."""
        length = idx.shape[1]
        if length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens is longer than max_length={self.max_length}")
        x: Tensor = self.dropout(self.norm(self.tokens(idx) + self.positions.weight[:length]))
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        x = self.transform_norm(F.gelu(self.transform(x)))
        return F.linear(x, self.tokens.weight, self.bias)

    def forward(self, idx: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        """Masked-LM loss, a scalar: the mean cross entropy where ``targets`` is not ``IGNORED``.

        ``idx`` [B, T] int64; ``mask`` [B, T] bool, true for real tokens, false for padding (at least one real token
        a row); ``targets`` [B, T] int64.
        """
        logits = self.logits(idx, mask).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
