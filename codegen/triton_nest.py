"""How a kernel lies on Triton's tiles: order of the axes, which one is contiguous, tile sizes, number of programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from dsc import gemm_tiles
from dsc.codegen.kernel import NBYTES, Axis, Index, Kernel, Let, product
from dsc.codegen.schedule import Schedule
from dsc.codegen.triton_axes import unfolded, without_units
from dsc.codegen.triton_index import bound

PERSISTENT = 16384
"""Most elements of a tile that holds a whole reduction."""
FEW = 8
"""Rows that one thread reduces by itself."""
MANY = 6
"""Buffers whose values fill the registers of a thread."""


@dataclass(frozen=True, slots=True)
class Nest:
    """A kernel without its axes of extent 1, each kind of axis in linear order: the last varies fastest."""

    kernel: Kernel
    parallel: tuple[Axis, ...]
    """The x side of a tile."""
    reduced: tuple[Axis, ...]
    """The r side: the reduce axes, or the parallel axis of a tiled kernel that the x side leaves out."""
    tiled: bool
    """Whether a kernel without reductions has tiles of two sides, as its accesses differ in what is contiguous."""
    x_inner: bool
    """Whether the contiguous side of a tile is the parallel one."""
    wide: bool
    """Whether index arithmetic needs 64 bits."""
    sizes: tuple[str, ...]
    """Those of the kernel as it came: its arguments."""
    batch: tuple[Axis, ...] = ()
    """Of a product: axes along which a program has one point."""
    summed: tuple[Axis, ...] = ()
    """Of a product: the contraction."""

    @property
    def rank(self) -> int:
        return bool(self.parallel) + bool(self.reduced)

    @property
    def xn(self) -> Index:
        return extent(self.parallel)

    @property
    def rn(self) -> Index:
        return extent(self.reduced)

    def persistent(self, schedule: Schedule) -> bool:
        return bool(self.rn <= schedule.RB) if self.rn.is_number else False


def extent(axes: tuple[Axis, ...]) -> Index:
    return sympy.Mul(*(sympy.sympify(a.extent) for a in axes))


def nest(kernel: Kernel) -> Nest:
    sizes = kernel.sizes
    kernel = unfolded(without_units(kernel))
    if (dot := product(kernel)) is not None:
        return _of_product(kernel, dot, sizes)
    accesses = [v.access[1] for v in kernel.lets if v.op == "load"] + [s.index for s in kernel.stores]
    votes = {a.name: sum(_votes(index, a, kernel) for index in accesses) for a in kernel.axes}
    parallel, reduced = _fastest_last(kernel.parallel, votes), _fastest_last(kernel.reduced, votes)
    x_inner = bool(parallel) and bool(reduced) and votes[parallel[-1].name] > votes[reduced[-1].name]
    rivals = () if reduced else tuple(a for a in parallel[:-1] if _rivals(a, parallel[-1], accesses, kernel))[-1:]
    return Nest(
        kernel=kernel,
        parallel=tuple(a for a in parallel if a not in rivals),
        reduced=reduced or rivals,
        tiled=bool(rivals),
        x_inner=x_inner,
        wide=_wide(kernel),
        sizes=sizes,
    )


def _of_product(kernel: Kernel, dot: Let, sizes: tuple[str, ...]) -> Nest:
    """Rows on the x side, columns on the r side of a tile, as they lie in memory."""
    left, right = (next(v.axes for v in kernel.lets if v.name == name) for name in dot.args)
    both = left & right
    return Nest(
        kernel=kernel,
        parallel=tuple(a for a in kernel.parallel if a.name in left - both),
        reduced=tuple(a for a in kernel.parallel if a.name in right - both),
        tiled=True,
        x_inner=False,
        wide=_wide(kernel),
        sizes=sizes,
        batch=tuple(a for a in kernel.parallel if a.name in both or a.name not in left | right),
        summed=kernel.reduced,
    )


def _rivals(a: Axis, fastest: Axis, accesses: list[Index], kernel: Kernel) -> bool:
    """Whether some access of two axes or more is contiguous along ``a``, another along ``fastest``, and both are long."""
    if any(e.is_number and e < 16 for e in map(sympy.sympify, (a.extent, fastest.extent))):
        return False
    return all(any(_votes(index, axis, kernel) > 1 for index in accesses) for axis in (a, fastest))


def _votes(index: Index, axis: Axis, kernel: Kernel) -> int:
    """How much an access wants ``axis`` to be the contiguous one: the number of its axes, or 0."""
    index = sympy.sympify(index)
    names = {a.name for a in kernel.axes}
    mine = [s for s in index.free_symbols if s.name == axis.name]
    if not mine or sympy.expand(index.xreplace({mine[0]: mine[0] + 1}) - index) != 1:
        return 0
    return sum(s.name in names for s in index.free_symbols)


def _fastest_last(axes: tuple[Axis, ...], votes: Mapping[str, int]) -> tuple[Axis, ...]:
    if len(axes) < 2:
        return axes
    best = max(range(len(axes)), key=lambda i: (votes[axes[i].name], i))
    return (*axes[:best], *axes[best + 1 :], axes[best])


def _wide(kernel: Kernel) -> bool:
    """Whether an index or a linear number of points may leave 31 bits; sizes that are not known may."""
    extents = {v.name: 1 for v in kernel.lets}  # values are i64: what is multiplied by them is, too
    for a in kernel.axes:
        if not sympy.sympify(a.extent).is_number:
            return True
        extents[a.name] = int(a.extent)
    counts = [extent(kernel.parallel), extent(kernel.reduced)]
    bounds = [bound(sympy.sympify(e), extents) for e in (*counts, *kernel.expressions())]
    # a tile may overshoot by its own size
    return any(b is None or b + PERSISTENT >= 2**31 for b in bounds)


def default_schedule(kernel: Kernel, *, interpreter: bool = False) -> Schedule:
    """Tiles by rule of thumb for a GPU, or wide ones for the interpreter, which takes its time by program.

    1. no reduction: 1024 points, 4 warps
    2. none, but accesses that differ in the contiguous axis: tiles of 64 by 32, so that both read whole lines
    3. a row fits a tile and is its contiguous side: as many whole rows as make 2048 points
    4. rows whose columns are summed too: 16 points a thread, so that enough loads are under way, and 4 of a row
    5. it fits, but the parallel side is contiguous: at least 128 bytes of columns, so that a warp reads whole lines
    6. it does not fit: loop, with 2048 points in a tile

    A thread gets 16 points, 8 in a kernel of many buffers, which would run out of registers.  Where columns of a few
    rows are reduced it gets whole columns, as many as it can store at once.
    """
    n = nest(kernel)
    if n.summed:
        return product_schedule(n)
    budget = 65536 if interpreter else 2048
    if any(v.op == "collect" for v in kernel.lets):
        rb = _fit(n.rn, PERSISTENT)
        warps = max(1, min(16, rb // 128))
        return Schedule(max(1, 512 * warps // rb), rb, warps)
    if not n.reduced:
        xb = _fit(n.xn, 65536 if interpreter else 1024)
        return Schedule(xb, 1, max(1, min(4, xb // 256)))
    if n.tiled:
        xb, rb = _fit(n.xn, budget // 32), _fit(n.rn, 32)
        return Schedule(xb, rb, max(1, min(4, xb * rb // 256)))
    narrowest = max(2, min(NBYTES[b.dtype] for b in kernel.buffers))
    least = 128 // narrowest if n.x_inner else 1
    rb = _fit(n.rn, PERSISTENT // _fit(n.xn, least))
    if not (n.rn.is_number and n.rn <= rb):
        rb = min(rb, 64 if n.x_inner else 2048)
    xb = _fit(n.xn, max(least, budget // rb))
    if n.x_inner and rb <= FEW and n.rn.is_number:
        xb = _fit(n.xn, max(512, xb))
        return Schedule(xb, rb, max(1, min(4, xb * narrowest // 512)))
    points = 256 if len(kernel.buffers) > MANY else 512
    return Schedule(xb, rb, max(1, min(16, xb * rb // points)))


def product_schedule(n: Nest) -> Schedule:
    """The tile that the model ranks first."""
    dot = product(n.kernel)
    assert dot is not None
    batch, rows, columns, k = (int(e) if e.is_number else None for e in (extent(n.batch), n.xn, n.rn, extent(n.summed)))
    form = str(dot.attr)
    if cuttable(n):
        assert batch is not None and rows is not None and columns is not None and k is not None  # it has no sizes
        tile, parts = gemm_tiles.chosen(batch, rows, columns, k, form, longest(n), draws(n.kernel))
        return with_tile(tile, parts)
    return with_tile(gemm_tiles.best(batch, rows, columns, form, rows_computed(n), draws(n.kernel)))


def draws(kernel: Kernel) -> bool:
    """Whether random numbers are drawn in a kernel."""
    return any(v.op == "random" for v in kernel.lets)


def longest(n: Nest) -> int:
    """Of the axes of a contraction, which is the one to be cut."""
    return max(int(a.extent) for a in n.summed)


def cuttable(n: Nest) -> bool:
    """Whether a product's contraction may be cut: nothing else is computed of its rows, summed, checked or kept along it."""
    kernel = n.kernel
    if kernel.sizes or rows_computed(n) or any(v.op in ("reduce", "collect", "check", "peak") for v in kernel.lets):
        return False
    summed = {a.name for a in kernel.reduced}
    if any(summed & {str(x) for x in sympy.sympify(s.index).free_symbols} for s in kernel.stores):
        return False
    return all(b.role != "inout" for b in kernel.buffers)


def rows_computed(n: Nest) -> bool:
    """Whether a product's left operand is not simply loaded."""
    dot = product(n.kernel)
    return dot is not None and any(v.name == dot.args[0] and v.op != "load" for v in n.kernel.lets)


def with_tile(t: gemm_tiles.Tile, parts: int = 1) -> Schedule:
    return Schedule(t.m, t.n, num_warps=t.warps, num_stages=t.stages, KB=t.k, parts=parts if parts > 1 else 0)


def _fit(n: Index, most: int) -> int:
    """The least power of two that is at least ``n``, or ``most``."""
    if not n.is_number:
        return most
    return min(most, 1 << max(0, int(n) - 1).bit_length())


def grid(kernel: Kernel, schedule: Schedule, sizes: Mapping[str, int]) -> int:
    """Number of programs; 0 where there is nothing to compute."""
    if schedule.programs or schedule.streams:
        return schedule.programs or schedule.streams
    n = nest(kernel)
    programs = -(-evaluate(n.xn, sizes) // schedule.XB) * evaluate(extent(n.batch), sizes)
    return programs * -(-evaluate(n.rn, sizes) // schedule.RB) if n.tiled else programs


def evaluate(e: Index, sizes: Mapping[str, int]) -> int:
    e = sympy.sympify(e)
    return int(e.xreplace({s: sympy.Integer(sizes[s.name]) for s in e.free_symbols}))


def tiles(kernel: Kernel, schedule: Schedule) -> dict[str, int]:
    """The constexpr arguments of the kernel."""
    n = nest(kernel)
    sides = {"XB": (n.parallel, schedule.XB), "RB": (n.reduced, schedule.RB), "KB": (n.summed, schedule.KB)}
    return {name: size for name, (axes, size) in sides.items() if axes}
