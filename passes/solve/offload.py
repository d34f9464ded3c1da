"""Which saved values to move away for a while, when to have them out, and when to start to bring them back.

Two copies may run beside the computation, one each way.  Values leave in the order in which they are made: those that
come first are wanted back last, and the peak lies between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Item:
    """A saved value; steps count from the first of the forward."""

    name: str
    nbytes: int
    born: int
    read: int
    """The last step of the forward that touches it."""
    wanted: int
    """The first step of the backward that reads it."""


@dataclass(frozen=True, slots=True)
class Placed:
    item: Item
    lands: int
    """After this step of the forward its copy is waited for, and its memory is free."""
    fetched: int
    """Before this step of the backward the copy back starts, and takes memory again."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the copies are planned along."""

    seconds: float
    alive: int
    """Bytes with nothing away."""


TRIES = 12
"""Values that are tried to be left where they are, because the computation would wait for them."""


def choose(
    steps: Sequence[Step], forward: int, items: Sequence[Item], budget: int, rate: float
) -> tuple[Placed, ...] | None:
    """Those of ``items`` that bring the peak within ``budget`` bytes; None if all of them do not.

    The fewest, in the order of their making.  Where memory lets the copy back of one begin too late, others are tried in
    its place, as long as that shortens the step.

    ``forward``: how many of the steps are the forward's.  ``rate``: bytes per second, one way.
    """
    order = sorted((i for i in items if i.wanted > forward), key=lambda i: (i.born, i.name))
    best = fewest(steps, forward, order, budget, rate)
    if best is None:
        return None
    stay: set[str] = set()
    late = waits(steps, best, rate)
    tried = sorted(late, key=lambda name: -late[name])
    for _ in range(TRIES):
        if not tried:
            break
        without = stay | {tried.pop(0)}
        other = fewest(steps, forward, [i for i in order if i.name not in without], budget, rate)
        if other is None or sum((then := waits(steps, other, rate)).values()) >= sum(late.values()):
            continue
        best, stay, late = other, without, then
        tried = sorted(late, key=lambda name: -late[name])
    return best


def fewest(
    steps: Sequence[Step], forward: int, order: Sequence[Item], budget: int, rate: float
) -> tuple[Placed, ...] | None:
    """As few of the first items as bring the peak within ``budget`` bytes; None if all of them do not."""
    low, high = 0, len(order)
    best = place(steps, forward, order, budget, rate)
    if best is None:
        return None
    while low < high:
        middle = (low + high) // 2
        found = place(steps, forward, order[:middle], budget, rate)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best


def waits(steps: Sequence[Step], placed: Sequence[Placed], rate: float) -> dict[str, float]:
    """Item -> seconds for which the computation waits for its copies; those without a wait are left out."""
    ahead: list[list[Event]] = [[] for _ in steps]
    behind: list[list[Event]] = [[] for _ in steps]
    for p in placed:
        ahead[p.fetched].append(Event("in", 0.0, p.item.name, p.item.nbytes))
        behind[p.item.born].append(Event("out", 0.0, p.item.name, p.item.nbytes))
    for p in placed:
        ahead[p.item.wanted].append(Event("in done", 0.0, p.item.name))
        behind[p.lands].append(Event("out done", 0.0, p.item.name))
    events = [e for a, s, b in zip(ahead, steps, behind) for e in (*a, Event("run", s.seconds), *b)]
    return _simulated(events, rate)[1]


def place(
    steps: Sequence[Step], forward: int, items: Sequence[Item], budget: int, rate: float
) -> tuple[Placed, ...] | None:
    """When each item is out and when it is fetched; None if the peak is above ``budget`` bytes all the same.

    1. Copies out run one after the other, each from when its value is made.
    2. Copies in start as late as they can for the value to be there in time, but no sooner than memory allows.
    """
    ends = list(accumulate(s.seconds for s in steps))
    starts = [0.0, *ends[:-1]]
    lands = []
    free = 0.0
    for i in items:
        free = max(free, ends[i.born]) + i.nbytes / rate
        at = i.read
        while at < forward - 1 and ends[at] < free:
            at += 1
        lands.append(at)
    change = [0] * (len(steps) + 1)
    for i, at in zip(items, lands):
        change[at + 1] -= i.nbytes
        change[i.wanted] += i.nbytes
    alive = [s.alive + c for s, c in zip(steps, accumulate(change))]
    if max(alive, default=0) > budget:
        return None
    limit = float("inf")
    wished: dict[str, int] = {}
    for i in sorted(items, key=lambda i: (-i.wanted, i.name)):
        limit = min(limit, starts[i.wanted]) - i.nbytes / rate
        at = i.wanted
        while at > forward and starts[at] > limit:
            at -= 1
        wished[i.name] = at
    fetched: dict[str, int] = {}
    earliest = forward
    for i in sorted(items, key=lambda i: (i.wanted, i.name)):
        at = i.wanted
        while at > max(wished[i.name], earliest) and alive[at - 1] + i.nbytes <= budget:
            at -= 1
            alive[at] += i.nbytes
        fetched[i.name] = earliest = at
    return tuple(Placed(i, at, fetched[i.name]) for i, at in zip(items, lands))


@dataclass(frozen=True, slots=True)
class Event:
    """What a step does: it computes for ``seconds``, or deals with a copy of ``nbytes`` under ``key``."""

    kind: str
    """run, out, out done, in, in done."""
    seconds: float = 0.0
    key: str = ""
    nbytes: int = 0


def elapsed(events: Sequence[Event], rate: float) -> float:
    """Seconds until the last event is over, with copies beside the computation and waits where it needs them."""
    return _simulated(events, rate)[0]


def _simulated(events: Sequence[Event], rate: float) -> tuple[float, dict[str, float]]:
    """Seconds until the last event is over, and those for which the computation waits, by the key of the copy."""
    now = 0.0
    free = {"out": 0.0, "in": 0.0}
    done: dict[tuple[str, str], float] = {}
    waited: dict[str, float] = {}
    for e in events:
        match e.kind:
            case "out" | "in":
                free[e.kind] = max(free[e.kind], now) + e.nbytes / rate
                done[e.kind, e.key] = free[e.kind]
            case "out done" | "in done":
                until = done[e.kind.removesuffix(" done"), e.key]
                if until > now:
                    waited[e.key] = waited.get(e.key, 0.0) + until - now
                    now = until
            case _:
                now += e.seconds
    return now, waited
