"""A residual network of basic blocks with batch normalisation; the default is ResNet-18.

He et al., "Deep Residual Learning for Image Recognition", 2015 (arXiv:1512.03385).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    channels: int = 3
    width: int = 64  # channels of the first stage; each further stage doubles them and halves the image
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    classes: int = 1000
    small_stem: bool = False  # 3x3 with stride 1 for images of 32 pixels, instead of 7x7 with stride 2 and pooling


class Block(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x)), the first convolution with ``stride``."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """[B, before, H, W] -> [B, after, H / stride, W / stride]."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of basic blocks, the spatial mean, a linear classifier."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = stem(config)
        stages: list[nn.Module] = []
        before = config.width
        for index, count in enumerate(config.blocks):
            after = config.width * 2**index
            for block in range(count):
                stages.append(Block(before, after, stride=2 if index and not block else 1))
                before = after
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """``images`` [B, channels, H, W] float, ``targets`` [B] int64 -> mean cross entropy, a scalar."""
        x: Tensor = self.stages(self.stem(images))
        return F.cross_entropy(self.head(x.mean((2, 3))), targets)


def stem(config: Config) -> nn.Sequential:
    """The layers that see pixels: [B, channels, H, W] -> [B, width, H, W] if small, else [B, width, H / 4, W / 4]."""
    if config.small_stem:
        conv = nn.Conv2d(config.channels, config.width, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(config.width), nn.ReLU())
    conv = nn.Conv2d(config.channels, config.width, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(config.width), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
