"""Kernels without what they do not need: values, buffers and axes; neighbouring axes joined into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy

from dsc.codegen.kernel import Axis, Kernel, Let, Store
from dsc.domain import same


def live(lets: Sequence[Let], roots: Sequence[str]) -> tuple[Let, ...]:
    """The lets that ``roots`` need, and every check: an error is part of the answer."""
    needed = set(roots)
    kept: list[Let] = []
    for v in reversed(lets):
        if v.name in needed or v.op == "check":
            needed.update(v.args)
            kept.append(v)
    return tuple(reversed(kept))


def reads(k: Kernel, buffer: str) -> bool:
    return any(v.op == "load" and v.access[0] == buffer for v in k.lets)


def drop_unread(k: Kernel) -> Kernel:
    kept = tuple(b for b in k.buffers if b.role != "in" or reads(k, b.name))
    return Kernel(k.name, k.axes, kept, k.lets, k.stores, k.origin)


def drop_idle(k: Kernel) -> Kernel:
    """Reduce axes along which nothing varies and nothing is reduced (a loss picks one element a row)."""
    along = {a for v in k.lets for a in v.axes} | {s.name for x in k.stores for s in x.index.free_symbols}
    if any(v.op in ("reduce", "dot") for v in k.lets):
        return k
    return replace(k, axes=tuple(a for a in k.axes if not a.reduce or a.name in along))


def collapse(k: Kernel) -> Kernel:
    """Joins neighbouring axes of one kind wherever every index walks them as one: ``i*8 + j -> p``."""
    place = 0
    while place + 1 < len(k.axes):
        outer, inner = k.axes[place], k.axes[place + 1]
        joined = _join(k, outer, inner) if outer.reduce == inner.reduce else None
        if joined is None:
            place += 1
        else:
            k = joined
    return k


def _join(k: Kernel, outer: Axis, inner: Axis) -> Kernel | None:
    a, b = (sympy.Symbol(x.name, integer=True, nonnegative=True) for x in (outer, inner))
    swaps: dict[sympy.Expr, sympy.Expr] = {}
    for e in _indices(k):
        if e in swaps or not e.free_symbols & {a, b}:
            continue
        ca, cb = _coefficient(e, a), _coefficient(e, b)
        if ca is None or cb is None or not same(ca, cb * inner.extent):
            return None
        swaps[e] = sympy.expand(e - ca * a)
    names = {outer.name: inner.name}
    axes = tuple(
        Axis(inner.name, inner.extent * outer.extent, inner.reduce) if x == inner else x for x in k.axes if x != outer
    )

    def attr(v: Let) -> Any:
        if isinstance(v.attr, tuple):
            return (v.attr[0], swaps.get(v.attr[1], v.attr[1]))
        return swaps.get(v.attr, v.attr) if isinstance(v.attr, sympy.Expr) else v.attr

    lets = tuple(
        Let(v.name, v.op, v.args, attr(v), v.dtype, frozenset(names.get(x, x) for x in v.axes)) for v in k.lets
    )
    stores = tuple(Store(s.buffer, swaps.get(s.index, s.index), s.value) for s in k.stores)
    return Kernel(k.name, axes, k.buffers, lets, stores, k.origin)


def _indices(k: Kernel) -> list[sympy.Expr]:
    return [
        *(v.attr[1] if isinstance(v.attr, tuple) else v.attr for v in k.lets if v.op in ("load", "index")),
        *(s.index for s in k.stores),
    ]


def _coefficient(e: sympy.Expr, s: sympy.Symbol) -> sympy.Expr | None:
    """Factor of ``s`` if the expression is affine in it."""
    total = sympy.Integer(0)
    for t in sympy.Add.make_args(e):
        if s not in t.free_symbols:
            continue
        factor = sympy.cancel(t / s)
        if s in factor.free_symbols:
            return None
        total += factor
    return total
