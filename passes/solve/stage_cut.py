"""Where to cut a line of operators into pipeline stages, on plain numbers.

A line is the operators of a model in an order in which they can run.  Contiguous pieces of it depend on each other in
one direction only, and a value that several pieces need is handed on from piece to piece, so that pieces talk to their
neighbours alone.  The slowest piece is made as fast as possible by dynamic programming over places to cut (as PipeDream,
SOSP 2019, section 3.1); two pieces a rank, there and back, by a search for the least sum (``folded``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dsc.passes.solve.pipeline_simulate import Pipeline

Numbers = NDArray[np.float64]
WIDE = 3.0
"""Times the median crossing bytes: a cut beyond is not worth trying,"""
CHEAP = 0.01
"""but where handing that on, there and back, takes less than this share of a piece's work."""
MOST = 1200
"""Places to cut that are tried."""
NEVER = float("inf")


@dataclass(frozen=True)
class Line:
    """``n`` operators and the ``n + 1`` places before, between and after them.  Sums are of what lies before a place."""

    forward: Numbers
    """Seconds."""
    dgrad: Numbers
    wgrad: Numbers
    made: Numbers
    """Bytes made here that some backward reads."""
    late: Numbers
    """Bytes that weight gradients read: what the forward saved for them, and what dgrad passes on."""
    parameters: Numbers
    """Bytes of parameters that are read here for the first time, shared ones aside; as ``gradients`` and ``state``."""
    gradients: Numbers
    state: Numbers
    crossing: Numbers
    """At each place: bytes that are handed on there."""
    send: Numbers
    """At each place: seconds for that, between ranks that are far from each other."""
    near: Numbers
    """The same between ranks of one machine."""
    allowed: NDArray[np.bool_]
    """At each place: whether there may be a cut."""
    shared: tuple[tuple[tuple[float, float, float], tuple[int, ...]], ...]
    """Parameters read at several operators: bytes as (parameters, gradients, state), places of those operators."""

    @property
    def length(self) -> int:
        return len(self.forward) - 1

    @property
    def total(self) -> Numbers:
        """Seconds of work before each place."""
        return self.forward + self.dgrad + self.wgrad

    def static(self, low: int, high: int) -> tuple[float, float, float]:
        """Bytes of parameters, gradients and optimizer state of a piece."""
        sums = [float(a[high] - a[low]) for a in (self.parameters, self.gradients, self.state)]
        for nbytes, uses in self.shared:
            if any(low <= u < high for u in uses):
                sums = [a + b for a, b in zip(sums, nbytes)]
        return sums[0], sums[1], sums[2]

    def held(self, low: int, high: int) -> float:
        """Bytes of one micro-batch from its forward to its backward: what arrives, and what is made for the backward."""
        return float(self.made[high] - self.made[low] + (self.crossing[low] if low else 0.0))

    def kept(self, low: int, high: int) -> float:
        return float(self.late[high] - self.late[low])


def pipeline(
    line: Line,
    cuts: Sequence[int],
    home: Sequence[int],
    microbatches: int,
    limit: float = NEVER,
    again: Sequence[bool] = (),
    machines: Sequence[int] = (),
    slow: Sequence[float] = (),
) -> Pipeline:
    """The pieces of a line as a pipeline; ``again``: which pieces compute their forward again for the backward.

    ``machines``: where each rank is; without it all are far from each other.  ``slow``: what each rank takes, as a
    multiple of the line's seconds.  Ranks that own two pieces with the same
    shared parameter hold it once.
    """
    pieces = list(pairwise(cuts))
    ranks = max(home) + 1
    redo = list(again) or [False] * len(pieces)
    times = [slow[r] if slow else 1.0 for r in home]
    f, i, w = (
        [float(a[h] - a[b]) * t for (b, h), t in zip(pieces, times)] for a in (line.forward, line.dgrad, line.wgrad)
    )
    whole = [line.held(b, h) for b, h in pieces]
    static = []
    for rank in range(ranks):
        mine = [p for p, r in zip(pieces, home) if r == rank]
        nbytes = sum(float(a[h] - a[b]) for a in (line.parameters, line.gradients, line.state) for b, h in mine)
        nbytes += sum(sum(each) for each, uses in line.shared if any(b <= u < h for b, h in mine for u in uses))
        static.append(nbytes)
    return Pipeline(
        ranks,
        microbatches,
        tuple(home),
        tuple(f),
        tuple(d + (x if r else 0.0) for d, x, r in zip(i, f, redo)),
        tuple(w),
        tuple(
            float((line.near if machines and machines[a] == machines[b] else line.send)[c])
            for c, a, b in zip(cuts[1:-1], home, home[1:])
        ),
        tuple(float(line.crossing[b]) if r and b else 0.0 if r else n for n, r, (b, _) in zip(whole, redo, pieces)),
        tuple(line.kept(b, h) for b, h in pieces),
        tuple(static),
        tuple(n if r else 0.0 for n, r in zip(whole, redo)),
        limit,
    )


def places(line: Line, least: int = 2, most: int = MOST) -> NDArray[np.int64]:
    """Places worth a cut, both ends included: not too wide for the wire, and of several at the same moment the narrowest.

    Width does not count where fewer than ``least`` places would be left.
    """
    n = line.length
    allowed = line.allowed.copy()
    allowed[[0, n]] = True
    inner = allowed[1:n]
    narrow = allowed.copy()
    if inner.any():
        cheap = 2 * line.send[1:n] <= CHEAP * line.total[n] / least
        narrow[1:n] &= (line.crossing[1:n] <= WIDE * np.median(line.crossing[1:n][inner])) | cheap
    found = _narrowest(line, np.flatnonzero(narrow))
    if len(found) < least + 1:
        found = _narrowest(line, np.flatnonzero(allowed))
    if len(found) < least + 1:
        found = np.flatnonzero(allowed)
    if len(found) <= most:
        return found
    edges = np.linspace(0.0, line.total[n], most - 1)
    bucket = np.searchsorted(edges, line.total[found], side="right")
    kept = {0, n}
    for b in np.unique(bucket):
        members = found[bucket == b]
        kept.add(int(members[np.argmin(line.crossing[members])]))
    return np.array(sorted(kept))


def _narrowest(line: Line, found: NDArray[np.int64]) -> NDArray[np.int64]:
    total = line.total
    kept = [0]
    for place in found[1:-1]:
        if len(kept) > 1 and total[place] - total[kept[-1]] <= 1e-9 * total[-1]:
            if line.crossing[place] < line.crossing[kept[-1]]:
                kept[-1] = int(place)
        else:
            kept.append(int(place))
    return np.array([*kept, line.length])


def straight(
    line: Line,
    parts: int,
    at: Sequence[int] | NDArray[np.int64],
    limit: float = NEVER,
    in_flight: Callable[[int], int] = lambda part: 1,
    again: bool = False,
    talk: float = 1.0,
) -> tuple[int, ...] | None:
    """Cuts into ``parts`` pieces at some of the places ``at``, such that the slowest piece is as fast as possible.

    A piece takes its work and ``talk`` times the seconds that its cuts are busy with; part ``k`` holds
    ``in_flight(k)`` micro-batches, and must fit into ``limit`` bytes.  None if nothing fits.
    """
    c = np.asarray(at)
    k = len(c)
    if k < parts + 1:
        return None
    total, crossing = line.total[c], line.crossing[c]
    if again:
        total = total + line.forward[c]
    wire = line.send[c] * talk
    cost = total[None, :] - total[:, None] + 2 * (wire[None, :] + wire[:, None])
    cost[np.tril_indices(k)] = NEVER
    if limit < NEVER:
        static = line.parameters + line.gradients + line.state
        nbytes = static[c][None, :] - static[c][:, None]
        for each, uses in line.shared:
            before = np.searchsorted(np.array(sorted(uses)), c)
            nbytes = nbytes + (before[None, :] > before[:, None]) * sum(each)
        made = line.made[c][None, :] - line.made[c][:, None]
        arrives = np.where(c > 0, crossing, 0.0)[:, None]
    best, back = np.full(k, NEVER), []
    best[0] = 0.0
    for part in range(parts):
        piece = cost
        if limit < NEVER:
            count = in_flight(part)
            held = made + arrives * count if again else (made + arrives) * count
            piece = np.where(nbytes + held > limit, NEVER, cost)
        ways = np.maximum(best[:, None], piece)
        back.append(ways.argmin(0))
        best = ways.min(0)
    if best[-1] == NEVER:
        return None
    found = [k - 1]
    for arg in reversed(back):
        found.append(int(arg[found[-1]]))
    return tuple(int(c[x]) for x in reversed(found))


def folded(
    line: Line, ranks: int, at: Sequence[int] | NDArray[np.int64], longest: float = NEVER, tolerance: float = 5e-4
) -> tuple[int, ...] | None:
    """Cuts into ``2 * ranks`` pieces, such that the largest sum of pieces ``r`` and ``2 * ranks - 1 - r`` is smallest.

    ``longest``: a piece may be so many times the mean.  A sum is tried (by halving): from both ends inwards, each rank
    takes a piece of the front and as much of the back as the sum leaves; for every end of the front, only the earliest
    start of the back is of use.
    """
    c = np.asarray(at)
    total = line.total[c]
    if len(c) < 2 * ranks + 1:
        return None
    most = longest * total[-1] / (2 * ranks)
    low, high = total[-1] / ranks, total[-1]
    best = _fold(total, ranks, high, most)
    while best is not None and high - low > tolerance * low:
        middle = (low + high) / 2
        found = _fold(total, ranks, middle, most)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return None if best is None else tuple(int(c[x]) for x in best)


def _fold(total: Numbers, ranks: int, budget: float, most: float) -> list[int] | None:
    k = len(total)
    none = 10 * k
    front = np.full(k, none)
    front[0] = k - 1
    trail = []
    slack = 1e-12 * total[-1]
    for rank in range(ranks - 1):
        inner = 2 * (ranks - 1 - rank)
        new, back = np.full(k, none), np.full((k, 2), -1)
        for i in np.flatnonzero(front < none):
            j = front[i]
            spent = total[i + 1 : j] - total[i]
            spent = spent[spent <= min(budget, most)]
            ends = np.arange(i + 1, i + 1 + len(spent))
            rest = np.minimum(budget - spent, most)
            starts = np.searchsorted(total, total[j] - rest - slack)
            starts = np.minimum(np.maximum(starts, ends + inner), j - 1)
            good = (starts - ends >= inner) & (total[j] - total[starts] <= rest + slack)
            ends, starts = ends[good], starts[good]
            better = starts < new[ends]
            new[ends[better]] = starts[better]
            back[ends[better]] = i, j
        trail.append(back)
        front = new
    for i in np.flatnonzero(front < none):
        j = int(front[i])
        if total[j] - total[i] <= budget and j - i >= 2:
            middle = int(i) + 1 + int(np.argmin(np.abs(total[i + 1 : j] - (total[i] + total[j]) / 2)))
            left, right = [int(i)], [j]
            for back in reversed(trail):
                i, j = back[i]
                left.append(int(i))
                right.append(int(j))
            return [*reversed(left), middle, *right]
    return None


def equal(layers: Sequence[int], length: int, parts: int, first: int = 0, last: int = 0) -> tuple[int, ...] | None:
    """Cuts at layers: as many to each part, what is before the first layer to the first part, what is after to the last.

    ``first`` and ``last``: layers that the ends are counted as, in addition (as torchtitan does, with one each).
    None where a part would have no layer.
    """
    share, rest = divmod(len(layers) + first + last, parts)
    cuts, at = [0], 0
    for part in range(parts - 1):
        at += share + (1 if part < rest else 0) - (first if part == 0 else 0)
        if not 0 < at < len(layers) or layers[at] <= cuts[-1]:
            return None
        cuts.append(layers[at])
    return (*cuts, length) if cuts[-1] < length else None
