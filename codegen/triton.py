"""Kernel IR to Triton: readable, stand-alone source of one kernel.

The parallel axes are one linear range, cut into tiles of ``XB`` points, a program each; the reduce axes are another,
cut into tiles of ``RB``.  (A transposing kernel, without reductions, has one of its parallel axes there.)  A value has the shape of the axes with which it varies, so what is the same along a row is
computed once for the row.  If ``RB`` holds the whole reduction the kernel is straight-line code; else it loops over it
once for each stage (see ``stages``), and once more for the stores that need the last.  Where sums run over rows too, a
program walks many tiles of whole rows and leaves one row of sums.

Arguments: buffers, sizes, ``fail`` if the kernel has checks that set a flag (int32, to 1 when one fails), then the
tile sizes.
Within a program all loads of an ``inout`` buffer come before its stores.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import sympy

from dsc.codegen import triton_dot, triton_stream
from dsc.codegen.kernel import Index, Kernel, Let, Store, stages
from dsc.codegen.schedule import Schedule
from dsc.codegen.triton_index import text
from dsc.codegen.triton_math import helpers
from dsc.codegen.triton_nest import Nest, default_schedule, grid, nest, tiles
from dsc.codegen.triton_value import TYPES, Values, grouped

__all__ = ["Schedule", "default_schedule", "emit", "grid", "tiles"]


def emit(kernel: Kernel, schedule: Schedule | None = None) -> str:
    schedule = schedule or default_schedule(kernel)
    n = nest(kernel)
    e = Emitter(n, schedule, Values(n, schedule))
    if n.summed and schedule.streams:
        triton_stream.body(e)
    elif n.summed:
        triton_dot.body(e)
    else:
        e.body()
    lines = ["import triton", "import triton.language as tl", ""]
    lines += [source.rstrip("\n") + "\n" for source in helpers(e.values.used)]
    lines += ["", *(f"# {line}".rstrip() for line in kernel.origin.splitlines()), "@triton.jit"]
    lines += [f"def {kernel.name}({', '.join(e.arguments())}):", *e.lines]
    return "\n".join(lines) + "\n"


@dataclass
class Emitter:
    n: Nest
    schedule: Schedule
    values: Values
    lines: list[str] = field(default_factory=list)
    depth: int = 1

    def arguments(self) -> Iterable[str]:
        k = self.n.kernel
        yield from (b.name for b in k.buffers)
        yield from self.n.sizes
        if k.checks and not self.schedule.asserts:
            yield self.values.fail
        yield from (f"{name}: tl.constexpr" for name in tiles(k, self.schedule))

    def w(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    # -- the frame

    def body(self) -> None:
        n, v, program = self.n, self.values, self.start()
        if self.schedule.programs:
            self.columns(self.live(), program)
            self.drop_unread_axes()
            return
        if n.tiled:
            across = f"(({text(n.rn)} + RB - 1) // RB)"
            self.w(f"{v.x} = {program} // {across} * XB + {v.arange('x')}")
            self.w(f"{v.r} = {program} % {across} * RB + {v.arange('r')}")
        elif n.parallel:
            self.w(f"{v.x} = {program} * XB + {v.arange('x')}")
        if n.parallel:
            self.decode("x")
        live = self.live()
        if n.reduced and not n.tiled and not n.persistent(self.schedule):
            self.looped(live)
        else:
            if n.reduced and not n.tiled:
                self.w(f"{v.r} = {v.arange('r')}")
            if n.reduced:
                self.decode("r")
            self.compute(live)
            self.barrier()
            self.write(n.kernel.stores)
        self.drop_unread_axes()
        if not self.lines:
            self.w("pass")

    def start(self) -> str:
        """The sizes, and the number of the program."""
        for size in self.n.sizes:  # int32, or a constant where Triton specialises: neither is what indices need
            self.w(f"{size} = tl.full([], {size}, tl.int64)")
        return f"tl.program_id(0){'.to(tl.int64)' if self.n.wide else ''}"

    def columns(self, live: list[Let], program: str) -> None:
        """Tiles of rows, one after the other, and the sums over them."""
        n, v = self.n, self.values
        assert n.parallel and n.persistent(self.schedule), "rows that are summed fit into a tile"
        sums, level = [x for x in live if x.op == "collect"], stages(n.kernel)
        once = [
            x for x in live if "x" not in v.sides[x.name] and not level[x.name] and x.op not in ("reduce", "collect")
        ]
        self.w(f"{v.program} = {program}")
        self.w(f"{v.r} = {v.arange('r')}")
        self.decode("r")
        self.compute(once)
        for x in sums:
            self.w(f"{x.name} = tl.full({v.shape(frozenset('xr'))}, {v.identity(x)}, {v.accumulator(x)})")
        self.w(f"for {v.x0} in range({v.program} * XB, {text(n.xn)}, {self.schedule.programs} * XB):")
        self.depth += 1
        self.w(f"{v.x} = {v.x0} + {v.arange('x')}")
        self.decode("x")
        self.compute(x for x in live if x not in once and x not in sums)
        for x in sums:
            self.w(f"{x.name} = {v.combine(x)}({x.name}, {v.met(x)})")
        self.barrier()
        found = {x.name for x in sums}
        self.write(s for s in n.kernel.stores if s.value not in found)
        self.depth -= 1
        for x in sums:
            self.w(f"{x.name} = {v.gathered(x, x.name)}")
        for s in n.kernel.stores:
            if s.value in found:
                mask = f", mask={v.mask['r']}" if v.masked["r"] else ""
                self.w(f"tl.store({v.place(s.buffer, s.index)} + {v.program} * {grouped(text(n.rn))}, {s.value}{mask})")

    def drop_unread_axes(self) -> None:
        """Axes that no line mentions: the accesses walk several as one."""
        for a in self.n.kernel.axes:
            found = [i for i, line in enumerate(self.lines) if re.search(rf"\b{a.name}\b", line)]
            if all(self.lines[i].lstrip().startswith(f"{a.name} = ") for i in found):
                self.lines[:] = [line for i, line in enumerate(self.lines) if i not in found]

    def decode(self, side: str) -> None:
        """The axes of a side, and its mask, from the linear index."""
        linear, axes, total = (
            (self.values.x, self.n.parallel, self.n.xn) if side == "x" else (self.values.r, self.n.reduced, self.n.rn)
        )
        if self.values.masked[side]:
            self.w(f"{self.values.mask[side]} = {linear} < {text(total)}")
        if len(axes) == 1:  # the linear index itself
            return
        stride = sympy.S.One
        for i, a in reversed(list(enumerate(axes))):
            size = sympy.sympify(a.extent)
            e = linear if stride == 1 else f"{linear} // {grouped(text(stride))}"
            if i:
                e = f"{e if stride == 1 else f'({e})'} % {grouped(text(size))}"
            self.w(f"{a.name} = {e}")
            stride *= size

    def looped(self, live: list[Let]) -> None:
        k = self.n.kernel
        level = stages(k)
        last = max((level[v.name] for v in live if v.op == "reduce"), default=0)
        inout = {b.name for b in k.buffers if b.role == "inout"}
        rows = [v for v in live if "r" not in self.values.sides[v.name] and v.op != "reduce"]
        final: list[Store] = []
        at: dict[int, list[Store]] = {}
        for s in k.stores:
            if "r" not in self.values.along(s.index):
                final.append(s)
            else:  # early, sparing a pass; but a later pass may not find an inout buffer already written
                at.setdefault(last if s.buffer in inout else min(level[s.value], last), []).append(s)
        waits = not any(s.buffer in inout for s in at.get(last, ()))
        for stage in range(last + 1):
            self.compute(v for v in rows if level[v.name] == stage)
            if stage == last and not waits:
                self.barrier()
            reduces = [v for v in live if v.op == "reduce" and level[v.name] == stage + 1]
            checks = [
                v for v in live if v.op == "check" and "r" in self.values.sides[v.name] and level[v.name] == stage
            ]
            self.loop(live, reduces, at.get(stage, []), checks)
        if waits:
            self.barrier()
        self.write(final)

    def loop(self, live: list[Let], reduces: list[Let], stores: list[Store], checks: list[Let]) -> None:
        """One pass over the reduce axes, computing what ``reduces``, ``stores`` and ``checks`` need."""
        if not (reduces or stores or checks):
            return
        roots = [a for v in reduces for a in v.args] + self.named(stores) + [v.name for v in checks]
        wanted = self.needed(roots, stop_at_rows=True)
        inside = [v for v in live if v.name in wanted]
        for v in reduces:
            sides = self.values.sides[v.args[0]] | {"r"}
            self.w(
                f"{v.name} = tl.full({self.values.shape(sides)}, {self.values.identity(v)}, {self.values.accumulator(v)})"
            )
        self.w(f"for {self.values.r0} in range(0, {text(self.n.rn)}, {self.values.tile['r']}):")
        self.depth += 1
        self.w(f"{self.values.r} = {self.values.r0} + {self.values.arange('r')}")
        self.decode("r")
        self.compute(inside)
        for v in reduces:
            self.w(f"{v.name} = {self.values.combine(v)}({v.name}, {self.values.part(v)})")
        self.write(stores)
        self.depth -= 1
        for v in reduces:
            self.w(f"{v.name} = {self.values.reduced(v, v.name)}")

    def barrier(self) -> None:
        """Other threads may hold copies of what was loaded along one side only: none may store before all have it."""
        inout = {b.name for b in self.n.kernel.buffers if b.role == "inout"}
        loads = [v for v in self.values.lets.values() if v.op == "load" and v.access[0] in inout]
        if any(len(self.values.sides[v.name]) < self.n.rank for v in loads):
            self.w("tl.debug_barrier()")

    # -- what is needed

    def live(self) -> list[Let]:
        checks = [v.name for v in self.values.lets.values() if v.op == "check"]
        wanted = self.needed(self.named(self.n.kernel.stores) + checks)
        return [v for v in self.values.lets.values() if v.name in wanted]

    def named(self, stores: Iterable[Store]) -> list[str]:
        """Values that ``stores`` mention, in what they store or where."""
        return [name for s in stores for name in (s.value, *self.mentioned(s.index))]

    def mentioned(self, index: Index) -> list[str]:
        return sorted(s.name for s in sympy.sympify(index).free_symbols if s.name in self.values.lets)

    def needed(self, names: list[str], *, stop_at_rows: bool = False, stop_at: Collection[str] = ()) -> set[str]:
        out: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name in out or name in stop_at or (stop_at_rows and "r" not in self.values.sides[name]):
                continue
            out.add(name)
            v = self.values.lets[name]
            todo += [*v.args, *(self.mentioned(v.access[1]) if v.op == "load" else ())]
        return out

    # -- values

    def compute(self, lets: Iterable[Let]) -> None:
        for v in lets:
            match v.op:
                case "const":
                    self.values.define(v)
                case "check":
                    self.check(v)
                case "index" if v.name in self.values.places:
                    pass
                case "reduce":
                    self.w(f"{v.name} = {self.values.reduced(v, self.values.part(v))}")
                case _:
                    self.w(f"{v.name} = {self.values.expression(v)}")

    def check(self, v: Let) -> None:
        a, ok = self.values.arg(v.args[0]), f"{v.name}_ok"
        size = text(sympy.sympify(v.attr))
        self.w(f"{v.name} = {a}")
        self.w(f"{ok} = ({v.name} >= 0) & ({v.name} < {grouped(size)})")
        masks = self.values.masks(self.values.sides[v.name])
        if self.schedule.asserts:
            fine = " | ".join([ok, *(f"~{m}" for m in masks)])
            self.w(f'tl.device_assert({fine}, "index out of range")')
        else:
            self.w(f"tl.store({self.values.fail} + {v.name} * 0, 1, mask={' & '.join([*masks, f'~{ok}'])})")
        self.w(f"{v.name} = tl.where({ok}, {v.name}, 0)")

    def write(self, stores: Iterable[Store], only: str = "") -> None:
        """``only``: a condition of a whole program."""
        for s in stores:
            masks = [*self.values.masks(self.values.along(s.index)), *([only] if only else [])]
            mask = f", mask={' & '.join(masks)}" if masks else ""
            value = self.values.arg(s.value)
            dtype = self.n.kernel.buffer(s.buffer).dtype
            if dtype != self.values.lets[s.value].dtype:
                value = f"{value} != 0" if dtype == "b1" else f"{value}.to({TYPES[dtype]})"
            self.w(f"tl.store({self.values.place(s.buffer, s.index)}, {value}{mask})")
