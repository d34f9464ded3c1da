"""The fastest way through forward and backward of a chain within any amount of memory: one table for all amounts.

After Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal Re-materialization Strategies for Heterogeneous
Chains", 2019 (rotor), with several choices a block, gradients that pile up, and parts run again inside of the backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


Cell: TypeAlias = tuple[Floats, Ints]
SPLIT = 1 << 16
"""What is added to a split's distance, to tell it from an option."""
SPLITS = 32
"""Places at which a stretch may be split; of longer ones, every so many."""


@dataclass(frozen=True)
class Table:
    """``time[m]``: seconds with ``m`` units of memory, infinite where it cannot be done."""

    stages: tuple[Stage, ...]
    unit: float
    cells: dict[tuple[int, int], tuple[Cell, Cell]] = field(repr=False)

    @property
    def time(self) -> Floats:
        return self.cells[0, len(self.stages) - 1][0][0]

    @property
    def least(self) -> int | None:
        """The fewest units that suffice."""
        good = np.flatnonzero(np.isfinite(self.time))
        return int(good[0]) if len(good) else None

    def moves(self, m: int) -> list[Move]:
        """The fastest schedule within ``m`` units."""
        units = _Units(self.stages, self.unit)
        out: list[Move] = []
        stack: list[Move | tuple[int, int, int, int]] = [(0, len(self.stages) - 1, m, 0)]
        while stack:
            task = stack.pop()
            if isinstance(task, Move):
                out.append(task)
                continue
            i, j, room, rerun = task
            how = int(self.cells[i, j][rerun][1][min(room, len(self.time) - 1)])
            assert how >= 0, "less memory than the table asks for"
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
    """Bytes as whole units."""

    def __init__(self, stages: Sequence[Stage], unit: float) -> None:
        self.unit = unit
        self.enters = [self.of(s.enters) for s in stages]
        self.grads = [0, *np.cumsum([self.of(s.gradients) for s in stages]).tolist()]
        self.once = [0, *np.cumsum([self.of(s.once) for s in stages]).tolist()]
        self.nbytes = [[self.of(o.nbytes) for o in s.options] for s in stages]
        self.more = [[self.of(extra(o)) for o in s.options] for s in stages]
        self.forward = [[self.of(o.forward_peak) for o in s.options] for s in stages]
        self.backward = [[self.of(o.backward_peak) for o in s.options] for s in stages]

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
    lean = [min(o.forward for o in s.options) for s in stages]
    lean_peak = [min(p) for p in units.forward]
    run_on = [0.0, *np.cumsum(lean).tolist()]
    cells: dict[tuple[int, int], tuple[Cell, Cell]] = {}
    known: dict[tuple[int, ...], tuple[Cell, Cell]] = {}
    for d in range(count):
        for i in range(count - d):
            j = i + d
            key = tuple(kinds[i : j + 1])
            if key not in known:
                known[key] = (
                    _cell(stages, units, cells, i, j, 0, width, run_on, lean_peak),
                    _cell(stages, units, cells, i, j, 1, width, run_on, lean_peak),
                )
            cells[i, j] = known[key]
    return Table(tuple(stages), unit, cells)


def _cell(
    stages: Sequence[Stage],
    units: _Units,
    cells: dict[tuple[int, int], tuple[Cell, Cell]],
    i: int,
    j: int,
    rerun: int,
    width: int,
    run_on: Sequence[float],
    lean_peak: Sequence[int],
) -> Cell:
    best: Floats = np.full(width, np.inf)
    how: Ints = np.full(width, -1, dtype=np.int32)

    def offer(times: Floats, start: int, label: int) -> None:
        better = times[start:] < best[start:]
        best[start:][better] = times[start:][better]
        how[start:][better] = label

    later = units.between(i + 1, j + 1)
    for x, option in enumerate(stages[i].options):
        saved = units.more[i][x] if rerun else units.nbytes[i][x]
        ahead, behind = units.forward[i][x], units.backward[i][x]
        if i == j:
            lazy = rerun and extra(option) == 0
            room = behind if lazy else max(ahead, saved + behind)
            seconds = option.backward if lazy else option.forward + option.backward
            offer(np.full(width, seconds), min(max(room, 0), width), x)
            continue
        room = max(ahead, saved + behind + later, 0)
        rest = _shifted(cells[i + 1, j][rerun][0], saved + units.enters[i + 1])
        offer(rest + (option.forward + option.backward), min(room, width), x)
    peak = lean_peak[i]
    step = max(1, math.ceil((j - i) / SPLITS))
    for k in range(i + 1, j + 1):
        if k - 1 > i:
            peak = max(peak, units.enters[k - 1] + lean_peak[k - 1])
        if peak >= width:
            break
        if (k - i) % step and k > i + 2:
            continue
        once = 0 if rerun else units.kept(i, k)
        right = _shifted(cells[k, j][rerun][0], units.enters[k] + once)
        left = _shifted(cells[i, k - 1][1][0], units.between(k, j + 1) + once)
        offer(right + left + (run_on[k] - run_on[i]), peak, SPLIT + k - i)
    return best, how


def _shifted(times: Floats, units: int) -> Floats:
    """``times[m - units]`` for every m."""
    if units == 0:
        return times
    out: Floats = np.full(len(times), np.inf)
    if units < len(times):
        out[units:] = times[: len(times) - units]
    return out
