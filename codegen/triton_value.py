"""The text of one value: its shape on the tile, its masks, its expression."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from dsc.codegen.kernel import COMPUTE, Index, Let
from dsc.codegen.schedule import Schedule
from dsc.codegen.triton_index import text
from dsc.codegen.triton_math import COMBINE, HELPERS, call
from dsc.codegen.triton_nest import Nest
from dsc.torch_shim import Mod

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


@dataclass
class Values:
    """Expressions of the values of a kernel, and what was met on the way: constants and helpers."""

    n: Nest
    schedule: Schedule
    used: set[str] = field(default_factory=set)
    """Helpers."""
    literals: dict[str, str] = field(default_factory=dict)
    """Constants by name: written where they are used."""
    sides: dict[str, frozenset[str]] = field(default_factory=dict)
    """Value -> the sides of the tile along which it varies: subset of {x, r}."""
    tile: Mapping[str, str] = field(default_factory=lambda: {"x": "XB", "r": "RB"})
    """Side -> the name of its length."""

    def __post_init__(self) -> None:
        n, k = self.n, self.n.kernel
        self.lets = {v.name: v for v in k.lets}
        self.axis_side = {a.name: side for side, axes in (("x", n.parallel), ("r", n.reduced)) for a in axes}
        taken = self.taken = {*self.lets, *(a.name for a in k.axes), *n.sizes, *(b.name for b in k.buffers)}
        self.r0 = _fresh("r0", taken)
        self.x0 = _fresh("x0", taken)
        self.program = _fresh("program", taken)
        self.x = n.parallel[0].name if len(n.parallel) == 1 else _fresh("x", taken)
        self.r = n.reduced[0].name if len(n.reduced) == 1 else _fresh("r", taken)
        self.mask = {"x": _fresh("xm", taken), "r": _fresh("rm", taken)}
        self.fail = _fresh("fail", taken)
        self.masked = {
            "x": not _divides(self.schedule.XB, n.xn),
            "r": not _divides(self.schedule.RB, n.rn),
        }
        self.axis = 1 if n.parallel and not n.x_inner else 0  # of a tile, for a reduction
        for v in k.lets:
            self.sides[v.name] = self._sides_of(v)
        self.places = self._places()

    def fresh(self, name: str) -> str:
        """A name that nothing in the kernel has."""
        return _fresh(name, self.taken)

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
        if v.op == "collect":
            return out - {"x"}
        return out - {"r"} if v.op == "reduce" and not self.n.tiled else out

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
        return "[" + ", ".join(self.tile[s] if s in sides else "1" for s in order if there[s]) + "]"

    def arange(self, side: str) -> str:
        out = f"tl.arange(0, {self.tile[side]})"
        if self.n.wide:
            out += ".to(tl.int64)"
        if self.n.rank < 2:
            return out
        return out + ("[:, None]" if (side == "x") != self.n.x_inner else "[None, :]")

    # -- expressions

    def define(self, v: Let) -> None:
        """Remember a constant."""
        self.literals[v.name] = _literal(v)

    def expression(self, v: Let) -> str:
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
                out = f"{self.helper('_uniform')}({self.arg(v.args[0])}, {self.offset(v.args[1])})"
                return out if v.dtype == "f32" else f"{out}.to({TYPES[v.dtype]})"
            case _:
                return self.pointwise(v)

    def offset(self, name: str) -> str:
        """Of a random number: where 32 bits hold the index that it is, in 32, which takes fewer registers."""
        return self.index(sympy.sympify(self.lets[name].attr)) if name in self.places else self.arg(name)

    def _places(self) -> frozenset[str]:
        """Indices that nothing but random numbers needs: they are written where those are drawn."""
        if self.n.wide:
            return frozenset()
        k = self.n.kernel
        others = {a for v in k.lets for a in (v.args if v.op != "random" else v.args[:1])}
        others |= {s.name for e in k.expressions() for s in e.free_symbols} | {s.value for s in k.stores}
        return frozenset(v.name for v in k.lets if v.op == "index" and v.name not in others and self.sides[v.name])

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
        return f"tl.full([], {literal}, {TYPES[self.lets[name].dtype]})" if typed else _signed(literal)

    def helper(self, name: str) -> str:
        if name in HELPERS:
            self.used.add(name)
        return name

    def load(self, v: Let, *, widen: bool = True) -> str:
        buffer, index = v.access
        dtype = self.n.kernel.buffer(buffer).dtype
        masks = self.masks(self.along(index))
        other = f", mask={' & '.join(masks)}, other=0" if masks else ""
        out = f"tl.load({self.place(buffer, index)}{other})"
        return out if dtype == COMPUTE[dtype] or not widen else f"{out}.to({TYPES[COMPUTE[dtype]]})"

    def index(self, index: Index) -> str:
        index = sympy.sympify(index)
        constants = {s: sympy.Integer(self.literals[s.name]) for s in index.free_symbols if s.name in self.literals}
        return text(self.walked(index.xreplace(constants)))

    def walked(self, index: Index) -> Index:
        """``index`` over the linear index of a side, where it walks several of its axes as one: ``9*i + j -> x``.

        Triton sees then that neighbouring points are neighbours in memory, whatever the extents.
        """
        for linear, axes in ((self.x, self.n.parallel), (self.r, self.n.reduced)):
            symbols = {s.name: s for s in index.free_symbols}
            size, run = sympy.S.One, list[sympy.Symbol]()
            step = index.coeff(symbols[axes[-1].name]) if axes and axes[-1].name in symbols else sympy.S.Zero
            for a in reversed(axes):
                s = symbols.get(a.name)
                if step == 0 or s is None or index.coeff(s) != sympy.expand(step * size):
                    break
                run.append(s)
                size *= sympy.sympify(a.extent)
            rest = index - sum(index.coeff(s) * s for s in run)
            if len(run) < 2 or rest.free_symbols & set(run):
                continue
            whole = sympy.Symbol(linear, integer=True, nonnegative=True)
            index = rest + step * (whole if len(run) == len(axes) else Mod(whole, size))
        return index

    def cast(self, a: str, source: str, target: str) -> str:
        if source == target:
            return a
        return f"{a} != 0" if target == "b1" else f"{a}.to({TYPES[target]})"

    def round(self, v: Let) -> str:
        a, through = self.arg(v.args[0]), str(v.attr)
        if through in ("b1", v.dtype):
            return a if through == v.dtype else f"({a} != 0).to({TYPES[v.dtype]})"
        return f"{a}.to({TYPES[through]}).to({TYPES[v.dtype]})"

    # -- reductions and places

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

    def met(self, v: Let) -> str:
        """What a tile brings to a sum over rows."""
        a = self.arg(v.args[0])
        return f"tl.where({self.mask['x']}, {a}, {self.identity(v)})" if self.masked["x"] else a

    def gathered(self, v: Let, a: str) -> str:
        """The rows of a tile as one."""
        return f"tl.reduce({a}, {1 - self.axis}, {self.combine(v)}, keep_dims=True)"

    def reduced(self, v: Let, a: str) -> str:
        if not self.n.reduced or self.n.tiled:  # all reduce axes have extent 1
            return self.arg(v.args[0])
        keep = ", keep_dims=True" if self.n.rank == 2 else ""
        out = f"tl.reduce({a}, {self.axis}, {self.combine(v)}{keep})"
        return f"{out} != 0" if v.dtype == "b1" else out

    def place(self, buffer: str, index: Index) -> str:
        """The pointers of an access."""
        at = self.index(index)
        return buffer if at == "0" else f"{buffer} + {at}"


def _literal(v: Let) -> str:
    if v.dtype == "b1":
        return str(bool(v.attr))
    assert isinstance(v.attr, (int, float))
    if v.dtype == "i64":
        return str(int(v.attr))
    number = float(v.attr)
    if math.isfinite(number):
        return repr(number)
    return 'float("nan")' if math.isnan(number) else _INF if number > 0 else f"-{_INF}"


def _signed(literal: str) -> str:
    return f"({literal})" if literal.startswith("-") else literal


def grouped(e: str) -> str:
    return e if e.isidentifier() or e.isdecimal() else f"({e})"


def _divides(tile: int, total: Index) -> bool:
    return bool(total.is_number and total % tile == 0)


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
