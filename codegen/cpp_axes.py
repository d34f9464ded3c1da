"""Reshaping iteration spaces: kernels in, equal kernels out.

    tidy    no axes of one point; axes that every index walks as one become one, and those walked in blocks become two
    strip   a long reduce axis becomes blocks of a length, so that sums can be flushed between them

Nothing here knows about C++.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import permutations

import sympy

from dsc.codegen.cpp_expr import Upto, ceil_div, known, stride, substitute
from dsc.codegen.kernel import Axis, Index, Kernel, Let, Store

WIDTH = 16
"""Lanes of a vector."""


def indices(k: Kernel) -> list[Index]:
    """Every expression in which axes may occur."""
    out = [s.index for s in k.stores]
    for v in k.lets:
        match v.attr:
            case (_, index):
                out.append(index)
            case sympy.Expr():
                out.append(v.attr)
            case _:
                pass
    return [sympy.sympify(e) for e in out]


def rewrite(k: Kernel, axes: tuple[Axis, ...], values: Mapping[str, Index]) -> Kernel:
    """``k`` over other axes: the old ones are replaced by ``values``."""
    return _changed(k, axes, lambda e: substitute(e, values))


def _changed(k: Kernel, axes: tuple[Axis, ...], change: Callable[[Index], Index]) -> Kernel:
    """``k`` over other axes, with every expression as ``change`` makes it."""

    def let(v: Let) -> Let:
        match v.attr:
            case (buffer, index):
                return replace(v, attr=(buffer, change(sympy.sympify(index))))
            case sympy.Expr():
                return replace(v, attr=change(v.attr))
            case _:
                return v

    stores = tuple(Store(s.buffer, change(sympy.sympify(s.index)), s.value) for s in k.stores)
    extents = tuple(replace(a, extent=change(sympy.sympify(a.extent))) for a in axes)
    return vary(replace(k, axes=extents, lets=tuple(map(let, k.lets)), stores=stores))


def vary(k: Kernel) -> Kernel:
    """``k`` with the axes of every value worked out from what it mentions."""
    axes, reduced = frozenset(a.name for a in k.axes), frozenset(a.name for a in k.reduced)
    # The last block of a reduction may be shorter than others.
    cut = axes & {s.name for a in k.reduced for s in sympy.sympify(a.extent).free_symbols}
    seen: dict[str, frozenset[str]] = {}
    lets = []
    for v in k.lets:
        match v.attr:
            case (_, index):
                own = frozenset(s.name for s in sympy.sympify(index).free_symbols)
            case sympy.Expr():
                own = frozenset(s.name for s in v.attr.free_symbols)
            case _:
                own = frozenset()
        own = (own & axes).union(*(seen[a] for a in v.args), *(seen[n] for n in own if n in seen))
        seen[v.name] = (own | cut) - reduced if v.op in ("reduce", "dot") else own
        lets.append(replace(v, axes=seen[v.name]))
    return replace(k, lets=tuple(lets))


def tidy(k: Kernel) -> Kernel:
    k = _with_reduce_axis(_alive(k))
    single = [a for a in k.axes if known(a.extent) == 1]
    keep = [a for a in single if a.reduce][-1:] if all(a in single for a in k.reduced) else []
    gone = {a.name: sympy.S.Zero for a in single if a not in keep}
    k = _unfolded(rewrite(k, tuple(a for a in k.axes if a.name not in gone), gone))
    while (pair := _mergeable(k)) is not None:
        k = _merge(k, *pair)
    return k


def _unfolded(k: Kernel) -> Kernel:
    """``p % 32`` and ``p // 32`` of a parallel axis become axes of their own: vectors are loaded along them, not gathered."""
    for a in k.axes:
        if (length := _block(k, a)) is not None:
            return _unfolded(_in_blocks(k, a, length))
    return k


def _block(k: Kernel, axis: Axis) -> int | None:
    """The length of the blocks in which indices walk the axis, if it is one, fills vectors, and divides the axis."""
    extent = known(axis.extent)
    if extent is None or axis.reduce or axis.name in counted(k):
        return None
    lengths = {known(x.args[1]) for e in indices(k) for x in _divided(e, axis.name)}
    length = lengths.pop() if len(lengths) == 1 else None
    return length if length is not None and WIDTH <= length < extent and extent % length == 0 else None


def _divided(e: Index, axis: str) -> list[Index]:
    """The remainders and quotients of the axis itself in an index."""
    found = (x for x in e.atoms(sympy.Function) if type(x).__name__ in ("Mod", "PythonMod", "FloorDiv"))
    return [x for x in found if x.args[0].is_Symbol and x.args[0].name == axis]


def _in_blocks(k: Kernel, axis: Axis, length: int) -> Kernel:
    block = sympy.Symbol(_fresh(k, f"{axis.name}_block"))
    inner = sympy.Symbol(axis.name)

    def change(e: Index) -> Index:
        parts = {x: block if type(x).__name__ == "FloorDiv" else inner for x in _divided(e, axis.name)}
        kept = {x: sympy.Dummy() for x in parts}  # the axis inside of them is the new one already
        whole = substitute(e.xreplace(kept), {axis.name: length * block + inner})
        return whole.xreplace({kept[x]: new for x, new in parts.items()})

    outer = Axis(block.name, sympy.Integer(known(axis.extent) // length))  # type: ignore[operator]
    split = (outer, replace(axis, extent=sympy.Integer(length)))
    return _changed(k, tuple(b for a in k.axes for b in (split if a.name == axis.name else (a,))), change)


def _alive(k: Kernel) -> Kernel:
    """Without values that no store needs; where none of them is a reduction, all axes are parallel."""
    wanted = {n for s in k.stores for n in (s.value, *_symbols(s.index))}
    lets = []
    for v in reversed(k.lets):
        if v.name in wanted:
            lets.append(v)
            wanted.update(v.args)
            wanted.update(_symbols(v.access[1] if v.op == "load" else v.attr))
    plain = not any(v.op == "reduce" for v in lets)
    axes = tuple(replace(a, reduce=a.reduce and not plain) for a in k.axes)
    return replace(k, axes=axes, lets=tuple(lets[::-1]))


def _symbols(e: object) -> set[str]:
    return {s.name for s in e.free_symbols} if isinstance(e, sympy.Expr) else set()


def _with_reduce_axis(k: Kernel) -> Kernel:
    """A reduction over no axes is one over a single point."""
    if k.reduced or not any(v.op == "reduce" for v in k.lets):
        return k
    return replace(k, axes=(*k.axes, Axis("point", sympy.S.One, reduce=True)))


def counted(k: Kernel) -> frozenset[str]:
    """Axes on which the extent of another depends: numbers of blocks."""
    names = {s.name for a in k.axes for s in sympy.sympify(a.extent).free_symbols}
    return frozenset(a.name for a in k.axes if a.name in names)


def _mergeable(k: Kernel) -> tuple[Axis, Axis] | None:
    es = indices(k)
    fixed = counted(k)
    for outer, inner in permutations(k.axes, 2):
        if (
            fixed.isdisjoint((outer.name, inner.name))
            and outer.reduce == inner.reduce
            and all(_one_walk(e, outer, inner) for e in es)
        ):
            return outer, inner
    return None


def _one_walk(e: Index, outer: Axis, inner: Axis) -> bool:
    a, b = stride(e, outer.name), stride(e, inner.name)
    return a is not None and b is not None and bool(a == b * inner.extent or sympy.expand(a - b * inner.extent) == 0)


def _merge(k: Kernel, outer: Axis, inner: Axis) -> Kernel:
    name = _fresh(k, f"{outer.name}_{inner.name}") if len(outer.name) + len(inner.name) < 12 else outer.name
    merged = Axis(name, _times(sympy.sympify(outer.extent), sympy.sympify(inner.extent)), outer.reduce)
    # Every index is c * (outer * extent + inner) + rest, so inner can carry the whole walk and outer vanish.
    walk = {outer.name: sympy.S.Zero, inner.name: sympy.Symbol(name)}
    axes = tuple(merged if a.name == inner.name else a for a in k.axes if a.name != outer.name)
    return rewrite(k, axes, walk)


def _times(a: Index, b: Index) -> Index:
    a, b = (b, a) if isinstance(b, Upto) else (a, b)
    return Upto(*(x * b for x in a.args)) if isinstance(a, Upto) else sympy.expand(a * b)


def _fresh(k: Kernel, name: str) -> str:
    taken = {a.name for a in k.axes} | {v.name for v in k.lets} | set(k.sizes)
    while name in taken:
        name += "_"
    return name


def strip(k: Kernel, axis: Axis, length: int) -> tuple[Kernel, str]:
    """Blocks of ``length`` points along the reduce axis, and the new axis just outside it that counts them."""
    n = sympy.sympify(axis.extent)
    count = known(n)
    block = sympy.Symbol(_fresh(k, f"{axis.name}_block"))
    if count is not None and count % length == 0:
        inside: Index = sympy.Integer(length)
    else:
        inside = Upto(sympy.Integer(length), n - length * block)
    outer = Axis(block.name, ceil_div(n, length), reduce=True)
    # rewrite() substitutes in extents too: the inner one must not lose its own block symbol.
    axes = tuple(b for a in k.axes for b in ((outer, Axis(a.name, inside, True)) if a.name == axis.name else (a,)))
    return rewrite(k, axes, {axis.name: length * block + sympy.Symbol(axis.name)}), block.name


def work(k: Kernel) -> Index:
    """Points of the iteration space, or a bound on them."""
    total: Index = sympy.S.One
    for a in k.axes:
        e = sympy.sympify(a.extent)
        total *= e.args[0] if isinstance(e, Upto) else e
    return total
