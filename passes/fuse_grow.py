"""Groups that join, best saving first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from dsc.domain import Space
from dsc.passes.fuse_space import joined_space, onwards, saving
from dsc.passes.fuse_web import Unit, Web, link, moved
from dsc.passes.walks import through


def cyclic(web: Web, a: Unit, b: Unit) -> bool:
    """Whether a path leads from one to the other through a third."""
    return _path(web, a, b) or _path(web, b, a)


def _path(web: Web, start: Unit, end: Unit) -> bool:
    return any(s != end.id and web.below[s] & web.bits[end.id] for s in start.succs)


def find_below(web: Web) -> None:
    """As built, units stand in an order in which each comes before those below it."""
    for i in sorted(web.units, reverse=True):
        web.below[i], web.bits[i] = 0, 1 << i
        for s in web.units[i].succs:
            web.below[i] |= 1 << s | web.below[s]


def join_below(web: Web, a: Unit, gone: int) -> None:
    """What ``a`` now reaches, and that everything above the two reaches it.

    The bits of both stand for it from now on: what was above either need not be told that it is above ``a``.
    """
    web.bits[a.id] |= web.bits.pop(gone)
    reached = web.below[a.id] = (web.below[a.id] | web.below.pop(gone)) & ~web.bits[a.id]
    stack = list(a.preds)
    while stack:
        i = stack.pop()
        wider = web.below[i] | reached
        if wider != web.below[i]:
            web.below[i] = wider
            stack += web.units[i].preds


def join(web: Web, a: Unit, b: Unit, space: Space) -> Unit:
    """Makes ``b`` part of ``a``; what the maker of a value reads is walked through in the order of the value's reader."""
    a_reads, b_reads = (
        {v: through(w, to) for v, w in x.reads.items()} if (to := onwards(x, y)) else x.reads
        for x, y in ((a, b), (b, a))
    )
    a.reads, b.reads = a_reads, b_reads
    a.nodes = sorted({*a.nodes, *b.nodes}, key=web.order.__getitem__)
    a.makes += b.makes
    for v in b.makes:
        web.maker[v] = a.id
    for v, walks in b.reads.items():
        a.reads[v] = a.reads.get(v, frozenset()) | walks
        web.readers[v].discard(b.id)
        web.readers[v].add(a.id)
    for p in b.preds:
        web.units[p].succs.discard(b.id)
        link(web, p, a.id)
    for s in b.succs:
        web.units[s].preds.discard(b.id)
        link(web, a.id, s)
    a.succs.discard(b.id)
    a.preds.discard(b.id)
    a.space, a.low, a.writes = space, min(a.low, b.low), a.writes | b.writes
    for v in a.makes:
        if v in a.reads and not web.outside(v, {a.id}):
            web.readers[v].discard(a.id)
            del a.reads[v]
    del web.units[b.id]
    join_below(web, a, b.id)
    return a


def neighbours(web: Web, unit: Unit) -> Iterator[Unit]:
    """Groups that share a value with this one: readers of what it makes, makers of what it reads, next readers."""
    found: dict[int, None] = {}
    for v in unit.makes:
        found.update(dict.fromkeys(sorted(web.readers.get(v, ()))))
    for v in unit.reads:
        if (m := web.maker.get(v)) is not None:
            found[m] = None
        others = sorted(web.readers[v])
        place = others.index(unit.id)
        found.update(dict.fromkeys(others[max(0, place - 4) : place + 5]))
    found.pop(unit.id, None)
    for i in found:
        if web.units[i].space is not None:
            yield web.units[i]


def grow(web: Web, limit: int) -> None:
    find_below(web)
    version = dict.fromkeys(web.units, 0)
    heap: list[tuple[int, int, int, int, int]] = []

    def offer(a: Unit, b: Unit) -> None:
        a, b = (a, b) if a.id < b.id else (b, a)
        gain = saving(web, a, b)
        if gain > 0:
            heapq.heappush(heap, (-gain, a.id, b.id, version[a.id], version[b.id]))

    for unit in web.live():
        for other in neighbours(web, unit):
            if unit.id < other.id:
                offer(unit, other)
    while heap:
        _, i, j, vi, vj = heapq.heappop(heap)
        if i not in web.units or j not in web.units or version[i] != vi or version[j] != vj:
            continue
        a, b = web.units[i], web.units[j]
        if len(a.nodes) + len(b.nodes) > limit:
            continue
        space = joined_space(web, a, b)
        if space is None or cyclic(web, a, b):
            continue
        merged = join(web, a, b, space)
        version[merged.id] += 1
        for other in neighbours(web, merged):
            offer(merged, other)


def join_small(web: Web, limit: int, launch_bytes: float) -> None:
    """Case 7: neighbours in order over one space, both cheaper than a launch."""
    previous: Unit | None = None
    for unit in web.live():
        if (
            previous is not None
            and previous.space == unit.space
            and max(moved(web, previous), moved(web, unit)) < launch_bytes
            and len(previous.nodes) + len(unit.nodes) <= limit
            and not cyclic(web, previous, unit)
            and not any(v in unit.reads for v in previous.makes)
            and not (previous.writes or unit.writes or (unit.space is not None and unit.space.columns))
        ):
            assert unit.space is not None
            previous = join(web, previous, unit, unit.space)
        else:
            previous = unit
