"""A transformer with long skips in the style of U-ViT: block ``i`` of the second half also reads block ``-i`` of the first.

Bao et al., "All are Worth Words: A ViT Backbone for Diffusion Models", CVPR 2023 (arXiv:2209.12152).  It learns to undo
noise on images: the loss is the mean squared error of the noise that it predicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    size: int = 32  # pixels on a side
    patch: int = 4
    layers: int = 6  # of both halves together, besides the one in the middle
    heads: int = 6
    width: int = 384
    channels: int = 3


class Block(nn.Module):
    """A pre-LN block: x + attention(LN(x)), then x + feedforward(LN(x)); first ``merge`` of a skip where it has one."""

    def __init__(self, config: Config, skip: bool = False) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"{config.heads} heads must divide width {config.width}")
        self.heads = config.heads
        self.merge = nn.Linear(2 * config.width, config.width) if skip else None
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        """``x`` and ``skip`` [B, T, width] -> [B, T, width]."""
        if self.merge is not None and skip is not None:
            x = self.merge(torch.cat((x, skip), dim=-1))
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        z: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return z


class UViT(nn.Module):
    """Patches and the time as tokens; half of the blocks, a block in the middle, the other half with skips."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        if config.layers % 2 or config.size % config.patch:
            raise ValueError("layers must be even, and the patch must divide the size")
        self.patch = config.patch
        length = (config.size // config.patch) ** 2
        self.embed = nn.Conv2d(config.channels, config.width, config.patch, config.patch)
        self.time = nn.Linear(1, config.width)
        self.positions = nn.Parameter(torch.zeros(length + 1, config.width))
        self.first = nn.ModuleList(Block(config) for _ in range(config.layers // 2))
        self.middle = Block(config)
        self.second = nn.ModuleList(Block(config, skip=True) for _ in range(config.layers // 2))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.patch * config.patch * config.channels)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        """``images`` and ``noise`` [B, channels, size, size], ``times`` [B] in [0, 1] -> mean squared error, a scalar."""
        t = times[:, None, None, None]
        noisy = images * (1 - t) + noise * t
        patches = self.embed(noisy).flatten(2).transpose(1, 2)
        x = torch.cat((self.time(times[:, None, None]), patches), dim=1) + self.positions
        skips: list[Tensor] = []
        for block in self.first:
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for block in self.second:
            x = block(x, skips.pop())
        predicted = self.head(self.norm(x))[:, 1:]
        loss: Tensor = (predicted - patches_of(noise, self.patch)).square().mean()
        return loss


def patches_of(images: Tensor, patch: int) -> Tensor:
    """[B, C, H, W] -> [B, H / patch * W / patch, patch * patch * C]."""
    batch, channels, height, width = images.shape
    rows, columns = height // patch, width // patch
    blocks = images.view(batch, channels, rows, patch, columns, patch)
    return blocks.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, -1)
