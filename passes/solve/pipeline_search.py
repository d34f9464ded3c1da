"""The search for a pipeline schedule under a memory limit: list scheduling, then moves of actions on the critical path.

A local search for job shops: only actions of the longest chain of waiting can shorten it (Nowicki and Smutnicki, "A fast
taboo search algorithm for the job shop problem", 1996), accepted late (Burke and Bykov, "The late acceptance
hill-climbing heuristic", 2017).  It counts evaluations, not seconds: the same numbers give the same orders everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dsc.passes.solve import pipeline_greedy as greedy
from dsc.passes.solve.pipeline_greedy import RULES
from dsc.passes.solve.pipeline_schedule import halves
from dsc.passes.solve.pipeline_simulate import Coded, Deadlock, Order, Pipeline, bound, simulate

MEMORY = 200
"""How many evaluations ago a solution was that a new one must not be worse than."""
NEAR = 1.0005
"""Of the lower bound: good enough."""
ROUNDING = 1e-9


@dataclass(frozen=True)
class Effort:
    """How much is tried."""

    greedy: int = 60
    """Random rules beyond the fixed ones."""
    moves: int = 30_000
    """Evaluations of the local search from each start."""
    starts: int = 2
    """How many of the best starts."""
    samples: int = 0
    """Shaken timelines that a robust order is judged on; none: nominal times alone."""


@dataclass(frozen=True)
class Jitter:
    """What a real machine adds to nominal times."""

    spread: float = 0.05
    """Of the seconds of an action: half-normal, as a share."""
    delay: float = 0.0
    """Seconds that every action takes more."""
    send: float = 1.0
    """Of the seconds of a message: half-normal, as a share."""


USUAL, NOMINAL = Effort(), Jitter()


def fits(p: Pipeline, orders: Sequence[Order]) -> bool:
    return all(peak <= p.limit * (1 + ROUNDING) for peak in simulate(p, orders).peaks)


def search(
    p: Pipeline,
    seeds: Iterable[Sequence[Order]] = (),
    effort: Effort = USUAL,
    jitter: Jitter = NOMINAL,
    seed: int = 0,
) -> tuple[Order, ...] | None:
    """The best orders found within ``p.limit`` bytes a rank; never worse than those of ``seeds`` that fit.

    With ``effort.samples`` the mean over that many shaken timelines counts, else the nominal seconds.  None if nothing
    fits.
    """
    rng = random.Random(seed)
    code = Coded(p)
    pool = _starts(p, seeds, effort, rng)
    if not pool:
        return None
    shaken = Shaken(code, effort.samples, jitter, seed)
    lowest = bound(p)
    found: list[tuple[float, list[list[int]]]] = []
    for seconds, orders in pool[: effort.starts]:
        ids = [code.encode(o) for o in orders]
        found.append((shaken.mean(ids) if effort.samples else seconds, ids))
        better = improve(code, ids, effort.moves, rng, lowest)
        if effort.samples:
            found.append((shaken.mean(better), better))
            better = improve(code, better, effort.moves // max(effort.samples, 1), rng, lowest, shaken)
            found.append((shaken.mean(better), better))
        else:
            found.append((code.run(better)[0], better))
    if effort.samples:  # a seed that stands up to jitter is better than a fragile order
        found += [(shaken.mean(ids), ids) for ids in ([code.encode(o) for o in orders] for _, orders in pool[:12])]
    best = min(found, key=lambda c: c[0])[1]
    return tuple(code.decode(ids) for ids in best)


def _starts(
    p: Pipeline, seeds: Iterable[Sequence[Order]], effort: Effort, rng: random.Random
) -> list[tuple[float, tuple[Order, ...]]]:
    """Seeds and greedy schedules that fit, the fastest first."""
    pool: dict[tuple[Order, ...], float] = {}

    def add(orders: Sequence[Order]) -> float:
        orders = tuple(map(halves, orders))
        if orders not in pool:
            try:
                line = simulate(p, orders)
            except Deadlock:
                return float("inf")
            if any(peak > p.limit * (1 + ROUNDING) for peak in line.peaks):
                return float("inf")
            pool[orders] = line.seconds
        return pool[orders]

    for orders in seeds:
        add(orders)
    best, near = RULES[0], float("inf")
    for k in range(len(RULES) + effort.greedy):
        if k < len(RULES):
            rule = RULES[k]
        else:
            rule = replace(
                best if rng.random() < 0.7 else rng.choice(RULES),
                fill=min(1.0, max(0.0, best.fill + rng.uniform(-0.3, 0.3))),
                patience=max(0.0, best.patience + rng.uniform(-0.3, 0.3)),
                noise=rng.choice((0.0, 0.3, 0.8, 1.3)),
            )
        made = greedy.schedule(p, rule, rng if rule.noise else None)
        if made is not None and (seconds := add(made)) < near:
            best, near = rule, seconds
    return sorted(((s, o) for o, s in pool.items()), key=lambda c: c[0])


class Shaken:
    """The same pipeline with times as a machine might take them."""

    def __init__(self, code: Coded, samples: int, jitter: Jitter, seed: int) -> None:
        rng = random.Random(1000 + seed)
        self.code = code
        self.times = []
        for _ in range(samples):
            seconds = [s * (1 + abs(rng.gauss(0, jitter.spread))) + jitter.delay for s in code.seconds]
            lags = [c * (1 + jitter.send * abs(rng.gauss(0, 1))) if c else 0.0 for c in code.lag]
            self.times.append((seconds, lags))

    def mean(self, orders: Sequence[Sequence[int]], stop: float = float("inf")) -> float:
        """Mean seconds; infinite beyond ``stop``."""
        total, most = 0.0, stop * len(self.times)
        for seconds, lags in self.times:
            total += self.code.run(orders, seconds, lags, most - total)[0]
            if total > most:
                return float("inf")
        return total / len(self.times)


def improve(
    code: Coded,
    start: Sequence[Sequence[int]],
    evaluations: int,
    rng: random.Random,
    lowest: float = 0.0,
    shaken: Shaken | None = None,
) -> list[list[int]]:
    """Orders no slower than ``start`` (forward, dgrad, wgrad apart), within the limit of the pipeline."""
    orders = [list(o) for o in start]
    value, done = code.run(orders)
    if done is None:
        return orders
    now = shaken.mean(orders) if shaken else value
    best, kept = now, [list(o) for o in orders]
    history = [now] * MEMORY
    path = _critical(code, orders, done)
    limit = code.p.limit * (1 + ROUNDING)
    for step in range(evaluations):
        if best <= lowest * NEAR and shaken is None:
            break
        move = _propose(code, orders, path, rng)
        if move is None:
            continue
        rank, a, b = move
        order = orders[rank]
        order.insert(b, order.pop(a))
        threshold = max(now, history[step % MEMORY])
        new, line = float("inf"), None
        if limit == float("inf") or code.peak(rank, order) <= limit:
            if shaken is None:
                new, line = code.run(orders, stop=threshold)
            else:
                line = code.run(orders)[1]
                new = shaken.mean(orders, threshold) if line is not None else new
        if line is None or new > threshold:
            order.insert(a, order.pop(b))
        else:
            now = new
            path = _critical(code, orders, line)
            if now < best:
                best, kept = now, [list(o) for o in orders]
        history[step % MEMORY] = now
    return kept


def _critical(code: Coded, orders: Sequence[Sequence[int]], done: Sequence[float]) -> list[tuple[int, int, int]]:
    """The longest chain of waiting as stretches (rank, first place, last place) with something to move."""
    last = [done[o[-1]] if o else 0.0 for o in orders]
    rank = max(range(len(orders)), key=last.__getitem__)
    at = len(orders[rank]) - 1
    places = {x: (r, i) for r, o in enumerate(orders) for i, x in enumerate(o)}
    found, end = [], at
    while at >= 0:
        x = orders[rank][at]
        start = done[x] - code.seconds[x]
        if at and done[orders[rank][at - 1]] >= start - 1e-9 * (start + 1e-30):
            at -= 1
            continue
        if end > at:
            found.append((rank, at, end))
        need = code.needs[x]
        if need < 0:
            break
        rank, at = places[need]
        end = at
    return found


def _propose(
    code: Coded, orders: Sequence[Sequence[int]], path: Sequence[tuple[int, int, int]], rng: random.Random
) -> tuple[int, int, int] | None:
    """A rank, a place and another place to which the action there may move."""
    if path and rng.random() < 0.75:
        rank, first, last = path[int(rng.random() * len(path))]
        a = first + int(rng.random() * (last - first + 1))
        where = rng.random()
        if where < 0.4:
            b = last + int(rng.random() ** 2 * 8)
        elif where < 0.8:
            b = first - int(rng.random() ** 2 * 8)
        else:
            b = first + int(rng.random() * (last - first + 1))
    else:
        rank = int(rng.random() * len(orders))
        a = int(rng.random() * len(orders[rank]))
        b = a + rng.choice((-1, 1)) * rng.choice((1, 1, 1, 2, 3, 5, 8))
    order = orders[rank]
    b = min(max(b, 0), len(order) - 1)
    if a == b:
        return None
    size = code.n * code.m
    x = order[a]
    lane = x // code.m
    before, after = x - size, x + size  # forward -> dgrad -> wgrad of the same stage and micro-batch
    for y in order[b:a] if b < a else order[a + 1 : b + 1]:
        if y // code.m == lane or y == (before if b < a else after):
            return None
    return rank, a, b
