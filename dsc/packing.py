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
    placed = Lifetimes(spans)
    for i in order:
        alive = sorted((offsets[j], offsets[j] + sizes[j]) for j in placed.meeting(*spans[i]))
        at = 0
        for start, end in alive:
            if at + sizes[i] <= start:
                break
            at = max(at, end)
        offsets[i] = at
        placed.add(i)
    total = max((o + s for o, s in zip(offsets, sizes)), default=0)
    return Layout(tuple(offsets), total)


class Lifetimes:
    """Spans of steps, found by what they meet: a model of many layers has many buffers, few of them alive at one time.

    A span of up to ``2**k`` steps lies in the one or two stretches of ``2**k`` steps that it touches.
    """

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.spans = spans
        self.stretches: dict[int, dict[int, list[int]]] = {}

    def add(self, i: int) -> None:
        first, last = self.spans[i]
        k = (last - first).bit_length()
        level = self.stretches.setdefault(k, {})
        for place in range(first >> k, (last >> k) + 1):
            level.setdefault(place, []).append(i)

    def meeting(self, first: int, last: int) -> set[int]:
        """Those added that share a step with first..last."""
        found: set[int] = set()
        for k, level in self.stretches.items():
            for place in range(first >> k, (last >> k) + 1):
                for j in level.get(place, ()):
                    if self.spans[j][0] <= last and first <= self.spans[j][1]:
                        found.add(j)
        return found


def span_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to the last element."""
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, stride))) * itemsize


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
