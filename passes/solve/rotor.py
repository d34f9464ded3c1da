"""The fastest way through forward and backward of a chain within any amount of memory: one table for all amounts.

After Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal Re-materialization Strategies for Heterogeneous
Chains", 2019 (rotor), with several choices a block, gradients that pile up, and parts run again inside of the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block: bytes saved inside, seconds, and bytes at the worst moments (see ``blocks.Choice``)."""

    nbytes: int
    forward: float
    backward: float
    forward_peak: int
    backward_peak: int
    more: int = -1
    """Of the bytes saved, those beyond the block's ``once``; all of them if -1."""


@dataclass(frozen=True, slots=True)
class Stage:
    enters: int
    """Bytes of what the block gets from the one before, 0 for the first."""
    gradients: int
    """Bytes that its backward leaves behind to the end."""
    options: tuple[Option, ...]
    once: int = 0
    """Bytes of results that must not be computed twice: a first run that saves nothing else keeps these."""


@dataclass(frozen=True, slots=True)
class Move:
    """``keep``: forward of block ``first``, storing its choice and what leaves it (unless it is ``alone``).

    ``skip``: forward of ``first`` up to, not including, ``last``, keeping only what enters ``last``, and in a first run
    what must not be computed twice.
    ``back``: backward of ``first``, after which its choice and what left it are gone.
    """

    kind: Literal["keep", "skip", "back"]
    first: int
    last: int = 0
    option: int = 0
    alone: bool = False


SPLIT = 1 << 16
"""What is added to a split's distance, to tell it from an option."""
SPLITS = 32
"""Places at which a stretch may be split; of longer ones, every so many."""

Cells: TypeAlias = dict[tuple[int, int], tuple[Floats, Floats]]
"""Stretch -> seconds by units of memory, of a first run and of one inside of the backward, after as many infinities:
``units`` less memory is a slice that starts so much further left."""

Offer: TypeAlias = tuple[Floats, Floats | None, float, int, int]
"""One way through a stretch: times of its parts that add up, seconds, the units that it needs, and the option of the first
block, or ``SPLIT`` and the distance to the split."""


@dataclass(frozen=True)
class Table:
    """``time[m]``: seconds with ``m`` units of memory, infinite where it cannot be done."""

    stages: tuple[Stage, ...]
    unit: float
    cells: Cells = field(repr=False)
    units: _Units = field(repr=False)

    @property
    def time(self) -> Floats:
        padded = self.cells[0, len(self.stages) - 1][0]
        return padded[len(padded) // 2 :]

    @property
    def least(self) -> int | None:
        """The fewest units that suffice."""
        good = np.flatnonzero(np.isfinite(self.time))
        return int(good[0]) if len(good) else None

    def moves(self, m: int) -> list[Move]:
        """The fastest schedule within ``m`` units."""
        units, width = self.units, len(self.time)
        out: list[Move] = []
        stack: list[Move | tuple[int, int, int, int]] = [(0, len(self.stages) - 1, m, 0)]
        while stack:
            task = stack.pop()
            if isinstance(task, Move):
                out.append(task)
                continue
            i, j, room, rerun = task
            how = _best(_offers(units, self.cells, i, j, rerun, width), min(room, width - 1))
            if how < SPLIT:
                option = self.stages[i].options[how]
                if not (rerun and i == j and extra(option) == 0):  # else its backward runs it just in time
                    out.append(Move("keep", i, option=how, alone=bool(rerun) and i == j))
                stack.append(Move("back", i, option=how))
                if j > i:
                    saved = units.more[i][how] if rerun else units.nbytes[i][how]
                    stack.append((i + 1, j, room - saved - units.enters[i + 1], rerun))
                continue
            k = i + how - SPLIT
            once = 0 if rerun else units.kept(i, k)
            out.append(Move("skip", i, k))
            stack.append((i, k - 1, room - units.between(k, j + 1) - once, 1))
            stack.append((k, j, room - units.enters[k] - once, rerun))
        return out


def extra(option: Option) -> int:
    return option.nbytes if option.more < 0 else option.more


class _Units:
    """Bytes as whole units, and sums along the chain."""

    def __init__(self, stages: Sequence[Stage], unit: float) -> None:
        self.stages, self.unit = stages, unit
        self.enters = [self.of(s.enters) for s in stages]
        self.grads = [0, *np.cumsum([self.of(s.gradients) for s in stages]).tolist()]
        self.once = [0, *np.cumsum([self.of(s.once) for s in stages]).tolist()]
        self.nbytes = [[self.of(o.nbytes) for o in s.options] for s in stages]
        self.more = [[self.of(extra(o)) for o in s.options] for s in stages]
        self.forward = [[self.of(o.forward_peak) for o in s.options] for s in stages]
        self.backward = [[self.of(o.backward_peak) for o in s.options] for s in stages]
        self.lean_peak = [min(p) for p in self.forward]
        """Of a forward that saves nothing."""
        self.run_on = [0.0, *np.cumsum([min(o.forward for o in s.options) for s in stages]).tolist()]
        """Seconds of such forwards of all blocks before."""

    def of(self, nbytes: int) -> int:
        """Rounded, up more often than down: the sum over a chain errs on the safe side."""
        return math.ceil(nbytes / self.unit - 0.35) if nbytes > 0 else 0

    def between(self, i: int, j: int) -> int:
        """Gradients that blocks i to j - 1 leave."""
        return int(self.grads[j] - self.grads[i])

    def kept(self, i: int, j: int) -> int:
        """What a first run of blocks i to j - 1 that saves nothing else keeps."""
        return int(self.once[j] - self.once[i])


def solve(stages: Sequence[Stage], kinds: Sequence[int], unit: float, slots: int) -> Table:
    """The table for up to ``slots`` units of memory.

    For blocks i..j, with what enters i stored and not counted, two times: of a first run, and of one inside of the
    backward, when what leaves j is there already.  Stretches of equal kinds are solved once.
    """
    units = _Units(stages, unit)
    count, width = len(stages), slots + 1
    cells: Cells = {}
    known: dict[tuple[int, ...], tuple[Floats, Floats]] = {}
    scratch: Floats = np.empty((max(len(s.options) for s in stages) + SPLITS + 3, width))
    for d in range(count):
        for i in range(count - d):
            j = i + d
            key = tuple(kinds[i : j + 1])
            if key not in known:
                first, again = (_fastest(_offers(units, cells, i, j, rerun, width), scratch) for rerun in (0, 1))
                known[key] = first, again
            cells[i, j] = known[key]
    return Table(tuple(stages), unit, cells, units)


def _offers(units: _Units, cells: Cells, i: int, j: int, rerun: int, width: int) -> Iterator[Offer]:
    """All ways to run blocks i to j that are looked at."""

    def less(padded: Floats, by: int) -> Floats:
        """``time[m - by]`` for every m."""
        by = min(by, width)
        return padded[width - by : 2 * width - by]

    nothing: Floats = np.zeros(width)
    later = units.between(i + 1, j + 1)
    for x, option in enumerate(units.stages[i].options):
        saved = units.more[i][x] if rerun else units.nbytes[i][x]
        ahead, behind = units.forward[i][x], units.backward[i][x]
        if i == j:
            lazy = rerun and extra(option) == 0
            room = behind if lazy else max(ahead, saved + behind)
            yield nothing, None, option.backward if lazy else option.forward + option.backward, max(room, 0), x
            continue
        rest = less(cells[i + 1, j][rerun], saved + units.enters[i + 1])
        yield rest, None, option.forward + option.backward, max(ahead, saved + behind + later, 0), x
    peak = units.lean_peak[i]
    step = max(1, math.ceil((j - i) / SPLITS))
    for k in range(i + 1, j + 1):
        if k - 1 > i:
            peak = max(peak, units.enters[k - 1] + units.lean_peak[k - 1])
        if peak >= width:
            break
        if (k - i) % step and k > i + 2:
            continue
        once = 0 if rerun else units.kept(i, k)
        right = less(cells[k, j][rerun], units.enters[k] + once)
        left = less(cells[i, k - 1][1], units.between(k, j + 1) + once)
        yield right, left, units.run_on[k] - units.run_on[i], peak, SPLIT + k - i


def _fastest(offers: Iterator[Offer], scratch: Floats) -> Floats:
    """The seconds of the best offer for each amount of memory, padded."""
    width, count = scratch.shape[1], 0
    for first, second, seconds, start, _ in offers:
        row = scratch[count]
        if second is None:
            np.add(first, seconds, out=row)
        else:
            np.add(first, second, out=row)
            row += seconds
        row[:start] = np.inf
        count += 1
    out: Floats = np.full(2 * width, np.inf)
    np.minimum.reduce(scratch[:count], axis=0, out=out[width:])
    return out


def _best(offers: Iterator[Offer], m: int) -> int:
    """The label of the best offer with ``m`` units of memory, the first of equals."""
    least, how = np.inf, -1
    for first, second, seconds, start, label in offers:
        time = first[m] + seconds if second is None else first[m] + second[m] + seconds
        if m >= start and time < least:
            least, how = time, label
    assert how >= 0, "less memory than the table asks for"
    return how
