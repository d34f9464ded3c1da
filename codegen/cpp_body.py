"""The four ways through a kernel: rows, lanes, streams and tiles.

    rows    the vector axis is reduced: vector accumulators along it, folded at the end of each stage
    lanes   the vector axis is parallel: every lane its own result, reductions are loops inside
    streams lanes over a short parallel axis whose sums lie in a row of memory, so that the buffers are read in order
    tiles   nothing is reduced and buffers disagree about which axis is contiguous: 16 x 16 blocks are turned in registers

``schedule`` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy

from dsc.codegen.cpp_expr import known
from dsc.codegen.cpp_nest import Lanes, Nest
from dsc.codegen.cpp_ops import FOLD, IDENTITY, SCALAR, VECTOR, combine
from dsc.codegen.cpp_schedule import WIDTH, closure, turned
from dsc.codegen.kernel import Axis, Let

Body = Callable[[Sequence[Lanes]], None]
BLOCK = 4096
"""Points of a vector axis that one thread takes at a time where that axis is shared."""


def body(n: Nest) -> None:
    axis = next((a for a in n.k.axes if a.name == n.s.vector), None)
    if axis is None:
        _finish(n, [Lanes(0)])
    elif axis.reduce:
        rows(n, axis)
    elif n.s.tile is not None:
        tiles(n, axis, n.axis(n.s.tile))
    elif _streams(n, axis):
        stream(n, axis)
    else:
        lanes(n, axis)


# Rows


def rows(n: Nest, axis: Axis) -> None:
    size = n.text(axis.extent)
    with n.threads(n.parallel_axes()):
        for name in sorted(n.s.keep):
            v = n.let[name]
            n.add(f"alignas(64) {SCALAR[v.dtype]} {_scratch(n, v)}[{-(-(known(axis.extent) or 0) // WIDTH) * WIDTH}];")
        kept: set[str] = set()
        for number, (reductions, stores) in enumerate(n.passes):
            if reductions or stores:
                _row_pass(n, axis, size, number, reductions, stores, kept)
        _finish(n, [Lanes(0)])


def _row_pass(
    n: Nest, axis: Axis, size: str, number: int, reductions: list[Let], stores: list[int], kept: set[str]
) -> None:
    roots = n.roots(number)
    # Values of the whole row first, also those needed only at the end: this pass may overwrite what they load.
    n.hoist([*roots, *n.outer_roots()])
    lets, ends = closure(n.k, roots, frozenset(kept))
    again = [n.let[name] for name in sorted(ends & kept)]
    new = [v for v in lets if v.name in n.s.keep]
    others = [a for a in n.k.reduced if a.name != axis.name]
    flushed = [v for v in reductions if _flushes(n, v)]
    inside = [v for v in reductions if v in flushed]
    _declare_totals(n, flushed)
    _declare(n, [v for v in reductions if v not in flushed], n.s.unroll, vector=True)
    with n.loops(others, roots):
        _declare(n, inside, n.s.unroll, vector=True)

        def point(groups: Sequence[Lanes]) -> None:
            for v in again:
                for g in groups:
                    n.env[v.name, g.u] = f"load({_scratch(n, v)} + {n.at(g.u)})"
            n.define(lets, groups)
            for v in new:
                for g in groups:
                    n.add(f"store({_scratch(n, v)} + {n.at(g.u)}, {n.value(v.name, g)});")
            for v in reductions:
                for g in groups:
                    term = n.wide(v.args[0], g)
                    if g.limit:
                        term = f"select(first({g.limit}), {term}, splat({_identity(v)}))"
                    _accumulate(n, v, g.u, term)
            for i in stores:
                n.store(i, groups)

        vector_loop(n, "0", size, known(axis.extent), n.s.unroll, point)
        _flush(n, inside, n.s.unroll)
    kept.update(v.name for v in new)
    for v in reductions:
        name = n.names[v.name]
        total = _total(n, v) if v in flushed else _merged(n, v, n.s.unroll)
        fold = f"{FOLD[str(v.attr)]}({total})"
        n.add(f"const {SCALAR[v.dtype]} {name} = {f'(float){fold}' if v in flushed else fold};")
        n.env[v.name, 0] = name


def _scratch(n: Nest, v: Let) -> str:
    return f"{n.names[v.name]}_row"


# Lanes


def lanes(n: Nest, axis: Axis) -> None:
    size, extent = n.text(axis.extent), known(axis.extent)
    i = n.names[axis.name]
    block = WIDTH * n.s.unroll if n.k.reduced else _block(extent)
    inner = n.k.reduced
    if not inner and _enough_outside(n):
        # Many rows for the threads: each walks its own from end to end.
        with n.threads(n.parallel_axes()):
            n.hoist(n.outer_roots())
            vector_loop(n, "0", size, extent, n.s.unroll, lambda groups: _lane_body(n, groups))
        return
    start = f"{i}_start"
    if extent is not None and extent <= block:
        with n.threads(n.parallel_axes()):
            n.hoist(n.outer_roots())
            vector_loop(n, "0", size, extent, n.s.unroll, lambda groups: _lane_body(n, groups))
        return
    with n.threads(n.parallel_axes(), [f"for (long {start} = 0; {start} < {size}; {start} += {block})"]):
        n.hoist(n.outer_roots())
        exact = extent is not None and extent % block == 0
        end = f"{start} + {block}" if exact else f"imin({start} + {block}, {size})"
        if exact and block == WIDTH * n.s.unroll:
            n.add(f"const long {i} = {start};")
            _lane_body(n, [Lanes(u) for u in range(n.s.unroll)])
            return
        n.add(f"const long {i}_end = {end};")
        vector_loop(n, start, f"{i}_end", block if exact else None, n.s.unroll, lambda groups: _lane_body(n, groups))


def _block(extent: int | None) -> int:
    """BLOCK, or a near number that leaves no remainder."""
    if extent is None or extent % BLOCK == 0:
        return BLOCK
    return next((b for b in range(BLOCK, BLOCK // 4, -WIDTH) if extent % b == 0), BLOCK)


def _enough_outside(n: Nest) -> bool:
    sizes = [known(a.extent) for a in n.parallel_axes()]
    return bool(sizes) and all(s is not None for s in sizes) and bool(sympy.prod(sizes) >= 64)


def _lane_body(n: Nest, groups: Sequence[Lanes]) -> None:
    for number, (reductions, stores) in enumerate(n.passes):
        if n.k.reduced and (reductions or stores):
            _lane_pass(n, number, reductions, stores, groups)
    _finish(n, groups)


def _lane_pass(n: Nest, number: int, reductions: list[Let], stores: list[int], groups: Sequence[Lanes]) -> None:
    roots = n.roots(number)
    before = [*roots, *n.outer_roots()]
    n.define(n._computable([v for v in closure(n.k, before)[0] if not v.axes & n.reduced]), groups)
    lets, _ = closure(n.k, roots)
    flushed = [v for v in reductions if _flushes(n, v)]
    _declare_totals(n, flushed, groups)
    _declare_lanes(n, [v for v in reductions if v not in flushed], groups)
    *outer, last = n.k.reduced
    with n.loops(outer, roots):
        _declare_lanes(n, flushed, groups)
        with n.loops([last], roots):
            n.define(lets, groups)
            for v in reductions:
                for g in _own(n, v, groups):
                    _accumulate(n, v, g.u, n.value(v.args[0], g))
            for i in stores:
                n.store(i, groups)
        for v in flushed:
            for g in _own(n, v, groups):
                acc = _accumulator(n, v, g.u)
                n.add(f"{_total(n, v, g.u)} += {f'to_f64({acc})' if n.vector(v) else acc};")
    for v in reductions:
        for g in _own(n, v, groups):
            name = n.names[v.name] + (f"_{g.u}" if g.u else "")
            result = _accumulator(n, v, g.u)
            if v in flushed:
                result = f"to_f32({_total(n, v, g.u)})" if n.vector(v) else f"(float){_total(n, v)}"
            n.add(f"const {(VECTOR if n.vector(v) else SCALAR)[v.dtype]} {name} = {result};")
            n.env[v.name, g.u] = name


def _own(n: Nest, v: Let, groups: Sequence[Lanes]) -> Sequence[Lanes]:
    return groups if n.vector(v) else [Lanes(0)]


# Streams


STREAM = 1 << 13
"""Points of a vector axis up to which its sums stay in the nearest cache."""


def _streams(n: Nest, axis: Axis) -> bool:
    """One pass of reductions over rows that lie one after the other, for threads that have other axes to share."""
    reducing = [p for p in n.passes if p[0] or p[1]]
    width = known(axis.extent)
    if len(reducing) != 1 or not reducing[0][0] or n.s.flush or not n.parallel_axes() or width is None:
        return False
    plain = all(n.vector(v) and v.dtype == "f32" for v in reducing[0][0])
    return plain and WIDTH * n.s.unroll < width <= STREAM


def stream(n: Nest, axis: Axis) -> None:
    number = next(i for i, p in enumerate(n.passes) if p[0])
    reductions, stores = n.passes[number]
    size, extent = n.text(axis.extent), known(axis.extent)
    padded = -(-(extent or 0) // WIDTH) * WIDTH
    roots = n.roots(number)
    lets, _ = closure(n.k, roots)
    with n.threads(n.parallel_axes()):
        n.hoist([*roots, *n.outer_roots()])
        i = n.names[axis.name]
        for v in reductions:
            n.add(f"alignas(64) float {_sums(n, v)}[{padded}];")
            start = f"splat({_identity(v)})"
            n.add(f"for (long {i} = 0; {i} < {padded}; {i} += {WIDTH}) store({_sums(n, v)} + {i}, {start});")
        with n.loops(n.k.reduced, roots):

            def point(groups: Sequence[Lanes]) -> None:
                n.define(lets, groups)
                for v in reductions:
                    for g in groups:
                        place = f"{_sums(n, v)} + {n.at(g.u)}"
                        n.add(f"store({place}, {combine(str(v.attr), f'load({place})', n.value(v.args[0], g))});")
                for k in stores:
                    n.store(k, groups)

            vector_loop(n, "0", size, extent, 1, point)

        def end(groups: Sequence[Lanes]) -> None:
            for v in reductions:
                for g in groups:
                    n.env[v.name, g.u] = f"load({_sums(n, v)} + {n.at(g.u)})"
            _finish(n, groups)

        vector_loop(n, "0", size, extent, 1, end)


def _sums(n: Nest, v: Let) -> str:
    return f"{n.names[v.name]}_sums"


# Tiles


def tiles(n: Nest, axis: Axis, other: Axis) -> None:
    assert n.s.vector is not None
    i, j = n.names[axis.name], n.names[other.name]
    start = f"{j}_start"
    exact = [(e := known(a.extent)) is not None and e % WIDTH == 0 for a in (axis, other)]
    limits = [None if exact[0] else f"{i}_lanes", None if exact[1] else f"{j}_lanes"]
    heads = [
        f"for (long {start} = 0; {start} < {n.text(other.extent)}; {start} += {WIDTH})",
        f"for (long {i} = 0; {i} < {n.text(axis.extent)}; {i} += {WIDTH})",
    ]
    group = Lanes(0, limits[0])
    loads = [v for v in n.k.lets if v.op == "load" and v.dtype == "f32" and not v.args]
    loads = [v for v in loads if turned(sympy.sympify(v.access[1]), axis.name, other.name)]
    stores = [
        (k, s) for k, s in enumerate(n.k.stores)
        if turned(sympy.sympify(s.index), axis.name, other.name) and n.let[s.value].dtype == "f32"
    ]  # fmt: skip
    with n.threads([a for a in n.parallel_axes() if a.name != other.name], heads):
        if limits[0]:
            n.add(f"const int {limits[0]} = imin({WIDTH}, {n.text(axis.extent)} - {i});")
        if limits[1]:
            n.add(f"const int {limits[1]} = imin({WIDTH}, {n.text(other.extent)} - {start});")
        upper, side = limits[0] or str(WIDTH), f", {limits[1]}" if limits[1] else ""

        def corner(index: sympy.Expr) -> str:
            return n.place_at(index, {axis.name: f"({i} + t)", other.name: start})

        for v in loads:
            tile = f"{n.names[v.name]}_tile"
            n.add(f"vf {tile}[{WIDTH}];")
            zero = f" else {tile}[t] = (vf){{}};" if limits[0] else ""
            test = f"if (t < {upper}) " if limits[0] else ""
            source = f"load({n.buffers[v.access[0]]} + {corner(sympy.sympify(v.access[1]))}{side})"
            n.add("#pragma GCC unroll 16")
            n.add(f"for (int t = 0; t < {WIDTH}; t++) {test}{tile}[t] = {source};{zero}")
            n.add(f"transpose({tile});")
            n.turned_loads[v.name] = f"{tile}[{j} - {start}]"
        for k, s in stores:
            tile = f"{n.names[s.value]}_tile{k}"
            n.add(f"vf {tile}[{WIDTH}];")
            n.turned_stores[k] = f"{tile}[{j} - {start}]"
        n.hoist(n.outer_roots())
        with n.block(f"for (long {j} = {start}; {j} < {start} + {limits[1] or WIDTH}; {j}++)"):
            n.opened.add(other.name)
            n.define(closure(n.k, n.outer_roots())[0], [group])
            for k in n.outer_stores():
                n.store(k, [group])
            n.opened.discard(other.name)
        for k, s in stores:
            tile = f"{n.names[s.value]}_tile{k}"
            n.add(f"transpose({tile});")
            target = f"{n.buffers[s.buffer]} + {corner(sympy.sympify(s.index))}"
            n.add(f"for (int t = 0; t < {upper}; t++) store({target}, {tile}[t]{side});")


# Pieces


def vector_loop(n: Nest, start: str, end: str, extent: int | None, unroll: int, point: Body) -> None:
    """From ``start`` to ``end`` by ``unroll`` groups of lanes, then by single and cut ones."""
    i = n.names[n.s.vector or ""]
    step = WIDTH * unroll
    groups = [Lanes(u) for u in range(unroll)]
    if extent is not None:
        main = extent // step * step
        if main:
            stop = end if main == extent else str(main) if start == "0" else f"{start} + {main}"
            with n.block(f"for (long {i} = {start}; {i} < {stop}; {i} += {step})"):
                point(groups)
        rest = extent - main
        if not rest:
            return
        at = str(main) if start == "0" else f"{start} + {main}"
        if rest >= WIDTH:
            whole = rest // WIDTH * WIDTH
            with n.block(f"for (long {i} = {at}; {i} < {at} + {whole}; {i} += {WIDTH})"):
                point([Lanes(0)])
            rest, at = rest - whole, f"{at} + {whole}"
        if rest:
            with n.block(""):
                n.add(f"const long {i} = {at};")
                point([Lanes(0, str(rest))])
        return
    with n.block(""):
        if not end.isidentifier():
            n.add(f"const long {i}_end = {end};")
            end = f"{i}_end"
        n.add(f"long {i} = {start};")
        with n.block(f"for (; {i} + {step} <= {end}; {i} += {step})"):
            point(groups)
        with n.block(f"for (; {i} < {end}; {i} += {WIDTH})"):
            n.add(f"const int m = imin({WIDTH}, {end} - {i});")
            point([Lanes(0, "m")])


def _finish(n: Nest, groups: Sequence[Lanes]) -> None:
    """What is stored once for a point of the parallel axes."""
    numbers = n.outer_stores()
    n.define(closure(n.k, n.outer_roots())[0], groups)
    for i in numbers:
        n.store(i, groups)


def _identity(v: Let) -> str:
    return IDENTITY[str(v.attr), v.dtype]


def _flushes(n: Nest, v: Let) -> bool:
    return n.s.flush and v.attr == "sum" and v.dtype == "f32"


def _accumulator(n: Nest, v: Let, u: int) -> str:
    return f"{n.names[v.name]}_acc{u}"


def _total(n: Nest, v: Let, u: int = 0) -> str:
    return f"{n.names[v.name]}_total{u}" if u else f"{n.names[v.name]}_total"


def _declare(n: Nest, reductions: Sequence[Let], unroll: int, *, vector: bool) -> None:
    for v in reductions:
        start = f"splat({_identity(v)})" if vector else _identity(v)
        names = ", ".join(f"{_accumulator(n, v, u)} = {start}" for u in range(unroll))
        n.add(f"{(VECTOR if vector else SCALAR)[v.dtype]} {names};")


def _declare_lanes(n: Nest, reductions: Sequence[Let], groups: Sequence[Lanes]) -> None:
    for v in reductions:
        _declare(n, [v], len(groups) if n.vector(v) else 1, vector=n.vector(v))


def _declare_totals(n: Nest, reductions: Sequence[Let], groups: Sequence[Lanes] | None = None) -> None:
    """Doubles: one vector in rows; in lanes one for each group, or a number."""
    for v in reductions:
        wide = groups is None or n.vector(v)
        count = len(groups) if groups is not None and wide else 1
        names = ", ".join(f"{_total(n, v, u)} = {'{}' if wide else '0.'}" for u in range(count))
        n.add(f"{'vd' if wide else 'double'} {names};")


def _accumulate(n: Nest, v: Let, u: int, term: str) -> None:
    acc = _accumulator(n, v, u)
    n.add(f"{acc} = {combine(str(v.attr), acc, term)};")


def _merged(n: Nest, v: Let, unroll: int) -> str:
    """The accumulators of a body in one, pairwise."""
    parts = [_accumulator(n, v, u) for u in range(unroll)]
    while len(parts) > 1:
        parts = [
            f"({combine(str(v.attr), *parts[i : i + 2])})" if i + 1 < len(parts) else parts[i]
            for i in range(0, len(parts), 2)
        ]
    return parts[0]


def _flush(n: Nest, reductions: Sequence[Let], unroll: int) -> None:
    for v in reductions:
        n.add(f"{_total(n, v)} += to_f64({_merged(n, v, unroll)});")
