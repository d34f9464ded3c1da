"""An encoder-decoder in the style of T5: the decoder reads what the encoder made in every block; one embedding for all.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020
(arXiv:1910.10683); with rotary positions in place of relative biases, and SwiGLU as in T5 1.1 and LLaMA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from dsc.models.llama import SwiGLU, rotary_table, rotate


@dataclass(frozen=True)
class Config:
    vocab: int = 8192
    max_length: int = 256
    layers: int = 3  # of the encoder, and as many of the decoder
    heads: int = 6
    width: int = 384
    hidden: int = 1024
    tied: bool = True  # the output head shares the token embedding
    theta: float = 10000.0
    epsilon: float = 1e-5


class Attention(nn.Module):
    """Multi-head attention of ``x`` to ``memory``; with rotary positions where tables are given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"{heads} heads must divide width {width}")
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor, causal: bool, tables: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """``x`` [B, T, width], ``memory`` [B, S, width], ``tables`` [T, head_width / 2] each -> [B, T, width]."""
        q, k, v = self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))
        if tables is not None:
            q, k = rotate(q, *tables), rotate(k, *tables)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return projected

    def split(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, heads, T, width / heads]."""
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)


class EncoderBlock(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + feedforward(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, config.epsilon)
        self.attention = Attention(config.width, config.heads)
        self.norm2 = nn.RMSNorm(config.width, config.epsilon)
        self.feedforward = SwiGLU(config.width, config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [B, S, width], ``cos`` and ``sin`` [S, head_width / 2] -> [B, S, width]."""
        y = self.norm1(x)
        x = x + self.attention(y, y, False, (cos, sin))
        z: Tensor = x + self.feedforward(self.norm2(x))
        return z


class DecoderBlock(nn.Module):
    """A pre-norm block that attends to itself causally, then to the encoder's result."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, config.epsilon)
        self.attention = Attention(config.width, config.heads)
        self.norm2 = nn.RMSNorm(config.width, config.epsilon)
        self.cross = Attention(config.width, config.heads)
        self.norm3 = nn.RMSNorm(config.width, config.epsilon)
        self.feedforward = SwiGLU(config.width, config.hidden)

    def forward(self, x: Tensor, memory: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [B, T, width], ``memory`` [B, S, width], ``cos`` and ``sin`` [T, head_width / 2] -> [B, T, width]."""
        y = self.norm1(x)
        x = x + self.attention(y, y, True, (cos, sin))
        x = x + self.cross(self.norm2(x), memory, False)
        z: Tensor = x + self.feedforward(self.norm3(x))
        return z


class EncoderDecoder(nn.Module):
    """Shared token embedding, encoder blocks, decoder blocks, a final RMSNorm on each side, a linear head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.max_length = config.max_length
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.encoder_norm = nn.RMSNorm(config.width, config.epsilon)
        self.decoder_norm = nn.RMSNorm(config.width, config.epsilon)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        cos, sin = rotary_table(config.max_length, config.width // config.heads, config.theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        if config.tied:
            self.head.weight = self.tokens.weight

    def encode(self, source: Tensor) -> Tensor:
        """``source`` [B, S] int64, S <= max_length -> [B, S, width]."""
        length = source.shape[1]
        x: Tensor = self.tokens(source)
        for block in self.encoder:
            x = block(x, self.cos[:length], self.sin[:length])
        y: Tensor = self.encoder_norm(x)
        return y

    def forward(self, source: Tensor, idx: Tensor, targets: Tensor) -> Tensor:
        """``source`` [B, S], ``idx`` and ``targets`` [B, T], all int64 -> mean cross entropy over tokens, a scalar."""
        length = max(source.shape[1], idx.shape[1])
        if length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens is longer than max_length={self.max_length}")
        memory = self.encode(source)
        x: Tensor = self.tokens(idx)
        for block in self.decoder:
            x = block(x, memory, self.cos[: idx.shape[1]], self.sin[: idx.shape[1]])
        logits = self.head(self.decoder_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
