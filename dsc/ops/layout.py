"""Strides that ATen's pointwise operators give their results, which fake tensors do not always foretell.

After ``TensorIterator`` (aten/src/ATen/TensorIterator.cpp: ``fast_set_up``, ``reorder_dimensions``): dimensions are
sorted by the strides of the operands, the first operand that tells two dimensions apart decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Ints = tuple[int, ...]


def pointwise_strides(operands: Sequence[torch.Tensor], shape: Sequence[int]) -> Ints:
    """Strides of the result of that shape; sizes and strides must be numbers."""
    if all(tuple(t.shape) == tuple(shape) for t in operands):
        if all(t.is_contiguous() for t in operands):
            return dense(shape, range(len(shape)))
        if len({t.stride() for t in operands}) == 1 and is_dense(operands[0]):
            return tuple(operands[0].stride())
    spread = [broadcast(t, shape) for t in operands]
    order = list(reversed(range(len(shape))))  # fastest first
    for i in range(1, len(order)):
        moving = i
        for place in reversed(range(i)):
            decision = compare(order[place], order[moving], spread, shape)
            if decision < 0:
                break
            if decision > 0:
                order[place], order[moving] = order[moving], order[place]
                moving = place
    return dense(shape, list(reversed(order)))


def broadcast(t: torch.Tensor, shape: Sequence[int]) -> Ints:
    """Strides of an operand along each dimension of the result, 0 where it repeats."""
    front = (0,) * (len(shape) - t.dim())
    return front + tuple(0 if n == 1 and n != m else s for n, m, s in zip(t.shape, shape[len(front) :], t.stride()))


def compare(a: int, b: int, spread: Sequence[Ints], shape: Sequence[int]) -> int:
    """1 if dimension ``b`` should be faster than ``a``, -1 if it should not, 0 if nothing tells."""
    for strides in spread:
        x, y = strides[a], strides[b]
        if x == 0 or y == 0:
            continue
        if x != y:
            return 1 if x > y else -1
        if shape[a] > shape[b]:
            return 1
    return 0


def dense(shape: Sequence[int], slowest_first: Sequence[int]) -> Ints:
    """Strides without gaps, dimensions in that order."""
    out, step = [0] * len(shape), 1
    for d in reversed(slowest_first):
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)


def is_dense(t: torch.Tensor) -> bool:
    """No gaps and no overlap, in some order of the dimensions."""
    step = 1
    for s, n in sorted((s, n) for s, n in zip(t.stride(), t.shape) if n != 1):
        if s != step:
            return False
        step *= n
    return True


def differ(a: Sequence[int], b: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the strides of some dimension longer than 1 do."""
    return any(x != y for n, x, y in zip(shape, a, b) if n > 1)
