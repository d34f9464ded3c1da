"""A model to look into: a module, its inputs, and what to differentiate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Model:
    """A module with inputs to trace it on: ``module(*args)`` gives a loss, or outputs whose sum stands for one."""

    name: str
    module: nn.Module
    args: tuple[object, ...]


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: object) -> object:
        return self.function(*args)


class Keyworded(nn.Module):
    """A module whose last arguments go by name: it takes them all by position."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.dsc_inner = module  # a name that ``origin`` leaves out of paths
        self.names = names

    def forward(self, *args: object) -> object:
        plain = len(args) - len(self.names)
        return self.dsc_inner(*args[:plain], **dict(zip(self.names, args[plain:])))


def loss_of(result: object) -> torch.Tensor | None:
    """A scalar to differentiate: the ``loss`` among named results, the result if it is one, else the sum of all.

    The sum is over the floating-point tensors that need a gradient; None if there is none.
    """
    if isinstance(result, Mapping) and isinstance(loss := result.get("loss"), torch.Tensor) and loss.numel() == 1:
        return loss if loss.requires_grad else None
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    wanted = [t for t in leaves if t.requires_grad]
    if len(wanted) == 1 and wanted[0].numel() == 1:
        return wanted[0]
    return torch.stack([t.float().sum() for t in wanted]).sum() if wanted else None
