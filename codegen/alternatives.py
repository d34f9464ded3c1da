"""Other schedules for a kernel of the IR than the default one, and what a launch with each has to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy

from dsc.codegen import product_schedules, roofline
from dsc.codegen.candidates import Choice, Code, choose, short_list
from dsc.codegen.kernel import NBYTES, Kernel
from dsc.codegen.roofline import Work
from dsc.codegen.schedule import Schedule
from dsc.codegen.triton_nest import evaluate, grid, nest
from dsc.target import Target

WARPS = 16
"""The most that are tried."""
TILE = 32768
"""The most elements of a tile that are tried."""


def alternatives(kernel: Kernel, default: Schedule, target: Target | None = None) -> tuple[Schedule, ...]:
    """The default first, then at most five neighbours of it: twice and half the warps, the tile, and both.

    1. A reduction that fits a tile also loops over half of it; one that loops takes longer and shorter steps.
    2. A kernel that walks rows (``programs``) keeps its programs and whole rows: other launches depend on them.
    3. Kernels whose sizes are not known yet have the default alone.
    4. For a ``target``, what its GPU can do.  Products have tiles of their own (``dsc.codegen.product_schedules``).
    """
    if kernel.sizes:
        return (default,)
    if default.KB:
        return product_schedules.schedules(kernel, default, target)
    d, n = default, nest(kernel)
    twice, half = d.num_warps * 2, d.num_warps // 2
    moves = [
        replace(d, num_warps=twice),
        replace(d, num_warps=half),
        replace(d, XB=d.XB * 2, num_warps=twice),
        replace(d, XB=d.XB // 2, num_warps=max(half, 1)),
        replace(d, XB=d.XB * 2),
    ]
    loops = bool(n.reduced) and not n.tiled and not n.persistent(d)
    if n.tiled or loops:
        moves[:0] = [replace(d, RB=d.RB * 2), replace(d, RB=d.RB // 2), replace(d, RB=d.RB * 4, num_warps=twice)]
    elif n.reduced and not d.programs and int(n.rn) > 1024:
        moves.insert(2, replace(d, RB=d.RB // 2, XB=d.XB))
    return short_list(d, [s for s in moves if _sensible(s)])


def _sensible(s: Schedule) -> bool:
    """Every thread has a point, and no tile is huge."""
    points = s.XB * s.RB
    return min(s.XB, s.RB, s.num_warps) >= 1 and s.num_warps <= WARPS and 32 * s.num_warps <= points <= TILE


def modelled(
    kernel: Kernel, default: Schedule, target: Target, compiled: Mapping[Schedule, Code | str]
) -> Choice[Schedule]:
    """The choice among the ``alternatives``, compiled for ``target``."""

    def seconds(s: Schedule, c: Code) -> float:
        if s.KB:
            return product_schedules.seconds(kernel, s, c, target, sum(traffic(kernel).values()))
        return roofline.seconds(work(kernel, s, c), c, target)

    return choose(kernel.name, target.name, default, compiled, seconds)


LOW = 0.25
"""Share of a multiprocessor's warps below which a kernel may not keep the memory busy."""


def troubled(code: Code) -> bool:
    """Whether a default schedule came out so badly that others are worth their compilation unasked."""
    return code.spilled > 0 or (code.occupancy < LOW and not code.tensor)  # a tile of a product is large on purpose


def work(kernel: Kernel, schedule: Schedule, code: Code) -> Work:
    """Of one launch of a kernel whose sizes are numbers."""
    n = nest(kernel)
    moved = traffic(kernel)
    programs = grid(kernel, schedule, {})
    if schedule.programs:
        loops = -(-evaluate(n.xn, {}) // (programs * schedule.XB))
        return Work(programs, loops, loops, sum(moved.values()))
    if not n.reduced or n.tiled or n.persistent(schedule):
        return Work(programs, 1, 1, sum(moved.values()))
    loops, passes = -(-evaluate(n.rn, {}) // schedule.RB), max(code.passes.values(), default=1)
    again = sum((code.passes.get(name, 1) - 1) * count for name, count in moved.items())
    return Work(programs, loops, loops * passes, sum(moved.values()), again)


def traffic(kernel: Kernel) -> dict[str, int]:
    """Bytes of each buffer that a launch touches, by the axes that its indices vary with; tables count by what is read."""
    extents = {a.name: evaluate(a.extent, {}) for a in kernel.axes}
    along = {v.name: v.axes for v in kernel.lets}
    out: dict[str, int] = {}
    accesses = [v.access for v in kernel.lets if v.op == "load"] + [(s.buffer, s.index) for s in kernel.stores]
    for name, index in accesses:
        axes: set[str] = set()
        for s in sympy.sympify(index).free_symbols:
            axes |= {s.name} if s.name in extents else set(along.get(s.name, ()))
        points = 1
        for a in axes & set(extents):
            points *= extents[a]
        out[name] = max(out.get(name, 0), points * NBYTES[kernel.buffer(name).dtype])
    return out
