"""Orders for a pipeline by list scheduling: at every moment each rank takes what a rule prefers among what can run.

The rule is after the heuristics of Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv:2401.10241), section 3:
weight gradients fill what would be idle, or make room.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import Literal

from dsc.passes.solve.pipeline_simulate import Order, Pipeline

EPSILON = 1e-12


@dataclass(frozen=True)
class Rule:
    """What a rank prefers."""

    prefer: Literal["I", "F", "other"] = "I"
    """dgrad, forward, or what the last action was not."""
    fill: float = 0.35
    """Share of a wgrad that may run on when something else arrives."""
    deep: bool = True
    """Among forwards, those of later stages first."""
    patience: float = 0.0
    """A forward waits for a dgrad that arrives within this share of it."""
    noise: float = 0.0
    """How much preferences are shaken, by random numbers."""
    full: bool = False
    """Use the room of later stages too while a micro-batch is in the last one of the rank, which will give it back."""


RULES = tuple(
    Rule(prefer, fill, deep, patience, full=full)
    for prefer in ("I", "F", "other")
    for fill in (0.0, 0.35, 1.0)
    for deep in (True, False)
    for patience in (0.0, 0.5)
    for full in (False, True)
)


def schedule(p: Pipeline, rule: Rule, rng: random.Random | None = None) -> tuple[Order, ...] | None:
    """Orders by ``rule`` within ``p.limit`` bytes a rank; None where it runs into a dead end."""
    return _Run(p, rule, rng).run()


class _Run:
    def __init__(self, p: Pipeline, rule: Rule, rng: random.Random | None) -> None:
        self.p, self.rule, self.rng = p, rule, rng
        self.lags = p.lags
        self.mine = [p.of(r) for r in range(p.ranks)]
        self.room = [p.limit - p.base(r) for r in range(p.ranks)]
        self.reserve = [sum(p.held[t] for t in self.mine[p.home[s]] if t > s) for s in range(p.stages)]
        """Bytes that later stages of the rank will need before this one's can be given back."""
        self.forwards, self.dgrads, self.wgrads = ([0] * p.stages for _ in range(3))
        self.arrived: list[list[float]] = [[] for _ in range(p.stages)]
        """When the input of each micro-batch is there; in order."""
        self.returned: list[list[float]] = [[] for _ in range(p.stages)]
        """When the gradient of each micro-batch is there."""
        self.arrived[0] = [0.0] * p.microbatches
        self.clock = [0.0] * p.ranks
        self.orders: list[list[tuple[int, str, int]]] = [[] for _ in range(p.ranks)]
        self.asleep: set[int] = set()
        self.events = [(0.0, r) for r in range(p.ranks)]

    def run(self) -> tuple[Order, ...] | None:
        left = 3 * self.p.stages * self.p.microbatches
        patience = 40 * left
        while left:
            patience -= 1
            if not self.events or patience < 0:
                return None
            now, rank = heapq.heappop(self.events)
            if now < self.clock[rank] - EPSILON:
                continue
            chosen = self.choose(rank, now)
            if chosen is None:
                self.asleep.add(rank)
            elif isinstance(chosen, float):
                heapq.heappush(self.events, (chosen, rank))
            else:
                self.do(rank, now, *chosen)
                left -= 1
        return tuple(map(tuple, self.orders))

    def choose(self, rank: int, now: float) -> tuple[str, int] | float | None:
        """An action, a moment to look again, or nothing to wait for."""
        can: list[tuple[float, str, int]] = []
        blocked = False
        last = self.mine[rank][-1]
        free = self.rule.full and self.forwards[last] > self.dgrads[last]
        for s in self.mine[rank]:
            f, i = self.forwards[s], self.dgrads[s]
            if f < len(self.arrived[s]) and f < self.p.microbatches:
                if self.p.held[s] + (0.0 if free else self.reserve[s]) <= self.room[rank] + EPSILON * self.p.held[s]:
                    can.append((self.arrived[s][f], "F", s))
                else:
                    blocked = True
            if i < f and i < len(self.returned[s]):
                can.append((self.returned[s][i], "I", s))
        later = [c for c in can if c[0] > now + EPSILON]
        soon = min((c[0] for c in later), default=None)
        ready = [c for c in can if c[0] <= now + EPSILON]
        if ready:
            best = min(ready, key=lambda c: self.rank_of(c[1], c[2], rank))
            return self.patient(best[1], best[2], rank, now, later)
        owed = [s for s in self.mine[rank] if self.wgrads[s] < self.dgrads[s]]
        if owed:
            s = min(owed, key=lambda s: (self.wgrads[s], -s))
            if soon is None or blocked or now + self.p.wgrad[s] * (1 - self.rule.fill) <= soon:
                return "W", s
        return soon

    def rank_of(self, kind: str, stage: int, rank: int) -> tuple[float, int]:
        prefer = self.rule.prefer
        if prefer == "other":
            last = self.orders[rank][-1][1] if self.orders[rank] else ""
            base = 0.0 if kind != last else 1.0
        else:
            base = 0.0 if kind == prefer else 1.0
        if self.rng is not None:
            base += self.rng.random() * self.rule.noise
        return base, -stage if kind == "I" or self.rule.deep else stage

    def patient(
        self, kind: str, stage: int, rank: int, now: float, later: list[tuple[float, str, int]]
    ) -> tuple[str, int] | float:
        """The forward, or what is better while a dgrad is about to arrive."""
        when = min((t for t, k, _ in later if k == "I"), default=None)
        if kind != "F" or not self.rule.patience or when is None:
            return kind, stage
        if when >= now + self.rule.patience * self.p.forward[stage]:
            return kind, stage
        for s in self.mine[rank]:
            if self.wgrads[s] < self.dgrads[s] and now + self.p.wgrad[s] <= when + EPSILON:
                return "W", s
        return when

    def do(self, rank: int, now: float, kind: str, s: int) -> None:
        p = self.p
        counts, cost, change = {
            "F": (self.forwards, p.forward, -p.held[s]),
            "I": (self.dgrads, p.dgrad, p.held[s] - p.kept[s]),
            "W": (self.wgrads, p.wgrad, p.kept[s]),
        }[kind]
        batch = counts[s]
        counts[s] += 1
        end = now + cost[s]
        self.clock[rank] = end
        self.room[rank] += change
        self.orders[rank].append((s, kind, batch))
        heapq.heappush(self.events, (end, rank))
        if kind == "F" and s == p.stages - 1:
            self.returned[s].append(end)
        elif kind == "F":
            self.send(self.arrived[s + 1], end, self.lags[s], p.home[s + 1])
        elif kind == "I" and s:
            self.send(self.returned[s - 1], end, self.lags[s - 1], p.home[s - 1])

    def send(self, into: list[float], end: float, lag: float, to: int) -> None:
        when = max(end, into[-1] if into else 0.0) + lag
        into.append(when)
        if to in self.asleep:
            self.asleep.remove(to)
            heapq.heappush(self.events, (max(when, self.clock[to]), to))
