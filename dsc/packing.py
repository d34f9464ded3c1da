"""Where buffers lie in one block of memory, so that those alive at one time never overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Layout:
    offsets: tuple[int, ...]
    total: int


def pack(sizes: Sequence[int], spans: Sequence[tuple[int, int]]) -> Layout:
    """First-fit offline packing, largest first: buffers alive at one time never overlap.

    Greedy by size for offset calculation: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
    Inference", 2020, section 5.2.
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    offsets = [0] * len(sizes)
    placed: list[int] = []
    for i in order:
        alive = sorted(
            (offsets[j], offsets[j] + sizes[j])
            for j in placed
            if spans[j][0] <= spans[i][1] and spans[i][0] <= spans[j][1]
        )
        at = 0
        for start, end in alive:
            if at + sizes[i] <= start:
                break
            at = max(at, end)
        offsets[i] = at
        placed.append(i)
    total = max((o + s for o, s in zip(offsets, sizes)), default=0)
    return Layout(tuple(offsets), total)


def span_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to the last element."""
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, stride))) * itemsize


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
