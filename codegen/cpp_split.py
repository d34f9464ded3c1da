"""Long reductions of little else, cut so that threads can share them.

    y[j] = sum over r of x[r, j]      becomes      part[c, j] = sum over r in chunk c of x[r, j]
                                                   y[j]       = sum over c of part[c, j]

Every stage of the kernel becomes such a pair, later stages load what earlier ones found, and stores end in a plain
pointwise kernel, but for those that need no sum: the first chunks make them on the way.  The chunks depend on sizes only, so the answer does not change with the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from dsc.codegen.cpp_axes import strip, vary, work
from dsc.codegen.cpp_expr import known, product
from dsc.codegen.cpp_schedule import closure, pass_roots, passes, vector_axis
from dsc.codegen.kernel import Axis, Buffer, Index, Kernel, Let, Store, indirect, stages

ROWS = 128
"""Rows of a chunk where the vector axis is parallel."""
RUN = 16384
"""Points of a chunk where it is reduced."""
ENOUGH = 8
"""Rows that keep threads busy without cutting."""
LONG = 65536
"""Points below which a reduction is not worth cutting."""


@dataclass(frozen=True, slots=True)
class Temporary:
    buffer: str
    dtype: str
    size: Index


@dataclass(frozen=True, slots=True)
class Pieces:
    kernels: tuple[Kernel, ...]
    temporaries: tuple[Temporary, ...]


def split(k: Kernel) -> Pieces | None:
    """``k`` in pieces, or None where its own nest does better.  ``k`` is tidy."""
    axis = _cut_axis(k)
    if axis is None:
        return None
    inner = known(product([a.extent for a in k.reduced if a.name != axis.name])) or 1
    columns = vector_axis(k) in {a.name for a in k.parallel}
    return cut(k, axis, max(1, (ROWS if columns else RUN) // inner))


def _cut_axis(k: Kernel) -> Axis | None:
    """The reduce axis to cut in chunks."""
    name = vector_axis(k)
    along = next((a for a in k.axes if a.name == name), None)
    if along is None or not k.reduced:
        return None
    outside = known(product([a.extent for a in k.parallel if a.name != name]))
    total = known(work(k))
    if outside is None or (total is not None and total < LONG):
        return None
    if along.reduce:
        return max(k.reduced, key=lambda a: known(a.extent) or LONG) if outside < ENOUGH else None
    reducing = [p for p in passes(k) if p[0]]
    width = known(along.extent)
    # Several stages over a wide matrix: its blocks of columns stay in cache from stage to stage.
    narrow = width is not None and width <= 256
    tall = known(product([a.extent for a in k.reduced]))
    if outside > 4 or not (narrow or len(reducing) == 1) or (tall is not None and tall < 2 * ROWS):
        return None
    return k.reduced[0]


def cut(k: Kernel, axis: Axis, length: int) -> Pieces:
    """``k`` with its reductions in chunks of ``length`` points of the reduce axis ``axis``."""
    made: list[Kernel] = []
    temporaries: list[Temporary] = []
    found: dict[str, Let] = {}
    points = product([a.extent for a in k.parallel])
    place = _place(k)
    plan = passes(k)
    inside = [i for p in plan for i in p[1]]
    outside = [i for i in range(len(k.stores)) if i not in inside]
    depth = stages(k)
    early = [i for i in inside if depth[k.stores[i].value] == 0 and not indirect(k.stores[i].index, k)]
    inside = [i for i in inside if i not in early]
    last = max(number for number, p in enumerate(plan) if p[0])
    first = min(number for number, p in enumerate(plan) if p[0])
    for number, (reductions, _) in enumerate(plan):
        if not reductions:
            continue
        on_the_way = [k.stores[i] for i in early] if number == first else []
        chunk, block = _chunked(k, axis, length, number, reductions, on_the_way, found, place, points)
        join = _join(k, f"{k.name}_join{number or ''}", reductions, block, place, points)
        found |= {v.name: Let(v.name, "load", (), (f"{v.name}_all", place), v.dtype, v.axes) for v in reductions}
        if number == last and outside:
            join = _finished(k, join, [k.stores[i] for i in outside], found, keep=bool(inside))
        made += [chunk, join]
        temporaries += [Temporary(f"{v.name}_part", v.dtype, block.extent * points) for v in reductions]
        written = {s.buffer for s in join.stores}
        temporaries += [Temporary(a, v.dtype, points) for v in reductions if (a := f"{v.name}_all") in written]
    if inside:
        made.append(_fill(k, inside, found))
    return Pieces(tuple(map(vary, made)), tuple(temporaries))


def _place(k: Kernel) -> Index:
    """Where a point of the parallel axes lies in a temporary."""
    out: Index = sympy.S.Zero
    for a in k.parallel:
        out = out * a.extent + sympy.Symbol(a.name)
    return sympy.expand(out)


def _chunked(
    k: Kernel,
    axis: Axis,
    length: int,
    number: int,
    reductions: list[Let],
    on_the_way: list[Store],
    found: dict[str, Let],
    place: Index,
    points: Index,
) -> tuple[Kernel, Axis]:
    """The kernel that makes the parts of some reductions, and the axis that counts them, as one to reduce."""
    lets, ends = closure(k, [*pass_roots(k, (reductions, [])), *(s.value for s in on_the_way)])
    parts = tuple(Store(f"{v.name}_part", place, v.name) for v in reductions)
    used = [*(found[e] for e in sorted(ends)), *lets, *reductions]
    buffers = tuple(Buffer(f"{v.name}_part", v.dtype, "out") for v in reductions)
    name = f"{k.name}_chunks{number or ''}"
    chunk, block = strip(_with(k, name, used, (*parts, *on_the_way), buffers), axis, length)
    new = {b.name for b in buffers}
    chunk = replace(
        chunk,
        axes=tuple(replace(a, reduce=False) if a.name == block else a for a in chunk.axes),
        stores=tuple(
            Store(s.buffer, sympy.Symbol(block) * points + s.index, s.value) if s.buffer in new else s
            for s in chunk.stores
        ),
    )
    return chunk, replace(next(a for a in chunk.axes if a.name == block), reduce=True)


def _join(k: Kernel, name: str, reductions: list[Let], block: Axis, place: Index, points: Index) -> Kernel:
    lets: list[Let] = []
    stores = []
    buffers = []
    none: frozenset[str] = frozenset()
    for v in reductions:
        part, total = f"{v.name}_p", v.name
        at = sympy.Symbol(block.name) * points + place
        lets.append(Let(part, "load", (), (f"{v.name}_part", at), v.dtype, none))
        if v.dtype == "f32" and v.attr in ("sum", "prod"):
            lets += [
                Let(f"{part}_wide", "cast", (part,), None, "f64", none),
                Let(f"{total}_wide", "reduce", (f"{part}_wide",), v.attr, "f64", none),
                Let(total, "cast", (f"{total}_wide",), None, "f32", none),
            ]
        else:
            lets.append(Let(total, "reduce", (part,), v.attr, v.dtype, none))
        stores.append(Store(f"{v.name}_all", place, total))
        buffers += [Buffer(f"{v.name}_part", v.dtype), Buffer(f"{v.name}_all", v.dtype, "out")]
    return Kernel(name, (*k.parallel, block), tuple(buffers), tuple(lets), tuple(stores))


def _finished(k: Kernel, join: Kernel, stores: list[Store], found: dict[str, Let], *, keep: bool) -> Kernel:
    """The last join, which also makes the stores of ``k`` outside its reduce axes."""
    lets, ends = closure(k, [n for s in stores for n in (s.value, *indirect(s.index, k))])
    own = {v.name for v in join.lets}
    more = [*(found[e] for e in sorted(ends) if e not in own), *lets]
    kept = join.stores if keep else ()
    mine = tuple(b for b in join.buffers if b.role == "in" or keep)
    both = _with(k, join.name, [*join.lets, *more], (*kept, *stores), mine)
    return replace(both, axes=join.axes)


def _fill(k: Kernel, numbers: list[int], found: dict[str, Let]) -> Kernel:
    """Stores along the reduce axes: nothing is reduced any more, so these are axes like others."""
    stores = tuple(k.stores[i] for i in numbers)
    lets, ends = closure(k, [n for s in stores for n in (s.value, *indirect(s.index, k))])
    plain = tuple(replace(a, reduce=False) for a in k.axes)
    return replace(_with(k, f"{k.name}_fill", [*(found[e] for e in sorted(ends)), *lets], stores, ()), axes=plain)


def _with(k: Kernel, name: str, lets: list[Let], stores: tuple[Store, ...], new: tuple[Buffer, ...]) -> Kernel:
    """``k`` with only these values and stores, and the buffers they mention."""
    written = {s.buffer for s in stores}
    loads = [v for v in lets if v.op == "load"]
    read = {v.access[0] for v in loads}
    old = tuple(
        replace(b, role="inout" if b.name in written and b.name in read else "out" if b.name in written else "in")
        for b in k.buffers
        if b.name in read | written
    )
    kept = {b.name for b in (*old, *new)}
    loaded = tuple(Buffer(v.access[0], v.dtype) for v in loads if v.access[0] not in kept)
    return replace(k, name=name, lets=tuple(lets), stores=stores, buffers=(*old, *new, *loaded), origin="")
