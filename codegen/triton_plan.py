"""How a kernel is launched on a GPU: whole, or as chunks and a join where a reduction has too few rows to fill it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy

from dsc.codegen import triton_columns, triton_split, triton_stream
from dsc.codegen.cpp_split import Temporary, cut
from dsc.codegen.kernel import Axis, Kernel, stages
from dsc.codegen.schedule import Schedule
from dsc.codegen.triton import emit
from dsc.codegen.triton_axes import without_units
from dsc.codegen.triton_nest import default_schedule, grid, nest

PROGRAMS = 128
"""So many programs keep a GPU busy (an A100 has 108 multiprocessors, an H100 132)."""
WORTH = 1 << 17
"""Points below which one launch is quicker than two, however few its programs."""
LEAST_ROWS, LEAST_RUN = 32, 2048
"""The shortest chunks: rows of a reduction over columns, points of one along them."""
INTERPRETED = 4
"""Programs that walk rows in the interpreter."""


@dataclass(frozen=True, slots=True)
class Part:
    """One launch."""

    kernel: Kernel
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of a kernel, one after the other, and what they hand on in memory."""

    kernel: Kernel
    parts: tuple[Part, ...]
    temporaries: tuple[Temporary, ...] = ()
    whole: Part | None = None
    """Of a product whose contraction is cut: the product, with the schedule that says so."""

    @property
    def choices(self) -> tuple[Part, ...]:
        """What has a schedule of its own: the launches, of which a product and its pieces are one."""
        return self.parts if self.whole is None else (self.whole, *self.parts[1:])

    def with_schedules(self, chosen: Mapping[str, Schedule]) -> Plan:
        """With other schedules for the launched kernels that ``chosen`` names."""
        own = chosen.get(self.kernel.name)
        made = of_product(self.kernel, own) if own is not None and own.KB else self
        parts = (replace(p, schedule=chosen.get(p.kernel.name, p.schedule)) for p in made.parts)
        return replace(made, parts=tuple(parts)) if chosen else made


def plan(kernel: Kernel, *, interpreter: bool = False) -> Plan:
    """One launch, or two where all of these hold; the second adds up the chunks in order, the same on every run.

    1. Every reduction of the kernel is made in one pass, and no value along the reduce axes needs it.
    2. The programs of one launch would leave most of a GPU idle, and it is not small.
    3. Sizes are numbers, and a reduce axis divides into equal chunks.

    A product is two launches where its contraction is in parts (``triton_split``, ``triton_stream``).
    A kernel that sums over rows too is two launches by itself (see ``triton_columns``).
    On a GPU checks are assertions: a flag would have to be waited for.
    """
    if triton_columns.collected(kernel):
        return _columns(kernel, interpreter)
    schedule = default_schedule(kernel, interpreter=interpreter)
    if schedule.KB:
        return of_product(kernel, schedule)
    chosen = _chunks(kernel)
    if chosen is None:
        return Plan(kernel, (Part(kernel, replace(schedule, asserts=kernel.checks and not interpreter)),))
    pieces = cut(without_units(kernel), *chosen)
    first, *rest = (_named(k, kernel) for k in pieces.kernels)
    first = replace(first, origin=kernel.origin)
    rest = [replace(k, origin=f"the chunks of {first.name}, added up") for k in rest]
    parts = tuple(Part(k, default_schedule(k, interpreter=interpreter)) for k in (first, *rest))
    return Plan(kernel, parts, pieces.temporaries)


def of_product(kernel: Kernel, schedule: Schedule) -> Plan:
    """With a schedule of the whole, which may cut its contraction."""
    if not schedule.parts:
        return Plan(kernel, (Part(kernel, schedule),))
    pieces = triton_stream.cut(kernel, schedule) if schedule.streams else triton_split.cut(kernel, schedule.parts)
    first, join = (_named(k, kernel) for k in pieces.kernels)
    parts = (Part(first, replace(schedule, parts=0)), Part(join, default_schedule(join)))
    return Plan(kernel, parts, pieces.temporaries, Part(kernel, schedule))


def launched(kernel: Kernel, schedule: Schedule) -> Part:
    """What runs the loop of a kernel with a schedule: itself, or the pieces of its contraction."""
    return of_product(kernel, schedule).parts[0] if schedule.parts else Part(kernel, schedule)


def source(kernel: Kernel, schedule: Schedule) -> str:
    """Triton of ``launched``."""
    part = launched(kernel, schedule)
    return emit(part.kernel, part.schedule)


def _columns(kernel: Kernel, interpreter: bool) -> Plan:
    bare = without_units(kernel)
    count = triton_columns.programs(bare, default_schedule(kernel).XB)
    count = min(count, INTERPRETED) if interpreter else count
    pieces = triton_columns.cut(bare, count)
    rows, join = pieces.kernels
    schedule = default_schedule(rows, interpreter=interpreter)
    schedule = replace(schedule, programs=count, asserts=rows.checks and not interpreter)
    rows = replace(rows, origin=kernel.origin)
    join = replace(join, origin=f"the sums of {rows.name}, added up")
    return Plan(
        kernel, (Part(rows, schedule), Part(join, default_schedule(join, interpreter=interpreter))), pieces.temporaries
    )


def _chunks(kernel: Kernel) -> tuple[Axis, int] | None:
    """The reduce axis to cut, and the length of a chunk."""
    n = nest(kernel)
    if not n.reduced or n.tiled or kernel.checks or kernel.sizes:
        return None
    level, along = stages(kernel), {a.name for a in n.kernel.reduced}
    needs = [level[s.value] for s in n.kernel.stores if along & {x.name for x in sympy.sympify(s.index).free_symbols}]
    if max(level.values(), default=0) != 1 or any(needs):
        return None
    if any(b.role == "inout" for b in kernel.buffers):
        return None
    schedule = default_schedule(kernel)
    programs, points = grid(kernel, schedule, {}), int(n.xn * n.rn)
    if programs >= PROGRAMS or points < WORTH:
        return None
    reduced = without_units(kernel).reduced
    axis = max(reduced, key=lambda a: int(a.extent))
    extent = int(axis.extent)
    inner = int(n.rn) // extent
    least = -(-(LEAST_ROWS if n.x_inner else LEAST_RUN) // inner)
    wanted = max(least, -(-extent * programs // (2 * PROGRAMS)))
    length = next((d for d in range(wanted, extent // 2 + 1) if extent % d == 0), None)
    return (axis, length) if length is not None else None


def _named(piece: Kernel, whole: Kernel) -> Kernel:
    """Buffers in the order of the whole kernel, what is new after them."""
    order = {b.name: i for i, b in enumerate(whole.buffers)}
    return replace(piece, buffers=tuple(sorted(piece.buffers, key=lambda b: order.get(b.name, len(order)))))
