"""A model to look into: a module, its inputs, and what to differentiate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Model:
    """A module with inputs to trace it on: ``module(*args)`` gives a loss, or outputs whose sum stands for one."""

    name: str
    module: nn.Module
    args: tuple[object, ...]


def loss_of(result: object) -> torch.Tensor | None:
    """A scalar to differentiate: the result if it is one, else the sum of all its floating-point tensors."""
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    wanted = [t for t in leaves if t.requires_grad]
    if len(wanted) == 1 and wanted[0].numel() == 1:
        return wanted[0]
    return torch.stack([t.float().sum() for t in wanted]).sum() if wanted else None
