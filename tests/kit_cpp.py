"""Kernels by hand: a small builder, an interpreter in torch as the oracle, and compiled runs of many kernels in one unit."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import sympy
import torch

from dsc.codegen.build import build, find_compiler
from dsc.codegen.cpp import Call, emit_unit
from dsc.codegen.kernel import COMPARISONS, COMPUTE, Axis, Buffer, Kernel, Let, Store

TORCH = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b1": torch.bool,
}  # fmt: skip


def sym(names: str) -> list[sympy.Symbol]:
    return [sympy.Symbol(n, integer=True, nonnegative=True) for n in names.split()]


@dataclass
class Make:
    """``k = Make("name", i=4, r=("reduce", 8)); k.out("y", "f32", i, k.sum(k.load("x", "f32", 8 * i + r)))``."""

    name: str
    axes: dict[str, object]
    buffers: dict[str, Buffer] = field(default_factory=dict)
    lets: list[Let] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)

    def let(self, op: str, *args: str, attr: object = None, dtype: str | None = None) -> str:
        of = {v.name: v for v in self.lets}
        names = {
            s.name
            for e in (attr if isinstance(attr, tuple) else (attr,))
            if isinstance(e, sympy.Expr)
            for s in e.free_symbols
        }
        axes = frozenset(n for n in names if n in self.axes).union(
            *(of[a].axes for a in args), *(of[n].axes for n in names if n in of)
        )
        if op == "reduce":
            axes = frozenset(a for a in axes if not isinstance(self.axes[a], tuple))
        if dtype is None:
            dtype = "b1" if op in COMPARISONS or op == "isnan" else of[args[-1]].dtype
        name = f"v{len(self.lets)}"
        self.lets.append(Let(name, op, args, attr, dtype, axes))  # type: ignore[arg-type]
        return name

    def load(self, buffer: str, dtype: str, index: object, role: str = "in") -> str:
        self.buffers.setdefault(buffer, Buffer(buffer, dtype, role))  # type: ignore[arg-type]
        index = sympy.sympify(index)
        lets = {v.name for v in self.lets}
        used = tuple(sorted(s.name for s in index.free_symbols if s.name in lets))
        return self.let("load", *used, attr=(buffer, index), dtype=COMPUTE[dtype])

    def const(self, value: object, dtype: str = "f32") -> str:
        return self.let("const", attr=value, dtype=dtype)

    def index(self, e: object) -> str:
        return self.let("index", attr=sympy.sympify(e), dtype="i64")

    def reduce(self, kind: str, value: str) -> str:
        return self.let("reduce", value, attr=kind)

    def cast(self, value: str, dtype: str) -> str:
        return self.let("cast", value, dtype=dtype)

    def out(self, buffer: str, dtype: str, index: object, value: str) -> None:
        self.buffers.setdefault(buffer, Buffer(buffer, dtype, "out"))
        self.stores.append(Store(buffer, sympy.sympify(index), value))

    def done(self) -> Kernel:
        axes = tuple(
            Axis(n, sympy.sympify(e[1]), True) if isinstance(e, tuple) else Axis(n, sympy.sympify(e))
            for n, e in self.axes.items()
        )
        return Kernel(
            self.name,
            axes,
            tuple(self.buffers.values()),
            tuple(self.lets),
            tuple(self.stores),
            f"{self.name} = by hand",
        )


def make(name: str, **axes: object) -> Make:
    return Make(name, axes)


# Oracle


def interpret(k: Kernel, buffers: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """What the kernel stores, computed with torch over the whole iteration space at once."""
    out = {b.name: buffers[b.name].clone() for b in k.buffers}
    env: dict[str, torch.Tensor] = {n: torch.tensor(v) for n, v in sizes.items()}
    full = []
    for i, a in enumerate(k.axes):
        n = int(evaluate(sympy.sympify(a.extent), env))
        full.append(n)
        env[a.name] = torch.arange(n).reshape([-1 if j == i else 1 for j in range(len(k.axes))])
    reduced = [i for i, a in enumerate(k.axes) if a.reduce]
    for v in k.lets:
        args = [env[a] for a in v.args]
        env[v.name] = _let(v, args, env, out, full, reduced)
    for s in k.stores:
        index = evaluate(sympy.sympify(s.index), env)
        index, value = torch.broadcast_tensors(torch.as_tensor(index), env[s.value])
        flat = out[s.buffer].reshape(-1)
        flat[index.reshape(-1)] = value.reshape(-1).to(flat.dtype)
    return out


def _let(v: Let, args: list[torch.Tensor], env, out, full: list[int], reduced: list[int]) -> torch.Tensor:
    dtype = TORCH[v.dtype]
    match v.op:
        case "load":
            buffer, index = v.access
            return out[buffer].reshape(-1)[evaluate(sympy.sympify(index), env)].to(dtype, copy=True)
        case "const":
            return torch.tensor(v.attr, dtype=dtype)
        case "index":
            return torch.as_tensor(evaluate(sympy.sympify(v.attr), env))
        case "check":
            return args[0]
        case "cast":
            return args[0] != 0 if v.dtype == "b1" else args[0].to(dtype)
        case "round":
            return args[0].to(TORCH[v.attr]).to(dtype)
        case "reduce":
            x = args[0]
            x = x.expand([full[i] if i in reduced else (x.shape[i] if x.dim() else 1) for i in range(len(full))])
            return _reduce(str(v.attr), x, reduced)
        case _:
            return pointwise(v.op, args).to(dtype)


def _reduce(kind: str, x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    match kind:
        case "sum":
            return x.to(torch.float64 if x.is_floating_point() else x.dtype).sum(dims, keepdim=True).to(x.dtype)
        case "max" | "min" if x.numel():
            return (x.amax if kind == "max" else x.amin)(dims, keepdim=True)
        case "max" | "min":
            limit = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
            worst = {
                "max": float("-inf") if x.is_floating_point() else limit.min,
                "min": float("inf") if x.is_floating_point() else limit.max,
            }
            return torch.full([1 if i in dims else n for i, n in enumerate(x.shape)], worst[kind], dtype=x.dtype)
        case _:
            f = {"prod": torch.prod, "any": torch.any, "all": torch.all}[kind]
            return reduce(lambda y, d: f(y, d, keepdim=True), dims, x)


def pointwise(op: str, a: list[torch.Tensor]) -> torch.Tensor:
    special = {
        "max": torch.maximum, "min": torch.minimum, "recip": torch.reciprocal, "rint": torch.round, "pow": torch.pow,
        "fma": lambda x, y, z: (x.double() * y.double() + z.double()), "and": torch.bitwise_and, "or": torch.bitwise_or,
        "xor": torch.bitwise_xor, "not": torch.bitwise_not, "where": torch.where, "rsqrt": lambda x: 1 / torch.sqrt(x),
    }  # fmt: skip
    return (special.get(op) or getattr(torch, op))(*a)


def evaluate(e: sympy.Expr, env: Mapping[str, torch.Tensor]):
    if e.is_Integer:
        return int(e)
    if e.is_Symbol:
        return env[e.name]
    args = [evaluate(a, env) for a in e.args]
    match type(e).__name__:
        case "Add":
            return reduce(lambda x, y: x + y, args)
        case "Mul":
            return reduce(lambda x, y: x * y, args)
        case "Pow":
            return args[0] ** args[1]
        case "FloorDiv":
            return args[0] // args[1]
        case "Mod" | "PythonMod":
            return args[0] % args[1]
        case "ModularIndexing":
            return args[0] // args[1] % args[2]
        case "CeilDiv":
            return -(-args[0] // args[1])
        case "Max":
            return reduce(lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)), args)
        case "Min":
            return reduce(lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)), args)
        case other:
            raise ValueError(other)


# Compiled


@dataclass(frozen=True)
class Unit:
    """Kernels compiled together, each with an entry of its own."""

    kernels: tuple[Kernel, ...]
    functions: dict[str, object]

    def __call__(self, name: str, buffers: Mapping[str, torch.Tensor], sizes: Mapping[str, int] | None = None) -> int:
        k = next(k for k in self.kernels if k.name == name)
        pointers = (ctypes.c_void_p * max(1, len(k.buffers)))(*(buffers[b.name].data_ptr() for b in k.buffers))
        longs = (ctypes.c_long * max(1, len(k.sizes)))(*((sizes or {})[s] for s in k.sizes))
        return self.functions[name](pointers, longs)  # type: ignore[operator]


def unit(kernels: Sequence[Kernel], folder: Path) -> Unit:
    calls = [[Call(k.name, tuple(range(len(k.buffers))), tuple(range(len(k.sizes))))] for k in kernels]
    compiler = find_compiler()
    assert compiler is not None
    library = build(emit_unit(kernels, calls), folder, compiler)
    return Unit(tuple(kernels), {k.name: library.function(f"run_{i}") for i, k in enumerate(kernels)})


GUARD = 64


def guarded(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor between two zones that nothing may write."""
    size = t.numel() * t.element_size()
    memory = torch.full((size + 2 * GUARD,), 0x5A, dtype=torch.uint8)
    inner = memory[GUARD : GUARD + size].view(t.dtype).reshape(t.shape) if size else t
    if size:
        inner.copy_(t)
    return memory, inner


def verify(
    u: Unit, name: str, buffers: Mapping[str, torch.Tensor], sizes: Mapping[str, int] | None = None, tol: float = 2e-6
) -> dict[str, torch.Tensor]:
    """Run compiled and interpreted; equal up to ``tol``, nothing written outside the buffers."""
    k = next(k for k in u.kernels if k.name == name)
    want = interpret(k, buffers, sizes or {})
    held = {n: guarded(t) for n, t in buffers.items()}
    assert u(name, {n: t for n, (_, t) in held.items()}, sizes) == 0
    for b in k.buffers:
        memory, got = held[b.name]
        assert (memory[:GUARD] == 0x5A).all(), f"{name}: wrote before {b.name}"
        assert (memory[len(memory) - GUARD :] == 0x5A).all(), f"{name}: wrote after {b.name}"
        close = {"bf16": 1e-2, "f16": 2e-3, "f64": 1e-12}.get(b.dtype, tol)
        torch.testing.assert_close(
            got,
            want[b.name],
            rtol=close,
            atol=close,
            equal_nan=True,
            msg=lambda m, b=b: f"{name} {sizes} {b.name}: {m}",
        )
    return {n: t for n, (_, t) in held.items()}
