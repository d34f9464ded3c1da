"""Kernels for tests: a small builder over the kernel IR, random kernels, and what a kernel means, in plain torch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import sympy
import torch

from dsc.codegen.kernel import COMPARISONS, COMPUTE, Axis, Buffer, Kernel, Let, Role, Store, indirect

DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b1": torch.bool,
}  # fmt: skip

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


# -- what a kernel means

_TORCH: Mapping[str, Callable[..., torch.Tensor]] = {
    "max": torch.maximum, "min": torch.minimum, "not": torch.bitwise_not, "and": torch.bitwise_and,
    "or": torch.bitwise_or, "xor": torch.bitwise_xor, "recip": torch.reciprocal, "rint": torch.round,
    "fma": lambda a, b, c: (a.double() * b.double() + c.double()).to(a.dtype),
}  # fmt: skip
_REDUCE: Mapping[str, Callable[..., torch.Tensor]] = {"max": torch.amax, "min": torch.amin}
_INDEX = {
    "FloorDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: (a + b - 1) // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ModularIndexing": lambda a, b, c: a // b % c,
}


def evaluate(kernel: Kernel, buffers: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
    """Run ``kernel`` in torch, an axis of the kernel an axis of every value. No ``random``; checks always pass."""
    n = len(kernel.axes)
    extents = [int(sympy.sympify(a.extent).subs({sym(s): e for s, e in sizes.items()})) for a in kernel.axes]
    values: dict[str, torch.Tensor] = {}
    axes = {
        a.name: torch.arange(e).reshape([-1 if d == k else 1 for k in range(n)])
        for d, (a, e) in enumerate(zip(kernel.axes, extents))
    }

    def index(e: object) -> torch.Tensor:
        expression = sympy.sympify(e)
        symbols = sorted(expression.free_symbols, key=str)
        known = {**sizes, **axes, **values}
        out = sympy.lambdify(symbols, expression, modules=[_INDEX])(*(known[s.name] for s in symbols))
        return out if isinstance(out, torch.Tensor) else torch.full([1] * n, int(out))

    def value(v: Let) -> torch.Tensor:
        args = [values[a] for a in v.args]
        match v.op:
            case "load":
                buffer, at = v.access
                return buffers[buffer].reshape(-1)[index(at)]
            case "const":
                return torch.full([1] * n, v.attr, dtype=DTYPES[v.dtype])
            case "index":
                return index(v.attr)
            case "check" | "cast":
                return args[0]
            case "round":
                return args[0].to(DTYPES[str(v.attr)])
            case "reduce":
                out = args[0].expand([e if a.reduce else s for a, e, s in zip(kernel.axes, extents, args[0].shape)])
                for d in [d for d, a in enumerate(kernel.axes) if a.reduce]:
                    out = (_REDUCE.get(str(v.attr)) or getattr(torch, str(v.attr)))(out, d, keepdim=True)
                return out
            case _:
                return (_TORCH.get(v.op) or getattr(torch, v.op))(*args)

    for v in kernel.lets:
        values[v.name] = value(v).to(DTYPES[v.dtype])
    for s in kernel.stores:
        at, what = torch.broadcast_tensors(index(s.index), values[s.value])
        buffers[s.buffer].view(-1)[at] = what.to(buffers[s.buffer].dtype)


# -- random kernels


def random_kernel(seed: int) -> tuple[Kernel, dict[str, torch.Tensor], dict[str, int]]:
    """A kernel with its buffers and sizes: mixed dtypes, several stages, permuted and broadcast accesses, gathers."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    extents = {f"i{k}": pick.choice([1, 2, 3, 4, 5, 8]) for k in range(pick.randint(0, 3))}
    extents |= {f"r_{k}": pick.choice([1, 2, 3, 5, 8]) for k in range(pick.randint(0, 2))}
    names = pick.sample(list(extents), len(extents)) if pick.random() < 0.3 else list(extents)
    sizes = {f"s_{a}": extents[a] for a in names if pick.random() < 0.25}
    b = Build("random", **{a: f"s_{a}" if f"s_{a}" in sizes else extents[a] for a in names})
    size_of = {a.name: a.extent for a in b.axes}
    buffers: dict[str, torch.Tensor] = {}
    pools: dict[str, list[str]] = {"f32": [], "f64": [], "i64": [], "b1": []}

    def order(axes: Sequence[str]) -> list[str]:
        return pick.sample(axes, len(axes)) if pick.random() < 0.4 else list(axes)

    def linear(axes: Sequence[str]) -> sympy.Expr:
        out = sympy.S.Zero
        for a in axes:
            out = out * size_of[a] + sym(a)
        return out

    def tensor(count: int, dtype: str) -> torch.Tensor:
        t = torch.randn(count) * 2
        return t > 0 if dtype == "b1" else (t.abs() if dtype == "u8" else t).to(DTYPES[dtype])

    def add(value: str) -> None:
        pools[b.lets[-1].dtype].append(value)

    for k in range(pick.randint(1, 4)):
        axes, dtype, offset = order([a for a in names if pick.random() < 0.75]), pick.choice([*DTYPES, *["f32"] * 5]), 3
        buffers[f"in{k}"] = tensor(math.prod(extents[a] for a in axes) + offset, dtype)
        add(b.load(f"in{k}", linear(axes) + pick.choice([0, 0, offset]), dtype))
    if pick.random() < 0.3:
        add(b.let("index", attr=linear(names), dtype="i64"))
    if pick.random() < 0.4:
        buffers["rows"], buffers["table"] = torch.randint(0, 7, (math.prod(extents.values()),)), torch.randn(7)
        row = b.let("check", b.load("rows", linear(names), "i64"), attr=sympy.Integer(7))
        add(b.load("table", sympy.Symbol(row, integer=True)))
    for dtype, choices in {"f32": [0.5, -1.25, 0.1, math.inf, math.nan], "i64": [2, -1, 0], "f64": [0.1, -3.0]}.items():
        if pools[dtype] and pick.random() < 0.5:
            add(b.const(pick.choice(choices), dtype))
    for _ in range(pick.randint(1, 9)):
        _random_let(b, pick, pools)
    for k in range(pick.randint(1, 3)):
        value = pick.choice([v for pool in pools.values() for v in pool][-6:])
        let = next(v for v in b.lets if v.name == value)
        whole = any(a.startswith("r_") for a in let.axes) or pick.random() < 0.3
        axes = order(names if whole else [a for a in names if not a.startswith("r_")])
        dtype = pick.choice(
            {"f32": ["f32", "f32", "bf16", "f16"], "i64": ["i64", "i32", "u8"]}.get(let.dtype, [let.dtype])
        )
        buffers[f"out{k}"] = torch.zeros(math.prod(extents[a] for a in axes), dtype=DTYPES[dtype])
        b.store(f"out{k}", linear(axes), value, dtype)
    kernel = b.kernel()
    assert all(indirect(v.access[1], kernel) <= set(v.args) for v in kernel.lets if v.op == "load")
    return kernel, buffers, {s: sizes[s] for s in kernel.sizes}


def _random_let(b: Build, pick: random.Random, pools: dict[str, list[str]]) -> None:
    dtype = pick.choice([d for d, pool in pools.items() if pool])
    x, y = pick.choice(pools[dtype]), pick.choice(pools[dtype])
    floats, reduces = dtype in ("f32", "f64"), any(a.reduce for a in b.axes)
    match pick.randint(0, 7):
        case 0 | 1 if reduces and sum(v.op == "reduce" for v in b.lets) < 4:
            out = b.reduce(pick.choice(["any", "all"] if dtype == "b1" else ["sum", "max", "min"]), x)
        case 2 if pools["b1"]:
            out = b.let("where", pick.choice(pools["b1"]), x, y)
        case 3 if dtype != "b1":
            out = b.let(pick.choice(sorted(COMPARISONS)), x, y)
        case 4:
            out = b.let("cast", x, dtype={"b1": "f32", "i64": "f32", "f64": "f32", "f32": "f64"}[dtype])
        case 5 if floats:
            out = b.let(pick.choice(["neg", "abs", "sigmoid", "tanh"]), x)
        case 6 if dtype in ("f32", "i64"):
            out = b.let("round", x, attr=pick.choice(["bf16", "f16"] if floats else ["i8", "u8", "i32"]))
        case _:
            out = b.let(
                pick.choice(["and", "or", "xor"] if dtype == "b1" else ["add", "sub", "mul", "max", "min"]), x, y
            )
    pools[b.lets[-1].dtype].append(out)
