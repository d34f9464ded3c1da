"""Kernels written by hand: a small builder over the kernel IR."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from dsc.codegen.kernel import COMPARISONS, COMPUTE, Axis, Buffer, Kernel, Let, Role, Store

Size = int | str | sympy.Expr


def sym(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


class Build:
    """``b = Build("k", i=4, r_j=8)``: axes in order, those named ``r_*`` reduce; then loads, operations and stores."""

    def __init__(self, name: str, origin: str = "", **axes: Size) -> None:
        self.name, self.origin = name, origin
        self.axes = tuple(
            Axis(a, sym(e) if isinstance(e, str) else sympy.sympify(e), a.startswith("r_")) for a, e in axes.items()
        )
        self.buffers: list[Buffer] = []
        self.lets: list[Let] = []
        self.stores: list[Store] = []

    def __getitem__(self, axis: str) -> sympy.Symbol:
        return sym(axis)

    def buffer(self, name: str, dtype: str = "f32", role: Role = "in") -> str:
        self.buffers.append(Buffer(name, dtype, role))
        return name

    def let(self, op: str, *args: str, attr: object = None, dtype: str | None = None) -> str:
        lets = {v.name: v for v in self.lets}
        axes = frozenset[str]().union(*(lets[a].axes for a in args))
        index = attr[1] if isinstance(attr, tuple) else attr if isinstance(attr, sympy.Expr) else None
        if index is not None:
            axes |= {s.name for s in index.free_symbols} & {a.name for a in self.axes}
        if op == "reduce":
            axes -= {a.name for a in self.axes if a.reduce}
        if dtype is None:
            dtype = "b1" if op in COMPARISONS or op == "isnan" else lets[args[-1]].dtype
        name = f"v{len(self.lets)}"
        self.lets.append(Let(name, op, args, attr, dtype, axes))  # type: ignore[arg-type]
        return name

    def load(self, buffer: str, index: object, dtype: str | None = None) -> str:
        """Load; declares the buffer if it is new."""
        if all(b.name != buffer for b in self.buffers):
            self.buffer(buffer, dtype or "f32")
        index = sympy.sympify(index)
        lets = {v.name for v in self.lets}
        args = sorted(s.name for s in index.free_symbols if s.name in lets)
        kind = next(b.dtype for b in self.buffers if b.name == buffer)
        return self.let("load", *args, attr=(buffer, index), dtype=COMPUTE[kind])

    def const(self, value: float | bool, dtype: str = "f32") -> str:
        return self.let("const", attr=value, dtype=dtype)

    def reduce(self, kind: str, value: str) -> str:
        return self.let("reduce", value, attr=kind)

    def store(self, buffer: str, index: object, value: str, dtype: str = "f32") -> None:
        if all(b.name != buffer for b in self.buffers):
            self.buffer(buffer, dtype, "out")
        self.stores.append(Store(buffer, sympy.sympify(index), value))

    def kernel(self) -> Kernel:
        return Kernel(self.name, self.axes, tuple(self.buffers), tuple(self.lets), tuple(self.stores), self.origin)


def pointwise(
    op: str,
    n: int,
    dtypes: Sequence[str],
    out: str,
    attr: object = None,
    dtype: str | None = None,
    name: str | None = None,
) -> Kernel:
    """``out[i] = op(in0[i], in1[i], ...)``."""
    b = Build(name or f"{op}_{'_'.join(dtypes)}", i=n)
    args = [b.load(f"in{k}", b["i"], d) for k, d in enumerate(dtypes)]
    b.store("out", b["i"], b.let(op, *args, attr=attr, dtype=dtype), out)
    return b.kernel()
