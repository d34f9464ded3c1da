"""Kernels that reduce rows and also sum over all rows, such as the backward of a norm with its parameters.

    y[i, j] = ... reduce over j ...;   w[j] = round(collect over i of x[i, j])

becomes two launches.  In the first a program walks rows and adds what it met of ``x`` in registers, a column each, to
leave one row of sums; the second adds up the rows of all programs, in order, and makes what follows from the sums.
The buffers are read once, and the answer is the same on every run.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from dsc.codegen.cpp_axes import vary
from dsc.codegen.cpp_split import Pieces, Temporary
from dsc.codegen.kernel import NBYTES, Axis, Buffer, Index, Kernel, Let, Store, indirect

SHARE = 0.03
"""Of the kernel's traffic: what the rows of sums may add to it, unless too few programs were left."""
MOST, LEAST = 256, 128
"""Programs that walk the rows."""


def collected(kernel: Kernel) -> list[Let]:
    """Values that sum over all rows."""
    return [v for v in kernel.lets if v.op == "collect"]


def late(kernel: Kernel) -> frozenset[str]:
    """Values that need such a sum, and the sums."""
    out: set[str] = set()
    for v in kernel.lets:
        if v.op == "collect" or out & {*v.args}:
            out.add(v.name)
    return frozenset(out)


def programs(kernel: Kernel, tile: int) -> int:
    """How many programs walk the rows, ``tile`` at a time: a power of two, with two tiles for each if there are."""
    row = int(row_length(kernel))
    rows = sympy.Mul(*(sympy.sympify(a.extent) for a in kernel.parallel))
    if not rows.is_number:
        return MOST
    whole = sum(NBYTES[b.dtype] for b in kernel.buffers if _by_point(kernel, b)) * row * int(rows)
    each = 2 * len(collected(kernel)) * row * NBYTES["f32"]
    count = MOST
    while count > LEAST and count * each > SHARE * whole:
        count //= 2
    while count > 1 and 2 * count * tile > int(rows):
        count //= 2
    return count


def row_length(kernel: Kernel) -> Index:
    return sympy.Mul(*(sympy.sympify(a.extent) for a in kernel.reduced))


def cut(kernel: Kernel, count: int) -> Pieces:
    """The two launches, with ``count`` programs in the first.  ``kernel`` has no axes of extent 1."""
    sums, after = collected(kernel), late(kernel)
    place: Index = sympy.S.Zero
    for a in kernel.reduced:
        place = place * a.extent + sympy.Symbol(a.name, integer=True, nonnegative=True)
    place = sympy.expand(place)
    ends = [s for s in kernel.stores if s.value in after]
    rows = [s for s in kernel.stores if s.value not in after]
    parts = tuple(Store(f"{v.name}_part", place, v.name) for v in sums)
    made = tuple(Buffer(f"{v.name}_part", v.dtype, "out") for v in sums)
    first = _with(kernel, f"{kernel.name}_rows", [*rows, *parts], made, kernel.lets, kernel.axes)
    block = Axis("program", sympy.Integer(count), reduce=True)
    at = sympy.Symbol("program", integer=True, nonnegative=True) * row_length(kernel) + place
    none: frozenset[str] = frozenset()
    joined: list[Let] = []
    for v in sums:
        joined.append(Let(f"{v.name}_p", "load", (), (f"{v.name}_part", at), v.dtype, none))
        joined.append(Let(v.name, "reduce", (f"{v.name}_p",), v.attr, v.dtype, none))
    lets = [*joined, *(v for v in kernel.lets if v.op != "collect")]
    plain = tuple(replace(a, reduce=False) for a in kernel.reduced)
    read = tuple(replace(b, role="in") for b in made)
    second = _with(kernel, f"{kernel.name}_join", ends, read, lets, (block, *plain))
    size = sympy.Integer(count) * row_length(kernel)
    return Pieces((first, vary(second)), tuple(Temporary(f"{v.name}_part", v.dtype, size) for v in sums))


def _with(
    kernel: Kernel, name: str, stores: list[Store], new: tuple[Buffer, ...], lets: tuple[Let, ...] | list[Let],
    axes: tuple[Axis, ...],
) -> Kernel:  # fmt: skip
    """``kernel`` with these stores and what they need of ``lets``; every check stays with the first piece."""
    whole = replace(kernel, name=name, lets=tuple(lets), stores=tuple(stores), axes=axes)
    names = [n for s in stores for n in (s.value, *indirect(s.index, whole))]
    wanted = set(names)
    kept = []
    for v in reversed(whole.lets):
        if v.name in wanted or (v.op == "check" and axes == kernel.axes):
            kept.append(v)
            wanted.update(v.args)
            wanted.update(indirect(v.access[1], whole) if v.op == "load" else ())
    kept.reverse()
    written = {s.buffer for s in stores}
    loaded = {v.access[0] for v in kept if v.op == "load"}
    old = tuple(b for b in kernel.buffers if b.name in written | loaded)
    added = tuple(b for b in new if b.name in written | loaded)
    return replace(whole, lets=tuple(kept), buffers=(*old, *added))


def _by_point(kernel: Kernel, b: Buffer) -> bool:
    """Whether the kernel reads or writes the buffer at every point, not once a row or a column."""
    indices = [v.access[1] for v in kernel.lets if v.op == "load" and v.access[0] == b.name]
    indices += [s.index for s in kernel.stores if s.buffer == b.name]
    row, across = {a.name for a in kernel.reduced}, {a.name for a in kernel.parallel}
    names = [{s.name for s in sympy.sympify(e).free_symbols} for e in indices]
    return any(n & row and n & across for n in names)
