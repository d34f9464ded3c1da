"""A small convolutional network with max pooling and without normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    channels: int = 3
    widths: tuple[int, ...] = (32, 64, 128)
    classes: int = 10


class ConvNet(nn.Module):
    """Per width: 3x3 convolution, ReLU, 2x2 max pooling; then the spatial mean and a linear classifier."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = (config.channels, *config.widths)
        self.convs = nn.ModuleList(nn.Conv2d(before, after, 3, padding=1) for before, after in pairwise(widths))
        self.head = nn.Linear(widths[-1], config.classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """``images`` [B, channels, H, W] float, ``targets`` [B] int64 -> mean cross entropy, a scalar."""
        x = images
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), targets)
