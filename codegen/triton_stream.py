"""Skinny products, of which programs share all steps of all tiles evenly (stream-K): none waits for a last, partly filled wave.

    steps of a program   [p * total / S, (p + 1) * total / S)   of tiles one after the other, each of them in K / KB steps

A program so has the end of a tile, whole ones perhaps, and the beginning of another.  The sums of each piece of a tile are
fp32, in memory; pieces that a tile has less than others are zeros.  The second launch is that of ``triton_split``: it adds
them in order, the same on every run, and makes what follows from the product.

Source: Osama, Merrill et al., "Stream-K: work-centric parallel decomposition for dense matrix-matrix multiplication on the
GPU", PPoPP 2023, section 4; there a program waits for its neighbours' sums instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsc.codegen import triton_dot
from dsc.codegen.cpp_axes import vary
from dsc.codegen.cpp_split import Pieces
from dsc.codegen.kernel import Buffer, Kernel, Store, product
from dsc.codegen.schedule import Schedule
from dsc.codegen.triton_axes import without_units
from dsc.codegen.triton_index import text
from dsc.codegen.triton_nest import evaluate, extent, nest
from dsc.codegen.triton_split import joined, only

if TYPE_CHECKING:
    from dsc.codegen.triton import Emitter


@dataclass(frozen=True, slots=True)
class Share:
    """How the steps of a product fall on programs."""

    programs: int
    steps: int
    """Of a tile."""
    tiles: int

    @property
    def total(self) -> int:
        return self.steps * self.tiles

    @property
    def longest(self) -> int:
        """Most steps of a program."""
        return -(-self.total // self.programs)

    def start(self, program: int) -> int:
        return program * self.total // self.programs

    @property
    def segments(self) -> int:
        """Most tiles of which a program has steps."""
        spans = ((self.start(p), self.start(p + 1)) for p in range(self.programs))
        return max((end - 1) // self.steps - first // self.steps + 1 for first, end in spans if end > first)

    @property
    def pieces(self) -> int:
        """Most programs that have steps of one tile."""
        spans = ((t * self.steps, (t + 1) * self.steps - 1) for t in range(self.tiles))
        return max(self.program(last) - self.program(first) + 1 for first, last in spans)

    def program(self, step: int) -> int:
        """That has a step."""
        return ((step + 1) * self.programs - 1) // self.total


def share(kernel: Kernel, s: Schedule, programs: int) -> Share:
    """Of a kernel whose sizes are numbers; every program is to have a step."""
    n = nest(kernel)
    batch, m, columns, k = (evaluate(e, {}) for e in (extent(n.batch), n.xn, n.rn, extent(n.summed)))
    return Share(programs, -(-k // s.KB), batch * -(-m // s.XB) * -(-columns // s.RB))


def cut(kernel: Kernel, schedule: Schedule) -> Pieces:
    """The two launches; the first is to be emitted with its ``streams``."""
    bare = without_units(kernel)
    dot = product(bare)
    assert dot is not None
    buffer = f"{dot.name}_part"
    second, temporary, place = joined(kernel, bare, schedule.parts)
    store = Store(buffer, place, dot.name)
    first = only(bare, f"{kernel.name}_steps", bare.lets, (store,), Buffer(buffer, "f32", "out"))
    return Pieces((vary(replace(first, origin=kernel.origin)), second), (temporary,))


def body(c: Emitter) -> None:
    """Writes the lines of the first launch with ``c``, the emitter of rows by columns."""
    n, s, v, dot = c.n, c.schedule, c.values, product(c.n.kernel)
    assert dot is not None
    (store,) = n.kernel.stores
    a, b = triton_dot.sides(c)
    h = share(n.kernel, s, s.streams)
    program = c.start()
    names = ("step", "end", "segment", "tile", "first", "last", "piece", "row", "column", "more")
    step, end, segment, tile, first, last, piece, row, column, more = map(v.fresh, names)
    points = text(extent((*n.batch, *n.parallel, *n.reduced)))
    c.w(f"{v.program} = {program}")
    c.w(f"{step} = {v.program} * {h.total} // {h.programs}")
    c.w(f"{end} = ({v.program} + 1) * {h.total} // {h.programs}")
    c.w(f"for {segment} in range(0, {h.segments}):")
    c.depth += 1
    c.w(f"{tile} = {step} // {h.steps}")
    c.w(f"{first} = {step} % {h.steps}")
    c.w(f"{last} = tl.minimum({h.steps}, {first} + {end} - {step})")
    c.w(f"{piece} = {v.program} - (({tile} * {h.steps} + 1) * {h.programs} - 1) // {h.total}")
    triton_dot.find(c, tile, row, column)
    a.depth = b.depth = c.depth
    triton_dot.spread(c, "x", f"{row} * XB")
    triton_dot.spread(c, "r", f"{column} * RB")
    done: set[str] = set()
    triton_dot.rows(a, [dot.args[0]], done)
    triton_dot.before(b, dot.args[1], done)
    triton_dot.loop(a, b, c, dot, done, [], "", {}, None, f"{first} * KB, {last} * KB")
    masks = [*v.masks(v.along(store.index)), f"({last} > {first})"]
    place = v.place(store.buffer, store.index)
    c.w(f"tl.store({place} + {piece} * {points}, {dot.name}, mask={' & '.join(masks)})")
    c.w(f"if ({last} == {h.steps}) & ({last} > {first}):")
    c.depth += 1
    c.w(f"for {more} in range({piece} + 1, {h.pieces}):")
    c.depth += 1
    masks = masks[:-1]
    mask = f", mask={' & '.join(masks)}" if masks else ""
    c.w(f"tl.store({place} + {more} * {points}, tl.full([XB, RB], 0.0, tl.float32){mask})")
    c.depth -= 2
    c.w(f"{step} += {last} - {first}")
    c.drop_unread_axes()
