"""The lets of one kernel as they are made: equal ones once, each with the axes it varies along and the rounding it has had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from dsc.codegen import indexing
from dsc.codegen.indexing import Index
from dsc.codegen.kernel import COMPUTE, Axis, Let
from dsc.domain import Extent, Space, product, same


class Unlowerable(Exception):
    """The group does not fit one kernel; the reason is for a remark, and the caller has another way."""


LOW = frozenset({"bf16", "f16"})
NARROW = frozenset({"i32", "i16", "i8", "u8"})
EXACT_OPS = frozenset({"neg", "abs", "max", "min", "where", "peak"})
"""Give a value of their operands' format: nothing to round."""


@dataclass
class Builder:
    """Collects the lets and stores of one kernel."""

    space: Space
    numerics: str
    axes: tuple[Axis, ...] = ()
    lets: list[Let] = field(default_factory=list)
    by_name: dict[str, Let] = field(default_factory=dict)
    seen: dict[tuple[object, ...], str] = field(default_factory=dict)
    exact: dict[str, str] = field(default_factory=dict)
    buffers: dict[Node, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes = tuple(
            Axis(f"{'r' if d.reduce else 'p'}{i}", sympy.sympify(d.extent), d.reduce)
            for i, d in enumerate(self.space.dims)
        )
        self.symbols = tuple(sympy.Symbol(a.name, integer=True, nonnegative=True) for a in self.axes)
        self.ranges = {s: d.extent for s, d in zip(self.symbols, self.space.dims)}
        self.reduced = frozenset(s for s, d in zip(self.symbols, self.space.dims) if d.reduce)

    def let(self, op: str, args: tuple[str, ...] = (), attr: Any = None, dtype: str = "") -> str:
        dtype = dtype or self.by_name[args[1 if op == "where" else 0]].dtype
        key = (op, args, repr(attr) if isinstance(attr, float) else attr, type(attr), dtype)
        if key in self.seen:
            return self.seen[key]
        axes = frozenset().union(*(self.by_name[a].axes for a in args))
        if isinstance(attr, tuple):
            axes |= self._axes_of(attr[1])
        elif isinstance(attr, sympy.Expr):
            axes |= self._axes_of(attr)
        if op in ("reduce", "dot"):
            axes -= {s.name for s in self.reduced}
        if op == "peak":
            axes -= {self.innermost.name}
        if op == "collect":
            axes &= {s.name for s in self.reduced}
        name = f"v{len(self.lets)}"
        made = Let(name, op, args, attr, dtype, axes)
        self.lets.append(made)
        self.by_name[name] = made
        self.seen[key] = name
        if op in EXACT_OPS and not (op in ("neg", "abs") and dtype == "i64"):  # -(-128) is no i8
            formats = {self.exact.get(a, "") for a in args if self.by_name[a].dtype == dtype}
            if len(formats) == 1 and (only := formats.pop()):
                self.exact[name] = only
        return name

    def _axes_of(self, e: sympy.Expr) -> frozenset[str]:
        out: set[str] = set()
        for s in e.free_symbols:
            if s in self.ranges:
                out.add(s.name)
            elif s.name in self.by_name:
                out |= self.by_name[s.name].axes
        return frozenset(out)

    def const(self, number: float | int | bool, dtype: str) -> str:
        """A constant of a compute dtype."""
        match dtype:
            case "b1":
                return self.let("const", attr=bool(number), dtype="b1")
            case "i64":
                return self.let("const", attr=int(number), dtype="i64")
            case _:
                return self.let("const", attr=float(number), dtype=dtype)

    def index(self, e: Extent, dtype: str = "i64") -> str:
        """The integer ``e`` itself, in a compute dtype."""
        if isinstance(e, int) or e.is_number:
            return self.const(int(e), dtype)
        return self.cast(self.let("index", attr=sympy.sympify(e), dtype="i64"), dtype)

    def cast(self, v: str, dtype: str) -> str:
        """To another compute dtype."""
        old = self.by_name[v]
        if old.dtype == dtype:
            return v
        if old.op == "const":
            assert isinstance(old.attr, (int, float, bool))
            # a number of 32 bits stays one in 64: 2.7f is not 2.7
            narrow = old.dtype == "f32" and dtype == "f64"
            return self.const(torch.tensor(old.attr, dtype=torch.float32).item() if narrow else old.attr, dtype)
        return self.let("cast", (v,), dtype=dtype)

    def rounded(self, v: str, dtype: str) -> str:
        """To the values of a storage dtype."""
        v = self.cast(v, COMPUTE[dtype])
        if (dtype not in LOW and dtype not in NARROW) or self.exact.get(v) == dtype:
            return v
        out = self.let("round", (v,), dtype, COMPUTE[dtype])
        self.exact[out] = dtype
        return out

    def result(self, v: str, dtype: str) -> str:
        """What an op hands on: rounded as eager stores it, unless ``numerics="fast"`` keeps the wider value."""
        if self.numerics == "fast" and dtype in LOW:
            return self.cast(v, "f32")
        return self.rounded(v, dtype)

    def load(self, buffer: str, dtype: str, index: Extent) -> str:
        e = sympy.sympify(index)
        indirect = tuple(sorted(s.name for s in e.free_symbols if s.name in self.by_name))
        out = self.let("load", indirect, (buffer, e), COMPUTE[dtype])
        if dtype in LOW or dtype in NARROW:
            self.exact[out] = dtype
        return out

    def reduce(self, kind: str, v: str) -> str:
        if not self.reduced:
            return v
        return self.let("reduce", (v,), kind, self.by_name[v].dtype)

    def collect(self, kind: str, v: str) -> str:
        """Over the parallel axes."""
        if kind != "sum":
            raise Unlowerable(f"{kind} over rows and columns at once")
        return self.let("collect", (v,), kind, self.by_name[v].dtype)

    @property
    def innermost(self) -> sympy.Symbol:
        """The last parallel axis."""
        return next(s for s in reversed(self.symbols) if s not in self.reduced)

    def off_row(self, index: Index, across: bool = False) -> bool:
        """Whether the index moves with the reduce axes, or the others where a node reduces ``across``."""
        return any(not isinstance(i, int) and bool(i.free_symbols & self.over(across)) for i in index)

    def over(self, across: bool) -> frozenset[sympy.Symbol]:
        return frozenset(self.symbols) - self.reduced if across else self.reduced

    def reduce_index(self, extents: Sequence[Extent], across: bool = False) -> Index:
        """Index into the reduced dimensions of a tensor, as the kernel's reduce axes run (or the parallel ones)."""
        mine = [(s, self.ranges[s]) for s in self.symbols if s in self.over(across)]
        if not same(product(extents), product(e for _, e in mine)):
            raise Unlowerable("reduces over other elements than its kernel")
        return indexing.reshape(tuple(s for s, _ in mine), [e for _, e in mine], extents, self.ranges)
