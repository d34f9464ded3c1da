"""A multilayer perceptron that classifies vectors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    features: int = 784
    hidden: tuple[int, ...] = (1024, 1024, 1024)
    classes: int = 10
    dropout: float = 0.0


class MLP(nn.Module):
    """Linear, GELU and dropout per hidden layer, then a linear classifier."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths = (config.features, *config.hidden)
        self.hidden = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.head = nn.Linear(widths[-1], config.classes)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """``x`` [B, features] float, ``targets`` [B] int64 -> mean cross entropy, a scalar."""
        for layer in self.hidden:
            x = self.dropout(F.gelu(layer(x)))
        return F.cross_entropy(self.head(x), targets)
