"""A train step on plain numbers: operators over storages, and what a stretch of them costs in time and memory.

The simulator stands in for fusion, ordering and liveness of the real program where thousands of variants are weighed.
What is chosen is checked on the real program afterwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

NEAR = 32
"""Operators between two that share an input and a launch: of two layers, they would keep the operands of both alive."""


@dataclass(frozen=True, slots=True)
class Op:
    """One launch if nothing is fused."""

    name: str
    reads: tuple[tuple[int, int], ...]
    """Value and the bytes read of it, each value once."""
    makes: tuple[int, ...]
    seconds: float
    """Of arithmetic alone; traffic comes on top, see ``simulate``."""
    forward: bool
    again: bool
    """Whether it may run twice: it draws no random numbers, writes nothing, and gives the same result each time."""
    fuses: bool = False
    """A kernel may compute it together with others."""
    over: int = 0
    """What it reduces over: 0 for nothing.  Operators that reduce over different dimensions share no kernel."""
    through: bool = True
    """Whether a reader may run in the same kernel."""
    heavy: bool = False
    """A product, a convolution or attention: worth more than its traffic."""
    what: str = ""
    """The operator's kind in words: equal ones cost the same on equal sizes."""


@dataclass(frozen=True, slots=True)
class Value:
    """One storage, with all its views."""

    name: str
    nbytes: int
    maker: int
    """Operator, or -1 for an input of the graph."""
    kind: str = "made"
    """made, input or tangent."""


@dataclass(frozen=True)
class Problem:
    ops: tuple[Op, ...]
    """Forward operators, then backward ones, each in the order of the graph."""
    values: tuple[Value, ...]
    results: frozenset[int]
    """Values that the forward returns."""
    gradients: frozenset[int]
    """Values that the backward returns: they live to the end."""
    bandwidth: float
    """Bytes per second."""
    launch: float
    """Seconds."""
    pinned: frozenset[int] = frozenset()
    """Values that the user wants saved if the backward reads them."""
    barred: frozenset[int] = frozenset()
    """Values that the user wants computed again."""
    default: frozenset[int] = frozenset()
    """Values that the plan without a budget saves."""
    effects: frozenset[int] = frozenset()
    """Forward operators that must run though nobody reads what they make."""

    @property
    def fixed(self) -> int:
        """Bytes that are alive all the time."""
        return sum(v.nbytes for v in self.values if v.maker < 0)

    def nbytes(self, values: Iterable[int]) -> int:
        return sum(self.values[v].nbytes for v in values)

    @cached_property
    def cheap(self) -> frozenset[int]:
        """Values that each reader may as well compute itself: kernels alone read them, from no more bytes than theirs."""
        stored = {v for op in self.ops if not op.fuses for v, _ in op.reads}
        sources: dict[int, dict[int, int]] = {}
        for op in self.ops:
            if not (op.forward and op.again and op.fuses and not op.over and op.through):
                continue
            found: dict[int, int] = {}
            for v, size in op.reads:
                for u, more in sources.get(v, {v: size}).items():
                    found[u] = max(found.get(u, 0), more)
            for v in op.makes:
                if v not in stored and sum(found.values()) <= 1.05 * self.values[v].nbytes:
                    sources[v] = found
        return frozenset(sources)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a sequence of operators costs."""

    seconds: float
    peak: int
    """Bytes, beyond what was said to be held."""
    groups: int


def needed(problem: Problem, targets: Iterable[int], have: Collection[int]) -> list[int]:
    """Operators that make the targets from what there is, in an order that computes each just before its first reader."""
    out: list[int] = []
    done: set[int] = set()
    for target in targets:
        stack = [target]
        while stack:
            v = stack[-1]
            maker = problem.values[v].maker
            if v in have or maker < 0 or maker in done:
                stack.pop()
                continue
            missing = [
                u
                for u, _ in problem.ops[maker].reads
                if u not in have and (m := problem.values[u].maker) >= 0 and m not in done
            ]
            if missing:
                stack += reversed(missing)
                continue
            done.add(maker)
            out.append(maker)
            stack.pop()
    return out


def just_in_time(problem: Problem, backward: Iterable[int], have: Collection[int]) -> list[int]:
    """Backward operators, each after the forward ones that must run again for it.

    A cheap value is computed again for every reader behind an operator that no kernel of ours fuses: kept in between, it
    would cost what saving it costs.
    """
    out: list[int] = []
    known = set(have)
    passing: set[int] = set()
    for b in backward:
        op = problem.ops[b]
        wanted = [
            v for v, _ in op.reads if v not in known and (m := problem.values[v].maker) >= 0 and problem.ops[m].forward
        ]
        redone = needed(problem, wanted, known) if wanted else []
        for o in redone:
            known.update(problem.ops[o].makes)
            passing.update(v for v in problem.ops[o].makes if v in problem.cheap)
        out += redone
        out.append(b)
        if not op.fuses or not all(problem.ops[o].fuses for o in redone):
            known -= passing
            passing.clear()
    return out


def simulate(
    problem: Problem, script: Sequence[int], results: Collection[int], dying: Collection[int] = (), held: int = 0
) -> Stretch:
    """Time and peak of operators run in this order.

    1. Fusible neighbours between the same barriers are one launch; what only they read exists in no memory.
    2. A cheap value with readers in several launches is computed in each of them.
    3. ``results`` live to the end; of the inputs, ``dying`` ones are freed after their last reader; ``held`` are bytes
       alive at the start, ``dying`` included.
    """
    ops, nbytes = _instances(problem, script)
    group = _groups(nbytes, ops, results)
    order, circle = _order(ops, group)
    while circle:
        group = [i if g in circle else g for i, g in enumerate(group)]
        order, circle = _order(ops, group)
    place = {g: t for t, g in enumerate(order)}
    members: list[list[int]] = [[] for _ in order]
    for i, g in enumerate(group):
        members[place[g]].append(i)
    stored, reads = _memory(nbytes, ops, [place[g] for g in group], members, results)
    return _walk(problem, nbytes, ops, members, stored, reads, results, dying, held)


def _instances(problem: Problem, script: Sequence[int]) -> tuple[list[Op], list[int]]:
    """Operators with a value of its own for each time that one runs, and the bytes of all values."""
    nbytes = [v.nbytes for v in problem.values]
    if len(set(script)) == len(script):
        return [problem.ops[o] for o in script], nbytes
    now: dict[int, int] = {}
    done: set[int] = set()
    ops = []
    for o in script:
        op = problem.ops[o]
        reads = tuple((now.get(v, v), n) for v, n in op.reads)
        if o in done:
            for v in op.makes:
                now[v] = len(nbytes)
                nbytes.append(nbytes[v])
        done.add(o)
        ops.append(replace(op, reads=reads, makes=tuple(now.get(v, v) for v in op.makes)))
    return ops, nbytes


def _groups(nbytes: Sequence[int], ops: Sequence[Op], results: Collection[int]) -> list[int]:
    """Operator -> the first operator of its launch."""
    n = len(ops)
    maker: dict[int, int] = {}
    before: list[list[tuple[int, int]]] = []  # operand's place, 1 if a launch ends between
    level = [0] * n
    latest = 0
    for i, op in enumerate(ops):
        edges = []
        level[i] = latest if op.forward else 0  # what runs again does so where it stands, not as early as it could
        for v, _ in op.reads:
            j = maker.get(v)
            if j is not None:
                other = ops[j]
                apart = not (op.fuses and other.fuses and other.through)
                apart = apart or (op.over != 0 and other.over != 0 and op.over != other.over)
                edges.append((j, int(apart)))
                level[i] = max(level[i], level[j] + apart)
        before.append(edges)
        if not op.forward:
            latest = max(latest, level[i])
        for v in op.makes:
            maker[v] = i
    lowest = [n] * n  # sink what can wait to its first reader
    for i in range(n - 1, -1, -1):
        if ops[i].fuses and lowest[i] < n and lowest[i] > level[i] and not any(v in results for v in ops[i].makes):
            level[i] = lowest[i]
        for j, ends in before[i]:
            lowest[j] = min(lowest[j], level[i] - ends)
    parent = list(range(n))
    over = [op.over for op in ops]

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(i: int, j: int) -> None:
        a, b = find(i), find(j)
        if a != b and (not over[a] or not over[b] or over[a] == over[b]):
            a, b = min(a, b), max(a, b)
            parent[b] = a
            over[a] = over[a] or over[b]

    for i in range(n):
        for j, ends in before[i]:
            if not ends and level[i] == level[j]:
                join(i, j)
    readers: dict[tuple[int, int], int] = {}
    for i, op in enumerate(ops):  # readers of one value read it once
        if op.fuses:
            for v, size in op.reads:
                if size * 4 > nbytes[v]:
                    j = readers.get((v, level[i]))
                    if j is not None and i - j <= NEAR:
                        join(i, j)
                    readers[v, level[i]] = i
    return [find(i) for i in range(n)]


def _order(ops: Sequence[Op], group: Sequence[int]) -> tuple[list[int], set[int]]:
    """Launches, each as soon as its operands are there, the one that stands first in the script first.

    And those of several operators that wait for one another, since a path between their operators leaves and comes back.
    """
    maker: dict[int, int] = {}
    after: dict[int, set[int]] = {}
    waiting: dict[int, int] = {}
    for i, op in enumerate(ops):
        g = group[i]
        after.setdefault(g, set())
        waiting.setdefault(g, 0)
        for v, _ in op.reads:
            h = maker.get(v, g)
            if h != g and g not in after[h]:
                after[h].add(g)
                waiting[g] += 1
        for v in op.makes:
            maker[v] = g
    ready = [g for g, w in waiting.items() if w == 0]
    heapq.heapify(ready)
    out = []
    while ready:
        g = heapq.heappop(ready)
        out.append(g)
        for h in after[g]:
            waiting[h] -= 1
            if waiting[h] == 0:
                heapq.heappush(ready, h)
    if len(out) == len(waiting):
        return out, set()
    left = set(waiting) - set(out)
    while ends := {g for g in left if not after[g] & left}:  # what merely waits for those
        left -= ends
    several = {g for i, g in enumerate(group) if i != g and g in left}
    return out, several


def _memory(
    nbytes: Sequence[int],
    ops: Sequence[Op],
    place: Sequence[int],
    members: Sequence[Sequence[int]],
    results: Collection[int],
) -> tuple[set[int], list[dict[int, int]]]:
    """Values that are written to memory, and what each launch reads of which."""
    maker: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for i, op in enumerate(ops):
        for v in op.makes:
            maker[v] = i
        for v, _ in op.reads:
            readers.setdefault(v, []).append(i)
    stored: set[int] = set()
    sources: dict[int, dict[int, int]] = {}

    def leaves(v: int) -> dict[int, int]:
        """What a value is computed from when a reader computes it itself."""
        if v not in sources:
            found: dict[int, int] = {}
            for u, size in ops[maker[v]].reads:
                inner = maker.get(u)
                if inner is None or u in stored or ops[inner].over or not ops[inner].fuses:
                    found[u] = max(found.get(u, 0), size)
                else:
                    for w, more in leaves(u).items():
                        found[w] = max(found.get(w, 0), more)
            sources[v] = found
        return sources[v]

    for i, op in enumerate(ops):
        for v in op.makes:
            if v in results:
                stored.add(v)
                continue
            outside = [r for r in readers.get(v, ()) if place[r] != place[i]]
            if not outside:
                if not op.fuses:
                    stored.add(v)
                continue
            if not op.fuses or op.over or any(not ops[r].fuses for r in outside):
                stored.add(v)
                continue
            inputs = leaves(v)
            unstored = [u for u in inputs if u in maker and u not in stored]
            if sum(inputs.values()) > nbytes[v] * 1.05 or any(nbytes[u] * 16 > nbytes[v] for u in unstored):
                stored.add(v)
                sources.pop(v, None)
            else:
                stored.update(unstored)
    reads = []
    for group in members:
        inside = {v for i in group for v in ops[i].makes}
        found: dict[int, int] = {}
        for i in group:
            for v, size in ops[i].reads:
                if v in inside:
                    continue
                if v in maker and v not in stored:
                    for u, more in leaves(v).items():
                        if u not in inside:
                            found[u] = max(found.get(u, 0), more)
                else:
                    found[v] = max(found.get(v, 0), size)
        reads.append(found)
    return stored, reads


def _walk(
    problem: Problem,
    nbytes: Sequence[int],
    ops: Sequence[Op],
    members: Sequence[Sequence[int]],
    stored: Collection[int],
    reads: Sequence[dict[int, int]],
    results: Collection[int],
    dying: Collection[int],
    held: int,
) -> Stretch:
    last: dict[int, int] = {}
    for t, found in enumerate(reads):
        for v in found:
            last[v] = t
    count = len(members)
    freed = [0] * (count + 1)
    made = [0] * count
    for t, group in enumerate(members):
        for i in group:
            for v in ops[i].makes:
                if v in stored:
                    made[t] += nbytes[v]
                    freed[count if v in results else max(last.get(v, t), t)] += nbytes[v]
    for v in dying:
        freed[last.get(v, count)] += nbytes[v]
    now = peak = held
    seconds = 0.0
    for t, group in enumerate(members):
        now += made[t]
        peak = max(peak, now)
        now -= freed[t]
        written = made[t]
        arithmetic = sum(ops[i].seconds for i in group)
        seconds += max(arithmetic, (sum(reads[t].values()) + written) / problem.bandwidth) + problem.launch
    return Stretch(seconds, peak, count)
