"""Products of few tiles and a long contraction, cut so that all multiprocessors have work (split-K).

    c[i, j] = sum over k of a[i, k] b[k, j]     becomes     part[s, i, j] = sum over k in piece s of a[i, k] b[k, j]
                                                            c[i, j]       = sum over s of part[s, i, j]

The pieces are a product with one more axis of a batch; their sums are fp32, in memory.  The second launch adds them in
order, the same on every run, and makes what follows from the product.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from dsc.codegen.cpp_axes import strip, vary
from dsc.codegen.cpp_split import Pieces, Temporary
from dsc.codegen.kernel import Axis, Buffer, Index, Kernel, Let, Store, indirect, product
from dsc.codegen.triton_axes import without_units


def cut(kernel: Kernel, count: int) -> Pieces:
    """The two launches, with the longest axis of the contraction in ``count`` equal pieces."""
    bare = without_units(kernel)
    dot = product(bare)
    assert dot is not None
    axis = max(bare.reduced, key=lambda a: int(a.extent))
    second, temporary, place = joined(kernel, bare, count)
    cut_up, block = strip(bare, axis, int(axis.extent) // count)
    points = sympy.Mul(*(sympy.sympify(a.extent) for a in bare.parallel))
    store = Store(temporary.buffer, sympy.Symbol(block) * points + place, dot.name)
    first = only(cut_up, f"{kernel.name}_parts", cut_up.lets, (store,), Buffer(temporary.buffer, "f32", "out"))
    (counted,) = (a for a in first.axes if a.name == block)
    order = (replace(counted, reduce=False), *(a for a in first.axes if a is not counted))
    return Pieces((vary(replace(first, axes=order, origin=kernel.origin)), second), (temporary,))


def joined(kernel: Kernel, bare: Kernel, count: int) -> tuple[Kernel, Temporary, Index]:
    """The second launch, for ``count`` pieces of each sum; what they lie in, and where a point lies in a piece."""
    dot = product(bare)
    assert dot is not None
    place: Index = sympy.S.Zero
    for a in bare.parallel:
        place = place * a.extent + sympy.Symbol(a.name)
    place = sympy.expand(place)
    points = sympy.Mul(*(sympy.sympify(a.extent) for a in bare.parallel))
    buffer, block = f"{dot.name}_part", "piece"
    while block in {*(a.name for a in bare.axes), *(v.name for v in bare.lets)}:
        block += "_"
    at = sympy.Symbol(block) * points + place
    none: frozenset[str] = frozenset()
    load = Let(f"{dot.name}_p", "load", (), (buffer, at), "f32", none)
    total = Let(dot.name, "reduce", (load.name,), "sum", "f32", none)
    lets = [x for v in bare.lets for x in ((load, total) if v is dot else (v,))]
    whole = replace(bare, axes=(*bare.parallel, Axis(block, sympy.Integer(count), reduce=True)))
    second = only(whole, f"{kernel.name}_join", tuple(lets), bare.stores, Buffer(buffer, "f32"))
    origin = f"the pieces of {kernel.name}, added up, and what follows"
    return vary(replace(second, origin=origin)), Temporary(buffer, "f32", sympy.Integer(count) * points), place


def only(kernel: Kernel, name: str, lets: tuple[Let, ...], stores: tuple[Store, ...], new: Buffer) -> Kernel:
    """``kernel`` with these stores, what they need of ``lets``, and the buffers that those mention."""
    known = replace(kernel, lets=lets)
    wanted = {n for s in stores for n in (s.value, *indirect(s.index, known))}
    kept: list[Let] = []
    for v in reversed(lets):
        if v.name in wanted:
            kept.append(v)
            wanted.update(v.args)
            wanted.update(indirect(v.access[1], known) if v.op == "load" else ())
    kept.reverse()
    touched = {s.buffer for s in stores} | {v.access[0] for v in kept if v.op == "load"}
    buffers = (*(b for b in kernel.buffers if b.name in touched), new)
    return replace(kernel, name=name, lets=tuple(kept), stores=stores, buffers=buffers)
