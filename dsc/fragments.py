"""What an allocator has to reserve for a program: its peak, and the holes between values of different lifetimes.

An allocator that knows nothing of what is to come: each value goes into the smallest hole that it fits into, or to the
end; neighbouring holes become one.
"""

from __future__ import annotations

import bisect

from dsc.liveness import Live, Profile

ALIGN = 512
"""Bytes to which torch's CUDA allocator rounds."""


def reserved(profile: Profile) -> int:
    """Bytes from the first to the last that is ever used."""
    count = len(profile.timeline)
    born: list[list[Live]] = [[] for _ in range(count + 1)]
    dies: list[list[Live]] = [[] for _ in range(count + 1)]
    for v in profile.values:
        if v.last >= max(v.first, 0) and v.nbytes:
            born[max(v.first, 0)].append(v)
            dies[v.last].append(v)
    heap = Heap()
    place: dict[int, int] = {}
    for t in range(count):
        for v in born[t]:
            place[id(v)] = heap.take(rounded(v.nbytes))
        for v in dies[t]:
            heap.give(place.pop(id(v)), rounded(v.nbytes))
    return heap.end


def rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class Heap:
    def __init__(self) -> None:
        self.end = 0
        self.holes: list[tuple[int, int]] = []
        """Start and size of each, by start; no two touch."""

    def take(self, size: int) -> int:
        """Where a value of so many bytes goes: the smallest hole, or the end."""
        best = min((h for h in self.holes if h[1] >= size), key=lambda h: (h[1], h[0]), default=None)
        if best is not None:
            self.holes.remove(best)
            if best[1] > size:
                bisect.insort(self.holes, (best[0] + size, best[1] - size))
            return best[0]
        if self.holes and sum(self.holes[-1]) == self.end:  # the last hole grows
            start, _ = self.holes.pop()
        else:
            start = self.end
        self.end = start + size
        return start

    def give(self, start: int, size: int) -> None:
        """Make a hole, one with those that it touches."""
        i = bisect.bisect(self.holes, (start, 0))
        if i < len(self.holes) and self.holes[i][0] == start + size:
            size += self.holes.pop(i)[1]
        if i and sum(self.holes[i - 1]) == start:
            start, before = self.holes.pop(i - 1)
            size += before
        bisect.insort(self.holes, (start, size))
