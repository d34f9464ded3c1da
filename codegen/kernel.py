"""The kernel IR: what one fused kernel computes, with nothing of how a machine runs it.

    kernel ::= name, axis*, buffer*, let*, store*
    axis   ::= name, extent, reduce?          an iteration space, not a loop
    buffer ::= name, dtype, role              role: in | out | inout
    let    ::= name, op, value*, attr, dtype  single assignment, in order; value: name of an earlier let
    store  ::= buffer, index, value

Extents and indices are integers or sympy expressions over axis names, size symbols and (for indirect
access) names of earlier ``i64`` values.  There are no loops, tiles, masks, pointers or thread ids here:
an emitter adds those, guided by its own schedule.  One kernel has one set of reduce axes, and every
``reduce`` runs over all of them, so a kernel is a nest over the parallel axes with stages inside.  So does its ``dot``,
of which a kernel has one at most: one operand varies along the rows of a matrix, the other along its columns, both along
the reduce axes and perhaps along axes of a batch.  A ``collect`` runs over all parallel axes: what it gives, and all that follows from it, varies along the reduce axes only, and no
``reduce`` needs it.

Operations of a ``let``:

    load     attr = (buffer, index)                  widened to the compute dtype of the buffer; args = values in index
    const    attr = number or bool
    index    attr = index expression                 the integer itself
    check    attr = size                             the argument, after proving 0 <= it < size (else the kernel fails)
    cast     compute dtype to compute dtype, as C does (float to int truncates, to b1 is != 0)
    round    attr = storage dtype                    to that dtype's values and back: where eager rounds or wraps
    random   attr = "uniform"; args = seed, offset   Philox 4x32-10, first word, as a number in [0, 1)
    reduce   attr = sum | prod | max | min | any | all     over all reduce axes; max and min keep NaN
    peak     attr = max                              over the last axis of the columns of a ``dot``, a value a block of columns
    collect  attr = sum                              over all parallel axes
    dot      attr = bf16 | f16 | tf32 | f32          the sum of products of two values rounded to that format, in f32
    the rest: POINTWISE below
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import sympy

Index: TypeAlias = sympy.Expr
Role = Literal["in", "out", "inout"]
Attr: TypeAlias = str | int | float | bool | sympy.Expr | tuple[str, sympy.Expr] | None

COMPUTE: Mapping[str, str] = {
    "f32": "f32", "bf16": "f32", "f16": "f32", "f64": "f64",
    "i64": "i64", "i32": "i64", "i16": "i64", "i8": "i64", "u8": "i64", "b1": "b1",
}  # fmt: skip
"""Storage dtype -> the dtype in which kernels compute with it."""

NBYTES: Mapping[str, int] = {
    "f32": 4, "bf16": 2, "f16": 2, "f64": 8, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "b1": 1,
}  # fmt: skip

POINTWISE: Mapping[str, int] = {
    # arithmetic on f32, f64, i64 (integers wrap)
    "add": 2, "sub": 2, "mul": 2, "neg": 1, "abs": 1, "max": 2, "min": 2,
    # floats only
    "div": 2, "recip": 1, "sqrt": 1, "rsqrt": 1, "exp": 1, "expm1": 1, "exp2": 1, "log": 1, "log1p": 1, "log2": 1,
    "sin": 1, "cos": 1, "tanh": 1, "erf": 1, "sigmoid": 1, "pow": 2, "floor": 1, "ceil": 1, "trunc": 1, "rint": 1,
    "atan2": 2, "fma": 3,
    # b1 results
    "lt": 2, "le": 2, "gt": 2, "ge": 2, "eq": 2, "ne": 2, "isnan": 1,
    # b1 or i64 (bitwise)
    "and": 2, "or": 2, "xor": 2, "not": 1,
    # b1, then two of one dtype
    "where": 3,
}  # fmt: skip
"""Pointwise operation -> number of arguments.  max and min return NaN when either side is NaN."""

COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
REDUCTIONS = frozenset({"sum", "prod", "max", "min", "any", "all"})


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    extent: Index
    reduce: bool = False


@dataclass(frozen=True, slots=True)
class Buffer:
    name: str
    dtype: str
    role: Role = "in"


@dataclass(frozen=True, slots=True)
class Let:
    name: str
    op: str
    args: tuple[str, ...]
    attr: Attr
    dtype: str
    """Compute dtype: f32 f64 i64 b1."""
    axes: frozenset[str]
    """Axes with which the value varies."""

    @property
    def access(self) -> tuple[str, Index]:
        """(buffer, index) of a load."""
        assert isinstance(self.attr, tuple)
        return self.attr


@dataclass(frozen=True, slots=True)
class Store:
    buffer: str
    index: Index
    value: str


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    axes: tuple[Axis, ...]
    buffers: tuple[Buffer, ...]
    lets: tuple[Let, ...]
    stores: tuple[Store, ...]
    origin: str = ""
    """Text of the graph nodes that it came from, a line each."""

    @property
    def parallel(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if not a.reduce)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.reduce)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the size symbols that extents and indices mention, sorted: arguments of the kernel."""
        bound = {a.name for a in self.axes} | {v.name for v in self.lets}
        free = {s.name for e in self.expressions() for s in e.free_symbols}
        return tuple(sorted(free - bound))

    @property
    def checks(self) -> bool:
        """Whether the kernel can fail at run time (an index out of range)."""
        return any(v.op == "check" for v in self.lets)

    def expressions(self) -> Iterator[Index]:
        for a in self.axes:
            yield sympy.sympify(a.extent)
        for v in self.lets:
            match v.attr:
                case (_, index):
                    yield sympy.sympify(index)
                case sympy.Expr() if v.op in ("index", "check"):
                    yield v.attr
                case _:
                    pass
        for s in self.stores:
            yield sympy.sympify(s.index)

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)


def stages(kernel: Kernel) -> dict[str, int]:
    """Value name -> how many reductions must be finished before it can be computed at a point.

    A reduce or dot of stage-n values is itself of stage n + 1; everything else has the stage of its arguments.
    """
    out: dict[str, int] = {}
    for v in kernel.lets:
        below = max((out[a] for a in v.args), default=0)
        out[v.name] = below + 1 if v.op in ("reduce", "dot") else below
    return out


def product(kernel: Kernel) -> Let | None:
    """The ``dot`` of a kernel."""
    return next((v for v in kernel.lets if v.op == "dot"), None)


def indirect(index: Index, kernel: Kernel) -> frozenset[str]:
    """Names of the values that ``index`` mentions."""
    names = {v.name for v in kernel.lets}
    return frozenset(s.name for s in index.free_symbols if s.name in names)


def show(kernel: Kernel) -> str:
    """Canonical text, the same for the same kernel, byte for byte."""
    axes = ", ".join(f"{a.name}{'!' if a.reduce else ''}<{a.extent}" for a in kernel.axes)
    lines = [f"kernel {kernel.name}({axes})"]
    lines += [f"  {b.role} {b.name}: {b.dtype}" for b in kernel.buffers]
    for v in kernel.lets:
        match v.attr:
            case None:
                tail = ""
            case (buffer, index):
                tail = f" {buffer}[{index}]"
            case attr:
                tail = f" {attr}"
        lines.append(f"  {v.name}: {v.dtype} = {v.op}{tail}{' ' if v.args else ''}{', '.join(v.args)}")
    lines += [f"  {s.buffer}[{s.index}] = {s.value}" for s in kernel.stores]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel and where in the arguments of the sequence its own lie."""

    kernel: str
    buffers: tuple[int, ...]
    sizes: tuple[int, ...] = ()
