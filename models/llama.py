"""A decoder-only language model in the style of LLaMA: RMSNorm, RoPE, SwiGLU, grouped-query attention.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023 (arXiv:2302.13971).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab: int = 8192
    max_length: int = 256
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    width: int = 384
    hidden: int = 1024
    theta: float = 10000.0
    epsilon: float = 1e-5


class Attention(nn.Module):
    """Causal attention in which ``heads / kv_heads`` query heads share a key and value head.

    Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", 2023 (arXiv:2305.13245).
    """

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        if width % heads or heads % kv_heads:
            raise ValueError(f"{heads} heads must divide width {width} and be a multiple of {kv_heads} key-value heads")
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.q = nn.Linear(width, heads * self.head_width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [B, T, width], ``cos`` and ``sin`` [T, head_width / 2] -> [B, T, width]."""
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.head_width).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.head_width).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.head_width).transpose(1, 2)
        k = repeat_heads(rotate(k, cos, sin), self.heads // self.kv_heads)
        v = repeat_heads(v, self.heads // self.kv_heads)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return projected


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``: Shazeer, "GLU Variants Improve Transformer", 2020 (arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + feedforward(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, config.epsilon)
        self.attention = Attention(config.width, config.heads, config.kv_heads)
        self.norm2 = nn.RMSNorm(config.width, config.epsilon)
        self.feedforward = SwiGLU(config.width, config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [B, T, width], ``cos`` and ``sin`` [T, head_width / 2] -> [B, T, width]."""
        x = x + self.attention(self.norm1(x), cos, sin)
        y: Tensor = x + self.feedforward(self.norm2(x))
        return y


class Llama(nn.Module):
    """Token embedding, blocks with rotary positions, a final RMSNorm, an untied head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.max_length = config.max_length
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.epsilon)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        cos, sin = rotary_table(config.max_length, config.width // config.heads, config.theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def logits(self, idx: Tensor) -> Tensor:
        """``idx`` [B, T] int64, T <= max_length -> logits [B, T, vocab]."""
        length = idx.shape[1]
        if length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens is longer than max_length={self.max_length}")
        x: Tensor = self.tokens(idx)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """``idx``, ``targets`` [B, T] int64 -> mean cross entropy over tokens, a scalar."""
        return F.cross_entropy(self.logits(idx).flatten(0, 1), targets.flatten())


def rotary_table(length: int, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding, each [length, head_width / 2] float32.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv:2104.09864).
    """
    frequencies = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (first half, second half) of the last dimension: [..., T, D] with tables [T, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """[B, heads, T, D] -> [B, heads * times, T, D], each head ``times`` times in a row."""
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)
