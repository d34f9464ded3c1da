"""What a program checks while it runs."""

from __future__ import annotations

import torch


def expect(t: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor if it has these strides (those of size-1 dimensions aside) and this dtype, else a copy that has."""
    found = t.stride()
    if t.dtype == dtype and (found == stride or all(f == s or n <= 1 for f, s, n in zip(found, stride, t.shape))):
        return t
    return torch.empty_strided(t.shape, stride, dtype=dtype, device=t.device).copy_(t)
