"""A vision transformer that classifies images.

Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020 (arXiv:2010.11929).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    size: int = 224
    patch: int = 16
    channels: int = 3
    layers: int = 6
    heads: int = 6
    width: int = 384
    classes: int = 1000
    dropout: float = 0.0


class Block(nn.Module):
    """A pre-LN block with bidirectional attention and an exact GELU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width, eps=1e-6)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width, eps=1e-6)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def attention(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return projected

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        y: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return y


class ViT(nn.Module):
    """Patches, a class token, position embeddings, pre-LN blocks; the class token is classified."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        if config.size % config.patch:
            raise ValueError(f"patches of {config.patch} pixels do not tile an image of {config.size}")
        count = (config.size // config.patch) ** 2
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(torch.empty(1, count + 1, config.width).normal_(std=0.02))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """``images`` [B, channels, size, size] float, ``targets`` [B] int64 -> mean cross entropy, a scalar."""
        x: Tensor = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), targets)
