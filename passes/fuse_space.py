"""Over which loop nest two groups run as one, if over any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node

from dsc import domain, ops
from dsc.domain import Space
from dsc.passes.fuse_web import Unit, Web, moved
from dsc.passes.walks import STRAIGHT, Walk
from dsc.steps import storage_of
from dsc.torch_shim import optimization_hint

NEAR = 64
"""Nodes between two groups that share an input and join (case 9)."""

LITTLE = 100
"""Groups that only share an input of so many times fewer bytes than either moves do not join for it (case 9)."""


def shuffles(unit: Unit, values: Iterable[Node]) -> bool:
    """Whether the group reads one of the values in another order than it lies in."""
    return any(not unit.reads[v] <= STRAIGHT for v in values if v in unit.reads)


def onwards(maker: Unit, reader: Unit) -> frozenset[Walk]:
    """The walks by which one group reads what the other makes."""
    return frozenset(w for v in maker.makes for w in reader.reads.get(v, ()))


def saving(web: Web, a: Unit, b: Unit) -> int:
    """Bytes not moved if the two run as one."""
    both = {a.id, b.id}
    saved = sum(
        web.size[v] for v, w in a.reads.items() if w & b.reads.get(v, frozenset()) and web.maker.get(v) not in both
    )
    for x, y in ((a, b), (b, a)):
        for v in x.makes:
            if v in y.reads:
                saved += web.size[v] * (1 if web.outside(v, both) else 2)
    return saved


def joined_space(web: Web, a: Unit, b: Unit) -> Space | None:
    """The nest of the two as one, or None."""
    assert a.space is not None and b.space is not None
    if a.writes or b.writes:
        return joined_in_place(a, b)
    if any(v in y.reads for x, y in ((a, b), (b, a)) for v in x.makes):
        first, second = (a, b) if any(v in b.reads for v in a.makes) else (b, a)
        met = None if shuffles(second, first.makes) else meet(web, first, second)
        if met is not None:
            return met if enough_parallel(met) else None
        internal = all(not web.outside(v, {first.id, second.id}) for v in first.makes)
        return second.space if internal and not first.space.reduces else None  # type: ignore[union-attr]
    if abs(a.low - b.low) > NEAR or saving(web, a, b) * LITTLE < min(moved(web, a), moved(web, b)):
        return None
    met = meet(web, a, b)
    return met if met is not None and enough_parallel(met) else None


def meet(web: Web, a: Unit, b: Unit) -> Space | None:
    """The nest of the two, sums of columns included."""
    assert a.space is not None and b.space is not None
    met = domain.meet(a.space, b.space)
    if met is None and web.columns:
        met = domain.cross(a.space, b.space)
    if met is None or not met.columns:
        return met
    return met if columns_fit(met, sorted({*a.nodes, *b.nodes}, key=web.order.__getitem__)) else None


MANY_ROWS, LONGEST = 1024, 16384
"""Case 10: rows that make partial sums worth it, and points of a row times sums that fit the registers of a program."""


def columns_fit(space: Space, nodes: Sequence[Node]) -> bool:
    """Case 10: rows that fit, and nothing but what has an element a column needs the sums."""
    row, rows = domain.product(d.extent for d in space.dims if d.reduce), domain.product(space.parallel)
    across = frozenset(n for n in nodes if domain.across(n, space))
    sums = sum(2 if ops.info(n).kind == "rowwise" else 1 for n in across)
    if not isinstance(row, int) or row * sums > LONGEST or int(optimization_hint(rows)) < MANY_ROWS:
        return False
    if not all(domain.sums_columns(n) for n in across):
        return False
    late = domain.follow(nodes, across)
    inside = set(nodes)
    for n in late:
        roots = {storage_of(a) for a in n.all_input_nodes} & inside
        if n in across:
            if roots & late:
                return False
        elif ops.info(n).kind != "item":
            apart = {r for r in roots - late if ops.info(r).kind != "create"}
            t = n.meta.get("val")
            if ops.info(n).kind != "pointwise" or apart or not isinstance(t, torch.Tensor):
                return False
            if not domain.same(domain.product(domain.shape(t)), row):
                return False
    return True


def joined_in_place(a: Unit, b: Unit) -> Space | None:
    """Case 11: what is written has been read at the same index, if at all."""
    assert a.space is not None and b.space is not None
    if a.space.reduces or b.space.reduces or any(shuffles(x, a.writes | b.writes) for x in (a, b)):
        return None
    if shuffles(a, b.makes) or shuffles(b, a.makes):
        return None
    return domain.meet(a.space, b.space)


def enough_parallel(space: Space) -> bool:
    """Case 6: rows to share between cores, unless the whole is small."""
    whole = int(optimization_hint(domain.product(space.extents)))
    rows = int(optimization_hint(domain.product(space.parallel)))
    return rows >= 16 or whole <= 1 << 15 or not space.reduces
