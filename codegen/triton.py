"""Kernel IR to Triton: readable, stand-alone source of one kernel.

The parallel axes are one linear range, cut into tiles of ``XB`` points, a program each; the reduce axes are another,
cut into tiles of ``RB``.  A value has the shape of the axes with which it varies, so what is the same along a row is
computed once for the row.  If ``RB`` holds the whole reduction the kernel is straight-line code; else it loops over it
once for each stage (see ``stages``), and once more for the stores that need the last.

Arguments: buffers, sizes, ``fail`` if the kernel has checks (int32, set to 1 when one fails), then the tile sizes.
Within a program all loads of an ``inout`` buffer come before its stores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import sympy

from dsc.codegen.kernel import COMPUTE, Index, Kernel, Let, Store, stages
from dsc.codegen.triton_index import text
from dsc.codegen.triton_math import COMBINE, HELPERS, call, helpers
from dsc.codegen.triton_nest import Nest, Schedule, default_schedule, grid, nest, tiles

__all__ = ["Schedule", "default_schedule", "emit", "grid", "tiles"]

TYPES = {
    "f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16", "f64": "tl.float64", "i64": "tl.int64",
    "i32": "tl.int32", "i16": "tl.int16", "i8": "tl.int8", "u8": "tl.uint8", "b1": "tl.int1",
}  # fmt: skip

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip

_INF = 'float("inf")'
_IDENTITY = {
    "sum": ("0.0", "0"),
    "prod": ("1.0", "1"),
    "max": (f"-{_INF}", str(-(2**63))),
    "min": (_INF, str(2**63 - 1)),
    "any": ("0", "0"),
    "all": ("1", "1"),
}
"""Reduction -> its identity on floats, on integers (b1 is reduced as int32)."""


def emit(kernel: Kernel, schedule: Schedule | None = None) -> str:
    e = _Emitter(nest(kernel), schedule or default_schedule(kernel))
    e.body()
    lines = ["import triton", "import triton.language as tl", ""]
    lines += [source.rstrip("\n") + "\n" for source in helpers(e.used)]
    lines += ["", *(f"# {line}".rstrip() for line in kernel.origin.splitlines()), "@triton.jit"]
    lines += [f"def {kernel.name}({', '.join(e.arguments())}):", *e.lines]
    return "\n".join(lines) + "\n"


@dataclass
class _Emitter:
    n: Nest
    schedule: Schedule
    lines: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Helpers."""
    depth: int = 1
    literals: dict[str, str] = field(default_factory=dict)
    """Constants by name: written where they are used."""
    sides: dict[str, frozenset[str]] = field(default_factory=dict)
    """Value -> the sides of the tile along which it varies: subset of {x, r}."""

    def __post_init__(self) -> None:
        k = self.n.kernel
        self.lets = {v.name: v for v in k.lets}
        self.axis_side = {a.name: "r" if a.reduce else "x" for a in k.axes}
        taken = {*self.lets, *self.axis_side, *self.n.sizes, *(b.name for b in k.buffers)}
        self.x, self.r, self.r0 = (_fresh(name, taken) for name in ("x", "r", "r0"))
        self.mask = {"x": _fresh("xm", taken), "r": _fresh("rm", taken)}
        self.fail = _fresh("fail", taken)
        self.masked = {
            "x": not _divides(self.schedule.XB, self.n.xn),
            "r": not _divides(self.schedule.RB, self.n.rn),
        }
        self.axis = 1 if self.n.parallel and not self.n.x_inner else 0  # of a tile, for a reduction
        for v in k.lets:
            self.sides[v.name] = self._sides_of(v)

    def arguments(self) -> Iterable[str]:
        k = self.n.kernel
        yield from (b.name for b in k.buffers)
        yield from self.n.sizes
        if k.checks:
            yield self.fail
        yield from (f"{name}: tl.constexpr" for name in tiles(k, self.schedule))

    def w(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    # -- shapes

    def _sides_of(self, v: Let) -> frozenset[str]:
        out = frozenset[str]().union(*(self.sides[a] for a in v.args))
        match v.attr:
            case (_, index):
                out |= self.along(index)
            case sympy.Expr() if v.op == "index":
                out |= self.along(v.attr)
            case _:
                pass
        return out - {"r"} if v.op == "reduce" else out

    def along(self, index: Index) -> frozenset[str]:
        """Sides of the tile along which an index varies."""
        names = {s.name for s in sympy.sympify(index).free_symbols}
        own = {self.axis_side[name] for name in names & self.axis_side.keys()}
        return frozenset(own).union(*(self.sides[name] for name in names & self.sides.keys()))

    def masks(self, sides: frozenset[str]) -> list[str]:
        return [self.mask[s] for s in ("x", "r") if s in sides and self.masked[s]]

    def shape(self, sides: frozenset[str]) -> str:
        order = ("r", "x") if self.n.x_inner else ("x", "r")
        there = {"x": bool(self.n.parallel), "r": bool(self.n.reduced)}
        return "[" + ", ".join(f"{s.upper()}B" if s in sides else "1" for s in order if there[s]) + "]"

    def arange(self, side: str) -> str:
        out = f"tl.arange(0, {side.upper()}B)"
        if self.n.wide:
            out += ".to(tl.int64)"
        if self.n.rank < 2:
            return out
        return out + ("[:, None]" if (side == "x") != self.n.x_inner else "[None, :]")

    # -- the frame

    def body(self) -> None:
        n = self.n
        for size in n.sizes:  # int32, or a constant where Triton specialises: neither is what indices need
            self.w(f"{size} = tl.full([], {size}, tl.int64)")
        if n.parallel:
            self.w(f"{self.x} = tl.program_id(0){'.to(tl.int64)' if n.wide else ''} * XB + {self.arange('x')}")
            self.decode("x")
        live = self.live()
        if n.reduced and not n.persistent(self.schedule):
            self.looped(live)
        else:
            if n.reduced:
                self.w(f"{self.r} = {self.arange('r')}")
                self.decode("r")
            self.compute(live)
            self.barrier()
            self.write(n.kernel.stores)
        if not self.lines:
            self.w("pass")

    def decode(self, side: str) -> None:
        """The axes of a side, and its mask, from the linear index."""
        linear, axes, total = (
            (self.x, self.n.parallel, self.n.xn) if side == "x" else (self.r, self.n.reduced, self.n.rn)
        )
        if self.masked[side]:
            self.w(f"{self.mask[side]} = {linear} < {text(total)}")
        stride = sympy.S.One
        for i, a in reversed(list(enumerate(axes))):
            size = sympy.sympify(a.extent)
            e = linear if stride == 1 else f"{linear} // {_grouped(text(stride))}"
            if i:
                e = f"{e if stride == 1 else f'({e})'} % {_grouped(text(size))}"
            self.w(f"{a.name} = {e}")
            stride *= size

    def looped(self, live: list[Let]) -> None:
        k = self.n.kernel
        level = stages(k)
        last = max((level[v.name] for v in live if v.op == "reduce"), default=0)
        inout = {b.name for b in k.buffers if b.role == "inout"}
        rows = [v for v in live if "r" not in self.sides[v.name] and v.op != "reduce"]
        final: list[Store] = []
        at: dict[int, list[Store]] = {}
        for s in k.stores:
            if "r" not in self.along(s.index):
                final.append(s)
            else:  # early, sparing a pass; but a later pass may not find an inout buffer already written
                at.setdefault(last if s.buffer in inout else min(level[s.value], last), []).append(s)
        waits = not any(s.buffer in inout for s in at.get(last, ()))
        for stage in range(last + 1):
            self.compute(v for v in rows if level[v.name] == stage)
            if stage == last and not waits:
                self.barrier()
            reduces = [v for v in live if v.op == "reduce" and level[v.name] == stage + 1]
            checks = [v for v in live if v.op == "check" and "r" in self.sides[v.name] and level[v.name] == stage]
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
            sides = self.sides[v.args[0]] | {"r"}
            self.w(f"{v.name} = tl.full({self.shape(sides)}, {self.identity(v)}, {self.accumulator(v)})")
        self.w(f"for {self.r0} in range(0, {text(self.n.rn)}, RB):")
        self.depth += 1
        self.w(f"{self.r} = {self.r0} + {self.arange('r')}")
        self.decode("r")
        self.compute(inside)
        for v in reduces:
            self.w(f"{v.name} = {self.combine(v)}({v.name}, {self.part(v)})")
        self.write(stores)
        self.depth -= 1
        for v in reduces:
            self.w(f"{v.name} = {self.reduced(v, v.name)}")

    def barrier(self) -> None:
        """Other threads may hold copies of what was loaded along one side only: none may store before all have it."""
        inout = {b.name for b in self.n.kernel.buffers if b.role == "inout"}
        loads = [v for v in self.lets.values() if v.op == "load" and v.access[0] in inout]
        if any(len(self.sides[v.name]) < self.n.rank for v in loads):
            self.w("tl.debug_barrier()")

    # -- what is needed

    def live(self) -> list[Let]:
        checks = [v.name for v in self.lets.values() if v.op == "check"]
        wanted = self.needed(self.named(self.n.kernel.stores) + checks)
        return [v for v in self.lets.values() if v.name in wanted]

    def named(self, stores: Iterable[Store]) -> list[str]:
        """Values that ``stores`` mention, in what they store or where."""
        return [name for s in stores for name in (s.value, *self.mentioned(s.index))]

    def mentioned(self, index: Index) -> list[str]:
        return sorted(s.name for s in sympy.sympify(index).free_symbols if s.name in self.lets)

    def needed(self, names: list[str], *, stop_at_rows: bool = False) -> set[str]:
        out: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name in out or (stop_at_rows and "r" not in self.sides[name]):
                continue
            out.add(name)
            v = self.lets[name]
            todo += [*v.args, *(self.mentioned(v.access[1]) if v.op == "load" else ())]
        return out

    # -- values

    def compute(self, lets: Iterable[Let]) -> None:
        for v in lets:
            match v.op:
                case "const":
                    self.literals[v.name] = _literal(v)
                case "check":
                    self.check(v)
                case "reduce":
                    self.w(f"{v.name} = {self.reduced(v, self.part(v))}")
                case _:
                    self.w(f"{v.name} = {self.value(v)}")

    def value(self, v: Let) -> str:
        match v.op:
            case "load":
                return self.load(v)
            case "index":
                index = sympy.sympify(v.attr)
                return f"({text(index)}).to(tl.int64)" if self.along(index) else f"tl.full([], {text(index)}, tl.int64)"
            case "cast":
                return self.cast(self.arg(v.args[0]), self.lets[v.args[0]].dtype, v.dtype)
            case "round":
                return self.round(v)
            case "random":
                out = f"{self.helper('_uniform')}({self.arg(v.args[0])}, {self.arg(v.args[1])})"
                return out if v.dtype == "f32" else f"{out}.to({TYPES[v.dtype]})"
            case _:
                return self.pointwise(v)

    def pointwise(self, v: Let) -> str:
        dtype = self.lets[v.args[-1]].dtype
        function = call(v.op, dtype)
        if function is not None:
            # Triton takes the type of a literal from the other side here, unless it made the literal a f32 before.
            adapts = v.op == "where" or (v.op in ("max", "min") and dtype != "f64")
            typed = not adapts or all(a in self.literals for a in v.args[-2:])
            args = [self.arg(a) for a in v.args[:-2]] + [self.arg(a, typed=typed) for a in v.args[-2:]]
            return f"{self.helper(function)}({', '.join(args)})"
        if v.op in _INFIX:
            literal = v.args[0] in self.literals and v.args[1] in self.literals
            a, b = self.arg(v.args[0], typed=literal), self.arg(v.args[1], typed=False)
            if dtype == "b1" and v.op in ("lt", "le", "gt", "ge"):  # true is -1 to a signed comparison of one bit
                a, b = (f"{self.arg(name)}.to(tl.int32)" for name in v.args)
            return f"{a} {_INFIX[v.op]} {b}"
        a = self.arg(v.args[0])
        match v.op:
            case "neg":  # Triton's own is 0 - x, which loses the sign of zero
                return f"{a} * -1.0" if v.dtype in ("f32", "f64") else f"-{a}"
            case "recip":
                return f"tl.div_rn(1.0, {a})" if v.dtype == "f32" else f"1.0 / {a}"
            case "rsqrt":
                return f"1.0 / tl.sqrt({a})"
            case "not":
                return f"~{a}"
            case "isnan":
                return f"{a} != {a}"
            case _:
                raise ValueError(f"unknown operation {v.op!r} in value {v.name} of kernel {self.n.kernel.name}")

    def arg(self, name: str, *, typed: bool = True) -> str:
        """A value as an operand; a constant needs its type unless the other operand gives it."""
        if name not in self.literals:
            return name
        literal = self.literals[name]
        return f"tl.full([], {literal}, {TYPES[self.lets[name].dtype]})" if typed else _grouped(literal, "-")

    def helper(self, name: str) -> str:
        if name in HELPERS:
            self.used.add(name)
        return name

    def load(self, v: Let) -> str:
        buffer, index = v.access
        dtype = self.n.kernel.buffer(buffer).dtype
        masks = self.masks(self.along(index))
        other = f", mask={' & '.join(masks)}, other=0" if masks else ""
        out = f"tl.load({_offset(buffer, self.index(index))}{other})"
        return out if dtype == COMPUTE[dtype] else f"{out}.to({TYPES[COMPUTE[dtype]]})"

    def index(self, index: Index) -> str:
        index = sympy.sympify(index)
        constants = {s: sympy.Integer(self.literals[s.name]) for s in index.free_symbols if s.name in self.literals}
        return text(index.xreplace(constants))

    def cast(self, a: str, source: str, target: str) -> str:
        if source == target:
            return a
        return f"{a} != 0" if target == "b1" else f"{a}.to({TYPES[target]})"

    def round(self, v: Let) -> str:
        a, through = self.arg(v.args[0]), str(v.attr)
        if through in ("b1", v.dtype):
            return a if through == v.dtype else f"({a} != 0).to({TYPES[v.dtype]})"
        return f"{a}.to({TYPES[through]}).to({TYPES[v.dtype]})"

    def check(self, v: Let) -> None:
        a, ok = self.arg(v.args[0]), f"{v.name}_ok"
        size = text(sympy.sympify(v.attr))
        self.w(f"{v.name} = {a}")
        self.w(f"{ok} = ({v.name} >= 0) & ({v.name} < {_grouped(size)})")
        masks = " & ".join([*self.masks(self.sides[v.name]), f"~{ok}"])
        self.w(f"tl.store({self.fail} + {v.name} * 0, 1, mask={masks})")
        self.w(f"{v.name} = tl.where({ok}, {v.name}, 0)")

    # -- reductions and stores

    def kind(self, v: Let) -> str:
        kind = str(v.attr)
        return {"max": "any", "min": "all", "sum": "any", "prod": "all"}.get(kind, kind) if v.dtype == "b1" else kind

    def combine(self, v: Let) -> str:
        return self.helper(COMBINE[self.kind(v)])

    def identity(self, v: Let) -> str:
        return _IDENTITY[self.kind(v)][v.dtype == "i64"]

    def accumulator(self, v: Let) -> str:
        return "tl.int32" if v.dtype == "b1" else TYPES[v.dtype]

    def part(self, v: Let) -> str:
        """What a tile brings to a reduction: the argument, with its identity outside of the range."""
        name = v.args[0]
        a = self.arg(name) if v.dtype != "b1" else f"{self.arg(name)}.to(tl.int32)"
        if self.masked["r"]:
            return f"tl.where({self.mask['r']}, {a}, {self.identity(v)})"
        sides = self.sides[name]
        return a if "r" in sides else f"tl.broadcast_to({a}, {self.shape(sides | {'r'})})"

    def reduced(self, v: Let, a: str) -> str:
        if not self.n.reduced:  # all reduce axes have extent 1
            return self.arg(v.args[0])
        keep = ", keep_dims=True" if self.n.rank == 2 else ""
        out = f"tl.reduce({a}, {self.axis}, {self.combine(v)}{keep})"
        return f"{out} != 0" if v.dtype == "b1" else out

    def write(self, stores: Iterable[Store]) -> None:
        for s in stores:
            masks = self.masks(self.along(s.index))
            mask = f", mask={' & '.join(masks)}" if masks else ""
            value = self.arg(s.value)
            dtype = self.n.kernel.buffer(s.buffer).dtype
            if dtype != self.lets[s.value].dtype:
                value = f"{value} != 0" if dtype == "b1" else f"{value}.to({TYPES[dtype]})"
            self.w(f"tl.store({_offset(s.buffer, self.index(s.index))}, {value}{mask})")


def _literal(v: Let) -> str:
    if v.dtype == "b1":
        return str(bool(v.attr))
    if v.dtype == "i64":
        return str(int(v.attr))
    number = float(v.attr)
    if math.isfinite(number):
        return repr(number)
    return 'float("nan")' if math.isnan(number) else _INF if number > 0 else f"-{_INF}"


def _grouped(e: str, marks: str = " *-") -> str:
    return f"({e})" if any(m in e for m in marks) and not e.startswith("(") else e


def _offset(buffer: str, index: str) -> str:
    return buffer if index == "0" else f"{buffer} + {index}"


def _divides(tile: int, total: Index) -> bool:
    return bool(total.is_number and total % tile == 0)


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
