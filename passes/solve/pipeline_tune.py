"""Where to cut and in which order to run, decided together.

Every split is tried with every known schedule; from the best of them on, cuts move under a fixed order and actions move
under fixed cuts, in turn, both judged by the same simulator.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dsc.passes.solve import pipeline_search, stage_cut
from dsc.passes.solve.pipeline_schedule import SCHEDULES, Known, halves, homes
from dsc.passes.solve.pipeline_search import Effort, Jitter, Shaken
from dsc.passes.solve.pipeline_simulate import Coded, Order, Pipeline, Timeline, bound, simulate
from dsc.passes.solve.stage_cut import NEVER, Line, pipeline

MEMORY = 50
"""How many moves of a cut ago a split was that a new one must not be worse than."""
STEPS = (1, 1, 2, 3, 5, 9, 15, 25)
"""Places by which a cut moves."""
LONGEST = (1.05, 1.15, 1.3, 1.6, 2.5)
"""How long a piece of a folded split may be, as multiples of the mean."""
LAYERED = frozenset({"equal", "weighted", "layers"})
"""Splits that cut at layers alone."""


@dataclass(frozen=True)
class Task:
    """What is to be planned."""

    line: Line
    layers: tuple[int, ...]
    ranks: int
    microbatches: int
    limit: float = NEVER
    """Bytes a rank."""
    again: bool = False
    """Whether all stages compute their forward again."""
    chunks: int = 2
    """Stages a rank, of schedules that take any number."""
    machines: tuple[int, ...] = ()
    """Where each rank is; empty: all apart."""
    slow: tuple[float, ...] = ()
    """What each rank takes, as a multiple of the line's seconds; empty: all are alike."""


@dataclass(frozen=True)
class Candidate:
    """One split under one schedule, and what comes of it."""

    split: str
    schedule: str
    cuts: tuple[int, ...]
    pipeline: Pipeline
    orders: tuple[Order, ...] = field(repr=False)
    timeline: Timeline = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def fits(self) -> bool:
        return max(self.timeline.peaks) <= self.pipeline.limit * (1 + 1e-9)

    @property
    def layered(self) -> bool:
        """Whether a person could have chosen it: layers, and a schedule by name."""
        return self.split in LAYERED and self.schedule in SCHEDULES


def candidate(
    task: Task, split: str, schedule: str, cuts: Sequence[int], home: Sequence[int], orders: Sequence[Order]
) -> Candidate:
    p = pipeline(
        task.line, cuts, home, task.microbatches, task.limit, [task.again] * (len(cuts) - 1), task.machines, task.slow
    )
    return Candidate(split, schedule, tuple(cuts), p, tuple(orders), simulate(p, orders))


def splits(task: Task, known: Known, parts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Cuts into so many parts: by layers as people do it, by layers and by nodes as well as it can be."""
    line, length = task.line, task.line.length
    starts = (0, *task.layers[1:], length)
    every = stage_cut.places(line, parts)

    def flight(part: int) -> int:
        return task.microbatches if known.name == "gpipe" else min(task.ranks - part, task.microbatches)

    limit = task.limit if parts == task.ranks else NEVER

    def straight(at: Sequence[int] | NDArray[np.int64], limit: float, talk: float = 1.0) -> tuple[int, ...] | None:
        return stage_cut.straight(line, parts, at, limit, flight, task.again, talk)

    ways: list[tuple[str, tuple[int, ...] | None]] = []
    if len(task.layers) > 1:
        ways.append(("equal", stage_cut.equal(task.layers, length, parts)))
        ways.append(("weighted", stage_cut.equal(task.layers, length, parts, 1, 1)))
        ways.append(("layers", straight(starts, NEVER)))
        if limit < NEVER:
            ways.append(("layers", straight(starts, limit)))
        if known.placement == "v":
            ways.append(("layers", stage_cut.folded(line, task.ranks, starts)))
    ways.append(("nodes", straight(every, NEVER)))
    ways.append(("nodes", straight(every, NEVER, talk=0.0)))
    if limit < NEVER:
        ways.append(("nodes", straight(every, limit)))
    if known.placement == "v":
        ways += [("folded", stage_cut.folded(line, task.ranks, every, longest)) for longest in LONGEST]
    seen: set[tuple[int, ...]] = set()
    for name, cuts in ways:
        if cuts is not None and cuts not in seen:
            seen.add(cuts)
            yield name, cuts


def portfolio(task: Task, names: Sequence[str] = tuple(SCHEDULES)) -> list[Candidate]:
    """Every split under every known schedule of those names that can take it, the fastest first."""
    found = []
    made: dict[object, list[tuple[str, tuple[int, ...]]]] = {}
    for known in map(SCHEDULES.__getitem__, names):
        chunks = known.chunks or task.chunks
        orders = known.orders(task.ranks, task.microbatches, chunks)
        if orders is None:
            continue
        home = homes(task.ranks, chunks, known.placement)
        key = known.placement, len(home), known.name == "gpipe" and task.limit < NEVER
        if key not in made:
            made[key] = list(splits(task, known, len(home)))
        found += [candidate(task, split, known.name, cuts, home, orders) for split, cuts in made[key]]
    return sorted(found, key=lambda c: c.seconds)


def best_of(found: Sequence[Candidate]) -> Candidate | None:
    """The fastest that fits."""
    return next((c for c in found if c.fits), None)


NOMINAL = Jitter()


@dataclass(frozen=True)
class Work:
    """How much is tried."""

    starts: int = 4
    """Candidates from which the common search sets out."""
    rounds: int = 2
    shifts: int = 1500
    """Evaluations of moved cuts in a round."""
    moves: int = 6000
    """Evaluations of moved actions in a round."""
    samples: int = 6
    """Shaken timelines on which the last choice is made."""


USUAL = Work()


def tune(
    task: Task,
    found: Sequence[Candidate],
    work: Work = USUAL,
    jitter: Jitter = NOMINAL,
    seed: int = 0,
    search: bool = True,
) -> Candidate | None:
    """The best split and order from the best candidates on; without ``search`` orders stay what they are.

    The last choice is by the mean over shaken timelines, among what was found and what it set out from, so that an order
    that only nominal times favour does not win.  None if nothing fits.
    """
    rng = random.Random(seed)
    pool = [c for c in found if c.fits][:12]
    for start in _starts(found, work.starts):
        now = start
        for _ in range(work.rounds):
            now = shift(task, now, work.shifts, rng)
            if search:
                now = reorder(now, work.moves, rng)
        if now.fits:
            pool.append(now)
    if not pool:
        return None
    return min(pool, key=lambda c: robust(c, work.samples, jitter, seed))


def robust(c: Candidate, samples: int, jitter: Jitter, seed: int) -> float:
    """Mean seconds over shaken timelines; nominal seconds without samples."""
    if not samples:
        return c.seconds
    code = Coded(c.pipeline)
    return Shaken(code, samples, jitter, seed).mean([code.encode(o) for o in c.orders])


def _starts(found: Sequence[Candidate], count: int) -> list[Candidate]:
    """The fastest few, but of one schedule two at most; those that fit first."""
    chosen: list[Candidate] = []
    for c in sorted(found, key=lambda c: (not c.fits, c.seconds)):
        if sum(c.schedule == o.schedule for o in chosen) < 2:
            chosen.append(c)
    return chosen[:count]


def excess(p: Pipeline, peaks: Sequence[float]) -> float:
    """Share by which the fullest rank is over its limit."""
    return max(0.0, max(peaks) / p.limit - 1) if p.limit < NEVER else 0.0


def shift(task: Task, c: Candidate, evaluations: int, rng: random.Random) -> Candidate:
    """Move cuts under the same orders, towards fewer seconds, and into the limit first."""
    at = stage_cut.places(task.line, len(c.cuts) - 1)
    where = [int(np.argmin(np.abs(at - cut))) for cut in c.cuts]
    if any(a >= b for a, b in pairwise(where)):
        return c
    home, again = c.pipeline.home, [task.again] * (len(c.cuts) - 1)
    code = Coded(c.pipeline)
    orders = [code.encode(o) for o in c.orders]

    def judge(places: Sequence[int]) -> float:
        p = pipeline(
            task.line,
            [int(at[x]) for x in places],
            home,
            task.microbatches,
            task.limit,
            again,
            task.machines,
            task.slow,
        )
        code.cost(p)
        over = excess(p, [code.peak(r, o) for r, o in enumerate(orders)])
        return code.run(orders)[0] * (1 + 10 * over)

    now = best = judge(where)
    kept = list(where)
    history = [now] * MEMORY
    for step in range(evaluations):
        new = _moved(where, len(at), rng)
        if new is not None:
            value = judge(new)
            if value <= max(now, history[step % MEMORY]):
                now, where = value, new
                if now < best:
                    best, kept = now, list(where)
        history[step % MEMORY] = now
    moved = candidate(task, "searched", c.schedule, [int(at[x]) for x in kept], home, c.orders)
    if moved.fits and not c.fits:
        return moved
    return moved if moved.seconds < c.seconds and moved.fits >= c.fits else c


def _moved(where: Sequence[int], count: int, rng: random.Random) -> list[int] | None:
    """The same places with one cut, or a run of them, moved; None where they would meet."""
    inner = len(where) - 2
    if inner < 1:
        return None
    first = last = 1 + int(rng.random() * inner)
    if rng.random() < 0.4:
        other = 1 + int(rng.random() * inner)
        first, last = min(first, other), max(first, other)
    by = rng.choice((-1, 1)) * rng.choice(STEPS)
    new = [x + by if first <= i <= last else x for i, x in enumerate(where)]
    return new if all(a < b for a, b in pairwise(new)) else None


def reorder(c: Candidate, evaluations: int, rng: random.Random) -> Candidate:
    """Move actions under the same cuts; they become ``searched`` if that is faster."""
    code = Coded(c.pipeline)
    ids = pipeline_search.improve(code, [code.encode(halves(o)) for o in c.orders], evaluations, rng, bound(c.pipeline))
    orders = tuple(code.decode(o) for o in ids)
    line = simulate(c.pipeline, orders)
    if line.seconds >= c.seconds or (excess(c.pipeline, line.peaks) and c.fits):
        return c
    return replace(c, schedule="searched", orders=orders, timeline=line)


def searched(c: Candidate, effort: Effort, jitter: Jitter, seed: int = 0) -> Candidate:
    """The same cuts under orders found from scratch; ``c`` where they are no better."""
    orders = pipeline_search.search(c.pipeline, [c.orders] if c.fits else [], effort, jitter, seed)
    if orders is None:
        return c
    line = simulate(c.pipeline, orders)
    if c.fits and line.seconds >= c.seconds:
        return c
    return replace(c, schedule="searched", orders=orders, timeline=line)
